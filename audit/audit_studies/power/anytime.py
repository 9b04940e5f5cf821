"""The e-processes of `e_processes` on the samples of `audit_comparison`: the beginnings of the same
blocks, with the pieces, budgets and level of the audit there.

A test has found the bug within a budget if its e-value reached 1/`ALPHA` at any token of the piece.
A token that is impossible is a rejection, as in every test that reads p.
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
from audit_studies.power.audit_comparison import BUDGETS, EXACT_PIECES, PIECES, SUITE, Found, counted, pieces
from audit_studies.power.compared_samples import LENGTH, ends_of, rows_of, sampled
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


def p_values(seen: Reads, at: slice, with_draft: bool) -> dict[str, float]:
    """One over the largest e-value of each test on the completions of a slice."""
    if seen.impossible[at].any():
        return dict.fromkeys(TESTS, 0.0)
    views = [seen.plain, seen.aimed] if with_draft else [seen.plain]
    joined = [Read(*(np.concatenate(parts) for parts in zip(*view[at], strict=True))) for view in views]
    return {f"{name}, any time": float(np.exp(-max(logs.max(), 0.0))) for name, logs in both(joined).items()}


@torch.inference_mode()
def block(bug: Bug, pair: Pair, number: int, count: int, tokens: int) -> Found:
    """Both tests, without and with the draft model, on `count` pieces of a block for every
    budget."""
    rows = rows_of(sampled(bug, pair, number, tokens // LENGTH), pair, bug.claimed)
    seen = reads_of(rows, ends_of(bug), number)
    places = [(budget, at) for budget in BUDGETS for at in pieces(budget, count, tokens)]  # none is beyond `tokens`
    found = [(name, budget, p) for budget, at in places for name, p in p_values(seen, at, False).items()]
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
