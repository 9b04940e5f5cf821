"""Rules without a plan, asked in cells and on points, against multiplied plans; and those that must be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, mapped
from torch import Tensor

from audit_studies.bugs import cells
from audit_studies.bugs.cells import chain_distribution, estimated_distribution, integrated_distribution
from specnb.distributions import normalise, sample
from specnb.enumeration import (
    completed,
    draft_trees,
    emissions,
    expected_accepted,
    joint_distribution,
    step_distribution,
)
from specnb.rules import Outcome, Rule, exact_match, token_verification
from specnb.trees import chain, independent_children

P, Q = distribution_pair("dense", vocab=3)


def test_drafts_may_come_from_another_distribution_than_the_reported_one() -> None:
    """With reported q = p every draft token is accepted."""
    sampled = mapped(lambda probs: normalise(probs**2), Q)
    first = completed(chain_distribution(lambda *given: token_verification(*given), P, P, 1, sampled), P, 2).sum(1)
    assert torch.allclose(first, sampled(()), atol=1e-12, rtol=0)


def own_samples(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Exact match by the target's own samples: each acceptance uniform is a sample from p."""
    own = sample(p, torch.cat([accept, final[..., None]], -1))
    accepted = (draft_tokens == own[..., :-1]).cumprod(-1).sum(-1)
    return Outcome(accepted, own.gather(-1, accepted[..., None])[..., 0])


@pytest.mark.parametrize("kind", PAIRS)
def test_a_function_is_asked_in_cells(kind: str) -> None:
    p, q = distribution_pair(kind, vocab=3)
    emitted = chain_distribution(own_samples, p, q, gamma=2)
    assert float((completed(emitted, p, 3) - joint_distribution(p, 3)).abs().max()) < 1e-12
    planned = step_distribution(exact_match, p, q, gamma=2)
    assert min(*emitted.values(), *planned.values()) > 0, "only what can be emitted is listed"
    assert expected_accepted(emitted) == pytest.approx(expected_accepted(planned), abs=1e-12)


def same_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, accept, accept[..., 0])


def folded(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, accept, (7 * final) % 1)


@pytest.mark.parametrize("rule", [same_uniform, folded])
def test_a_rule_that_reads_uniforms_otherwise_is_refused(rule: Rule) -> None:
    with pytest.raises(ValueError, match=f"{rule.__name__} changes its answer inside a cell"):
        chain_distribution(rule, P, Q, gamma=1)


@pytest.mark.parametrize("lenience", [0.5, 0.99, 1 - 1e-6, 1 - 1e-9, 1 + 1e-9, 1.1])
@pytest.mark.parametrize("kind", ["dense", "zeros in q"])
def test_no_leak_is_small_enough_to_hide_in_a_cell(lenience: float, kind: str) -> None:
    """Either it shows as a change inside a cell or, where it fills a cell, as a wrong
    distribution."""
    p, q = distribution_pair(kind, vocab=3)

    def lenient(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, lenience * accept, final)

    try:
        emitted = chain_distribution(lenient, p, q, gamma=1)
    except ValueError:
        return
    assert float((completed(emitted, p, 2) - joint_distribution(p, 2)).abs().max()) > 1e-11


def test_the_result_does_not_depend_on_how_many_cells_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, wanted = draft_trees((-1, 0), Q, independent_children), step_distribution(token_verification, P, Q, 2)
    for count in (1, 40):
        monkeypatch.setattr(cells, "CELLS", count)
        emitted = integrated_distribution(token_verification, drafts, P, (-1, 0), (token_verification,))
        assert emitted == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("accepted", "token"), [(2, 0), (0, 3), (-1, 0)])
def test_what_a_rule_cannot_emit_is_refused(accepted: int, token: int) -> None:
    def rule(p: Tensor, *others: Any) -> Outcome:
        return Outcome(*torch.tensor([accepted, token]).expand(len(p), 2).unbind(1))

    with pytest.raises(ValueError, match="the rule returned"):
        chain_distribution(rule, P, Q, gamma=1)


@pytest.mark.parametrize("parents", [chain(2), (-1, -1)])
def test_an_estimate_is_near_the_enumeration(parents: tuple[int, ...]) -> None:
    drafts = draft_trees(parents, Q, independent_children)
    planned = completed(emissions(token_verification, drafts, P, parents), P, 3)
    estimate = completed(estimated_distribution(token_verification, drafts, P, parents), P, 3)
    assert 0 < float((planned - estimate).abs().sum()) / 2 < 1e-3
    assert float(estimate.sum()) == pytest.approx(1, abs=1e-12)
