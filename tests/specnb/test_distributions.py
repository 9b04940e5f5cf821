"""Distributions: standardisation and the nucleus against slow references, sampling at the extremes,
identities of the residual; one stream of uniforms per row and purpose."""

from __future__ import annotations

import math
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
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GenerationConfig

from specnb.distributions import (
    PURPOSES,
    UNITS,
    Sampling,
    by_sorting,
    draw_uniforms,
    normalise,
    nucleus,
    overlap,
    residual,
    sample,
    standardise,
    standardise_probs,
    stream,
    total_variation,
)

INF, NAN = math.inf, math.nan
LARGEST, SMALLEST = math.nextafter(1.0, 0.0), torch.finfo(torch.float32).tiny

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


FILTERS: dict[str, Any] = {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "min_p": 0.15}


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
any_uniform = st.one_of(st.sampled_from([0.0, 5e-324, LARGEST]), st.floats(0, 1, exclude_max=True))


@given(weights, any_uniform, st.sampled_from([torch.float32, torch.float64]))
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


def test_an_overlap_is_a_probability_whatever_the_rounding() -> None:
    p = torch.rand(2000, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p /= p.sum(dim=-1, keepdim=True)
    assert (p.sum(dim=-1) > 1).any()
    assert overlap(p, p).max() == 1


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


# Settings


@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": value} for value in (math.nextafter(SMALLEST, 0), 1e39, -5e-324, NAN, 10**400)),
        *({"top_k": value} for value in (0, -3)),
        *({"top_p": value} for value in (-0.0, math.nextafter(1, 2), NAN)),
        *({"min_p": value} for value in (-5e-324, math.nextafter(1, 2), NAN)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(settings))} is .*; it must"):
        Sampling(**settings)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", ["0.7", None, [0.7]])
def test_a_setting_that_is_no_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} is .*; it must be a number"):
        Sampling(**{name: value})


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"temperature": SMALLEST}, {"temperature": 0.0}),
        ({"top_k": np.int64(1)}, {"temperature": 0.0}),
        ({"top_k": 4}, {}),
        ({"top_p": 5e-324}, {"temperature": 0.0}),
        ({"top_p": math.nextafter(1, 0)}, {}),
        ({"min_p": 5e-324}, {}),
        ({"min_p": 1}, {"temperature": 0.0}),
    ],
    ids=str,
)
def test_settings_at_their_limits_are_taken(settings: dict[str, Any], same: dict[str, Any]) -> None:
    logits = torch.tensor([[0.3, 2.0, -1.0, 1.0], [-INF, 0.0, 0.5, 0.25]])
    found, want = standardise(logits, Sampling(**settings)), standardise(logits, Sampling(**same))
    assert torch.allclose(found, want, atol=1e-6, rtol=0)


def test_a_distribution_is_not_checked_in_place_of_logits() -> None:
    """Rows without mass come out as NaN; no test waits for the device."""
    probs = torch.tensor([[0.0, 0.0], [0.25, 0.75]])
    for sampling in (Sampling(0), Sampling(0.5), Sampling(top_k=1)):
        assert standardise_probs(probs, sampling).isnan().any(-1).tolist() == [True, False]


def test_a_uniform_at_the_edge_of_a_cell_belongs_to_the_next_token() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    for uniform, token in {0.0: 1, 0.25: 3, 0.75: 4, math.nextafter(0.25, 0): 1, LARGEST: 4}.items():
        found = sample(probs, torch.tensor(uniform, dtype=torch.float64))
        assert int(found) == token
        assert found.dtype == torch.int64
    assert sample(torch.tensor([[NAN, 0.5, 0.5], [0.5, 0.5, 0.0]]), torch.tensor([0.5, 0.5])).tolist() == [2, 1]


# The nucleus

DTYPES = [torch.float32, torch.float64]
TOP_PS = [5e-324, 1e-9, 0.1, 0.5, math.nextafter(0.5, 1), 0.8, 0.9, 0.999, math.nextafter(1, 0)]


def slow_nucleus(row: list[float], top_p: float) -> list[float]:
    """Tokens from the most probable on, the lower index first among equals, while the mass before
    is too small."""
    kept, mass = [0.0] * len(row), 0
    for token in sorted(range(len(row)), key=lambda token: (-row[token], token)):
        if mass < math.ceil(top_p * UNITS):
            kept[token] = row[token]
        mass += int(row[token] * UNITS)
    return kept


