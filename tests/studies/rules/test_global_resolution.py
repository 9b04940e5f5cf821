"""Global Resolution: the optimum at small tolerance, the paper's bounds, and planted bugs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from distributions_for_tests import PAIRS, distance, first_distributions
from scipy.optimize import minimize
from torch import Tensor

from studies.rules import global_resolution as module
from studies.rules.global_resolution import GlobalResolution, global_resolution, optimal_set, transport
from studies.rules.merged_drafts import independent, selected
from studies.rules.optimal_acceptance import optimal_cover, proposed_sets

every_kind = pytest.mark.parametrize("kind", PAIRS)


def optimum(p: Tensor, q: Tensor, k: int) -> float:
    return optimal_cover(p, proposed_sets(q, k)).value


@every_kind
@pytest.mark.parametrize(("vocab", "k"), [(3, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-3])
def test_the_deviation_and_the_acceptance_are_within_the_papers_bounds(
    kind: str, vocab: int, k: int, tolerance: float
) -> None:
    p, q = first_distributions(kind, vocab)
    emitted, accepted = selected(global_resolution(tolerance), p, independent(q, k))
    assert distance(emitted, p) <= 7.5 * tolerance
    assert abs(accepted - optimum(p, q, k)) <= 10 * tolerance


@pytest.mark.parametrize("seed", range(3))
def test_at_small_tolerance_it_reaches_the_optimum(seed: int) -> None:
    p, q = first_distributions("dense", 4, seed)
    emitted, accepted = selected(global_resolution(1e-9), p, independent(q, 3))
    assert distance(emitted, p) < 1e-7
    assert accepted == pytest.approx(optimum(p, q, 3), abs=1e-7)
    chosen = sorted(optimal_set(tuple(p.tolist()), tuple(q.tolist()), 3))
    assert float(p[chosen].sum()) + 1 - float(q[chosen].sum()) ** 3 == pytest.approx(optimum(p, q, 3), abs=1e-9)


def test_rows_of_any_leading_shape() -> None:
    rule, rows = GlobalResolution(1e-6), [first_distributions("dense", 3, seed) for seed in range(6)]
    p, q = (torch.stack(side).float().reshape(2, 3, 3) for side in zip(*rows, strict=True))
    tokens = torch.tensor([[[0, 1], [2, 2], [1, 0]], [[2, 0], [0, 0], [1, 2]]])
    accept, after = rule(p, q[..., None, :].expand(2, 3, 2, 3), tokens)
    assert accept.dtype == after.dtype == torch.float32
    for row, column in ((0, 1), (1, 2)):
        alone = rule(p[row, column], q[row, column].expand(2, 3), tokens[row, column])
        assert torch.equal(alone[0], accept[row, column])
        assert torch.equal(alone[1], after[row, column])


# Planted bugs


def wrong_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token counts as outside. The search then has no end to reach, and is cut short."""
    short = {"maxfun": 1_000}
    monkeypatch.setattr(module, "optimal_set", lambda p, q, k: frozenset())
    monkeypatch.setattr(module, "minimize", lambda *given, options, **more: minimize(*given, options=short, **more))


def no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is sampled from p where no draft token is emitted."""
    monkeypatch.setattr(module, "transport", lambda p, q, k, tolerance: (transport(p, q, k, tolerance)[0], p))


def shares_not_conditional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is accepted with its share, not divided by what the tokens before it leave."""
    monkeypatch.setattr(module, "_in_turn", lambda shares, tokens: [shares.get(x, 0.0) for x in tokens])


@pytest.mark.parametrize("bug", [wrong_set, no_residual, shares_not_conditional])
def test_a_bug_is_found(bug: Callable[[pytest.MonkeyPatch], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the distribution or the acceptance is off by more than the bounds allow."""
    p, q = torch.tensor([1, 3, 4, 2]).double() / 10, torch.tensor([4, 2, 1, 3]).double() / 10
    bug(monkeypatch)
    tolerance = 1e-6
    transport.cache_clear()  # of what was solved without the bug
    emitted, accepted = selected(global_resolution(tolerance), p, independent(q, 3))
    transport.cache_clear()
    assert distance(emitted, p) > 7.5 * tolerance or abs(accepted - optimum(p, q, 3)) > 10 * tolerance
