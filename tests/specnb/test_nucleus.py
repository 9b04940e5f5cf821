"""The nucleus against a slow reference in whole numbers, by both ways of finding it, also where
tokens are tied."""

from __future__ import annotations

import math

import pytest
import torch
from distributions_for_tests import examples
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from specnb import distributions as module
from specnb.distributions import UNITS, Sampling, by_sorting, normalise, nucleus, standardise

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


weights = st.lists(st.sampled_from([0, 1, 2, 3, 4, 1e-3, 1e-9, 1e-15]), min_size=1, max_size=9).filter(any)
"""Many ties, zeros, and probabilities that differ by many orders of magnitude."""


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.lists(weights, min_size=1, max_size=3), top_p=st.one_of(st.sampled_from(TOP_PS), st.floats(1e-6, 0.999)))
@examples
def test_the_nucleus_is_that_of_the_slow_reference(dtype: torch.dtype, rows: list[list[float]], top_p: float) -> None:
    width = max(map(len, rows))
    probs = normalise(torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=dtype))
    wanted = [slow_nucleus(row, top_p) for row in probs.tolist()]
    assert nucleus(probs, top_p).tolist() == wanted
    with pytest.MonkeyPatch.context() as patch:  # as a large vocabulary
        patch.setattr(module, "SMALL", 0)
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
