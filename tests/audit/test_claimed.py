"""Claimed settings: filters in any order, min-p, and settings that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import llama

from specnb.audit import Engine, audit
from specnb.audit.claimed import (
    ENGINE_ORDERS,
    FILTERS,
    NOT_AUDITED,
    Claimed,
    claimed_probs,
    claimed_sampling,
    cutoff_gap,
    other_orders,
)
from specnb.sampling.distributions import Sampling, sample, standardise

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
