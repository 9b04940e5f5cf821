"""The estimate of total variation: its interval covers what the witnesses see, and never claims too much."""

from __future__ import annotations

import numpy as np
import pytest

from specnb.audit.witness import Follower


def followed(generator: np.random.Generator, p: np.ndarray, r: np.ndarray, n: int) -> Follower:
    """Witnesses of single tokens and of those likelier under r, on n draws from r."""
    tokens = generator.choice(len(p), p=r, size=n)
    sets = np.concatenate([np.eye(len(p)), [(r > p).astype(float)]])
    follower = Follower()
    for part in np.array_split(tokens, 5):
        follower.add(sets[:, part].T - sets @ p)
    return follower


@pytest.mark.parametrize("mix", [0.0, 0.1, 0.5])
def test_the_lower_end_stays_below_the_total_variation(mix: float) -> None:
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.ones(6))
    r = (1 - mix) * p + mix * generator.dirichlet(np.ones(6))
    truth = np.abs(p - r).sum() / 2
    estimates = [followed(generator, p, r, 1500).estimate() for _ in range(200)]
    above = sum(one.low > truth for one in estimates)
    assert above <= 10  # at most 2.5% of 200 are expected, 10 or more of them have a chance of 3%
    if mix == 0.5:
        assert np.mean([one.value for one in estimates]) == pytest.approx(truth, rel=0.15)
        assert np.mean([one.low > 0 for one in estimates]) > 0.9


def test_the_interval_narrows() -> None:
    generator = np.random.default_rng(0)
    p, r = np.full(4, 0.25), np.array([0.3, 0.3, 0.2, 0.2])
    short, long = (followed(generator, p, r, n).estimate() for n in (500, 20_000))
    assert long.high - long.low < 0.3 * (short.high - short.low)
    assert long.low < 0.1 < long.high
    assert long.n == 20_000


def test_the_witness_followed_is_chosen_before_the_token_is_seen() -> None:
    follower = Follower()
    first = follower.add(np.array([[-0.5, 0.5], [0.2, -0.1], [0.3, 0.4]]))
    assert first.tolist() == [-0.5, -0.1, 0.4]  # the first witness until the second one leads
    assert follower.add(np.array([[1.0, -1.0]])).tolist() == [-1.0]


def test_nothing_seen_bounds_nothing() -> None:
    assert Follower().estimate()[:3] == (0.0, 0.0, 1.0)
