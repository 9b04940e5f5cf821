"""Enumeration is checked by hand, against a formula, and on rules that it must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, mapped
from torch import Tensor

from specnb import enumeration
from specnb.distributions import normalise, sample
from specnb.drafters import ChainDrafter, Context, Proposal
from specnb.enumeration import (
    completed,
    count_distribution,
    draft_trees,
    drafter_step_distribution,
    estimated_distribution,
    expected_accepted,
    integrated_distribution,
    joint_distribution,
    multiplied,
    step_distribution,
)
from specnb.rules import Outcome, Plan, PlannedRule, Rule, exact_match, token_verification
from specnb.trees import SCHEMES, Scheme, TokenTree, chain, distinct_children, independent_children

P, Q = distribution_pair("dense", vocab=3)


def coin(heads: float) -> Tensor:
    return torch.tensor([heads, 1 - heads], dtype=torch.float64)


AFTER = {(): coin(0.25), (0,): coin(0.5), (1,): coin(1.0)}.__getitem__


def test_by_hand() -> None:
    """p = (3/4, 1/4) and q = (1/4, 3/4): draft 1 is accepted with 1/3, and otherwise replaced by
    0."""
    emitted = step_distribution(token_verification, lambda _: coin(0.75), lambda _: coin(0.25), gamma=1)
    assert emitted == pytest.approx(
        {(0, 0): 3 / 16, (0, 1): 1 / 16, (1, 0): 3 / 16, (1, 1): 1 / 16, (0,): 1 / 2}, abs=1e-13
    )
    assert joint_distribution(AFTER, 2).tolist() == [[0.125, 0.125], [0.75, 0.0]]
    assert joint_distribution(AFTER, 0) == 1.0
    assert completed({(0,): 0.5, (1, 1): 0.5}, AFTER, length=2).tolist() == [[0.25, 0.25], [0.0, 0.5]]
    counts = count_distribution({(0,): 0.5, (1,): 0.125, (1, 0): 0.25, (0, 0): 0.125}, gamma=2)
    assert (counts.tolist(), counts.dtype) == ([0.625, 0.375, 0.0], torch.float64)
    assert expected_accepted({(0,): 0.5, (1, 0): 0.25, (0, 0, 1): 0.25}) == 0.75


def test_the_tree_by_hand() -> None:
    """Two children 0 and 1, tested with p(0) = 1/4 and then certainty: 1 is followed by what p has
    after it."""
    emitted = step_distribution(exact_match, AFTER, lambda _: coin(0.5), (-1, -1), scheme=distinct_children)
    assert emitted == pytest.approx({(0, 0): 0.125, (0, 1): 0.125, (1, 0): 0.75})


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["dense", "zeros in q", "one-hot q"])
def test_a_tree_has_the_product_of_its_rows_and_each_row_its_scheme(kind: str, scheme: Scheme) -> None:
    parents, (_, q) = (-1, -1, 0, 0, 1), distribution_pair(kind, vocab=3)
    drafts, paths = draft_trees(parents, q, scheme), TokenTree(parents).paths.tolist()
    assert float(drafts.probability.sum()) == pytest.approx(1, abs=1e-12)
    assert len(drafts.tokens.unique(dim=0)) == len(drafts.tokens)
    for tokens, rows, probability in zip(drafts.tokens.tolist(), drafts.q, drafts.probability.tolist(), strict=True):
        chance = 1.0
        for node, parent in enumerate(parents):
            prefix, x = tuple(tokens[i] for i in paths[parent + 1] if i >= 0), tokens[node]
            earlier = [torch.tensor(tokens[i]) for i in range(node) if parents[i] == parent]
            row = torch.zeros(3).double() if -1 in prefix else scheme(q(prefix), earlier)
            assert torch.equal(rows[node], row)
            assert (x == -1) == (not row.any())
            chance *= float(row[x]) if x >= 0 else 1.0
        assert probability == pytest.approx(chance, abs=1e-15)


def test_drafts_may_come_from_another_distribution_than_the_reported_one() -> None:
    """With reported q = p every draft token is accepted; one that q excludes is accepted if the
    target can say it."""
    sampled = mapped(lambda probs: normalise(probs**2), Q)
    for rule in (token_verification, lambda *given: token_verification(*given)):
        first = completed(step_distribution(rule, P, P, 1, sampled), P, 2).sum(1)
        assert torch.allclose(first, sampled(()), atol=1e-12, rtol=0)
        emitted = step_distribution(rule, lambda _: coin(0.5), lambda _: coin(1.0), 1, lambda _: coin(0.0))
        assert emitted == pytest.approx({(1, 0): 0.5, (1, 1): 0.5})
        emitted = step_distribution(rule, lambda _: coin(1.0), lambda _: coin(1.0), 1, lambda _: coin(0.0))
        assert emitted == pytest.approx({(0,): 1.0})


def test_a_plan_out_of_range_or_without_a_number_is_read_as_a_comparison_reads_it() -> None:
    accept = torch.tensor([[2.0, float("nan")]]).double()
    rule = PlannedRule(lambda p, q, x, tree: Plan(accept.expand(len(x), 2), p))
    drafts = draft_trees((-1, 0), lambda _: coin(1.0), independent_children)
    emitted = multiplied(rule, drafts, lambda _: coin(0.5), (-1, 0))
    assert emitted == pytest.approx({(0, 0): 0.5, (0, 1): 0.5})


# Rules without a plan


def own_samples(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Exact match by the target's own samples: each acceptance uniform is a sample from p."""
    own = sample(p, torch.cat([accept, final[..., None]], -1))
    accepted = (draft_tokens == own[..., :-1]).cumprod(-1).sum(-1)
    return Outcome(accepted, own.gather(-1, accepted[..., None])[..., 0])


