"""Enumeration is checked against closed forms, by hand, and on rules that it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from math import prod

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, mapped
from torch import Tensor

from specnb.distributions import Conditional, normalise, overlap, residual
from specnb.enumeration import (
    CORNER_INSET,
    Emissions,
    completed,
    count_distribution,
    joint_distribution,
    step_distribution,
)
from specnb.rules import Outcome, Rule, exact_match, rejection_sampling, token_verification

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


# Cells


def edges_asked(p: Tensor, q: Tensor, token: int, lenience: float = 1.0) -> list[list[float]]:
    """The edges of both uniforms of a step with one draft token, from what a rule is asked; the last edge is 1."""
    asked: list[Tensor] = []

    def noting(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        assert p.dtype == q.dtype == torch.float64
        assert draft_tokens.dtype == torch.int64
        if int(draft_tokens[0, 0]) == token:
            asked.append(torch.cat([accept, final[:, None]], -1))
        return Outcome(torch.zeros_like(draft_tokens[:, 0]), torch.zeros_like(draft_tokens[:, 0]))

    step_distribution(noting, lambda _: p, lambda _: q, gamma=1, lenience=lenience)
    centres, lower, upper = asked
    edges = []
    for axis in (0, 1):
        firsts = (lower - CORNER_INSET)[:, axis].unique()
        firsts = firsts[torch.cat([torch.ones(1).bool(), firsts.diff() > 1e-13])]
        edges.append([*firsts.tolist(), 1.0])
        middles = [(low + high) / 2 for low, high in pairwise(edges[-1])]
        assert sorted({round(x, 11) for x in centres[:, axis].tolist()}) == pytest.approx(middles, abs=1e-10)
        lasts = (upper + CORNER_INSET)[:, axis].unique()
        assert all(min(abs(last - edge) for edge in edges[-1]) < 1e-12 for last in lasts.tolist())
    assert len(centres) == (len(edges[0]) - 1) * (len(edges[1]) - 1)
    return edges


def merged(points: list[float]) -> list[float]:
    """0, 1 and the points between them, each once."""
    kept: list[float] = []
    for point in sorted([0.0, 1.0, *(min(max(point, 0.0), 1.0) for point in points)]):
        if not kept or point - kept[-1] > 1e-12:
            kept.append(point)
    return kept


def sums(mass: list[float]) -> list[float]:
    return [sum(mass[: i + 1]) for i in range(len(mass))]


@pytest.mark.parametrize("lenience", [1.0, 0.8])
@pytest.mark.parametrize("token", [0, 1, 2])
def test_cells_end_where_a_rule_may_change_its_answer(token: int, lenience: float) -> None:
    """At p/q, p/(lq), p/(Mq) and the sums of p for the draft token; at the sums of p and of both residuals after it."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.45, 0.35]
    ratio, least = p[token] / q[token], min(b / a for a, b in zip(p, q, strict=True))
    residuals = []
    for scale in (1.0, lenience):
        left = [max(0.0, a - scale * b) for a, b in zip(p, q, strict=True)]
        residuals += sums([x / sum(left) for x in left])
    target, draft = (torch.tensor(probs, dtype=torch.float64) for probs in (p, q))
    have = edges_asked(target, draft, token, lenience)
    assert have[0] == pytest.approx(merged([ratio, ratio / lenience, ratio * least, *sums(p)]), abs=1e-12)
    assert have[1] == pytest.approx(merged([*sums(p), *residuals]), abs=1e-12)


def test_cells_of_tokens_that_one_or_both_exclude() -> None:
    """0/0 is no edge, and neither are ratios beyond 1."""
    p, q = torch.tensor([0.25, 0.75, 0.0, 0.0]).double(), torch.tensor([0.5, 0.25, 0.25, 0.0]).double()
    for token, edges in {0: [0, 1 / 6, 0.25, 0.5, 1], 1: [0, 0.25, 1], 2: [0, 0.25, 1]}.items():  # M = 3
        accept, final = edges_asked(p, q, token)
        assert accept == pytest.approx(edges, abs=1e-12)
        assert final == pytest.approx([0, 0.25, 1], abs=1e-12)


