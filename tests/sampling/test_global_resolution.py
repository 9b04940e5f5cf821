"""Global Resolution: the optimum at small tolerance, the paper's bounds, and planted bugs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from distributions_for_tests import PAIRS, distance, first_distributions
from scipy.optimize import minimize

from specnb.sampling import global_resolution as module
from specnb.sampling.draft_schemes import independent
from specnb.sampling.global_resolution import GlobalResolution, optimal_set, transport
from specnb.sampling.optimal_acceptance import optimal_independent
from specnb.sampling.threshold_enumeration import asked_selection, planned_selection

every_kind = pytest.mark.parametrize("kind", PAIRS)


@every_kind
@pytest.mark.parametrize(("vocab", "k"), [(3, 2), (4, 3)])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-3])
def test_the_deviation_and_the_acceptance_are_within_the_papers_bounds(
    kind: str, vocab: int, k: int, tolerance: float
) -> None:
    p, q = first_distributions(kind, vocab)
    emitted, accepted = planned_selection(GlobalResolution(tolerance).plan, p, independent(q, k))
    assert distance(emitted, p) <= 7.5 * tolerance
    assert abs(accepted - optimal_independent(p, q, k)) <= 10 * tolerance


@pytest.mark.parametrize("seed", range(3))
def test_at_small_tolerance_it_reaches_the_optimum(seed: int) -> None:
    p, q = first_distributions("dense", 4, seed)
    emitted, accepted = planned_selection(GlobalResolution(1e-9).plan, p, independent(q, 3))
    assert distance(emitted, p) < 1e-7
    assert accepted == pytest.approx(optimal_independent(p, q, 3), abs=1e-7)


def test_the_rule_does_what_its_plan_says() -> None:
    p, q = first_distributions("dense", 3)
    rule = GlobalResolution(1e-3)
    asked, planned = (
        asked_selection(rule, rule.plan, p, independent(q, 2)),
        planned_selection(rule.plan, p, independent(q, 2)),
    )
    assert distance(asked[0], planned[0]) < 1e-12
    assert asked[1] == pytest.approx(planned[1], abs=1e-12)


@every_kind
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_optimal_set_has_the_value_of_the_closed_form(kind: str, k: int) -> None:
    p, q = first_distributions(kind, 4)
    chosen = sorted(optimal_set(tuple(p.tolist()), tuple(q.tolist()), k))
    value = float(p[chosen].sum()) + 1 - float(q[chosen].sum()) ** k
    assert value == pytest.approx(optimal_independent(p, q, k), abs=1e-12)


def test_equal_parameters_are_equal_rules() -> None:
    assert GlobalResolution(1e-3) == GlobalResolution(1e-3) != GlobalResolution(1e-4)


def test_drafts_with_no_more_mass_than_the_tolerance_are_left_out() -> None:
    """Drafts with the last token have a mass of 1 - (1 - 0.0001)^2, about 0.0002."""
    p, q = (0.2, 0.5, 0.3), (0.9, 0.0999, 0.0001)
    for tolerance, served in ((1e-3, False), (1e-6, True)):
        flow, _ = transport(p, q, 2, tolerance)
        assert any(shares for draft, shares in flow.items() if 2 in draft) == served


# Planted bugs

SHORT = {"maxfun": 1_000}


def wrong_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token counts as outside. The search then has no end to reach, and is cut short."""
    monkeypatch.setattr(module, "optimal_set", lambda p, q, k: frozenset())
    monkeypatch.setattr(module, "minimize", lambda *given, options, **more: minimize(*given, options=SHORT, **more))


def no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is sampled from p where no draft token is emitted."""
    monkeypatch.setattr(module, "transport", lambda p, q, k, tolerance: (transport(p, q, k, tolerance)[0], p))


def shares_not_conditional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is accepted with its share, not divided by what the tokens before it leave."""
    monkeypatch.setattr(module, "_in_turn", lambda shares, tokens: [shares.get(x, 0.0) for x in tokens])


def repeats_tested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn = module._in_turn

    def twice(shares: dict[int, float], tokens: list[int]) -> list[float]:
        accept = in_turn(shares, tokens)
        return [shares.get(x, 0.0) if x in tokens[:i] else accept[i] for i, x in enumerate(tokens)]

    monkeypatch.setattr(module, "_in_turn", twice)


@pytest.mark.parametrize("bug", [wrong_set, no_residual, shares_not_conditional, repeats_tested_again])
def test_a_bug_is_found(bug: Callable[[pytest.MonkeyPatch], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the distribution or the acceptance is off by more than the bounds allow."""
    p, q = torch.tensor([1, 3, 4, 2]).double() / 10, torch.tensor([4, 2, 1, 3]).double() / 10
    bug(monkeypatch)
    tolerance = 1e-6
    emitted, accepted = planned_selection(GlobalResolution(tolerance).plan, p, independent(q, 3))
    off = distance(emitted, p) > 7.5 * tolerance or abs(accepted - optimal_independent(p, q, 3)) > 10 * tolerance
    assert off