masses = st.lists(st.sampled_from([0, 1, 2, 3, 4, 1e-3, 1e-9, 1e-15]), min_size=1, max_size=9).filter(any)
"""Many ties, zeros, and probabilities that differ by many orders of magnitude."""


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.lists(masses, min_size=1, max_size=3), top_p=st.one_of(st.sampled_from(TOP_PS), st.floats(1e-6, 0.999)))
@examples
def test_the_nucleus_is_that_of_the_slow_reference(dtype: torch.dtype, rows: list[list[float]], top_p: float) -> None:
    width = max(map(len, rows))
    probs = normalise(torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=dtype))
    wanted = [slow_nucleus(row, top_p) for row in probs.tolist()]
    assert nucleus(probs, top_p).tolist() == wanted
    with pytest.MonkeyPatch.context() as patch:  # as a large vocabulary
        patch.setattr("specnb.distributions.SMALL", 0)
        assert nucleus(probs, top_p).tolist() == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_p", TOP_PS)
def test_large_vocabularies_flat_and_sharp_with_and_without_ties(dtype: torch.dtype, top_p: float) -> None:
    """From one token that has nearly all mass to all equal; rounded logits tie thousands of
    tokens."""
    logits = 3 * torch.randn(4, 5_003, generator=torch.Generator().manual_seed(0), dtype=dtype)
    logits[3] = logits[3].round()
    for temperature in (0.02, 0.3, 1, 4, 1e6):
        for given_logits in (logits, torch.zeros_like(logits)):
            probs = torch.softmax(given_logits / temperature, dim=-1)
            found = nucleus(probs, top_p)
            assert torch.equal(found, by_sorting(probs, top_p))
    assert found.tolist() == [slow_nucleus(row, top_p) for row in probs.tolist()]


def test_any_shape_and_layout() -> None:
    probs = torch.softmax(torch.randn(5_000, 2, 3, generator=torch.Generator().manual_seed(0)), dim=0).movedim(0, -1)
    found = nucleus(probs, 0.3)
    assert found.shape == probs.shape
    assert all(torch.equal(found[i, j], by_sorting(probs[i, j], 0.3)) for i in range(2) for j in range(3))
    assert nucleus(probs[:0], 0.3).shape == (0, 3, 5_000)


@pytest.mark.parametrize("vocab", [3, 5_000])
def test_a_row_of_nan_is_none_of_the_others_business(vocab: int) -> None:
    logits = torch.zeros(2, vocab)
    logits[1] = -torch.inf
    probs = standardise(logits, Sampling(top_p=0.5), check=False)
    assert probs.isnan().all(dim=-1).tolist() == [False, True]
    assert torch.equal(probs[0], standardise(logits[0], Sampling(top_p=0.5)))


def test_sorting_reads_no_value_on_a_device() -> None:
    with FakeTensorMode():
        assert by_sorting(torch.empty(2, 5_000, device="cuda"), 0.5).shape == (2, 5_000)
        assert nucleus(torch.empty(2, 5_000, device="cuda"), 0.5).device.type == "cuda"


# Uniforms

NUMBERS = (0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**63 + 1000, 2**64 - 1)


def test_streams_are_those_of_a_plain_philox() -> None:
    """What is committed was sampled with them."""
    for seed, row in product(NUMBERS, repeat=2):
        for number, purpose in enumerate(("draft", "accept", "final")):
            bits = np.random.Philox(key=np.array([seed, row], dtype=np.uint64), counter=[0, 0, 0, number])
            assert stream(seed, row, purpose).random(5).tolist() == np.random.Generator(bits).random(5).tolist()


def test_seeds_rows_and_purposes_all_have_different_streams() -> None:
    """No two share a number, also not a row and a seed that are exchanged, nor shifted by any
    lag."""
    keys = [(seed, row, purpose) for seed in (0, 1, 2) for row in (0, 1, 2) for purpose in PURPOSES]
    for one, other in combinations([set(stream(*key).random(500)) for key in keys], 2):
        assert not one & other
    every = [stream(*key).random() for key in product(NUMBERS, NUMBERS, PURPOSES)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(("steps", "gamma"), [(3, 2), (5, 0), (1, 4)])
def test_uniforms_are_those_of_the_streams_in_order(steps: int, gamma: int) -> None:
    """So they do not depend on the batch, more steps only append some, and the final ones do not
    depend on gamma."""
    numbers = draw_uniforms(5, [4, 0], steps, gamma)
    assert numbers.draft.dtype == numbers.accept.dtype == numbers.final.dtype == torch.float64
    for at, row in enumerate([4, 0]):
        for part, name in ((numbers.draft, "draft"), (numbers.accept, "accept")):
            assert part[at].tolist() == stream(5, row, name).random((steps, gamma)).tolist()
        assert numbers.final[at].tolist() == stream(5, row, "final").random(steps).tolist()
