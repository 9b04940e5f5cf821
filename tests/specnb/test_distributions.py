"""Distributions: standardisation against a slow reference, sampling at the extremes, identities of the residual."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from specnb.distributions import (
    Sampling,
    normalise,
    one_hot,
    overlap,
    residual,
    sample,
    standardise,
    standardise_probs,
    total_variation,
    unnormalised_residual,
)

INF, NAN = math.inf, math.nan
LARGEST = math.nextafter(1.0, 0.0)

# Standardisation


def slow_distribution(logits: list[float], sampling: Sampling) -> list[float]:
    """Section 2.2 in plain Python: temperature, then top-k, then top-p."""
    peak = max(logits)
    if sampling.temperature == 0:
        return [float(token == logits.index(peak)) for token in range(len(logits))]
    probs = _norm([math.exp((logit - peak) / sampling.temperature) for logit in logits])
    if sampling.top_k is not None:
        weakest = sorted(probs, reverse=True)[: sampling.top_k][-1]
        probs = _norm([x if x >= weakest else 0.0 for x in probs])
    if sampling.top_p < 1:
        kept, mass = set(), 0.0
        for token in sorted(range(len(probs)), key=lambda token: (-probs[token], token)):
            assume(abs(mass - sampling.top_p) > 1e-5)  # whether the mass is reached must not be up to rounding
            if mass < sampling.top_p:
                kept.add(token)
            mass += probs[token]
        probs = _norm([x if token in kept else 0.0 for token, x in enumerate(probs)])
    return probs


def _norm(mass: list[float]) -> list[float]:
    return [m / sum(mass) for m in mass]


rows = st.lists(st.one_of(st.integers(-8, 8), st.just(-INF)), min_size=1, max_size=9).filter(
    lambda row: max(row) > -INF
)
"""Logits in halves below: equal ones are exactly equal, and there are many of them."""

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]),
    top_k=st.one_of(st.none(), st.integers(1, 11)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0), Sampling(0.5), Sampling(3), Sampling(top_k=2), Sampling(top_p=0.7)], ids=str
)
def test_a_distribution_in_place_of_logits_gives_the_same_distribution(sampling: Sampling) -> None:
    logits = torch.tensor([[0.3, -1.0, 0.9, 0.9], [0.0, -torch.inf, 2.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(standardise_probs(standardise(logits), sampling), standardise(logits, sampling))


def test_plain_sampling_leaves_a_distribution_as_it_is() -> None:
    probs = torch.tensor([0.1, 0.2, 0.7])
    assert standardise_probs(probs, Sampling()) is probs


@given(rows, samplings)
@examples
def test_standardise_agrees_with_the_slow_reference(row: list[float], sampling: Sampling) -> None:
    want = torch.tensor(slow_distribution([x / 2 for x in row], sampling), dtype=torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        have = standardise(torch.tensor(row, dtype=dtype) / 2, sampling)
        assert have.dtype == dtype
        torch.testing.assert_close(have.double(), want, atol=tolerance, rtol=tolerance)
        assert torch.equal(have > 0, want > 0)


def distribution_of(*parts: float, **settings: Any) -> list[float]:
    """The distribution that the settings make of weights, given as logits."""
    return standardise(torch.tensor(parts, dtype=torch.float64).log(), Sampling(**settings)).tolist()


def test_temperature_zero_takes_the_lowest_index_among_equals() -> None:
    assert distribution_of(1, 5, 2, 5, temperature=0) == [0, 1, 0, 0]


def test_tokens_tied_with_the_k_th_stay() -> None:
    assert distribution_of(2, 1, 1, 1, 0.5, top_k=2) == pytest.approx([0.4, 0.2, 0.2, 0.2, 0])


@pytest.mark.parametrize("top_k", [5, 6, 10**9])
def test_top_k_of_the_whole_vocabulary_changes_nothing(top_k: int) -> None:
    assert distribution_of(2, 1, 1, 1, 3, top_k=top_k) == distribution_of(2, 1, 1, 1, 3)


def test_the_nucleus_is_the_smallest_set_that_reaches_the_mass() -> None:
    assert distribution_of(1, 1, 1, 1, top_p=0.5) == [0.5, 0.5, 0, 0]  # reached exactly, lower indices first
    assert distribution_of(1, 1, 1, 1, top_p=math.nextafter(0.5, 1)) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert distribution_of(1, 1, 4, 2, top_p=1e-9) == [0, 0, 1, 0]


def test_top_p_applies_after_top_k() -> None:
    """top-k 2 makes (5, 3)/8 of (5, 3, 2)/10, and 5/8 reaches the mass alone where 5/10 does not."""
    assert distribution_of(5, 3, 2, top_k=2, top_p=0.6) == [1, 0, 0]
    assert distribution_of(5, 3, 2, top_p=0.6) == pytest.approx([5 / 8, 3 / 8, 0])


@given(rows, samplings, st.integers(-1000, 1000))
@examples
def test_adding_a_constant_to_the_logits_changes_nothing(row: list[float], sampling: Sampling, shift: int) -> None:
    logits = torch.tensor(row, dtype=torch.float32)
    assert torch.equal(standardise(logits + shift, sampling), standardise(logits, sampling))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (2, 1, 3), (0,)])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0), Sampling(0.7, top_k=3), Sampling(1.3, 4, 0.8), Sampling(top_p=0.5)]
)
def test_any_leading_shape_gives_what_single_rows_give(shape: tuple[int, ...], sampling: Sampling) -> None:
    logits = torch.randn(*shape, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distributions = standardise(logits, sampling)
    assert distributions.shape == logits.shape
    for row in product(*map(range, shape)):
        assert torch.equal(distributions[row], standardise(logits[row], sampling))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_distributions_of_half_precision_logits_are_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    distributions = standardise(logits, Sampling(0.8, 20, 0.9))
    assert distributions.dtype == torch.float32
    torch.testing.assert_close(distributions, standardise(logits.float(), Sampling(0.8, 20, 0.9)))


def test_a_very_low_temperature_is_the_argmax_and_does_not_overflow() -> None:
    logits = torch.tensor([3e4, 1.0, 3e4 - 1, -INF])
    for temperature in (1e-3, 1e-10, 1e-35):
        assert torch.equal(standardise(logits, Sampling(temperature)), standardise(logits, Sampling(0)))


@pytest.mark.parametrize("bad", [[1.0, NAN], [INF, 0.0], [-INF, -INF], [INF, -INF]])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0), Sampling(top_k=1), Sampling(top_p=0.5)])
def test_rows_without_a_distribution_raise_or_come_out_as_nan(bad: list[float], sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, 0.0], bad, [1.0, 2.0]])
    with pytest.raises(ValueError, match=r"logits row 1 has the maximum (nan|inf|-inf)"):
        standardise(logits, sampling)
    distributions = standardise(logits, sampling, check=False)
    assert distributions.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": -3}, "top_k is -3"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_k": INF}, "top_k is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"top_p": True}, "top_p is True"),
        ({"top_p": 10**400}, "top_p is 10000"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


# Sampling a token


def weighted(weights: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return normalise(torch.tensor(weights, dtype=dtype))


weights = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)
uniforms = st.one_of(st.sampled_from([0.0, 5e-324, LARGEST]), st.floats(0, 1, exclude_max=True))


@given(weights, uniforms, st.sampled_from([torch.float32, torch.float64]))
@examples
def test_sample_finds_the_token_whose_cell_holds_the_uniform(
    row: list[int], uniform: float, dtype: torch.dtype
) -> None:
    token = int(sample(weighted(row, dtype), torch.tensor(uniform, dtype=torch.float64)))
    assert row[token] > 0
    cumulated = [Fraction(sum(row[: i + 1]), sum(row)) for i in range(len(row))]
    edge = min(abs(float(c) - uniform) for c in [Fraction(0), *cumulated])
    if edge > 1e-6:
        assert token == next(i for i, c in enumerate(cumulated) if uniform < c)


@pytest.mark.parametrize("vocab", [1_000, 50_257, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_impossible_token_is_sampled_from_a_large_vocabulary(vocab: int, dtype: torch.dtype) -> None:
    """Most tokens have no probability here, at both ends too, and float32 distributions do not quite sum to 1."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(4, vocab, generator=generator, dtype=dtype)
    possible = torch.rand(4, vocab, generator=generator) < 0.01
    possible[:, vocab // 2], possible[:, :9], possible[:, -9:] = True, False, False
    distributions = standardise(logits.where(possible, -INF))
    edges = distributions.double().cumsum(-1)[possible].reshape(-1).unique()[::97]
    extremes = torch.tensor([0.0, 5e-324, 1e-12, 0.5, 1 - 1e-12, LARGEST], dtype=torch.float64)
    for uniform in torch.cat([extremes, edges[edges < 1][:40]]):
        tokens = sample(distributions, uniform.expand(4))
        assert (distributions.gather(-1, tokens[:, None]) > 0).all()


def test_a_distribution_that_sums_to_less_or_more_is_sampled_in_proportion() -> None:
    """Sums of float32 probabilities are off by rounding; here by far more, to see what happens."""
    middles = (torch.arange(300, dtype=torch.float64) + 0.5) / 300
    for total in (0.3, 0.9999999, 1.0000001, 3.0):
        probs = total * torch.tensor([1 / 3, 0, 2 / 3, 0], dtype=torch.float64)
        tokens = sample(probs.expand(300, 4), middles)
        assert torch.bincount(tokens, minlength=4).tolist() == [100, 0, 200, 0]


@given(st.floats(1e-300, 1e300), st.integers(0, 3))
@examples
def test_the_largest_uniform_samples_the_last_token_whatever_the_sum(total: float, zeros: int) -> None:
    probs = torch.tensor([0.25 * total, 0.75 * total] + [0.0] * zeros, dtype=torch.float64)
    assert sample(probs, torch.tensor(LARGEST, dtype=torch.float64)) == 1


def test_rare_tokens_of_a_float32_distribution_keep_their_cells() -> None:
    """float32 sums above 1/2 move in steps of 6e-8, which would lose most tokens of probability 1e-9."""
    rare = torch.arange(1, 1001)
    probs = torch.tensor([0.5] + [1e-9] * 1000 + [0.499999])
    uniform = (0.5 + 1e-9 * (rare.double() - 0.5)) / probs.double().sum()
    assert torch.equal(sample(probs.expand(1000, 1002), uniform), rare)


@pytest.mark.parametrize("uniform_dtype", [torch.float32, torch.float64])
def test_cells_are_as_wide_as_the_distribution_says(uniform_dtype: torch.dtype) -> None:
    """On evenly spread uniforms a distribution in multiples of their distance comes out exactly."""
    parts = torch.tensor([0, 11, 0, 1, 30, 22, 0])
    middles = (torch.arange(64, dtype=uniform_dtype) + 0.5) / 64
    tokens = sample((parts / 64).expand(64, 7), middles)
    assert torch.equal(torch.bincount(tokens, minlength=7), parts)
    assert torch.equal(tokens, tokens.sort().values)


def test_sample_multiplies_the_uniform_by_the_sum_and_takes_columns() -> None:
    probs = standardise(torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(1))).double()
    uniforms = torch.rand(3, 4, generator=torch.Generator().manual_seed(2)).double().T
    assert not uniforms.is_contiguous()
    want = sample(probs, uniforms.contiguous())
    assert torch.equal(sample(probs, uniforms), want)
    assert torch.equal(sample(probs / 4, uniforms), want)  # a power of two, so that nothing is rounded


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_sample_takes_any_leading_shape(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    distributions = standardise(torch.randn(*shape, 5, generator=generator))
    uniform = torch.rand(shape, generator=generator)
    tokens = sample(distributions, uniform)
    assert tokens.shape == shape
    for row in product(*map(range, shape)):
        assert tokens[row] == sample(distributions[row], uniform[row])


# Comparing two distributions


@st.composite
def pairs(draw_example: st.DrawFn) -> tuple[list[int], list[int]]:
    vocab = draw_example(st.integers(1, 6))
    row = st.lists(st.integers(0, 9), min_size=vocab, max_size=vocab).filter(any)
    return draw_example(row), draw_example(row)


@given(pairs())
@examples
def test_residual_overlap_and_distance_agree_with_fractions(pair: tuple[list[int], list[int]]) -> None:
    p, q = ([Fraction(w, sum(row)) for w in row] for row in pair)
    beta = sum(map(min, p, q))
    left = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    assert sum(left) == 1 - beta  # appendix A.1: the normaliser
    assert sum(abs(a - (a + b) / 2) for a, b in zip(p, q, strict=True)) == 1 - beta  # Definition 3.2 and Lemma 3.3
    p_distribution, q_distribution = weighted(pair[0]), weighted(pair[1])
    assert float(overlap(p_distribution, q_distribution)) == pytest.approx(float(beta), abs=1e-15)
    assert float(total_variation(p_distribution, q_distribution)) == pytest.approx(float(1 - beta), abs=1e-15)
    if p != q:
        want = [float(x / (1 - beta)) for x in left]
        assert residual(p_distribution, q_distribution).tolist() == pytest.approx(want, abs=1e-13)


@given(pairs())
@examples
def test_mass_identities(pair: tuple[list[int], list[int]]) -> None:
    """accept + residual = p and accept + reject = q, for every token."""
    p, q = (weighted(row) for row in pair)
    accept = torch.minimum(p, q)
    torch.testing.assert_close(accept + (1 - overlap(p, q)) * residual(p, q), p, atol=1e-15, rtol=0)
    torch.testing.assert_close(accept + total_variation(p, q) * residual(q, p), q, atol=1e-15, rtol=0)


@given(pairs())
@examples
def test_distance_is_symmetric_bounded_and_separates_equal_and_disjoint_distributions(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = (weighted(row) for row in pair)
    distance = float(total_variation(p, q))
    assert distance == float(total_variation(q, p))
    assert 0 <= distance <= 1 + 1e-15
    assert (distance < 1e-12) == torch.allclose(p, q, atol=1e-12)
    assert (distance > 1 - 1e-12) == bool(((p == 0) | (q == 0)).all())


def test_residual_of_equal_distributions_and_against_nothing_is_p() -> None:
    p = weighted([1, 0, 3])
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, torch.zeros(3, dtype=torch.float64)), p)
    rough = torch.tensor([0.3, 0.0, 0.6], dtype=torch.float64)  # what rounding makes of a distribution, exaggerated
    assert torch.equal(unnormalised_residual(rough, rough), rough)
    assert residual(rough, rough).tolist() == pytest.approx([1 / 3, 0, 2 / 3])


