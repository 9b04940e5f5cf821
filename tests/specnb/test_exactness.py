"""Judging a rule: exact rules and known bugs are told apart, and tokens per step are those of
closed forms."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair
from rule_checks import BUGS
from torch import Tensor

from specnb.distributions import overlap
from specnb.drafters import ChainDrafter, Context, Proposal
from specnb.enumeration import completed, expected_accepted, joint_distribution, step_distribution
from specnb.exactness import EXACT, judge_drafter, judge_rule, optimal_accepted, random_pairs, worst_prefix
from specnb.ngram import PromptLookupDrafter, UniformDrafter
from specnb.rules import (
    Outcome,
    Rule,
    block_verification,
    exact_match,
    greedy_verification,
    lenient_verification,
    recursive_rejection,
    rejection_sampling,
    token_verification,
    traversal_verification,
)
from specnb.theory import expected_tokens, lenient_distribution
from specnb.trees import distinct_children

WRONG = {bug.__name__: bug(token_verification) for bug in BUGS}
P, Q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], dtype=torch.float64)
IID = {"iid": (lambda _: P, lambda _: Q)}


def as_function(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, accept, final)


@pytest.mark.parametrize("rule", [token_verification, block_verification, rejection_sampling, exact_match])
def test_exact_rules_are_judged_exact(rule: Rule) -> None:
    found = judge_rule(rule)
    assert found.exact
    assert found.worst.resolution == EXACT == 1e-12
    assert found.optimum == pytest.approx(found.block_verification, abs=1e-12)
    assert found.tokens_per_step <= found.block_verification + 1e-12
    assert "worst prefix" not in str(found)


def test_a_function_is_judged_as_its_plan() -> None:
    """Asked in cells it may differ in the last bits alone."""
    one, other = judge_rule(as_function, gamma=2), judge_rule(token_verification, gamma=2)
    assert one.exact
    assert one.tokens_per_step == pytest.approx(other.tokens_per_step, abs=1e-12)
    assert judge_rule(as_function, gamma=2) == one, "it is deterministic"


@pytest.mark.parametrize("name", WRONG)
def test_every_planted_bug_of_a_rule_is_judged_inexact(name: str) -> None:
    """Its worst prefix has the probabilities that are named, and they differ by more than an exact
    rule's do."""
    found = judge_rule(WRONG[name], gamma=2, pairs=random_pairs(4))
    assert not found.exact
    tokens, target, of_rule = found.worst.worst
    assert found.worst.resolution / 2 < abs(target - of_rule) <= found.worst.total_variation + 1e-12
    where, gamma = found.worst.where.rsplit(", gamma ", 1)
    p, q = random_pairs(4)[where]
    assert target == pytest.approx(float(joint_distribution(p, len(tokens))[tokens]), abs=1e-12)
    if found.worst.resolution == EXACT:
        joint = completed(step_distribution(WRONG[name], p, q, int(gamma)), p, int(gamma) + 1)
        assert of_rule == pytest.approx(float(joint[tokens].sum()), abs=1e-12)
    assert f"worst prefix: {tokens}" in str(found)


@pytest.mark.parametrize("lenience", [0.5, 0.99])
def test_a_lenient_rule_is_off_by_the_known_amount(lenience: float) -> None:
    """The first token has the distribution of `theory`, and only the last token of a step is tested
    if gamma is 1."""
    found = judge_rule(lenient_verification(lenience), gamma=1, pairs=IID)
    known = float((lenient_distribution(P, Q, lenience) - P).abs().sum()) / 2
    assert not found.exact
    assert found.worst.total_variation == pytest.approx(known, abs=1e-12)
    assert found.tokens_per_step == pytest.approx(1 + float(torch.minimum(P / lenience, Q).sum()), abs=1e-12)
    assert judge_rule(lenient_verification(1.0), gamma=1, pairs=IID).exact


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_with_iid_acceptance_tokens_per_step_are_capped_geometric(gamma: int) -> None:
    found = judge_rule(token_verification, gamma, IID)
    assert found.cases == gamma
    assert found.tokens_per_step == pytest.approx(float(expected_tokens(float(overlap(P, Q)), gamma)), abs=1e-12)


def test_greedy_verification_is_exact_for_one_hot_targets_alone() -> None:
    one_hot = {kind: distribution_pair(kind, 3) for kind in PAIRS if kind.startswith("one-hot p")}
    assert judge_rule(greedy_verification, pairs=one_hot).exact
    assert not judge_rule(greedy_verification).exact


def test_trees_are_judged_by_their_parents() -> None:
    found = judge_rule(recursive_rejection, (-1, -1, 0), scheme=distinct_children)
    assert (found.exact, found.optimum) == (True, None)
    assert found.block_verification >= found.tokens_per_step == found.token_verification
    assert "the best exact rule" not in str(found)
    assert judge_rule(traversal_verification, (-1, -1, 0)).exact
    assert not judge_rule(lenient_verification(0.5), (-1, -1)).exact