@pytest.mark.parametrize("kind", PAIRS)
def test_a_function_is_asked_in_cells(kind: str) -> None:
    p, q = distribution_pair(kind, vocab=3)
    emitted = step_distribution(own_samples, p, q, gamma=2)
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
        step_distribution(rule, P, Q, gamma=1)


@pytest.mark.parametrize("lenience", [0.5, 0.99, 1 - 1e-6, 1 - 1e-9, 1 + 1e-9, 1.1])
@pytest.mark.parametrize("kind", ["dense", "zeros in q"])
def test_no_leak_is_small_enough_to_hide_in_a_cell(lenience: float, kind: str) -> None:
    """Either it shows as a change inside a cell or, where it fills a cell, as a wrong
    distribution."""
    p, q = distribution_pair(kind, vocab=3)

    def lenient(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, lenience * accept, final)

    try:
        emitted = step_distribution(lenient, p, q, gamma=1)
    except ValueError:
        return
    assert float((completed(emitted, p, 2) - joint_distribution(p, 2)).abs().max()) > 1e-11


def test_the_result_does_not_depend_on_how_many_cells_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, wanted = draft_trees((-1, 0), Q, independent_children), step_distribution(token_verification, P, Q, 2)
    for cells in (1, 40):
        monkeypatch.setattr(enumeration, "CELLS", cells)
        emitted = integrated_distribution(token_verification, drafts, P, (-1, 0), (token_verification,))
        assert emitted == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("rare", [0, 2])
def test_a_rare_token_at_an_end_of_the_uniforms_is_found(rare: int) -> None:
    """A drafter that samples it and reports a q without it must not pass."""
    honest = torch.full((3,), 0.4985, dtype=torch.float64)
    honest[rare] = 0.003
    reported = honest.clone()
    reported[rare] = 0
    reported /= reported.sum()

    class Draws(ChainDrafter):
        vocab = 3

        def __init__(self, q: Tensor) -> None:
            self.q = q

        def propose(self, context: Context, uniforms: Tensor) -> Proposal:
            tokens = sample(honest.expand(*uniforms.shape, 3), uniforms)
            return Proposal(tokens, self.q.expand(*uniforms.shape, 3))

    def off(q: Tensor) -> float:
        emitted = drafter_step_distribution(Draws(q), lambda tokens: honest.flip(0), (0,), gamma=1)
        joint = joint_distribution(lambda tokens: honest.flip(0), 2)
        return float((completed(emitted, lambda tokens: honest.flip(0), 2) - joint).abs().max())

    assert off(honest) < 1e-8
    assert off(reported) > 1e-4


@pytest.mark.parametrize(("accepted", "token"), [(2, 0), (0, 3), (-1, 0)])
def test_what_a_rule_cannot_emit_is_refused(accepted: int, token: int) -> None:
    def rule(p: Tensor, *others: Any) -> Outcome:
        return Outcome(*torch.tensor([accepted, token]).expand(len(p), 2).unbind(1))

    with pytest.raises(ValueError, match="the rule returned"):
        step_distribution(rule, P, Q, gamma=1)


@pytest.mark.parametrize("parents", [chain(2), (-1, -1)])
def test_an_estimate_is_near_the_enumeration(parents: tuple[int, ...]) -> None:
    drafts = draft_trees(parents, Q, independent_children)
    planned = completed(multiplied(token_verification, drafts, P, parents), P, 3)
    estimate = completed(estimated_distribution(token_verification, drafts, P, parents), P, 3)
    assert 0 < float((planned - estimate).abs().sum()) / 2 < 1e-3
    assert float(estimate.sum()) == pytest.approx(1, abs=1e-12)
