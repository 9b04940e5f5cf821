"""Tests of `estimate.over_rows`: what it returns, its coverage, and what it refuses."""

import numpy as np
import pytest

from specnb.estimate import over_rows, ratio_of_sums


def test_ratio_of_sums_is_a_special_case():
    generator = np.random.default_rng(0)
    top, bottom = generator.random(30), generator.integers(1, 9, size=30)
    ours = over_rows(lambda c: top[c].sum() / bottom[c].sum(), 30, resamples=4000, seed=3)
    theirs = ratio_of_sums(top, bottom, resamples=4000, seed=3)
    np.testing.assert_allclose(ours[:3], theirs[:3], rtol=1e-12)
    assert ours.n == 30


def test_interval_covers_as_often_as_it_says():
    # 90% of bootstrap intervals should contain the true mean, 0; fewer than 75% or more than 99% of 100
    # has probability below 1e-4 at the slightly lower coverage that 40 rows have.
    generator = np.random.default_rng(1)
    covered = 0
    for trial in range(100):
        rows = generator.normal(size=40)
        interval = over_rows(lambda c, rows=rows: rows[c].mean(), 40, level=0.9, resamples=400, seed=trial)
        covered += interval.low <= 0 <= interval.high
    assert 75 <= covered <= 99


def test_difference_of_the_same_rows_is_certain():
    rows = np.random.default_rng(2).normal(size=20)
    assert over_rows(lambda c: (rows[c] + 1).mean() - rows[c].mean(), 20)[:3] == pytest.approx((1, 1, 1))


def test_refuses_too_few_rows():
    with pytest.raises(ValueError, match="too few"):
        over_rows(len, 7)
