"""Enumeration is checked against closed forms, by hand, and on rules that it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, mapped
from torch import Tensor

from specnb.sampling.distributions import normalise, overlap, residual
from specnb.sampling.enumeration import (
    Conditional,
    Emissions,
    completed,
    count_distribution,
    joint_distribution,
    step_distribution,
)
from specnb.sampling.verification import Outcome, Rule, exact_match, rejection_sampling, token_verification

P, Q = distribution_pair("dense", vocab=3)


def coin(heads: float) -> Tensor:
    return torch.tensor([heads, 1 - heads], dtype=torch.float64)


def test_joint_distribution_by_hand() -> None:
    after = {(): coin(0.25), (0,): coin(0.5), (1,): coin(1.0)}
    want = torch.tensor([[0.125, 0.125], [0.75, 0.0]], dtype=torch.float64)
    assert torch.equal(joint_distribution(after.__getitem__, 2), want)
    assert joint_distribution(after.__getitem__, 0) == 1.0


def test_step_distribution_by_hand() -> None:
    """p = (3/4, 1/4) and q = (1/4, 3/4): draft 1 is accepted with 1/3, and otherwise replaced by 0."""
    emitted = step_distribution(token_verification, lambda _: coin(0.75), lambda _: coin(0.25), gamma=1)
    want = {(0, 0): 3 / 16, (0, 1): 1 / 16, (1, 0): 3 / 16, (1, 1): 1 / 16, (0,): 1 / 2}
    assert emitted == pytest.approx(want, abs=1e-13)


def test_completed_by_hand() -> None:
    after = {(): coin(0.25), (0,): coin(0.5), (1,): coin(1.0)}
    have = completed({(0,): 0.5, (1, 1): 0.5}, after.__getitem__, length=2)
    assert torch.equal(have, torch.tensor([[0.25, 0.25], [0.0, 0.5]], dtype=torch.float64))


def by_formula(
    accept_mass: Callable[[Tensor, Tensor], Tensor],
    final_distribution: Callable[[Tensor, Tensor], Tensor],
    p: Conditional,
    q: Conditional,
    gamma: int,
) -> Emissions:
    """The distribution of what a step emits when x is drafted and accepted with `accept_mass(p, q)[x]`."""
    emitted: Emissions = {}
    for n in range(gamma + 1):
        for draft_tokens in product(range(len(p(()))), repeat=n):
            chance = 1.0
            for i, x in enumerate(draft_tokens):
                chance *= float(accept_mass(p(draft_tokens[:i]), q(draft_tokens[:i]))[x])
            p_next, q_next = p(draft_tokens), q(draft_tokens)
            rejected = 1 - float(accept_mass(p_next, q_next).sum())
            final = p_next if n == gamma else rejected * final_distribution(p_next, q_next)
            emitted |= {(*draft_tokens, x): chance * float(final[x]) for x in range(len(final))}
    return emitted


def one_shot_mass(p: Tensor, q: Tensor) -> Tensor:
    return p * (q / p).nan_to_num(nan=torch.inf, posinf=torch.inf).min()


def mismatch_distribution(p: Tensor, q: Tensor) -> Tensor:
    return (p * (1 - q)) / (p * (1 - q)).sum().clamp_min(1e-300)


FORMULAS: list[tuple[Rule, object, object]] = [
    (token_verification, torch.minimum, residual),
    (rejection_sampling, one_shot_mass, lambda p, q: p),
    (exact_match, torch.mul, mismatch_distribution),
]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    ("rule", "accept_mass", "final_distribution"), FORMULAS, ids=lambda x: getattr(x, "__name__", "")
)
def test_cells_give_what_the_formulas_say(
    rule: Rule,
    accept_mass: Callable[[Tensor, Tensor], Tensor],
    final_distribution: Callable[[Tensor, Tensor], Tensor],
    kind: str,
) -> None:
    p, q = distribution_pair(kind, vocab=3)
    have, want = step_distribution(rule, p, q, gamma=2), by_formula(accept_mass, final_distribution, p, q, gamma=2)
    for tokens in have.keys() | want.keys():
        assert have.get(tokens, 0.0) == pytest.approx(want.get(tokens, 0.0), abs=1e-12)


@pytest.mark.parametrize("gamma", range(4))
def test_emissions_are_a_distribution_over_one_to_gamma_plus_one_tokens(gamma: int) -> None:
    emitted = step_distribution(token_verification, P, Q, gamma)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    assert min(emitted.values()) > 0
    assert {len(tokens) for tokens in emitted} == set(range(1, gamma + 2))


def test_count_distribution_follows_from_the_overlaps() -> None:
    """One token more than n only if the first n drafts are all accepted, each at its own context."""
    counts = count_distribution(step_distribution(token_verification, P, Q, gamma=2), gamma=2)
    first = overlap(P(()), Q(()))
    both = torch.stack([torch.minimum(P(()), Q(()))[x] * overlap(P((x,)), Q((x,))) for x in range(3)]).sum()
    torch.testing.assert_close(counts, torch.stack([1 - first, first - both, both]), atol=1e-12, rtol=0)


def test_drafts_may_come_from_another_distribution_than_the_reported_one() -> None:
    """With reported q = p every draft token is accepted: the first token emitted has the distribution `sampled`."""
    sampled = mapped(lambda probs: normalise(probs**2), Q)
    emitted = step_distribution(token_verification, P, P, gamma=1, sampled=sampled)
    first = completed(emitted, P, 2).sum(1)
    torch.testing.assert_close(first, sampled(()), atol=1e-12, rtol=0)


def test_drafts_that_the_reported_distribution_excludes_are_enumerated_too() -> None:
    """p(x)/q(x) is then infinite, or 0/0: the draft is accepted if the target can say it."""
    p, q, sampled = coin(0.5), coin(1.0), coin(0.0)
    emitted = step_distribution(token_verification, lambda _: p, lambda _: q, gamma=1, sampled=lambda _: sampled)
    assert emitted == pytest.approx({(1, 0): 0.5, (1, 1): 0.5})
    emitted = step_distribution(token_verification, lambda _: q, lambda _: q, gamma=1, sampled=lambda _: sampled)
    assert emitted == pytest.approx({(0,): 1.0})


def lenient(lenience: float) -> Rule:
    def rule(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, lenience * accept, final)

    return rule


def same_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, accept, accept[..., 0])


def folded(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, accept, (7 * final) % 1)


def added(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, accept, (accept[..., 0] + final) % 1)


@pytest.mark.parametrize("rule", [same_uniform, folded, added])
def test_a_rule_that_reads_uniforms_otherwise_is_refused(rule: Rule) -> None:
    with pytest.raises(ValueError, match=f"{rule.__name__} changes its answer inside a cell"):
        step_distribution(rule, P, Q, gamma=1)


@pytest.mark.parametrize("lenience", [0.5, 0.9, 0.99, 1 - 1e-6, 1 - 1e-9, 1 + 1e-9, 1.1])
@pytest.mark.parametrize("kind", ["dense", "zeros in q"])
def test_no_leak_is_small_enough_to_hide_in_a_cell(lenience: float, kind: str) -> None:
    """Either it shows as a change inside a cell or, where it fills a cell, as a wrong distribution."""
    p, q = distribution_pair(kind, vocab=3)
    try:
        distance = (
            (completed(step_distribution(lenient(lenience), p, q, gamma=1), p, 2) - joint_distribution(p, 2))
            .abs()
            .max()
        )
    except ValueError:
        distance = torch.tensor(torch.inf)
    assert distance > 1e-11


def test_an_inexact_rule_is_seen_even_where_every_cell_is_constant() -> None:
    def always_accept(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, torch.zeros_like(accept), final)

    distance = (completed(step_distribution(always_accept, P, Q, 1), P, 2) - joint_distribution(P, 2)).abs().sum() / 2
    assert distance == pytest.approx(float(1 - overlap(P(()), Q(()))))
