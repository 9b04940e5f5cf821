"""Enumeration is checked by hand, against a formula, and on rules that it must refuse."""

from __future__ import annotations

import pytest
import torch
from distributions_for_tests import distribution_pair, mapped
from torch import Tensor

from specnb.distributions import normalise, sample
from specnb.drafters import ChainDrafter, Context, Proposal
from specnb.enumeration import (
    completed,
    distribution_of_counts,
    draft_trees,
    drafter_step_distribution,
    emissions,
    expected_accepted,
    joint_distribution,
    step_distribution,
)
from specnb.rules import Plan, PlannedRule, exact_match, token_verification
from specnb.trees import SCHEMES, Scheme, TokenTree, distinct_children, independent_children

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
    counts = distribution_of_counts({(0,): 0.5, (1,): 0.125, (1, 0): 0.25, (0, 0): 0.125}, gamma=2)
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
    first = completed(step_distribution(token_verification, P, P, 1, sampled), P, 2).sum(1)
    assert torch.allclose(first, sampled(()), atol=1e-12, rtol=0)
    for heads, wanted in ((0.5, {(1, 0): 0.5, (1, 1): 0.5}), (1.0, {(0,): 1.0})):
        target, draft = (lambda _, heads=heads: coin(heads)), lambda _: coin(1.0)
        emitted = step_distribution(token_verification, target, draft, 1, lambda _: coin(0.0))
        assert emitted == pytest.approx(wanted)


def test_a_plan_out_of_range_or_without_a_number_is_read_as_a_comparison_reads_it() -> None:
    accept = torch.tensor([[2.0, float("nan")]]).double()
    rule = PlannedRule(lambda p, q, x, tree: Plan(accept.expand(len(x), 2), p))
    drafts = draft_trees((-1, 0), lambda _: coin(1.0), independent_children)
    emitted = emissions(rule, drafts, lambda _: coin(0.5), (-1, 0))
    assert emitted == pytest.approx({(0, 0): 0.5, (0, 1): 0.5})


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
