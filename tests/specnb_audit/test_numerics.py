"""The target's numerics: how large they are in each dtype, and that they cause no false alarm."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from tiny import gpt2, llama
from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb.models.loading import TRAINED_PAIR, load_model
from specnb_audit import numerics
from specnb_audit.claimed import claimed_probs
from specnb_audit.numerics import (
    ORDERS,
    OTHER_KERNELS,
    WEIGHTS,
    Numerics,
    crossing,
    given_numerics,
    in_dtype,
    measure_numerics,
)
from specnb_audit.teacher_forcing import Completion

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


def test_one_token_at_a_time_gives_the_logits_of_the_whole_pass() -> None:
    """The engine is run over the prompt, and then over one token after the other with its cache."""
    model = llama(dtype=torch.float64)
    seen: list[tuple[list[list[int]], bool, bool]] = []

    def record(module: object, given: tuple[object, ...], more: dict[str, Any]) -> None:
        seen.append((more["input_ids"].tolist(), more["use_cache"], more.get("past_key_values") is not None))

    model.register_forward_pre_hook(record, with_kwargs=True)
    many, one = numerics._many_and_one(model, model, TEXTS[0])
    assert many.shape == one.shape == (6, 4)
    assert torch.allclose(many, one, atol=1e-12)
    tokens = [([[token]], True, True) for token in TEXTS[0].tokens[:-1]]
    assert seen == [([[1, 2, 0, 2, 3, 1, 1]], False, False), ([[1, 2]], True, False), *tokens]


LOGITS = torch.randn(2, 10, 5, generator=torch.Generator().manual_seed(0)).double()


def measured_by_hand(
    monkeypatch: pytest.MonkeyPatch, sampling: Sampling, scale: float, **settings: Any
) -> tuple[Numerics, list[tuple[bool, Completion]]]:
    """Of logits made by hand, `(tokens, 5)` for each text; and whether the engine is the model, with the texts."""
    model, seen = llama(), list[tuple[bool, Completion]]()

    def many_and_one(target: object, engine: object, text: Completion) -> tuple[torch.Tensor, torch.Tensor]:
        assert target is model
        at = sum(len(one.tokens) for _, one in seen)
        seen.append((engine is model, text))
        many = LOGITS[0, at : at + len(text.tokens)]
        return many.float(), (many + scale * LOGITS[1, at : at + len(text.tokens)]).float()

    monkeypatch.setattr(numerics, "_many_and_one", many_and_one)
    given = [Completion([1], []), *[Completion([2], [0] * 9)] * 2]
    return measure_numerics(model, given, sampling, **settings), seen


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5), Sampling(0.5, top_k=2), Sampling(top_p=0.6)])
@pytest.mark.parametrize("scale", [0.3, 0.0])
def test_the_differences_are_those_computed_by_hand(
    sampling: Sampling, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seen = measured_by_hand(monkeypatch, sampling, scale, positions=9)
    assert seen == [(True, Completion([2], [0] * 5))] * 2  # 9 positions of two texts, rounded up
    many = LOGITS[0].float().double()
    one = (LOGITS[0] + scale * LOGITS[1]).float().double()
    p, r = (claimed_probs(logits, sampling).numpy() for logits in (many, one))
    tv = np.abs(p - r).sum(axis=1) / 2
    nats = [sum(b * math.log(b / a) for a, b in zip(*pair, strict=True) if a and b) for pair in zip(p, r, strict=True)]
    difference = (one - many).numpy()
    spread = difference.std(axis=1)
    numbers = (10, np.abs(difference).max(), tv.max(), tv.mean(), max(0.0, float(np.mean(nats))), spread.max())
    assert found[:6] == pytest.approx(numbers, rel=1e-9, abs=1e-15)


def test_which_texts_and_positions_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to four texts that have tokens, 16 positions in all by default."""
    seen: list[Completion] = []

    def many_and_one(target: object, engine: object, text: Completion) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(text)
        return torch.zeros(len(text.tokens), 4), torch.zeros(len(text.tokens), 4)

    monkeypatch.setattr(numerics, "_many_and_one", many_and_one)
    texts = [Completion([at], [at] * at) for at in (0, 9, 2, 9, 9, 9)]
    assert measure_numerics(llama(), texts).positions == 14
    assert [(one.prompt, len(one.tokens)) for one in seen] == [([9], 4), ([2], 2), ([9], 4), ([9], 4)]
    seen.clear()
    assert measure_numerics(llama(), texts, positions=1).positions == 4
    assert [len(one.tokens) for one in seen] == [1] * 4


WHOLE = "the target's forward passes over one token differ from its pass over the whole sequence"