def test_residual_and_overlap_take_any_leading_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (standardise(torch.randn(2, 3, 5, generator=generator)) for _ in range(2))
    p[1, 2] = q[1, 2]
    for row in product(range(2), range(3)):
        assert torch.equal(residual(p, q)[row], residual(p[row], q[row]))
        assert overlap(p, q)[row] == overlap(p[row], q[row])
        assert total_variation(p, q)[row] == total_variation(p[row], q[row])


def test_one_hot_is_a_distribution() -> None:
    distributions = one_hot(torch.tensor([[2, 0]]), 3, torch.float64)
    assert distributions.dtype == torch.float64
    assert distributions.tolist() == [[[0, 0, 1], [1, 0, 0]]]


def test_normalise_divides_by_the_sum_of_the_last_axis() -> None:
    assert normalise(torch.tensor([[1.0, 3.0], [2.0, 2.0]])).tolist() == [[0.25, 0.75], [0.5, 0.5]]
    assert normalise(torch.zeros(2)).isnan().all()


# Settings


def test_the_defaults_are_plain_sampling() -> None:
    assert Sampling() == Sampling(temperature=1.0, top_k=None, top_p=1.0)
    assert hash(Sampling(0.5, 3, 0.9)) == hash(Sampling(0.5, 3, 0.9))
    with pytest.raises(FrozenInstanceError):
        Sampling().temperature = 2.0  # type: ignore[misc]
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(standardise(logits), torch.softmax(logits, -1))