@pytest.mark.parametrize("kind", PAIRS)
def test_block_verification_accepts_the_optimum(kind: str) -> None:
    p, q = distribution_pair(kind, vocab=3)
    for gamma in (1, 2, 3):
        accepted = expected_accepted(step_distribution(block_verification, p, q, gamma))
        assert accepted == pytest.approx(optimal_accepted(p, q, gamma), abs=1e-12)


def test_the_worst_prefix_is_the_shortest_with_the_largest_difference() -> None:
    want = joint_distribution(lambda _: P, 2)
    assert worst_prefix(want, want).tokens == (0,)
    have = want.clone()
    have[1] += torch.tensor([0.0, 0.01, 0.0])
    have[2] -= torch.tensor([0.0, 0.0, 0.01])
    assert tuple(worst_prefix(have, want)) == ((1,), pytest.approx(0.3), pytest.approx(0.31))
    have = want.clone()
    have[0, 0], have[0, 1] = have[0, 0] + 0.02, have[0, 1] - 0.02
    assert tuple(worst_prefix(have, want)) == ((0, 0), pytest.approx(0.25), pytest.approx(0.27))


def test_pairs_have_what_they_are_named_after() -> None:
    for vocab, seed in product((3, 4), (0, 1)):
        contexts = [(), *product(range(vocab), repeat=1), *product(range(vocab), repeat=2)]
        kinds = {name.split(", ")[1]: pair for name, pair in random_pairs(vocab).items() if name.endswith(str(seed))}
        sums = {kind: {round(float(pair[1](context).sum()), 9) for context in contexts} for kind, pair in kinds.items()}
        assert sums.pop("no draft token after some prefixes") == {0.0, 1.0}
        assert set(map(tuple, sums.values())) == {(1.0,)}
        assert all(float(pair[0](context).sum()) == pytest.approx(1) for pair in kinds.values() for context in contexts)
        assert any(0 in one(context) for one in kinds["impossible tokens"] for context in contexts)
        assert min(float(overlap(*(one(context) for one in kinds["q near p"]))) for context in contexts) > 0.8
        assert not torch.equal(kinds["any p and q"][0]((0,)), kinds["any p and q"][0]((1,)))


# What is refused


@pytest.mark.parametrize("gamma", [0, -1])
def test_a_gamma_without_draft_tokens_is_refused(gamma: int) -> None:
    with pytest.raises(ValueError, match=f"gamma is {gamma}"):
        judge_rule(token_verification, gamma)


def test_an_error_of_the_rule_says_what_it_was_given() -> None:
    def unchecked(p: Tensor, q: Tensor, x: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        q.gather(-1, x[..., None])  # also where no token was proposed
        return token_verification(p, q, x, accept, final)

    with pytest.raises(RuntimeError, match="out of bounds") as raised:
        judge_rule(unchecked, gamma=2)
    (note,) = raised.value.__notes__
    assert " tokens, no draft token after some prefixes, seed " in note


class Sharper(UniformDrafter):
    """Samples from a power of q and reports q: what was sampled from another temperature."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        q = torch.tensor([0.6, 0.3, 0.1]).double().expand(*uniforms.shape, 3)
        sampled = (q**2 / (q**2).sum(-1, keepdim=True)).cumsum(-1)
        return Proposal((sampled <= uniforms[..., None]).sum(-1), q)


class Silent(ChainDrafter):
    vocab = 3

    def distribution(self, context: Context, position: int) -> Tensor:
        return torch.zeros(len(context.tokens), 3)


class Random(UniformDrafter):
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return super().propose(context, torch.rand_like(uniforms))


class Doubled(UniformDrafter):
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        sampled = super().propose(context, uniforms)
        return sampled._replace(q=2 * sampled.q)


def test_a_drafter_is_judged_by_the_q_that_it_reports() -> None:
    for drafter in (UniformDrafter(3), PromptLookupDrafter(3, shortest=1)):
        found = judge_drafter(drafter)
        assert found.exact, found
        assert 0 < found.proposing <= found.prefixes == 24
    found = judge_drafter(Sharper(3), prefixes=[(0, 1), (2,)])
    assert not found.exact
    assert found.worst.total_variation > 0.05
    assert "Sharper is NOT exact" in str(found)


@pytest.mark.parametrize("drafter", [Silent(), Random(3), Doubled(3), UniformDrafter(9)])
def test_what_cannot_be_judged_is_refused(drafter: ChainDrafter) -> None:
    with pytest.raises(ValueError, match=r"proposes|sums|vocabulary"):
        judge_drafter(drafter)
