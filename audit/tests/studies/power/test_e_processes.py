"""The e-processes that the audit is compared with: fair bets under p, and found deviations."""

import numpy as np
import pytest
import torch

from audit_studies.power import e_processes
from audit_studies.power.e_processes import SLOPES, both, pit, read, surprise, tilted
from specnb_audit.bets import Row

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def test_each_factor_of_the_score_has_expectation_one() -> None:
    score = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64)
    factors = np.exp([tilted(P[None], score[None], torch.tensor([token]))[0] for token in range(3)])
    assert P.numpy() @ factors == pytest.approx(np.ones(len(SLOPES)))


def test_each_density_of_the_transform_integrates_to_one() -> None:
    """Whatever the values before: the last of these is at many places."""
    before, places = np.random.default_rng(0).beta(2, 3, size=40), (np.arange(2000) + 0.5) / 2000
    for density in (e_processes._beta, e_processes._histogram):
        last = [density(np.append(before, place))[-1] for place in places]
        assert np.mean(last) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("exact", [True, False])
def test_both_find_tokens_of_q_and_none_of_p(exact: bool) -> None:
    random = np.random.default_rng(1)
    tokens = random.choice(3, size=2000, p=(P if exact else (P + Q) / 2).numpy()).tolist()
    row = Row(tokens, P.expand(2000, 3), Q.expand(2000, 3))
    reads = [read(row, random.random(2000), aimed) for aimed in (False, True)]
    for name, logs in both(reads).items():
        assert (logs.max() > np.log(1e6)) is not np.bool_(exact), name


def test_the_mean_over_runs_of_an_e_value_under_p_is_at_most_about_one() -> None:
    random = np.random.default_rng(2)
    runs = random.random((2000, 60))
    assert np.mean([np.exp(pit(u)[-1]) for u in runs]) == pytest.approx(1, abs=0.15)
    tokens = random.choice(3, size=(2000, 60), p=P.numpy())
    bets = tilted(P.expand(120_000, 3), -P.log().expand(120_000, 3), torch.from_numpy(tokens.ravel()))
    values = [np.exp(surprise(one)[-1]) for one in bets.reshape(2000, 60, -1)]
    assert np.mean(values) == pytest.approx(1, abs=0.15)
