"""Distributions: standardisation against a slow reference, sampling at the extremes, identities of
the residual."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import llama
from torch import Tensor
from transformers import GenerationConfig

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
    """Section 2.2 in plain Python: temperature, then top-k, then top-p, then min-p."""
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
            # Whether the mass is reached must not be up to rounding.
            assume(abs(mass - sampling.top_p) > 1e-5)
            if mass < sampling.top_p:
                kept.add(token)
            mass += probs[token]
        probs = _norm([x if token in kept else 0.0 for token, x in enumerate(probs)])
    least = sampling.min_p * max(probs)
    # Nor whether a token is below a limit.
    assume(all(x == max(probs) or abs(x - least) > 1e-6 for x in probs))
    return _norm([x if x >= least else 0.0 for x in probs])


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
    min_p=st.sampled_from([0.0, 0.0, 0.11, 0.6, 1.0]),
)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0), Sampling(0.5), Sampling(3), Sampling(top_k=2), Sampling(top_p=0.7)], ids=str
)
def test_a_distribution_in_place_of_logits_gives_the_same_distribution(sampling: Sampling) -> None:
    logits = torch.tensor([[0.3, -1.0, 0.9, 0.9], [0.0, -torch.inf, 2.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(standardise_probs(standardise(logits), sampling), standardise(logits, sampling))


@given(rows, samplings)
@examples
def test_standardise_agrees_with_the_slow_reference(row: list[float], sampling: Sampling) -> None:
    want = torch.tensor(slow_distribution([x / 2 for x in row], sampling), dtype=torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        have = standardise(torch.tensor(row, dtype=dtype) / 2, sampling)
        assert have.dtype == dtype
        torch.testing.assert_close(have.double(), want, atol=tolerance, rtol=tolerance)
        assert torch.equal(have > 0, want > 0)


FILTERS: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 6,
    "top_p": 0.8,
    "min_p": 0.15,
}


@pytest.mark.parametrize("names", [names for n in range(5) for names in combinations(FILTERS, n)], ids="-".join)
def test_every_combination_of_filters_is_that_of_transformers(names: tuple[str, ...]) -> None:
    """Its own processors, in the order in which `generate` puts them together."""
    chosen = {name: FILTERS[name] for name in names}
    switched_off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
    model: Any = llama()
    processors = model._get_logits_processor(GenerationConfig(do_sample=True, **(switched_off | chosen)))
    logits = 2 * torch.randn(50, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = torch.softmax(processors(torch.zeros(50, 1, dtype=torch.long), logits.clone()), dim=-1)
    torch.testing.assert_close(standardise(logits, Sampling(**chosen)), want)


def distribution_of(*parts: float, **settings: Any) -> list[float]:
    """The distribution that the settings make of weights, given as logits."""
    return standardise(torch.tensor(parts, dtype=torch.float64).log(), Sampling(**settings)).tolist()


def test_the_nucleus_is_the_smallest_set_that_reaches_the_mass() -> None:
    # Reached exactly, lower indices first.
    assert distribution_of(1, 1, 1, 1, top_p=0.5) == [0.5, 0.5, 0, 0]
    assert distribution_of(1, 1, 1, 1, top_p=math.nextafter(0.5, 1)) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert distribution_of(1, 1, 4, 2, top_p=1e-9) == [0, 0, 1, 0]


@given(rows, samplings, st.integers(-1000, 1000))
@examples
def test_adding_a_constant_to_the_logits_changes_nothing(row: list[float], sampling: Sampling, shift: int) -> None:
    logits = torch.tensor(row, dtype=torch.float32)
    assert torch.equal(standardise(logits + shift, sampling), standardise(logits, sampling))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (2, 1, 3), (0,)])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0), Sampling(0.7, top_k=3), Sampling(1.3, 4, 0.8, 0.1), Sampling(top_p=0.5)]
)
def test_any_leading_shape_gives_what_single_rows_give(shape: tuple[int, ...], sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, 7, generator=generator, dtype=torch.float64)
    distributions, uniform = standardise(logits, sampling), torch.rand(shape, generator=generator)
    tokens = sample(distributions, uniform)
    assert (distributions.shape, tokens.shape) == (logits.shape, shape)
    for row in product(*map(range, shape)):
        assert torch.equal(distributions[row], standardise(logits[row], sampling))
        assert tokens[row] == sample(distributions[row], uniform[row])


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
    """Rows are counted over all leading axes, and the first one is named."""
    logits = torch.zeros(2, 3, 2)
    logits[1, 0] = logits[1, 2] = torch.tensor(bad)
    maximum = float(torch.tensor(bad).amax())
    with pytest.raises(ValueError, match=rf"^logits row 3 has the maximum {maximum}: each row needs a finite largest"):
        standardise(logits, sampling)
    assert standardise(logits, sampling, check=False).isnan().any(-1).tolist() == [[False] * 3, [True, False, True]]


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
    """Most tokens have no probability here, at both ends too, and float32 distributions do not
    quite sum to 1."""
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
    """float32 sums above 1/2 move in steps of 6e-8, which would lose most tokens of probability
    1e-9."""
    rare = torch.arange(1, 1001)
    probs = torch.tensor([0.5] + [1e-9] * 1000 + [0.499999])
    uniform = (0.5 + 1e-9 * (rare.double() - 0.5)) / probs.double().sum()
    assert torch.equal(sample(probs.expand(1000, 1002), uniform), rare)


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
    # Definition 3.2 and Lemma 3.3.
    assert sum(abs(a - (a + b) / 2) for a, b in zip(p, q, strict=True)) == 1 - beta
    p_distribution, q_distribution = weighted(pair[0]), weighted(pair[1])
    assert float(overlap(p_distribution, q_distribution)) == pytest.approx(float(beta), abs=1e-15)
    assert float(total_variation(p_distribution, q_distribution)) == pytest.approx(float(1 - beta), abs=1e-15)
    if p != q:
        want = [float(x / (1 - beta)) for x in left]
        assert residual(p_distribution, q_distribution).tolist() == pytest.approx(want, abs=1e-13)


def test_residual_of_equal_distributions_and_against_nothing_is_p() -> None:
    p = weighted([1, 0, 3])
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, torch.zeros(3, dtype=torch.float64)), p)
    # What rounding makes of a distribution, exaggerated.
    rough = torch.tensor([0.3, 0.0, 0.6], dtype=torch.float64)
    assert torch.equal(unnormalised_residual(rough, rough), rough)
    assert residual(rough, rough).tolist() == pytest.approx([1 / 3, 0, 2 / 3])


def test_normalise_divides_by_the_sum_of_the_last_axis() -> None:
    assert normalise(torch.tensor([[1.0, 3.0], [2.0, 2.0]])).tolist() == [[0.25, 0.75], [0.5, 0.5]]
    assert normalise(torch.zeros(2)).isnan().all()


# Settings


def test_the_defaults_are_plain_sampling() -> None:
    assert Sampling() == Sampling(temperature=1.0, top_k=None, top_p=1.0, min_p=0.0)
    assert hash(Sampling(0.5, 3, 0.9)) == hash(Sampling(0.5, 3, 0.9))
    with pytest.raises(FrozenInstanceError):
        Sampling().temperature = 2.0  # type: ignore[misc]
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(standardise(logits), torch.softmax(logits, -1))


TEMPERATURES = "it must be 0 (argmax) or positive and finite, from 1.2e-38 to 3.4e+38"
TOP_KS = "it must be a whole number from 1, or None for no limit"
TOP_PS = "it must lie in (0, 1], where 1 keeps every token"
MIN_PS = "it must lie in [0, 1], where 0 keeps every token"
SMALLEST, LARGEST_FLOAT32 = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": math.nextafter(SMALLEST, 0)}, TEMPERATURES),
        ({"temperature": math.nextafter(LARGEST_FLOAT32, INF)}, TEMPERATURES),
        ({"temperature": -5e-324}, TEMPERATURES),
        ({"temperature": NAN}, TEMPERATURES),
        ({"temperature": True}, TEMPERATURES),
        ({"temperature": "1"}, TEMPERATURES),
        ({"temperature": 1j}, TEMPERATURES),
        ({"temperature": 10**400}, TEMPERATURES),
        ({"top_k": True}, TOP_KS),
        ({"top_k": 3.0}, TOP_KS),
        ({"top_k": -3}, TOP_KS),
        ({"top_k": np.int64(0)}, TOP_KS),
        ({"top_p": -0.0}, TOP_PS),
        ({"top_p": math.nextafter(1, 2)}, TOP_PS),
        ({"top_p": NAN}, TOP_PS),
        ({"top_p": True}, TOP_PS),
        ({"top_p": 10**400}, TOP_PS),
        ({"top_p": "0.5"}, TOP_PS),
        ({"min_p": -5e-324}, MIN_PS),
        ({"min_p": math.nextafter(1, 2)}, MIN_PS),
        ({"min_p": NAN}, MIN_PS),
        ({"min_p": True}, MIN_PS),
        ({"min_p": None}, MIN_PS),
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
        ({"top_k": 10**9}, {}),
        ({"top_k": None}, {}),
        ({"top_p": Fraction(1, 2)}, {"top_p": 0.5}),
        ({"top_p": 1}, {}),
        ({"top_p": 5e-324}, {"temperature": 0.0}),
        ({"top_p": math.nextafter(1, 0)}, {}),
        ({"min_p": 5e-324}, {}),
        ({"min_p": 1}, {"temperature": 0.0}),
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
    # (2, 3); the last are equal.
    q = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]], dtype=torch.float64)
    assert overlap(p, q).tolist() == [[0.75, 0.5], [0.75, 1.0]]
    assert total_variation(p, q).tolist() == [[0.25, 0.5], [0.25, 0.0]]
    assert unnormalised_residual(p, q).tolist() == [
        [[0, 0.25, 0], [0.25, 0.25, 0]], [[0, 0, 0.25], [0.25, 0.25, 0.5]]
    ]  # fmt: skip
    assert residual(p, q).tolist() == [[[0, 1, 0], [0.5, 0.5, 0]], [[0, 0, 1], [0.25, 0.25, 0.5]]]


def test_a_uniform_at_the_edge_of_a_cell_belongs_to_the_next_token() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    for uniform, token in {0.0: 1, 0.25: 3, 0.75: 4, math.nextafter(0.25, 0): 1, LARGEST: 4}.items():
        found = sample(probs, torch.tensor(uniform, dtype=torch.float64))
        assert int(found) == token
        assert found.dtype == torch.int64
    assert sample(torch.tensor([[NAN, 0.5, 0.5], [0.5, 0.5, 0.0]]), torch.tensor([0.5, 0.5])).tolist() == [2, 1]


def test_one_hot_takes_any_leading_shape() -> None:
    assert one_hot(torch.tensor(1), 2).tolist() == [0.0, 1.0]
    assert one_hot(torch.tensor([[2, 0]]), 3, torch.float64).tolist() == [[[0, 0, 1], [1, 0, 0]]]
    assert one_hot(torch.tensor(1), 2).dtype == torch.float32
    assert one_hot(torch.tensor(1), 2, torch.float64).dtype == torch.float64
