"""The target's numerics: how large they are in each dtype, and that they cause no false alarm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny import gpt2, llama
from transformers import PreTrainedModel

from specnb.audit.numerics import ORDERS, OTHER_KERNELS, WEIGHTS, Numerics, crossing, in_dtype, measure_numerics
from specnb.audit.teacher_forcing import Completion
from specnb.models.loading import TRAINED_PAIR, load_model
from specnb.sampling.distributions import Sampling

TEXTS = [Completion([1, 2], [0, 2, 3, 1, 1, 0]), Completion([3], [2, 2, 0, 1, 0, 0]), Completion([0], [])]


def test_the_two_ways_agree_to_the_precision_of_the_dtype() -> None:
    exact = measure_numerics(llama(dtype=torch.float64), TEXTS, positions=12)
    single = measure_numerics(llama(), TEXTS, positions=12)
    half = measure_numerics(llama(dtype=torch.bfloat16), TEXTS, positions=12)
    assert exact.positions == single.positions == half.positions == 12
    assert exact.logit < 1e-12
    assert exact.logit < single.logit < 1e-4
    assert half.logit < 0.1
    for measured in (exact, single, half):
        assert 0 <= measured.tv_mean <= measured.tv
        assert 0 <= measured.nats < 0.01
    assert "forward passes over one token differ" in str(half)


@torch.inference_mode()
def test_a_copy_in_another_dtype_is_the_model_loaded_in_it() -> None:
    tokens = torch.arange(200)[None]
    copied = in_dtype(load_model(TRAINED_PAIR / "draft", packed=False), torch.bfloat16)
    loaded = load_model(TRAINED_PAIR / "draft", dtype=torch.bfloat16, packed=False)
    assert torch.equal(copied(tokens).logits, loaded(tokens).logits)


def test_positions_are_bounded() -> None:
    assert measure_numerics(llama(), TEXTS, positions=4).positions == 4
    assert measure_numerics(llama(), TEXTS, Sampling(0), positions=100).positions == 12


def test_evidence_must_pass_one_over_delta() -> None:
    log_e = np.array([1.0, 5.0, 20.0, 3.0])
    assert crossing(log_e, 1e-6, 0.0) == 3
    assert crossing(log_e, 1e-6, 0.0, before=100) == 103
    assert crossing(log_e[:2], 1e-6, 0.0) is None
    assert crossing(log_e, 1e-6, 1.0) is None


@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_numerics_alone_do_not_reject(spread: float) -> None:
    """Tokens from distributions that differ from p by noise in the logits; the bet is the best there is, r itself."""
    generator, n, runs, alarms = np.random.default_rng(0), 4000, 100, 0
    p = generator.dirichlet(np.ones(10))
    r = p * np.exp(spread * generator.standard_normal(10))
    r /= r.sum()
    nats = float((r * np.log(r / p)).sum())
    for _ in range(runs):
        log_e = np.log(r / p)[generator.choice(10, p=r, size=n)].cumsum()
        alarms += crossing(log_e, 0.01, nats) is not None
    assert alarms <= 7  # eight or more have a chance of 1e-5 at a rate of 0.01


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_model_that_says_not_to_use_its_cache_is_measured_as_any_other(make: Callable[[], PreTrainedModel]) -> None:
    """As saved by many training programs, with `use_cache` off in its configuration. GPT-2 then returns no cache."""
    without = make()
    without.config.use_cache = False
    measured = measure_numerics(without, TEXTS, positions=12)
    assert measured == measure_numerics(make(), TEXTS, positions=12)
    assert measured.logit < 1e-4


def test_two_errors_in_opposite_directions_are_explained_and_no_more() -> None:
    given = Numerics(16, logit=0.125, tv=0.25, tv_mean=0.0, nats=0.0)
    assert (given.logit_gap, given.mass_gap) == (0.25, 0.5)
    assert given._replace(spread=1e-9).mass_gap == OTHER_KERNELS * given.mass_gap
    assert given.explains(0.25, 0.5)
    assert not given.explains(0.26, 0.5)
    assert not given.explains(0.25, 0.51)


def test_the_factors_with_numerics_are_a_mean_of_powers_below_one() -> None:
    """Hoelder's inequality needs orders between 0 and 1, and the mean of supermartingales weights that add up to 1."""
    assert ((ORDERS > 0) & (ORDERS < 1)).all()
    assert (WEIGHTS > 0).all()
    assert WEIGHTS.sum() == pytest.approx(1, abs=1e-12)