@pytest.mark.parametrize(
    ("dtype", "own", "source"),
    [
        (None, True, WHOLE),
        (torch.float32, True, WHOLE),
        (torch.bfloat16, False, "forward passes over one token in bfloat16 differ from the target's pass"),
        (torch.float64, False, "forward passes over one token in float64 differ from the target's pass"),
    ],
)
def test_another_dtype_needs_a_copy_of_the_model(
    dtype: torch.dtype | None, own: bool, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seen = measured_by_hand(monkeypatch, Sampling(), 0.1, positions=2, engine_dtype=dtype)
    assert [engine for engine, _ in seen] == [own, own]
    assert found.source == source


def test_the_copy_has_the_dtype_and_unrounded_rotary_frequencies() -> None:
    model = llama(dtype=torch.float64)
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.mul_(1 + 1e-3)
    copied = in_dtype(model, torch.bfloat16)
    assert copied is not model
    assert {weights.dtype for weights in copied.parameters()} == {torch.bfloat16}
    assert all(torch.equal(weights, before[name]) for name, weights in model.state_dict().items())
    own = copied.model.rotary_emb.inv_freq
    assert own.dtype == frequencies.dtype
    assert torch.equal(own, frequencies)
    assert own is not frequencies
    assert in_dtype(gpt2(), torch.bfloat16).dtype == torch.bfloat16  # without such frequencies


def test_the_words_on_numerics() -> None:
    given = Numerics(16, logit=0.0123, tv=0.00456, tv_mean=0.0, nats=0.0)
    assert str(given) == f"{WHOLE} by up to 0.012 in a logit and 0.0046 in total variation (16 positions)"
    assert str(given._replace(positions=0, source="as given")) == "as given"
    assert (given.spread, given.source) == (0.0, WHOLE)


def test_the_bounds_that_a_measurement_gives() -> None:
    """Twice the largest difference, or as far apart as two normal errors with twice the spread will ever be."""
    largest = 7.034483825  # of a million normal values, but for a probability of 1e-6
    assert float(norm.sf(largest)) == pytest.approx(1e-12, rel=1e-6)
    given = Numerics(16, logit=0.125, tv=0.25, tv_mean=0.0, nats=0.0)
    for spread, logit_gap, mass_gap in ((0.0, 0.25, 0.5), (0.01, 0.25, 1.0), (0.1, 0.2 * 2**0.5 * largest, 1.0)):
        bounds = given._replace(spread=spread)
        assert bounds.logit_gap == pytest.approx(logit_gap, rel=1e-6)
        assert bounds.mass_gap == mass_gap
        assert bounds.explains(bounds.logit_gap, mass_gap)
        for further in ((bounds.logit_gap + 1e-9, 0.0), (0.0, mass_gap + 1e-9), (math.nan, 0.0), (0.0, math.nan)):
            assert not bounds.explains(*further)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("gap", [0.0, 0.3, 2.0])
def test_a_given_tolerance_as_numerics(temperature: float, gap: float) -> None:
    """At temperature 0 the distributions are one-hot, and only the gap in a logit counts."""
    found = given_numerics(gap, Sampling(temperature))
    ratio = gap / temperature if temperature else 0.0
    tv = math.tanh(ratio / 4)
    assert found[:6] == pytest.approx((0, gap / 2, tv, tv, ratio**2 / 8, 0.0), rel=1e-12)
    assert str(found) == f"the engine's logits are taken to err by up to {gap / 2:.2g}, as given"
    assert found.logit_gap == pytest.approx(gap)


@pytest.mark.parametrize("gap", [-0.1, math.inf, math.nan])
def test_a_tolerance_is_finite(gap: float) -> None:
    words = f"logit_tolerance is {gap}; it must be 0 or more, in units of logits"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        given_numerics(gap, Sampling())


MIXTURE = {1 - 2**-10: 0.5, 1 / 2: 0.1, 3 / 4: 0.1, 7 / 8: 0.1, 15 / 16: 0.1, 31 / 32: 0.1}
"""Order of Hoelder's inequality: weight in the mean."""


@pytest.mark.parametrize("nats", [0.0, 0.001, 0.02, 0.5])
@pytest.mark.parametrize("before", [0, 7])
def test_the_evidence_beyond_the_numerics_is_the_mean_over_orders(nats: float, before: int) -> None:
    """With 1/delta on either side of what is left after each token."""
    log_e = np.array([3.0, 2.0, 9.0, 14.0, 11.0, 20.0])
    explained = [
        math.log(sum(weight * math.exp(a * log - (before + at) * nats * a / (1 - a)) for a, weight in MIXTURE.items()))
        for at, log in enumerate(log_e, 1)
    ]
    if not nats:
        explained = log_e.tolist()
    for at, value in enumerate(explained):
        if value <= max([0.0, *explained[:at]]):
            continue
        assert crossing(log_e[: at + 1], math.exp(-value + 1e-9), nats, before) == before + at + 1
        assert crossing(log_e[: at + 1], math.exp(-value - 1e-9), nats, before) is None
    assert crossing(log_e, 1e-300, nats) is None
    assert crossing(np.empty(0), 0.1, nats) is None


def test_evidence_of_exactly_one_over_delta_passes_without_numerics() -> None:
    assert crossing(np.array([0.0, -np.log(0.01)]), 0.01, 0.0) == 2
