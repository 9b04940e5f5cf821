"""Claimed settings: filters in any order, min-p, and settings that are refused by name."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import llama

from specnb.distributions import Sampling, sample, standardise
from specnb_audit import Engine, audit
from specnb_audit.claimed import (
    Claimed,
    CutoffGap,
    claimed_probs,
    claimed_sampling,
    cutoff_gap,
    other_orders,
)
from specnb_audit.setting_names import ENGINE_ORDERS, FILTERS, NOT_AUDITED

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0], dtype=torch.float64)


def by_hand(order: tuple[str, ...], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    logits = dict(enumerate(LOGITS.tolist()))
    for name in order:
        largest = max(logits.values())
        mass = {token: torch.tensor(value - largest).double().exp().item() for token, value in logits.items()}
        probs = {token: value / sum(mass.values()) for token, value in mass.items()}
        ranked = sorted(probs, key=lambda token: -probs[token])
        if name == "temperature":
            logits = {token: value / temperature for token, value in logits.items()}
            continue
        if name == "top-k":
            kept = ranked[:top_k]
        elif name == "min-p":
            kept = [token for token in ranked if probs[token] >= min_p * probs[ranked[0]]]
        else:
            kept = [token for at, token in enumerate(ranked) if sum(probs[one] for one in ranked[:at]) < top_p]
        logits = {token: logits[token] for token in kept}
    mass = {token: torch.tensor(value).double().exp().item() for token, value in logits.items()}
    return [mass.get(token, 0.0) / sum(mass.values()) for token in range(len(LOGITS))]


@given(st.permutations(FILTERS), st.floats(0.3, 3), st.integers(1, 5), st.floats(0.2, 0.99), st.floats(0.01, 0.8))
@settings(derandomize=True, deadline=None, database=None, max_examples=60)
def test_filters_are_applied_in_the_order_given(
    order: list[str], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    claimed = Claimed(temperature, top_k, top_p, min_p, tuple(order))
    found = claimed_probs(LOGITS, claimed)
    assert found.tolist() == pytest.approx(by_hand(tuple(order), temperature, top_k, top_p, min_p))
    for token in range(len(LOGITS)):
        gap = cutoff_gap(LOGITS, claimed, token)
        assert (gap.logit > 1e-12 or gap.mass > 1e-12) == (float(found[token]) == 0)


def test_the_default_order_is_that_of_sampling() -> None:
    assert torch.allclose(claimed_probs(LOGITS, Claimed(0.7, 4, 0.9)), standardise(LOGITS, Sampling(0.7, 4, 0.9)))
    assert claimed_probs(LOGITS, Claimed(0, 4, 0.9)).tolist() == [1, 0, 0, 0, 0]
    assert claimed_sampling({"temperature": 0.7, "top_k": -1, "top_p": None}) == Sampling(0.7)
    named, listed = claimed_sampling({"top_p": 0.9}, "llama.cpp"), claimed_sampling({"min_p": 0.1}, "top-p, min-p")
    assert isinstance(named, Claimed)
    assert isinstance(listed, Claimed)
    assert named.order == ENGINE_ORDERS["llama.cpp"]
    assert listed.order == ("top-p", "min-p", "temperature", "top-k")


def test_each_row_of_a_batch_has_its_own_filters() -> None:
    rows = torch.stack([LOGITS, 2 * LOGITS, LOGITS.flip(0)])
    claimed = Claimed(0.7, 4, 0.9, 0.2, ("min-p", "top-p", "temperature", "top-k"))
    alone = torch.stack([claimed_probs(row, claimed) for row in rows])
    assert torch.allclose(claimed_probs(rows, claimed), alone)


def test_the_gap_of_greedy_decoding_is_that_to_the_largest_logit() -> None:
    gaps = [cutoff_gap(LOGITS, Sampling(0), token) for token in range(len(LOGITS))]
    assert gaps == [(float(LOGITS[0] - logit), 0.0) for logit in LOGITS]


def test_gaps_are_in_units_of_logits_whatever_the_order() -> None:
    after, before = (Claimed(0.5, 2, order=order) for order in (("temperature", "top-k"), ("top-k", "temperature")))
    assert cutoff_gap(LOGITS, after, 3).logit == cutoff_gap(LOGITS, before, 3).logit == 1.5


@pytest.mark.parametrize("name", NOT_AUDITED)
def test_settings_that_cannot_be_claimed_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 1.5; the audit cannot claim it"):
        claimed_sampling({name: 1.5})
    assert claimed_sampling({name: NOT_AUDITED[name]}) == Sampling()


def test_bad_claims_are_refused() -> None:
    with pytest.raises(ValueError, match="best_of is no setting"):
        claimed_sampling({"best_of": 2})
    with pytest.raises(ValueError, match="order of filters is top-p, top-p"):
        Claimed(order=("top-p", "top-p"))
    with pytest.raises(ValueError, match="order of filters is sglang"):
        claimed_sampling({}, "sglang")
    with pytest.raises(ValueError, match="min_p is 2"):
        Claimed(min_p=2)


def test_only_orders_that_matter_are_tried() -> None:
    assert other_orders(Sampling(0.7)) == other_orders(Sampling(0, top_p=0.9)) == {}
    assert list(other_orders(claimed_sampling({"temperature": 0.7, "top_p": 0.9}, "llama.cpp"))) == ["transformers"]


def test_an_order_that_explains_a_finding_is_named() -> None:
    """Sampled with the temperature after top-p, claimed with the temperature before it."""
    target, order = llama(), claimed_sampling({"temperature": 0.4, "top_p": 0.8}, "llama.cpp")
    uniforms = torch.rand(40, 10, generator=torch.Generator().manual_seed(0))
    sequences = torch.ones(40, 1, dtype=torch.int64)
    with torch.inference_mode():
        for u in uniforms.T:
            probs = claimed_probs(target(input_ids=sequences).logits[:, -1], order)
            sequences = torch.cat([sequences, sample(probs, u)[:, None]], dim=1)
    given: dict[str, Any] = {"prompts": [[1]] * 40, "engine": Engine(torch.float32), "progress": False}
    assert not audit(target, sequences[:, 1:].tolist(), sampling=order, **given).rejected
    wrong = audit(target, sequences[:, 1:].tolist(), sampling=Sampling(0.4, top_p=0.8), **given)
    assert wrong.rejected
    assert any("--filter-order llama.cpp" in note for note in wrong.notes)


def test_a_token_that_is_kept_has_no_gap() -> None:
    assert cutoff_gap(torch.tensor([2.0, 1.0, 0.0]), Claimed(top_k=2), 1) == (0.0, 0.0)


def test_a_near_tie_at_top_k_is_no_gap_of_top_p() -> None:
    """Token 5 is a hair less likely than the fifth token; an engine that keeps it instead has 0.95 before it."""
    p = [0.3, 0.2, 0.2, 0.2, 0.05, 0.05 * (1 - 1e-5)]
    sampling = Sampling(top_k=5, top_p=0.95)
    gap = cutoff_gap(torch.tensor(p, dtype=torch.float64).log(), sampling, 5)
    assert gap == pytest.approx((1e-5, 0.0), rel=1e-3)
    near = Engine(logit_tolerance=1e-3)
    assert not audit(lambda prefix: p, [[5]], prompts=[[]], sampling=sampling, engine=near, progress=False).rejected
    with_more = Sampling(top_k=5, top_p=0.9)  # without the fifth token 0.9 are kept
    assert cutoff_gap(torch.tensor(p).log(), with_more, 5).mass > 0


def gap_by_hand(logits: list[float], claimed: Claimed, token: int) -> tuple[float, float]:
    """What each filter lacks to keep `token`; the ones before it have kept it in place of the weakest."""
    now, temperature, gap, excess = dict(enumerate(logits)), 1.0, 0.0, 0.0
    for name in claimed.order:
        own, ranked = logits[token] / temperature, sorted(now, key=lambda one: -now[one])
        mass = {one: math.exp(now[one] - max(now.values())) for one in now}
        if name == "temperature":
            temperature = claimed.temperature
            now = {one: value / temperature for one, value in now.items()}
            continue
        if name == "top-k":
            weakest = now[ranked[claimed.top_k - 1]] if len(now) >= (claimed.top_k or 0) else -math.inf  # type: ignore[operator]
            kept = [one for one in now if now[one] > weakest or (now[one] == weakest and own >= weakest)]
            gap = max(gap, temperature * (weakest - own))
        elif name == "min-p":
            weakest = max(now.values()) + (math.log(claimed.min_p) if claimed.min_p else -math.inf)
            kept = [one for one in now if now[one] >= weakest]
            gap = max(gap, temperature * (weakest - own))
        else:
            total = sum(mass.values())
            kept = [
                one for at, one in enumerate(ranked) if sum(mass[few] for few in ranked[:at]) < claimed.top_p * total
            ]
            excess = sum(mass[one] for one in now if mass[one] > mass[token]) / total - claimed.top_p
        now = {one: now[one] for one in {*kept, token}}
    return gap, max(0.0, excess)


@given(st.permutations(FILTERS), st.floats(0.3, 3), st.integers(1, 5), st.floats(0.2, 0.99), st.floats(0.01, 0.8))
@settings(derandomize=True, deadline=None, database=None, max_examples=60)
def test_gaps_are_those_of_each_filter_in_turn(
    order: list[str], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    claimed = Claimed(temperature, top_k, top_p, min_p, tuple(order))
    for token in range(len(LOGITS)):
        assert cutoff_gap(LOGITS, claimed, token) == pytest.approx(gap_by_hand(LOGITS.tolist(), claimed, token))


@pytest.mark.parametrize("order", [("top-k", "min-p", "top-p"), ("min-p", "top-k", "top-p"), ("top-p", "top-k")])
@pytest.mark.parametrize("logits", [[2.0, 1.0, 1.0, 0.0], [2.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 9])
@pytest.mark.parametrize("min_p", [0.0, 1.0])
def test_gaps_among_equal_logits(order: tuple[str, ...], logits: list[float], top_k: int | None, min_p: float) -> None:
    claimed = Claimed(1.0, top_k, 0.55, min_p, order)
    by_hand = replace(claimed, top_k=9) if top_k is None else claimed
    for token in range(4):
        found = cutoff_gap(torch.tensor(logits), claimed, token)
        assert found == pytest.approx(gap_by_hand(logits, by_hand, token), abs=1e-6)


def test_filters_that_are_not_claimed_leave_no_gap() -> None:
    for sampling in (Sampling(), Claimed(), Sampling(0.5), Claimed(2.0), Claimed(min_p=0.01)):
        assert [cutoff_gap(LOGITS, sampling, token) for token in range(5)] == [CutoffGap(0.0, 0.0)] * 5
    near = cutoff_gap(LOGITS, Claimed(min_p=0.1), 4)
    assert near == pytest.approx((2 + math.log(0.1) + 1, 0.0))


def test_the_order_of_the_filters_is_completed_and_checked() -> None:
    assert (Claimed().min_p, Claimed().order, FILTERS) == (0.0, FILTERS, ("temperature", "top-k", "top-p", "min-p"))
    assert Claimed(order=("min-p",)).order == ("min-p", "temperature", "top-k", "top-p")
    assert Claimed(order=()).order == FILTERS
    allowed = (
        "give each of temperature, top-k, top-p, min-p at most once, or one of transformers, vllm, llama.cpp, mlx-lm"
    )
    for order in (("top-p", "top-p"), ("top-p", "typical"), ("typical",)):
        words = f"the order of filters is {', '.join(order)}; {allowed}"
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            Claimed(order=order)
    with pytest.raises(FrozenInstanceError):
        Claimed().min_p = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("min_p", [-0.01, 1.01, math.nan, math.inf, True, False, "0.5", None, [0.5]])
def test_min_p_lies_between_0_and_1(min_p: Any) -> None:
    words = f"min_p is {min_p!r}; it must lie in [0, 1], where 0 keeps every token"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        Claimed(min_p=min_p)
    for good in (0, 0.0, 0.5, 1, 1.0):
        assert Claimed(min_p=good).min_p == good
    with pytest.raises(ValueError, match="temperature is -1"):
        Claimed(temperature=-1)


def test_a_tie_with_the_most_probable_token_is_kept_at_a_min_p_of_1() -> None:
    probs = claimed_probs(torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 1.0]]), Claimed(min_p=1.0))
    assert probs.tolist() == [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)])
def test_distributions_have_the_shape_of_the_logits_in_float32_or_better(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    logits = torch.randn(*shape, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    for sampling in (Sampling(0.7), Claimed(), Claimed(0.7, 4, 0.9, 0.1, ("min-p", "top-p")), Claimed(0, 4)):
        found = claimed_probs(logits, sampling)
        assert found.shape == logits.shape
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(found.sum(dim=-1), torch.ones(shape, dtype=found.dtype))
        rows = zip(logits.reshape(-1, 7), found.reshape(-1, 7), strict=True)
        assert all(torch.allclose(claimed_probs(row, sampling), one) for row, one in rows)


OFF: dict[str, Any] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "no_repeat_ngram_size": 0,
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
    "grammar": None,
    "typical_p": 1,
    "xtc_probability": 0,
    "mirostat": 0,
}


@pytest.mark.parametrize("name", OFF)
def test_a_setting_is_off_at_its_own_value_or_none(name: str) -> None:
    """Penalties and probabilities at the value that changes nothing; lists and grammars also where they are empty."""
    assert NOT_AUDITED == OFF
    off = [None, OFF[name]] + ([[], {}, "", 0] if OFF[name] is None else [float(OFF[name])])
    assert [claimed_sampling({name: value}) for value in off] == [Sampling()] * len(off)
    advice = "generate without it" if OFF[name] is None else f"generate with {name}={OFF[name]}"
    for value in [[5], "json", 2] if OFF[name] is None else [1 - OFF[name], 0.5, 2]:
        words = f"{name} is {value}; the audit cannot claim it: {advice}"
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            claimed_sampling({"temperature": 0.5, name: value})


@pytest.mark.parametrize(
    ("given", "order", "claimed"),
    [
        ({}, "transformers", Sampling()),
        ({"temperature": None, "top_k": None, "top_p": None, "min_p": None}, "transformers", Sampling()),
        ({"temperature": 0, "top_k": 1, "top_p": 0.5, "min_p": 0}, "transformers", Sampling(0, 1, 0.5)),
        ({"temperature": 0.5, "top_k": 0}, "transformers", Sampling(0.5)),
        ({"temperature": 0.5, "top_k": -1}, FILTERS, Sampling(0.5)),
        ({"top_k": 2, "repetition_penalty": 1}, "temperature,top-k", Sampling(1.0, 2)),
        ({"min_p": 0.1}, "transformers", Claimed(min_p=0.1)),
        ({"top_p": 0.5}, "vllm", Claimed(top_p=0.5, order=("temperature", "min-p", "top-k", "top-p"))),
        ({"top_k": 3}, "llama.cpp", Claimed(top_k=3, order=("top-k", "top-p", "min-p", "temperature"))),
        ({"min_p": 1}, "mlx-lm", Claimed(min_p=1, order=("top-p", "min-p", "top-k", "temperature"))),
        ({}, " top-p , top-k", Claimed(order=("top-p", "top-k", "temperature", "min-p"))),
        ({}, ["top-p"], Claimed(order=("top-p", "temperature", "top-k", "min-p"))),
    ],
)
def test_the_settings_of_an_engine_as_a_claim(given: dict[str, Any], order: Any, claimed: Sampling) -> None:
    """Where neither min-p nor another order is claimed, it is a plain `Sampling`."""
    found = claimed_sampling(given, order)
    assert found == claimed
    assert type(found) is type(claimed)


def test_a_setting_that_nobody_knows_is_refused() -> None:
    for name in ("best_of", "seed"):
        words = f"{name} is no setting that the audit knows; leave it out if it changes no distribution"
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            claimed_sampling({"temperature": 0.5, name: None})
    with pytest.raises(ValueError, match="top_k is -2"):
        claimed_sampling({"top_k": -2})
    with pytest.raises(ValueError, match="top_k is -3"):
        claimed_sampling({"top_k": -3})


@pytest.mark.parametrize(
    ("given", "order", "engines"),
    [
        ({}, "transformers", []),
        ({"temperature": 0.5}, "transformers", []),
        ({"top_k": 2, "top_p": 0.5}, "transformers", ["mlx-lm"]),
        ({"temperature": 0.5, "top_k": 2}, "transformers", ["llama.cpp"]),
        ({"temperature": 0.5, "min_p": 0.2}, "transformers", ["llama.cpp"]),
        ({"top_p": 0.5, "min_p": 0.2}, "transformers", ["vllm"]),
        ({"temperature": 0.5, "top_p": 0.5}, "mlx-lm", ["transformers"]),
        ({"temperature": 2.0, "top_p": 0.5, "min_p": 0.2}, "transformers", ["vllm", "llama.cpp"]),
        ({"temperature": 0.5, "top_k": 2, "top_p": 0.5}, "vllm", ["llama.cpp", "mlx-lm"]),
        (
            {"temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.1},
            ("min-p", "temperature"),
            ["transformers", "vllm", "llama.cpp", "mlx-lm"],
        ),
        ({"temperature": 0, "top_k": 2, "top_p": 0.5, "min_p": 0.1}, "vllm", []),
    ],
)
def test_other_orders_are_those_in_which_the_active_filters_differ(
    given: dict[str, Any], order: Any, engines: list[str]
) -> None:
    sampling = claimed_sampling(given, order)
    found = other_orders(sampling)
    assert list(found) == engines
    for engine, other in found.items():
        plain = (sampling.temperature, sampling.top_k, sampling.top_p)
        assert other == Claimed(*plain, given.get("min_p", 0.0), ENGINE_ORDERS[engine])
    without = Claimed(0.5, order=("top-p",))
    assert other_orders(without) == {}  # top-p and min-p are off
