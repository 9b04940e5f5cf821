"""Every alternative is a distribution, a bet on it is fair, and it is the one that its name says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, examples
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from specnb.distributions import normalise
from specnb_audit.alternatives import (
    ALTERNATIVES,
    DEPENDENCE,
    LEARNED,
    CondensedDistributions,
    alternative_distributions,
    condense_distributions,
)

KEYS = st.tuples(st.sampled_from(sorted(PAIRS)), st.integers(2, 9), st.integers(0, 10**6))


FULL = 64  # cells for every token


Array = NDArray[Any]


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
    score = torch.stack([p, q, before, normalise(q.sqrt())]).amax(dim=0)
    assert torch.equal(score[seen.ids[0]].sort().values, score.sort().values[-min(head, len(p)) :])
    pooled = [token for token in range(len(p)) if token not in seen.ids[0]]
    assert all((seen.cell[token] == seen.p.shape[1] - 2) == bool(q[token] > p[token]) for token in pooled)


@given(KEYS, st.sampled_from([2, 5, FULL]), st.booleans())
@examples
def test_every_alternative_is_a_fair_bet(key: tuple[str, int, int], head: int, raw: bool) -> None:
    """sum over x of p(x) r(x)/p(x) is 1 where p has no zeros that r fills, and less where it has."""
    p, q, before = pair(*key)
    seen = for_every_token(p, q, before, head, raw)
    had = torch.zeros_like(seen.p, dtype=torch.bool)
    had[:, :-2] = seen.ids % 2 == 0
    for kind, probs in one_by_one(seen, had):
        assert kind in ALTERNATIVES
        assert (probs >= 0).all(), kind
        assert torch.allclose(probs.sum(dim=-1), torch.ones(len(p), dtype=torch.float64)), kind
        possible = p > 0
        ratio = torch.where(possible, seen.at_token(probs) / seen.at_token(seen.p).where(possible, 1.0), 0.0)
        if kind != "repeats":  # whose distribution differs from row to row: the token before is part of it
            mean = float((p * ratio).sum())
            assert mean <= 1 + 1e-9, kind
            reached = probs[0][seen.p[0] > 0].sum()
            assert mean == pytest.approx(float(reached), abs=1e-9), kind


def test_distributions_with_all_mass_in_pooled_cells_have_alternatives() -> None:
    """A flat q beside a p that is concentrated on the tokens with a cell: no alternative is NaN."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.0, 0.0, 0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    for first, second in ((p, q), (q, p)):
        condensed = condense_distributions(torch.tensor([0]), first, p, second, likely=2)
        for name, probs in one_by_one(condensed, torch.zeros_like(condensed.p, dtype=torch.bool)):
            assert float(probs.sum()) == pytest.approx(1), name


def test_no_bet_gains_where_one_token_is_certain() -> None:
    """At temperature 0 no bet gains on argmax tokens."""
    p = torch.eye(4, dtype=torch.float64)[:1]
    seen = condense_distributions(torch.tensor([0]), p, p, p, likely=4)
    for kind, probs in one_by_one(seen, torch.zeros_like(seen.p, dtype=torch.bool)):
        assert seen.at_token(probs) <= 1 + 1e-12, kind


# Against distributions written down token by token


def tempered(probs: Array, power: float) -> Array:
    with np.errstate(divide="ignore"):
        weight = np.where(probs > 0, np.exp(power * np.log(probs)), 0.0)
    return np.asarray(weight / weight.sum())


def best(probs: Array, alone: Array) -> Array:
    """All mass on the likeliest token with a cell of its own, the first of several."""
    return np.asarray(np.eye(len(probs))[np.where(alone, probs, -1.0).argmax()])


def cut(probs: Array, alone: Array, weakest: float) -> Array:
    """The tokens with a cell of their own that are at least as likely as `weakest`; `probs` where they have no mass."""
    kept = np.where(alone & (probs >= weakest), probs, 0.0)
    return kept / kept.sum() if kept.sum() > 0 else probs


def top_k(probs: Array, alone: Array, k: int) -> Array:
    own = np.sort(probs[alone])[::-1]
    return cut(probs, alone, own[min(k, len(own)) - 1])


def top_p(probs: Array, alone: Array, limit: float) -> Array:
    total = 0.0
    for own in np.sort(probs[alone])[::-1]:
        total += own
        if total >= limit:
            return cut(probs, alone, own)
    return probs


def completed(accepted: Array, rest: Array) -> Array:
    return np.asarray(accepted + max(0.0, 1 - accepted.sum()) * rest)


def rest_of(p: Array, q: Array) -> Array:
    """norm(max(0, p - q)), and p where that has no mass."""
    excess = np.maximum(p - q, 0)
    return np.asarray(excess / excess.sum() if excess.sum() > 0 else p)


