"""Claimed settings: filters in any order, penalties, how far a token is from being kept, and what
is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.distributions import Sampling, normalise, standardise
from specnb_audit import Engine, audit
from specnb_audit.claimed import (
    Claimed,
    claimed_probs,
    claimed_sampling,
    cutoff_gap,
    other_orders,
)
from specnb_audit.penalties import Penalties
from specnb_audit.setting_names import ENGINE_ORDERS, FILTERS, NOT_AUDITED

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0], dtype=torch.float64)


@given(st.permutations(FILTERS), st.floats(0.3, 3), st.integers(1, 5), st.floats(0.2, 0.99), st.floats(0.01, 0.8))
@settings(derandomize=True, deadline=None, database=None, max_examples=60)
def test_filters_are_applied_one_after_the_other(
    order: list[str], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Each alone is that of `standardise`, or min-p written down; a token has a gap exactly where
    it is removed."""
    claimed, probs = Claimed(temperature, top_k, top_p, min_p, tuple(order)), standardise(LOGITS)
    for name in order:
        if name == "min-p":
            probs = normalise(probs.where(probs >= min_p * probs.max(), 0.0))
        else:
            one = {"temperature": Sampling(temperature), "top-k": Sampling(top_k=top_k), "top-p": Sampling(top_p=top_p)}
            probs = standardise(probs.log(), one[name])
    found = claimed_probs(LOGITS, claimed)
    assert torch.allclose(found, probs, atol=1e-9)
    for token in range(len(LOGITS)):
        gap = cutoff_gap(LOGITS, claimed, token)
        assert (gap.logit > 1e-12 or gap.mass > 1e-12) == (float(found[token]) == 0)
        # With as much tolerance the filters keep it: its logit is raised by the gap, and top-p by
        # the mass.
        raised = LOGITS.clone()
        raised[token] += gap.logit + 1e-9
        wider = replace(claimed, top_p=min(1.0, top_p + gap.mass + 1e-9))
        assert gap.logit == 0 or gap.mass > 0 or float(claimed_probs(raised, wider)[token]) > 0


def test_a_tie_with_the_most_probable_token_is_kept_at_a_min_p_of_1() -> None:
    assert claimed_probs(torch.tensor([1.0, 1.0, 0.0]), Claimed(min_p=1.0)).tolist() == [0.5, 0.5, 0.0]


def test_gaps_are_in_units_of_logits_whatever_the_order() -> None:
    after, before = (Claimed(0.5, 2, order=order) for order in (("temperature", "top-k"), ("top-k", "temperature")))
    assert cutoff_gap(LOGITS, after, 3).logit == cutoff_gap(LOGITS, before, 3).logit == 1.5


def test_a_near_tie_at_top_k_is_no_gap_of_top_p() -> None:
    """Token 5 is a hair less likely than the fifth token; an engine that keeps it instead has 0.95
    before it."""
    p = [0.3, 0.2, 0.2, 0.2, 0.05, 0.05 * (1 - 1e-5)]
    sampling = Sampling(top_k=5, top_p=0.95)
    gap = cutoff_gap(torch.tensor(p, dtype=torch.float64).log(), sampling, 5)
    assert gap == pytest.approx((1e-5, 0.0), rel=1e-3)
    near = Engine(logit_tolerance=1e-3)
    assert not audit(lambda prefix: p, [[5]], prompts=[[]], sampling=sampling, engine=near, progress=False).rejected
    with_more = Sampling(top_k=5, top_p=0.9)  # without the fifth token 0.9 are kept
    assert cutoff_gap(torch.tensor(p).log(), with_more, 5).mass > 0


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.5), Claimed(temperature=0.5, top_k=3)])
def test_a_token_too_improbable_for_a_float_is_far_from_being_possible(sampling: Sampling) -> None:
    logits = torch.tensor([0.0, -9.0, -90.0])
    assert claimed_probs(logits, sampling).tolist()[2] == 0
    assert [cutoff_gap(logits, sampling, token).logit for token in range(3)] == [0, 0, 90]


@pytest.mark.parametrize(
    ("given", "order", "claimed"),
    [
        ({}, "transformers", Sampling()),
        ({"temperature": 0, "top_k": 1, "top_p": 0.5, "min_p": 0}, "transformers", Sampling(0, 1, 0.5)),
        ({"temperature": 0.5, "top_k": -1}, FILTERS, Sampling(0.5)),
        ({"top_k": 2, "repetition_penalty": 1}, "temperature,top-k", Sampling(1.0, 2)),
        ({"presence_penalty": 0.5}, "transformers", Claimed(penalties=Penalties(presence_penalty=0.5))),
        ({"logit_bias": {"3": -1}}, "transformers", Claimed(penalties=Penalties(logit_bias={3: -1.0}))),
        ({"top_p": 0.5}, "vllm", Claimed(top_p=0.5, order=("temperature", "min-p", "top-k", "top-p"))),
        ({}, " top-p , top-k", Claimed(order=("top-p", "top-k", "temperature", "min-p"))),
    ],
)
def test_the_settings_of_an_engine_as_a_claim(given: dict[str, Any], order: Any, claimed: Sampling) -> None:
    """Where neither another order nor penalties are claimed, it is a plain `Sampling`."""
    found = claimed_sampling(given, order)
    assert found == claimed
    assert type(found) is type(claimed)


@pytest.mark.parametrize(
    ("given", "order", "engines"),
    [
        ({}, "transformers", []),
        ({"top_k": 2, "top_p": 0.5}, "transformers", ["mlx-lm"]),
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
    with pytest.raises(ValueError, match=f"^{name} is 1.5; the audit cannot claim it: {advice}, or give .*target"):
        claimed_sampling({"temperature": 0.5, name: 1.5})
