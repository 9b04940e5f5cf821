"""The helpers of `condensed`: the likeliest tokens in the order of ids, and the mask of larger entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributions_for_tests import examples
from hypothesis import given
from hypothesis import strategies as st

from specnb.distributions import normalise
from specnb_audit.alternatives import condense_distributions, greater_mask, top_tokens


@given(st.integers(2, 300), st.integers(1, 300), st.integers(0, 10**6))
@examples
def test_the_likeliest_tokens_are_those_with_the_largest_scores(vocab: int, count: int, seed: int) -> None:
    count = min(count, vocab)
    score = torch.rand(3, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = top_tokens(score, count)
    assert torch.equal(found, score.topk(count).indices.sort(dim=-1).values)


def test_greater_mask_is_one_or_zero_and_broadcasts() -> None:
    a = torch.tensor([[0.1, 0.5], [0.3, 0.2]])
    assert greater_mask(a, torch.tensor([0.2, 0.2])).tolist() == [[0, 1], [1, 0]]
    assert greater_mask(a[0], a).tolist() == [[0, 0], [0, 1]]
    assert greater_mask(a, a).dtype == a.dtype


def test_the_likeliest_tokens_stay_on_the_device_of_the_scores() -> None:
    """The device `meta` has shapes and no numbers; as on a GPU, nothing can be read there by numpy."""
    found = top_tokens(torch.empty(3, 7, device="meta"), 2)
    assert (found.device.type, found.shape) == ("meta", (3, 2))


@pytest.mark.parametrize(("vocab", "likely"), [(12, 4), (5, 5), (5, 9), (12, 1)])
@pytest.mark.parametrize("given", ["p", "p and q", "p, q and raw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cells_are_the_likeliest_tokens_and_two_pools(vocab: int, likely: int, given: str, dtype: torch.dtype) -> None:
    """Beside a calculation with one token after the other; some of the probabilities are zero."""
    generator = np.random.default_rng(vocab)
    n = 6
    every = [generator.dirichlet(np.full(vocab, 0.5), size=n) for _ in range(4)]
    for drawn in every:
        drawn[:, 1::4] = 0
        drawn /= drawn.sum(axis=1, keepdims=True)
    p, previous_p, q, raw = (torch.from_numpy(drawn).to(dtype) for drawn in every)
    tokens = torch.from_numpy(generator.integers(vocab, size=n))
    others = {"p": (None, None), "p and q": (q, None), "p, q and raw": (q, raw)}[given]
    found = condense_distributions(tokens, p, previous_p, *others, previous_token=2, likely=likely)
    cells = min(likely, vocab) + 2
    assert found.p.shape == found.sizes.shape == (n, cells)
    assert [one is None for one in (found.q, found.raw)] == [one is None for one in others]
    assert found.p.dtype == dtype
    assert found.ids.dtype == found.sizes.dtype == found.cell.dtype == found.previous_cell.dtype == torch.int64
    compared = [one for one in (p, previous_p, *others) if one is not None]
    for at in range(n):
        score = torch.stack([one[at] for one in compared]).amax(dim=0)
        ids = sorted(score.argsort(stable=True)[-min(likely, vocab) :].tolist())
        assert score[ids].sort().values.tolist() == score[found.ids[at]].sort().values.tolist()
        ids = found.ids[at].tolist()
        assert ids == sorted(set(ids))
        larger = (previous_p if others[0] is None else q)[at] > p[at]
        pooled = [token for token in range(vocab) if token not in ids]
        pools = [[token for token in pooled if bool(larger[token]) == first] for first in (True, False)]
        groups = [*([one] for one in ids), *pools]
        for condensed, probs in zip(
            (found.p, found.previous_p, found.q, found.raw), (p, previous_p, *others), strict=True
        ):
            if condensed is not None and probs is not None:
                expected = [float(probs[at, group].double().sum()) for group in groups]
                assert condensed[at].tolist() == pytest.approx(expected, abs=1e-6 if dtype == torch.float32 else 1e-12)
        assert found.sizes[at].tolist() == [1] * len(ids) + [len(pool) for pool in pools]
        where = {one: number for number, group in enumerate(groups) for one in group}
        assert int(found.cell[at]) == where[int(tokens[at])]
        assert int(found.previous_cell[at]) == where[2 if at == 0 else int(tokens[at - 1])]
    assert torch.equal(found.at_token(found.p), found.p.gather(-1, found.cell[:, None])[:, 0])
    several = torch.stack([found.p, found.previous_p, found.p + 1])[:, None]
    at_token = found.at_token(several)
    assert at_token.shape == (3, 1, n)
    assert torch.equal(at_token[2, 0], found.at_token(found.p) + 1)


def test_128_tokens_have_a_cell_by_default_and_the_token_before_is_0() -> None:
    p = normalise(torch.arange(1.0, 301.0)).expand(2, -1)
    found = condense_distributions(torch.tensor([299, 5]), p, p)
    assert found.p.shape == (2, 130)
    assert found.ids[0].tolist() == list(range(172, 300))
    assert found.sizes[0, -2:].tolist() == [0, 172]
    assert (found.cell.tolist(), found.previous_cell.tolist()) == ([127, 129], [129, 127])


def test_cells_have_the_mass_one_whatever_the_rounding_of_the_distributions() -> None:
    p = torch.full((1, 6), 1 / 6, dtype=torch.float64)
    found = condense_distributions(torch.tensor([0]), 1.0009 * p, 0.9991 * p, 1.0005 * p, 0.5 * p, likely=2)
    for one in (found.p, found.previous_p, found.q, found.raw):
        assert one is not None
        assert float(one.sum()) == pytest.approx(1, abs=1e-12)


def test_scores_that_carry_gradients_are_ranked_as_any_others() -> None:
    score = torch.tensor([[0.1, 0.5, 0.4], [0.7, 0.1, 0.2]], requires_grad=True)
    assert top_tokens(score, 2).tolist() == [[1, 2], [0, 2]]
