"""Every suspect is a law, and a bet on it is fair: shown by summing over all tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import PAIRS, examples, law_pair
from torch import Tensor

from specnb import exact
from specnb.audit.cells import View, view
from specnb.audit.suspects import KINDS, suspect_laws
from specnb.law import normalise, residual
from specnb.verify import token_verification

KEYS = st.tuples(st.sampled_from(sorted(PAIRS)), st.integers(2, 9), st.integers(0, 10**6))
FULL = 64  # cells for every token


def pair(kind: str, vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """p, q, and another p for the position before."""
    p, q = law_pair(kind, vocab, seed)
    return p(()), q(()), p((0,))


def for_every_token(p: Tensor, q: Tensor, before: Tensor, head: int, raw: bool = True):
    """The view of the same laws with each token emitted in turn."""
    vocab = len(p)
    rows = [law.expand(vocab, -1) for law in (p, before, q, normalise(q.sqrt()))]
    return view(torch.arange(vocab), rows[0], rows[1], rows[2], rows[3] if raw else None, head=head)


def one_by_one(seen: View, had: Tensor) -> list[tuple[str, Tensor]]:
    return [(kind, law) for kind, laws in suspect_laws(seen, had) for law in laws]


@given(KEYS, st.integers(1, 9))
@examples
def test_a_view_of_a_law_loses_nothing(key: tuple[str, int, int], head: int) -> None:
    p, q, before = pair(*key)
    seen = for_every_token(p, q, before, head)
    for law, cells in ((p, seen.p), (q, seen.q), (before, seen.before)):
        assert torch.allclose(cells.sum(dim=-1), torch.ones(len(p), dtype=torch.float64))
        # The tokens' own masses add up to those of the cells they are said to lie in.
        gathered = torch.zeros_like(cells[0]).scatter_add(0, seen.cell, law)
        assert torch.allclose(gathered, cells[0], atol=1e-12)
    held = torch.bincount(seen.cell, minlength=seen.p.shape[1])
    assert torch.equal(held, seen.sizes[0])
    assert torch.equal(seen.previous[1:], seen.cell[:-1])


@given(KEYS, st.sampled_from([2, 5, FULL]), st.booleans())
@examples
def test_every_suspect_is_a_fair_bet(key: tuple[str, int, int], head: int, raw: bool) -> None:
    """sum over x of p(x) r(x)/p(x) is 1 where p has no zeros that r fills, and less where it has."""
    p, q, before = pair(*key)
    seen = for_every_token(p, q, before, head, raw)
    had = torch.zeros_like(seen.p, dtype=torch.bool)
    had[:, :-2] = seen.ids % 2 == 0
    kinds = set()
    for kind, law in one_by_one(seen, had):
        kinds.add(kind)
        assert (law >= 0).all(), kind
        assert torch.allclose(law.sum(dim=-1), torch.ones(len(p), dtype=torch.float64)), kind
        possible = p > 0
        ratio = torch.where(possible, seen.at_token(law) / seen.at_token(seen.p).where(possible, 1.0), 0.0)
        if kind != "repeats":  # whose law differs from row to row: the token before is part of it
            mean = float((p * ratio).sum())
            assert mean <= 1 + 1e-9, kind
            reached = law[0][seen.p[0] > 0].sum()
            assert mean == pytest.approx(float(reached), abs=1e-9), kind
    assert kinds <= set(KINDS)


@given(st.sampled_from(["dense", "zeros in q", "zeros in p"]), st.integers(3, 6), st.integers(0, 10**6))
@examples
def test_suspects_have_the_law_of_the_bug_they_are_named_after(kind: str, vocab: int, seed: int) -> None:
    """What one step of a broken Algorithm 1 emits first, enumerated, is among the laws suspected."""
    p, q, before = pair(kind, vocab, seed)
    seen = for_every_token(p, q, before, FULL, raw=False)
    suspected: dict[str, list[Tensor]] = {}
    for name, law in one_by_one(seen, torch.zeros_like(seen.p, dtype=torch.bool)):
        by_token = torch.zeros(vocab, dtype=torch.float64).scatter(0, seen.ids[0], law[0, :-2])
        suspected.setdefault(name, []).append(by_token)

    def emitted(rule, tested: Tensor, drawn: Tensor) -> Tensor:
        steps = exact.step_law(rule, lambda _: p, lambda _: tested, 1, drawn=lambda _: drawn)
        first = torch.zeros(vocab, dtype=torch.float64)
        for tokens, chance in steps.items():
            first[tokens[0]] += chance
        return first

    def among(law: Tensor, name: str) -> bool:
        return any(torch.allclose(law, one, atol=1e-9) for one in suspected[name])

    argmax = torch.nn.functional.one_hot(q.argmax(), vocab).double()
    assert among(emitted(token_verification, q, argmax), "greedy-draft")
    assert among(emitted(token_verification, q, normalise(q**1.4)), "wrong-q")
    assert among(emitted(token_verification, normalise(q**0.5), q), "wrong-q")
    overlap = torch.minimum(p, q).sum()
    assert among(torch.minimum(p, q) + (1 - overlap) * p, "no-residual")
    inverted = torch.minimum(p, q) + (1 - overlap) * residual(q, p)
    assert among(inverted, "draft-leak")
    assert among(q, "draft-leak")


def test_a_certain_token_leaves_no_suspect_but_the_truth_or_none() -> None:
    """At temperature 0 a text of argmaxes never gains by any bet."""
    p = torch.eye(4, dtype=torch.float64)[:1]
    seen = view(torch.tensor([0]), p, p, p, head=4)
    for kind, law in one_by_one(seen, torch.zeros_like(seen.p, dtype=torch.bool)):
        assert seen.at_token(law) <= 1 + 1e-12, kind


def test_lumps_hold_what_has_no_cell() -> None:
    generator = np.random.default_rng(0)
    p, q = (torch.from_numpy(generator.dirichlet(np.ones(50), size=3)) for _ in range(2))
    seen = view(torch.tensor([1, 2, 3]), p, p, q, head=10)
    assert seen.p.shape == (3, 12)
    assert torch.equal(seen.sizes[:, -2:].sum(dim=-1), torch.full((3,), 40))
    assert (seen.q[:, -2] > seen.p[:, -2]).all()  # the first lump is of those that q finds likelier
    assert (seen.q[:, -1] < seen.p[:, -1]).all()
