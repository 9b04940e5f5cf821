"""Tests that may stop early, on the samples of `audit_comparison`: the beginnings of the same blocks,
with the pieces, budgets and level of the audit there.

The e-processes of `e_processes` have found a bug within a budget if their e-value reached 1/`ALPHA`
at any token of the piece. "surprise, few looks" is the z-test that looks at each budget up to
`tokens`, at an equal part of the level each time. A token that is impossible is a rejection, as in
`audit_comparison`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from audit_studies.bugs.bug import Bug
from audit_studies.bugs.known_bugs import EXACT
from audit_studies.power import relatives
from audit_studies.power.audit_comparison import BUDGETS, EXACT_PIECES, PIECES, SUITE, Found, counted, pieces
from audit_studies.power.compared_samples import LENGTH, Judged, View, ends_of, judge, rows_of, sampled
from audit_studies.power.e_processes import Read, both, read
from audit_studies.power.random_pair import random_pair
from specnb.loading import Pair
from specnb_audit.bets import Row
from studies.study import Study

TESTS = ("surprise, any time", "pit, any time")


class Reads(NamedTuple):
    """What the tests read of completions, one entry for each: along p, along q/p, and whether a
    token is impossible."""

    plain: list[Read]
    aimed: list[Read]
    impossible: NDArray[np.bool_]


def reads_of(rows: Sequence[Row], ends: Sequence[int] | None, seed: int) -> Reads:
    """What the tests read of `rows`; `seed` is that of the transform's own uniforms."""
    random, plain, aimed, impossible = np.random.default_rng([4, seed]), list[Read](), list[Read](), []
    for row in rows:
        own = row.p.gather(-1, torch.as_tensor(list(row.tokens))[:, None])
        after_the_end = any(token in (ends or ()) for token in row.tokens[:-1])
        impossible.append(after_the_end or bool((own == 0).any()))
        noise = random.random(len(own))
        plain.append(read(row, noise, aimed=False))
        if row.q is not None:
            aimed.append(read(row, noise, aimed=True))
    return Reads(plain, aimed, np.array(impossible))


def few_looks(seen: Judged, at: slice, looks: Sequence[int]) -> dict[str, float]:
    """The p-value of the z-test that looks at a slice after so many tokens each time, as often as
    it can there: without and with the draft model."""
    ends = [at.start + look // LENGTH for look in looks if at.start + look // LENGTH <= at.stop]

    def smallest(view: View) -> float:
        score, variance = view.score * seen.judged, view.variance * seen.judged
        return min(relatives.surprise(score[at.start : end], variance[at.start : end]) for end in ends)

    plain, aimed = smallest(seen.plain), smallest(seen.aimed)
    plain = 0.0 if seen.zero[at].any() else plain
    alone, twice = (min(1.0, len(looks) * p) for p in (plain, 2 * min(plain, aimed)))
    return {"surprise, few looks": alone, "surprise, few looks, draft": twice}


def p_values(seen: Reads, at: slice, with_draft: bool) -> dict[str, float]:
    """One over the largest e-value of each test on the completions of a slice."""
    if seen.impossible[at].any():
        return dict.fromkeys(TESTS, 0.0)
    views = [seen.plain, seen.aimed] if with_draft else [seen.plain]
    joined = [Read(*(np.concatenate(parts) for parts in zip(*view[at], strict=True))) for view in views]
    return {f"{name}, any time": float(np.exp(-max(logs.max(), 0.0))) for name, logs in both(joined).items()}


@torch.inference_mode()
def block(bug: Bug, pair: Pair, number: int, count: int, tokens: int) -> Found:
    """All tests, without and with the draft model, on `count` pieces of a block for every budget."""
    rows, ends = rows_of(sampled(bug, pair, number, tokens // LENGTH), pair, bug.claimed), ends_of(bug)
    seen = reads_of(rows, ends, number)
    places = [(budget, at) for budget in BUDGETS for at in pieces(budget, count, tokens)]  # none is beyond `tokens`
    judged, looks = judge(rows, ends, number), [budget for budget in BUDGETS if budget <= tokens]
    found = [(name, budget, p) for budget, at in places for name, p in few_looks(judged, at, looks).items()]
    found += [(name, budget, p) for budget, at in places for name, p in p_values(seen, at, False).items()]
    with_draft = [(budget, p_values(seen, at, True)) for budget, at in places]
    return found + [(f"{name}, draft", budget, p) for budget, values in with_draft for name, p in values.items()]


def measure(item: str, tokens: int, exact_blocks: int) -> pd.DataFrame:
    """One line for each test and budget of the bug `item`, as in `audit_comparison`."""
    is_exact = item == EXACT.name
    blocks, most = (exact_blocks, EXACT_PIECES) if is_exact else (1, PIECES)
    found: Found = []
    for number in range(blocks):
        found += block(SUITE[item], random_pair(), number, -(-most // blocks), tokens)
    return counted(item, found)


STUDY = Study(
    measure,
    settings={"tokens": 5000, "exact_blocks": 4},
    small={"tokens": 2000, "exact_blocks": 1},
    items=tuple(SUITE),
    small_items=("exact", "no-residual"),
)