def emitted(p: Array, tested: Array, sampled: Array) -> Array:
    """The token that a step emits whose draft token comes from `sampled` and is tested as if it came from `tested`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        accept = np.nan_to_num(np.minimum(1.0, p / tested), nan=0.0)
    return completed(sampled * accept, rest_of(p, tested))


def written_down(p: Array, before: Array, alone: Array, last: int, had: Array) -> list[tuple[str, Array]]:
    """What is bet on without a draft: distributions of single tokens, in the order in which they come."""
    found = [("argmax", best(p, alone))]
    found += [("sharper", tempered(p, power)) for power in (1.1, 1.25, 1.5, 2.0, 3.0)]
    found += [("flatter", tempered(p, power)) for power in (0.9, 0.8, 0.67, 0.5)]
    found += [("near-uniform", tempered(p, power)) for power in (0.25, 0.05)]
    found += [("tail-cut", top_k(p, alone, k)) for k in (2, 5, 10, 20, 50, 100)]
    found += [("tail-cut", top_p(p, alone, limit)) for limit in (0.9, 0.95, 0.98, 0.99, 0.999)]
    found += [("tail-cut", cut(p, alone, share * p[alone].max())) for share in (0.1, 0.03, 0.01)]
    found += [("shifted", before), ("repeats", np.eye(len(p))[last])]
    for name, factors in (("repeats", (1.25, 2.0, 5.0)), ("avoids", (0.8, 0.5, 0.2))):
        for factor in factors:
            weight = np.where(had, factor * p, p)
            found.append((name, weight / weight.sum()))
    return found


def written_down_with_draft(p: Array, q: Array, raw: Array | None, alone: Array) -> list[tuple[str, Array]]:
    overlap, others = np.minimum(p, q), [tempered(q, power) for power in (0.5, 0.7, 1.4, 2.0)]
    found = [("draft-leak", q), ("no-residual", completed(overlap, p)), ("redraw", completed(p * q, p))]
    found += [("residual-only", rest_of(p, q)), ("greedy-draft", emitted(p, q, best(q, alone)))]
    found += [("wrong-q", emitted(p, q, top_k(q, alone, k))) for k in (2, 5, 10, 20, 50, 100)]
    found += [("wrong-q", emitted(p, q, other)) for other in others]
    found += [("wrong-q", emitted(p, other, q)) for other in others]
    found.append(("blind-acceptance", completed(q * [np.minimum(p, x).sum() for x in q], p)))
    found += [("lenience", completed(np.minimum(p / x, q), rest_of(p, q))) for x in (0.9, 0.7, 0.5, 0.3)]
    uniforms = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
    found += [("constant-uniform", completed(np.where(p > u * q, q, 0.0), rest_of(p, q))) for u in uniforms]
    if raw is not None:
        found += [("wrong-q", emitted(p, raw, q)), ("wrong-q", emitted(p, q, raw))]
    return found


@pytest.mark.parametrize(
    ("kind", "vocab", "likely"),
    [
        ("dense", 9, 4),
        ("dense", 40, FULL),
        ("dense", 130, 110),
        ("zeros in p", 9, FULL),
        ("zeros in q", 9, FULL),
        ("zeros in both", 9, 3),
        ("one-hot p", 5, 2),
        ("one-hot q", 5, FULL),
        ("disjoint", 6, FULL),
        ("equal", 6, 3),
    ],
)
@pytest.mark.parametrize("with_raw", [False, True])
def test_the_distributions_are_those_that_their_names_say(kind: str, vocab: int, likely: int, with_raw: bool) -> None:
    """Written down on single tokens, of which those of a pooled cell have equal shares of it, and summed over cells."""
    for seed in range(2):
        p, q, before = pair(kind, vocab, seed)
        if kind == "dense":
            p = normalise(p**3)
        seen = for_every_token(p, q, before, likely, with_raw)
        generator = np.random.default_rng(seed)
        had = torch.from_numpy(generator.random(seen.p.shape) < 0.5)
        had[:, -2:] = False
        found = one_by_one(seen, had)
        assert all(probs.shape == seen.p.shape and probs.dtype == seen.p.dtype for _, probs in found)
        for at in (0, vocab // 2, vocab - 1):
            cell = np.repeat(np.arange(seen.p.shape[1]), seen.sizes[at].numpy())  # of each token
            alone = cell < seen.p.shape[1] - 2
            on_p, on_previous_p, on_q, on_raw = (
                None if cells is None else (cells[at] / seen.sizes[at].clamp_min(1)).numpy()[cell]
                for cells in (seen.p, seen.previous_p, seen.q, seen.raw)
            )
            assert on_p is not None
            assert on_previous_p is not None
            assert on_q is not None
            last = int(np.flatnonzero(cell == int(seen.previous_cell[at]))[0])
            expected = written_down(on_p, on_previous_p, alone, last, had[at].numpy()[cell])
            expected += written_down_with_draft(on_p, on_q, on_raw, alone)
            assert [name for name, _ in found] == [name for name, _ in expected]
            for (name, probs), (_, own) in zip(found, expected, strict=True):
                summed = np.bincount(cell, own, minlength=seen.p.shape[1])
                assert probs[at].numpy() == pytest.approx(summed, abs=1e-9), name


def test_without_a_draft_nothing_is_bet_on_one() -> None:
    p, _, before = pair("dense", 6, 0)
    rows = torch.stack([p, before])
    seen = condense_distributions(torch.tensor([0, 1]), rows, rows, raw=rows, likely=FULL)
    names = dict.fromkeys(name for name, _ in one_by_one(seen, torch.zeros_like(seen.p, dtype=torch.bool)))
    assert list(names) == [
        "argmax", "sharper", "flatter", "near-uniform", "tail-cut", "shifted", "repeats", "avoids",
    ]  # fmt: skip


def test_every_kind_is_explained() -> None:
    """Those that depend on other sequences, and those that are learnt, are among them."""
    assert all(meaning.strip() == meaning and len(meaning) > 30 for meaning in ALTERNATIVES.values())
    assert {*DEPENDENCE, *LEARNED} <= ALTERNATIVES.keys()


def test_cells_have_the_mass_one_whatever_the_rounding_of_the_distributions() -> None:
    p = torch.full((1, 6), 1 / 6, dtype=torch.float64)
    found = condense_distributions(torch.tensor([0]), 1.0009 * p, 0.9991 * p, 1.0005 * p, 0.5 * p, likely=2)
    for one in (found.p, found.previous_p, found.q, found.raw):
        assert one is not None
        assert float(one.sum()) == pytest.approx(1, abs=1e-12)