TEMPERATURES = "it must be 0 (argmax) or positive and finite, from 1.2e-38 to 3.4e+38"
TOP_KS = "it must be a whole number from 1, or None for no limit"
TOP_PS = "it must lie in (0, 1], where 1 keeps every token"
SMALLEST, LARGEST_FLOAT32 = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": math.nextafter(SMALLEST, 0)}, TEMPERATURES),
        ({"temperature": math.nextafter(LARGEST_FLOAT32, INF)}, TEMPERATURES),
        ({"temperature": -5e-324}, TEMPERATURES),
        ({"temperature": True}, TEMPERATURES),
        ({"temperature": False}, TEMPERATURES),
        ({"temperature": "1"}, TEMPERATURES),
        ({"temperature": None}, TEMPERATURES),
        ({"temperature": 1j}, TEMPERATURES),
        ({"temperature": 10**400}, TEMPERATURES),
        ({"top_k": True}, TOP_KS),
        ({"top_k": 3.0}, TOP_KS),
        ({"top_k": "3"}, TOP_KS),
        ({"top_k": np.int64(0)}, TOP_KS),
        ({"top_p": -0.0}, TOP_PS),
        ({"top_p": math.nextafter(1, 2)}, TOP_PS),
        ({"top_p": -0.5}, TOP_PS),
        ({"top_p": None}, TOP_PS),
        ({"top_p": "0.5"}, TOP_PS),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_setting_out_of_range_is_named_with_what_it_may_be(settings: dict[str, Any], message: str) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Sampling(**settings)
    assert str(error.value) == f"{name} is {value!r}; {message}"


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": SMALLEST}, {"temperature": 0.0}),
        ({"temperature": Fraction(1, 2)}, {"temperature": 0.5}),
        ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
        ({"top_k": np.int64(1)}, {"temperature": 0.0}),
        ({"top_k": 4}, {}),
        ({"top_k": None}, {}),
        ({"top_p": Fraction(1, 2)}, {"top_p": 0.5}),
        ({"top_p": 1}, {}),
        ({"top_p": 5e-324}, {"temperature": 0.0}),
        ({"top_p": math.nextafter(1, 0)}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_settings_at_their_limits_are_taken(settings: dict[str, Any], same: dict[str, Any], dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.3, 2.0, -1.0, 1.0], [-INF, 0.0, 0.5, 0.25]], dtype=dtype)
    found, want = standardise(logits, Sampling(**settings)), standardise(logits, Sampling(**same))
    assert torch.allclose(found, want, atol=1e-6, rtol=0)
    assert found.dtype == dtype