def test_edges_that_differ_by_rounding_are_one() -> None:
    p = torch.tensor([0.25, 2e-14, 0.25 - 4e-14, 0.5 + 2e-14], dtype=torch.float64)
    accept, final = edges_asked(p, p, 0)
    assert accept == pytest.approx([0, 0.25, 0.5, 1], abs=1e-12)
    assert final == pytest.approx([0, 0.25, 0.5, 1], abs=1e-12)
    near_the_ends = torch.tensor([5e-14, 0.5, 0.5 - 1e-13, 5e-14], dtype=torch.float64)
    assert edges_asked(near_the_ends, near_the_ends, 1)[1] == pytest.approx([0, 0.5, 1], abs=1e-12)


@pytest.mark.parametrize("kind", ["zeros in q", "one-hot q", "zeros in both", "disjoint"])
def test_only_what_can_be_emitted_is_listed(kind: str) -> None:
    p, q = distribution_pair(kind, vocab=3)
    drafted: set[tuple[int, ...]] = set()

    def noting(*given: Tensor) -> Outcome:
        drafted.update(map(tuple, given[2].tolist()))
        return token_verification(*given)

    emitted = step_distribution(noting, p, q, gamma=2)
    assert min(emitted.values()) > 0
    assert drafted == {x for x in product(range(3), repeat=2) if float(q(())[x[0]] * q(x[:1])[x[1]]) > 0}
    want = by_formula(torch.minimum, residual, p, q, gamma=2)
    assert emitted == pytest.approx({tokens: chance for tokens, chance in want.items() if chance > 1e-15}, abs=1e-12)


def test_without_draft_tokens_a_step_is_one_token_of_the_target() -> None:
    assert step_distribution(token_verification, lambda _: coin(0.25), lambda _: coin(0.5), gamma=0) == {
        (0,): 0.25, (1,): 0.75
    }  # fmt: skip

    def noting(*given: Tensor) -> Outcome:
        assert [tuple(part.shape[1:]) for part in given] == [(1, 2), (0, 2), (0,), (0,), ()]
        assert given[2].dtype == torch.int64
        return token_verification(*given)

    assert len(step_distribution(noting, lambda _: coin(0.25), lambda _: coin(0.5), gamma=0)) == 2
    alone = torch.ones(1, dtype=torch.float64)
    assert step_distribution(token_verification, lambda _: alone, lambda _: alone, gamma=2) == {(0, 0, 0): 1.0}


def test_the_number_of_tokens_by_hand() -> None:
    counts = count_distribution({(0,): 0.5, (1,): 0.125, (1, 0): 0.25, (0, 0): 0.125}, gamma=2)
    assert counts.tolist() == [0.625, 0.375, 0.0]
    assert counts.dtype == torch.float64


def test_tables_are_float64_of_one_axis_a_token() -> None:
    for length in (1, 2, 3):
        joint = joint_distribution(P, length)
        assert joint.shape == (3,) * length
        assert joint.dtype == completed({(): 1.0}, P, length).dtype == torch.float64
        assert torch.equal(completed({(): 1.0}, P, length), joint)
        for tokens in product(range(3), repeat=length):
            chances = [float(P(tokens[:i])[x]) for i, x in enumerate(tokens)]
            assert float(joint[tokens]) == pytest.approx(prod(chances), abs=1e-15)
    twice = completed({(0,): 0.25, (0, 1): 0.25, (2,): 0.5}, P, 2)
    want = torch.zeros(3, 3).double()
    want[0], want[2] = 0.25 * P((0,)), 0.5 * P((2,))
    want[0, 1] += 0.25
    assert torch.allclose(twice, want, atol=1e-15, rtol=0)
