"""Rules whose exactness is disputed: which are exact, how far the others are off, and planted
bugs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributions_for_tests import PAIRS, distance, distribution_pair
from torch import Tensor

from specnb.enumeration import completed, expected_accepted, joint_distribution, step_distribution
from specnb.rules import PlannedRule, block_verification
from specnb.trees import Scheme, TokenTree, independent_children
from studies.rules import published_rules as module
from studies.rules.published_rules import (
    best_path_block,
    chosen_path,
    hierarchical_verification,
    hierarchical_verification_code,
    hierarchical_verification_file,
    hub_children,
    spechub,
    spechub_code,
    with_shortcut,
)

P, Q = torch.tensor([0.05, 0.35, 0.2, 0.4]).double(), torch.tensor([0.4, 0.3, 0.2, 0.1]).double()
THIRDS = torch.tensor([1, 2]).double() / 3
RIGHT = module._power_sum
every_kind = pytest.mark.parametrize("kind", PAIRS)


def first_token(rule: PlannedRule, p: Tensor, q: Tensor, k: int, scheme: Scheme = independent_children) -> Tensor:
    """The distribution of the first token that is emitted, with k draft tokens for one position."""
    made = step_distribution(rule, lambda _: p, lambda _: q, (-1,) * k, scheme=scheme)
    return completed(made, lambda _: p, 2).sum(-1)


def float64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# Hierarchical verification (that of the paper is in the table of exact rules)


@every_kind
@pytest.mark.parametrize("seed", range(2))
def test_with_its_cap_it_is_block_verification(kind: str, seed: int) -> None:
    p, q = distribution_pair(kind, vocab=3, seed=seed)
    block, capped = (step_distribution(rule, p, q, 3) for rule in (block_verification, hierarchical_verification))
    assert all(capped[key] == pytest.approx(chance, abs=1e-12) for key, chance in block.items())


@pytest.mark.parametrize(
    ("rule", "ninths"), [(hierarchical_verification_code, 1), (hierarchical_verification_file, 3)], ids=repr
)
def test_the_codes_are_exact_for_one_draft_token_only(rule: PlannedRule, ninths: int) -> None:
    for kind in PAIRS:
        p, q = distribution_pair(kind, vocab=4)
        have = completed(step_distribution(rule, p, q, 1), p, 2)
        assert distance(have.flatten(), joint_distribution(p, 2).flatten()) < 1e-12
    have = completed(step_distribution(rule, lambda _: THIRDS, lambda _: THIRDS.flip(0), 2), lambda _: THIRDS, 3)
    want = joint_distribution(lambda _: THIRDS, 3)
    assert distance(have.flatten(), want.flatten()) == pytest.approx(ninths / 9, abs=1e-12)


# The best of several draft tokens or paths


def test_one_path_is_block_verification_and_two_accept_more() -> None:
    p, q = distribution_pair("dense", vocab=2)
    block, one, two = (
        expected_accepted(step_distribution(rule, p, q, parents))
        for rule, parents in (
            (block_verification, (-1, 0)),
            (best_path_block, (-1, 0)),
            (best_path_block, (-1, -1, 0, 1)),
        )
    )
    assert one == pytest.approx(block, abs=1e-12)
    assert two > block + 0.05


def test_of_many_tokens_with_equal_ratios_the_lowest_is_chosen() -> None:
    """Torch keeps the order of more than 16 equal numbers in a stable sort only."""
    probs = torch.full((4, 40), 1 / 40, dtype=torch.float64)
    tokens = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:3] for seed in range(30)])
    chosen = chosen_path(probs.expand(30, 4, 40), probs[:3].expand(30, 3, 40), tokens, TokenTree((-1, -1, -1)))
    assert torch.equal(chosen.nodes[:, 0], tokens.argmin(-1))


@pytest.mark.parametrize("power", [lambda a, b, k: torch.ones_like(a), lambda a, b, k: RIGHT(a, b, k - 1)])
def test_verification_with_q_or_as_of_one_path_fewer_is_found(power: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_power_sum", power)
    assert distance(first_token(best_path_block, P, Q, 3), P) > 1e-3


# SpecHub's code


def test_spechub_s_code_is_off_where_the_target_is_nearly_certain() -> None:
    q, certain = float64(0.5, 0.3, 0.2), torch.tensor(1 - 1e-3, dtype=torch.float64)
    for hub, shortcut in ((certain, False), (torch.nextafter(certain, torch.ones(())), True)):
        p = torch.stack([hub, (1 - hub) / 2, (1 - hub) / 2])
        off = distance(first_token(spechub_code, p, q, 2, hub_children), p)
        assert off == pytest.approx(1e-3 if shortcut else 0.0, abs=1e-12)
        for tokens, only_hub in (([1, 0], [0.0, 1.0]), ([0, 2], [1.0, 0.0])):
            accept, after = with_shortcut(p, q.expand(2, -1), torch.tensor(tokens))
            exact = spechub(p, q.expand(2, -1), torch.tensor(tokens))
            assert accept.tolist() == (only_hub if shortcut else exact[0].tolist())
            assert torch.equal(after, exact[1])