def test_the_hottest_distribution_is_uniform_over_what_is_possible() -> None:
    logits = torch.tensor([1e4, -1e4, -INF, 0.0])
    assert standardise(logits, Sampling(LARGEST_FLOAT32)).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def test_the_row_without_a_distribution_is_counted_over_all_leading_axes() -> None:
    hint = (
        "each row needs a finite largest logit and no NaN; look for an overflow in the model (its dtype) or a filter "
        "that removed everything"
    )
    for bad, maximum in (([NAN, 0.0], "nan"), ([INF, 0.0], "inf"), ([-INF, -INF], "-inf")):
        for place, row in (((0, 0), 0), ((1, 2), 5), ((1, 0), 3)):
            logits = torch.zeros(2, 3, 2)
            logits[place] = torch.tensor(bad)
            logits[1, 2] = torch.tensor(bad)  # the first one is named
            for sampling in (Sampling(), Sampling(0)):
                with pytest.raises(ValueError) as error:  # noqa: PT011
                    standardise(logits, sampling)
                assert str(error.value) == f"logits row {row} has the maximum {maximum}: {hint}"
    with pytest.raises(ValueError, match="logits row 0 has the maximum nan"):
        standardise(torch.tensor([NAN, 0.0]))


def test_a_distribution_is_not_checked_in_place_of_logits() -> None:
    """Rows without mass come out as NaN; no test waits for the device."""
    probs = torch.tensor([[0.0, 0.0], [0.25, 0.75]])
    for sampling in (Sampling(0), Sampling(0.5), Sampling(top_k=1)):
        assert standardise_probs(probs, sampling).isnan().any(-1).tolist() == [True, False]


