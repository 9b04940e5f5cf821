"""Every alternative is a distribution, and a bet on it is fair: shown by summing over all tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specnb.audit.alternatives import ALTERNATIVES, alternative_distributions
from specnb.audit.condensed import CondensedDistributions, condense_distributions
from specnb.sampling import enumeration
from specnb.sampling.distributions import normalise, residual
from specnb.sampling.verification import Rule, token_verification

KEYS = st.tuples(st.sampled_from(sorted(PAIRS)), st.integers(2, 9), st.integers(0, 10**6))
FULL = 64  # cells for every token


def pair(kind: str, vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """p, q, and another p for the position before."""
    p, q = distribution_pair(kind, vocab, seed)
    return p(()), q(()), p((0,))


def for_every_token(p: Tensor, q: Tensor, before: Tensor, head: int, raw: bool = True) -> CondensedDistributions:
    """The same distributions with each token emitted in turn."""
    vocab = len(p)
    rows = [probs.expand(vocab, -1) for probs in (p, before, q, normalise(q.sqrt()))]
    return condense_distributions(torch.arange(vocab), rows[0], rows[1], rows[2], rows[3] if raw else None, likely=head)


def one_by_one(seen: CondensedDistributions, had: Tensor) -> list[tuple[str, Tensor]]:
    return [(kind, probs) for kind, distributions in alternative_distributions(seen, had) for probs in distributions]


@given(KEYS, st.integers(1, 9))
@examples
def test_cells_keep_all_mass(key: tuple[str, int, int], head: int) -> None:
    p, q, before = pair(*key)
    seen = for_every_token(p, q, before, head)
    for probs, cells in ((p, seen.p), (q, seen.q), (before, seen.previous_p)):
        assert cells is not None
        assert torch.allclose(cells.sum(dim=-1), torch.ones(len(p), dtype=torch.float64))
        # The tokens' own masses add up to those of the cells they are said to lie in.
        merge_rows = torch.zeros_like(cells[0]).scatter_add(0, seen.cell, probs)
        assert torch.allclose(merge_rows, cells[0], atol=1e-12)
    held = torch.bincount(seen.cell, minlength=seen.p.shape[1])
    assert torch.equal(held, seen.sizes[0])
    assert torch.equal(seen.previous_cell[1:], seen.cell[:-1])


@given(KEYS, st.sampled_from([2, 5, FULL]), st.booleans())
@examples
def test_every_alternative_is_a_fair_bet(key: tuple[str, int, int], head: int, raw: bool) -> None:
    """sum over x of p(x) r(x)/p(x) is 1 where p has no zeros that r fills, and less where it has."""
    p, q, before = pair(*key)
    seen = for_every_token(p, q, before, head, raw)
    had = torch.zeros_like(seen.p, dtype=torch.bool)
    had[:, :-2] = seen.ids % 2 == 0
    kinds = set()
    for kind, probs in one_by_one(seen, had):
        kinds.add(kind)
        assert (probs >= 0).all(), kind
        assert torch.allclose(probs.sum(dim=-1), torch.ones(len(p), dtype=torch.float64)), kind
        possible = p > 0
        ratio = torch.where(possible, seen.at_token(probs) / seen.at_token(seen.p).where(possible, 1.0), 0.0)
        if kind != "repeats":  # whose distribution differs from row to row: the token before is part of it
            mean = float((p * ratio).sum())
            assert mean <= 1 + 1e-9, kind
            reached = probs[0][seen.p[0] > 0].sum()
            assert mean == pytest.approx(float(reached), abs=1e-9), kind
    assert kinds <= set(ALTERNATIVES)


@given(st.sampled_from(["dense", "zeros in q", "zeros in p"]), st.integers(3, 6), st.integers(0, 10**6))
@examples
def test_alternatives_have_the_distribution_of_their_bug(kind: str, vocab: int, seed: int) -> None:
    """What one step of a broken Algorithm 1 emits first, enumerated, is one of the alternatives."""
    p, q, before = pair(kind, vocab, seed)
    seen = for_every_token(p, q, before, FULL, raw=False)
    alternatives: dict[str, list[Tensor]] = {}
    for name, probs in one_by_one(seen, torch.zeros_like(seen.p, dtype=torch.bool)):
        by_token = torch.zeros(vocab, dtype=torch.float64).scatter(0, seen.ids[0], probs[0, :-2])
        alternatives.setdefault(name, []).append(by_token)

    def emitted(rule: Rule, tested: Tensor, sampled: Tensor) -> Tensor:
        steps = enumeration.step_distribution(rule, lambda _: p, lambda _: tested, 1, sampled=lambda _: sampled)
        first = torch.zeros(vocab, dtype=torch.float64)
        for tokens, chance in steps.items():
            first[tokens[0]] += chance
        return first

    def among(probs: Tensor, name: str) -> bool:
        return any(torch.allclose(probs, one, atol=1e-9) for one in alternatives[name])

    argmax = torch.nn.functional.one_hot(q.argmax(), vocab).double()
    assert among(emitted(token_verification, q, argmax), "greedy-draft")
    assert among(emitted(token_verification, q, normalise(q**1.4)), "wrong-q")
    assert among(emitted(token_verification, normalise(q**0.5), q), "wrong-q")
    overlap = torch.minimum(p, q).sum()
    assert among(torch.minimum(p, q) + (1 - overlap) * p, "no-residual")
    inverted = torch.minimum(p, q) + (1 - overlap) * residual(q, p)
    assert among(inverted, "draft-leak")
    assert among(q, "draft-leak")
    accepted = q * torch.minimum(p, q[:, None]).sum(dim=-1)  # of x: u <= q(x)/p(y) for a y sampled from p
    assert among(accepted + (1 - accepted.sum()) * p, "blind-acceptance")


def test_no_bet_gains_where_one_token_is_certain() -> None:
    """At temperature 0 no bet gains on argmax tokens."""
    p = torch.eye(4, dtype=torch.float64)[:1]
    seen = condense_distributions(torch.tensor([0]), p, p, p, likely=4)
    for kind, probs in one_by_one(seen, torch.zeros_like(seen.p, dtype=torch.bool)):
        assert seen.at_token(probs) <= 1 + 1e-12, kind


def test_distributions_with_all_mass_in_pooled_cells_have_alternatives() -> None:
    """A flat q beside a p that is concentrated on the tokens with a cell: no alternative is NaN."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.0, 0.0, 0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    for first, second in ((p, q), (q, p)):
        condensed = condense_distributions(torch.tensor([0]), first, p, second, likely=2)
        for name, probs in one_by_one(condensed, torch.zeros_like(condensed.p, dtype=torch.bool)):
            assert float(probs.sum()) == pytest.approx(1), name


def test_pooled_cells_hold_the_other_tokens() -> None:
    generator = np.random.default_rng(0)
    p, q = (torch.from_numpy(generator.dirichlet(np.ones(50), size=3)) for _ in range(2))
    seen = condense_distributions(torch.tensor([1, 2, 3]), p, p, q, likely=10)
    assert seen.p.shape == (3, 12)
    assert torch.equal(seen.sizes[:, -2:].sum(dim=-1), torch.full((3,), 40))
    assert seen.q is not None
    assert (seen.q[:, -2] > seen.p[:, -2]).all()  # the first lump is of those that q finds likelier
    assert (seen.q[:, -1] < seen.p[:, -1]).all()
