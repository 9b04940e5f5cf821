"""Exact samplers with all bets at once: nine kinds, twenty seeds each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from samplers import audit_of, sample_row, sampled_rows, tables, zipf_tables

from specnb.distributions import Sampling, standardise
from specnb_audit.bets import Row

P, Q = zipf_tables()
CUT = standardise(P.log(), Sampling(top_p=0.8))
GREEDY = standardise(P.log(), Sampling(temperature=0))
NEAR = tables(closeness=0.9)
END = 7


def ended(rows: list[Row]) -> list[Row]:
    """Each row up to its first end token."""
    cut = []
    for row in rows:
        tokens = list(row.tokens)
        n = tokens.index(END) + 1 if END in tokens else len(tokens)
        cut.append(Row(tokens[:n], row.p[:n], None if row.q is None else row.q[:n], prompt=row.prompt))
    return cut


EXACT: dict[str, Callable[[int], list[Row]]] = {
    "plain": lambda seed: sampled_rows(P, P, None, 3, 80, seed),
    "with a draft": lambda seed: sampled_rows(P, P, Q, 3, 80, seed),
    "end tokens": lambda seed: ended(sampled_rows(P, P, None, 8, 40, seed)),
    "end tokens, with a draft": lambda seed: ended(sampled_rows(P, P, Q, 8, 40, seed)),
    "top-p": lambda seed: sampled_rows(CUT, CUT, Q, 3, 80, seed),
    "greedy": lambda seed: sampled_rows(GREEDY, GREEDY, Q, 3, 80, seed),
    "steps": lambda seed: [sample_row(*tables(), 60, 1000 * seed + row) for row in range(3)],
    "steps, a near draft": lambda seed: [sample_row(*NEAR, 60, 1000 * seed + row) for row in range(3)],
    "many short": lambda seed: [replace(row, prompt=[1]) for row in sampled_rows(P, P, None, 40, 5, seed)],
}


@pytest.mark.parametrize("kind", EXACT)
def test_exact_samplers_reach_no_evidence(kind: str) -> None:
    """An e-value of 10^4 has probability 10^-4 at most for one of them, and 0.002 for any of 20; one
    of 10^6 rejects."""
    peaks = [audit_of(EXACT[kind](seed), eos=END if "end" in kind else None).log10_e_peak for seed in range(20)]
    print(kind, max(peaks))
    assert max(peaks) < 4
    assert sum(peak > 1 for peak in peaks) <= 9  # ten or more have a chance of 1e-5