def test_ties_beyond_sixteen_tokens_go_to_the_lowest() -> None:
    """Torch keeps the order of more than 16 equal numbers in a stable sort only."""
    logits = torch.zeros(2, 3, 100)
    logits[..., ::3] = 1.0
    probs = standardise(logits, Sampling(top_p=0.25))
    ordered = standardise(logits)
    share = float(ordered[0, 0, 0])
    kept = math.ceil(0.25 / share)
    assert (probs[..., : 3 * kept : 3] > 0).all()
    assert int((probs > 0).sum()) == 6 * kept
    assert torch.equal(standardise(logits, Sampling(0)).argmax(-1), torch.zeros(2, 3, dtype=torch.int64))


# Values by hand


def test_sums_over_the_last_axis_of_broadcast_batches() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0]], [[0.25, 0.25, 0.5]]], dtype=torch.float64)  # (2, 1, 3)
    q = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]], dtype=torch.float64)  # (2, 3)
    assert overlap(p, q).tolist() == [[0.75, 0.0], [0.75, 0.5]]
    assert total_variation(p, q).tolist() == [[0.25, 1.0], [0.25, 0.5]]
    assert unnormalised_residual(p, q).tolist() == [
        [[0, 0.25, 0], [0.5, 0.5, 0]], [[0, 0, 0.25], [0.25, 0.25, 0]]
    ]  # fmt: skip
    assert residual(p, q).tolist() == [[[0, 1, 0], [0.5, 0.5, 0]], [[0, 0, 1], [0.5, 0.5, 0]]]


def test_a_uniform_at_the_edge_of_a_cell_belongs_to_the_next_token() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    for uniform, token in {0.0: 1, 0.25: 3, 0.75: 4, math.nextafter(0.25, 0): 1, LARGEST: 4}.items():
        found = sample(probs, torch.tensor(uniform, dtype=torch.float64))
        assert int(found) == token
        assert found.dtype == torch.int64
    assert sample(torch.tensor([[NAN, 0.5, 0.5], [0.5, 0.5, 0.0]]), torch.tensor([0.5, 0.5])).tolist() == [2, 1]


def test_one_hot_takes_any_leading_shape() -> None:
    assert one_hot(torch.tensor(1), 2).tolist() == [0.0, 1.0]
    assert one_hot(torch.tensor(1), 2).dtype == torch.float32
    assert one_hot(torch.zeros(2, 1, 3, dtype=torch.int64), 4).shape == (2, 1, 3, 4)
    assert one_hot(torch.tensor(1), 2, torch.float64).dtype == torch.float64
