"""The target's rounding errors: how large they are, that they cause no false alarm, and what they
explain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import gpt2, llama
from transformers import MambaConfig, MambaForCausalLM

from specnb.distributions import Sampling, standardise, total_variation
from specnb_audit import audit, numerics
from specnb_audit.numerics import (
    NEGLIGIBLE,
    Impossible,
    ImpossibleTokens,
    Numerics,
    bar,
    crossing,
    given_numerics,
    in_dtype,
    measure_numerics,
)
from specnb_audit.teacher_forcing import Completion

TEXTS = [Completion([1, 2], [0, 2, 3, 1, 1, 0]), Completion([3], [2, 2, 0, 1, 0, 0]), Completion([0], [])]


def test_negligible_numerics_hold_no_rejection_back() -> None:
    """An e-value of 10^6.14 of an engine that differs by 1e-12 nats, as by 0, and unlike one by 1e-6."""
    log_e = np.full(20_000, 6.14 * np.log(10))
    assert [crossing(log_e, 1e-6, nats) for nats in (0.0, 1e-12, 1e-6)] == [1, 1, None]


@pytest.mark.parametrize("nats", [0.0, 1e-12, 1e-6, 1e-3])
def test_the_e_value_that_is_needed_is_the_one_that_rejects(nats: float) -> None:
    needed = bar(1e-6, nats, 500)
    assert crossing(np.array([needed + 1e-9]), 1e-6, nats, 499) == 500
    if nats < NEGLIGIBLE:  # the only term of the mean
        assert crossing(np.array([needed - 1e-6]), 1e-6, nats, 499) is None


@torch.no_grad()
def test_a_target_without_a_cache_of_keys_is_measured_by_passes_over_prefixes() -> None:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=4, hidden_size=8, state_size=4, num_hidden_layers=2, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, use_mambapy=False,
    )  # fmt: skip
    model = MambaForCausalLM(config).eval()
    measured = measure_numerics(model, TEXTS, positions=12)
    assert (measured.positions, measured.logit < 1e-4) == (12, True)
    given = [(one.prompt, one.tokens) for one in TEXTS if one.tokens]
    prompts, tokens = zip(*given, strict=True)
    assert not audit(model, tokens, prompts=prompts, progress=False).rejected


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


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_given_tolerance_bounds_what_it_says(temperature: float) -> None:
    """Logits moved by up to half the tolerance: total variation and divergence stay within the
    stated bounds."""
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature)
    numerics = given_numerics(0.3, sampling)
    logits = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    signs = torch.randint(2, logits.shape, generator=generator) * 2 - 1
    p, r = (standardise(each, sampling) for each in (logits, logits + 0.15 * signs))
    assert float(total_variation(p, r).max()) <= numerics.tv
    for order in (1.5, 2.0, 8.0):
        renyi = (r**order * p ** (1 - order)).sum(dim=-1).log() / (order - 1)
        assert float(renyi.max()) <= order * numerics.nats
    assert numerics.explains(0.3, 0.0)
    assert not numerics.explains(0.31, 0.0)


@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_numerics_alone_do_not_reject(spread: float) -> None:
    """Tokens from distributions that differ from p by noise in the logits; the bet is the best
    there is, r itself."""
    generator, n, runs, alarms = np.random.default_rng(0), 4000, 100, 0
    p = generator.dirichlet(np.ones(10))
    r = p * np.exp(spread * generator.standard_normal(10))
    r /= r.sum()
    nats = float((r * np.log(r / p)).sum())
    for _ in range(runs):
        log_e = np.log(r / p)[generator.choice(10, p=r, size=n)].cumsum()
        alarms += crossing(log_e, 0.01, nats) is not None
    assert alarms <= 7  # eight or more have a chance of 1e-5 at a rate of 0.01


# Impossible tokens


NAN = float("nan")
# Up to 0.2 in a logit and 0.1 in mass.
NARROW = Numerics(16, logit=0.1, tv=0.05, tv_mean=0.0, nats=0.0)
WIDE = Numerics(16, logit=0.5, tv=0.25, tv_mean=0.0, nats=0.0)  # up to 1 and 0.5


@pytest.mark.parametrize(
    ("gap", "with_both", "without_any", "without_bfloat16", "without_the_engine"),
    [
        ((0.2, 0.1), "borderline", "violations", "borderline", "undeclared"),
        ((0.21, 0.0), "undeclared", "violations", "violations", "undeclared"),
        ((0.0, 0.11), "undeclared", "violations", "violations", "undeclared"),
        ((1.0, 0.5), "undeclared", "violations", "violations", "undeclared"),
        ((1.01, 0.0), "violations", "violations", "violations", "violations"),
        ((0.0, 0.51), "violations", "violations", "violations", "violations"),
        ((NAN, NAN), "violations", "violations", "violations", "violations"),
    ],
)
def test_the_class_of_a_token_is_what_explains_its_gaps(
    gap: tuple[float, float], with_both: str, without_any: str, without_bfloat16: str, without_the_engine: str
) -> None:
    one = Impossible(0, 1, 2, *gap)
    for own, undeclared, name in (
        (NARROW, WIDE, with_both),
        (None, None, without_any),
        (NARROW, None, without_bfloat16),
        (None, WIDE, without_the_engine),
    ):
        asked: list[int] = []

        def measure(given: Numerics | None = undeclared, asked: list[int] = asked) -> Numerics:
            assert given is not None
            asked.append(1)
            return given

        found = ImpossibleTokens(own, None if undeclared is None else measure)
        assert found.add(one) == found.add(one) == name
        assert found.listed == {key: [one] * 2 * (key == name) for key in ("violations", "borderline", "undeclared")}
        assert found.counts == {key: 2 * (key == name) for key in ("violations", "borderline", "undeclared")}
        assert len(found.gaps) == 2
        needed = undeclared is not None and gap[0] == gap[0] and name != "borderline"
        assert asked == [1] * needed  # bfloat16 is measured once, for the first token that needs it


# What is known of the engine
