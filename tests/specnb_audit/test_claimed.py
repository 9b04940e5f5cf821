"""Claimed settings: filters in any order, min-p, how far a token is from being kept, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.distributions import Sampling
from specnb_audit import Engine, audit
from specnb_audit.claimed import (
    Claimed,
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
def test_filters_are_applied_in_the_order_given(
    order: list[str], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    claimed = Claimed(temperature, top_k, top_p, min_p, tuple(order))
    found = claimed_probs(LOGITS, claimed)
    assert found.tolist() == pytest.approx(by_hand(tuple(order), temperature, top_k, top_p, min_p))
    for token in range(len(LOGITS)):
        gap = cutoff_gap(LOGITS, claimed, token)
        assert gap == pytest.approx(gap_by_hand(LOGITS.tolist(), claimed, token))
        assert (gap.logit > 1e-12 or gap.mass > 1e-12) == (float(found[token]) == 0)


@pytest.mark.parametrize("order", [("top-k", "min-p", "top-p"), ("top-p", "top-k")])
@pytest.mark.parametrize("logits", [[2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
@pytest.mark.parametrize("top_k", [None, 2, 9])
@pytest.mark.parametrize("min_p", [0.0, 1.0])
def test_gaps_among_equal_logits(order: tuple[str, ...], logits: list[float], top_k: int | None, min_p: float) -> None:
    claimed = Claimed(1.0, top_k, 0.55, min_p, order)
    by_hand = replace(claimed, top_k=9) if top_k is None else claimed
    for token in range(4):
        found = cutoff_gap(torch.tensor(logits), claimed, token)
        assert found == pytest.approx(gap_by_hand(logits, by_hand, token), abs=1e-6)


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


@pytest.mark.parametrize(
    ("given", "order", "engines"),
    [
        ({}, "transformers", []),
        ({"temperature": 0.5}, "transformers", []),
        ({"top_k": 2, "top_p": 0.5}, "transformers", ["mlx-lm"]),
        ({"top_p": 0.5, "min_p": 0.2}, "transformers", ["vllm"]),
        ({"temperature": 0.5, "top_p": 0.5}, "mlx-lm", ["transformers"]),
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


@pytest.mark.parametrize("name", NOT_AUDITED)
def test_a_setting_is_off_at_its_own_value_or_none(name: str) -> None:
    off = NOT_AUDITED[name]
    for value in [None, off] + ([[], "", 0] if off is None else []):
        assert claimed_sampling({name: value}) == Sampling()
    advice = "generate without it" if off is None else f"generate with {name}={off}"
    with pytest.raises(ValueError, match=f"^{name} is 1.5; the audit cannot claim it: {advice}$"):
        claimed_sampling({"temperature": 0.5, name: 1.5})


ALLOWED = "give each of temperature, top-k, top-p, min-p at most once, or one of transformers, vllm, llama.cpp, mlx-lm"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Claimed(order=("top-p", "top-p")), f"the order of filters is top-p, top-p; {ALLOWED}"),
        (lambda: claimed_sampling({}, "sglang"), f"the order of filters is sglang; {ALLOWED}"),
        (lambda: Claimed(min_p=1.01), "min_p is 1.01; it must lie in [0, 1], where 0 keeps every token"),
        (lambda: Claimed(min_p=math.nan), "min_p is nan; it must lie in [0, 1], where 0 keeps every token"),
        (
            lambda: claimed_sampling({"best_of": 2}),
            "best_of is no setting that the audit knows; leave it out if it changes no distribution",
        ),
        (lambda: claimed_sampling({"top_k": -2}), "top_k is -2"),
    ],
)
def test_bad_claims_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        make()
