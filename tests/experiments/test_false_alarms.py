"""A smaller edition of the recorded check: exact samplers on distributions, and what the table says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from samplers import sample_row, tables

from specnb.experiments.false_alarms import peaks, resampled, table


def test_exact_samplers_stay_below_what_ville_allows() -> None:
    """The bets of 40 audits, at rates where alarms are allowed: ever reaching 10 has a chance of at most 0.1."""
    rows = [replace(sample_row(*tables(seed), 100, seed), steps=None) for seed in range(2)]
    found = peaks(rows, range(40), progress=False)
    counted = table(found, 200)
    assert counted.alarms.tolist() == [int((found >= level).sum()) for level in (1, 2, 3, 6)]
    assert (counted.alarms <= [11, 4, 2, 0]).all()
    assert counted.audits.eq(40).all()
    assert len(set(found)) > 1


def test_tokens_are_resampled_from_the_same_distributions() -> None:
    row = sample_row(*tables(), 2000, 0)
    one, again, other = (resampled(row, seed, 0) for seed in (0, 0, 1))
    assert one.tokens == again.tokens != other.tokens
    assert one.p is row.p
    hits = np.mean([resampled(row, seed, 0).tokens for seed in range(20)] == np.asarray(row.p.argmax(dim=-1)))
    assert hits == pytest.approx(float(row.p.amax(dim=-1).mean()), abs=0.02)
