"""Global Resolution: the optimum at small tolerance, the paper's bounds, and planted bugs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product

import pytest
import torch
from distributions_for_tests import PAIRS, distance, first_distributions
from scipy.optimize import minimize

from specnb.distributions import overlap
from specnb.draft_schemes import independent
from specnb.enumeration import asked_selection, planned_selection
from studies.rules import global_resolution as module
from studies.rules.global_resolution import GlobalResolution, optimal_set, transport
from studies.rules.optimal_acceptance import optimal_independent, proposed_sets

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
    transport.cache_clear()  # of what was solved without the bug
    emitted, accepted = planned_selection(GlobalResolution(tolerance).plan, p, independent(q, 3))
    transport.cache_clear()
    off = distance(emitted, p) > 7.5 * tolerance or abs(accepted - optimal_independent(p, q, 3)) > 10 * tolerance
    assert off


# The optimum, which has one form only


def mass(probs: Sequence[float], tokens: Iterable[int]) -> float:
    return sum(probs[x] for x in tokens)


@pytest.mark.parametrize(("vocab", "k"), [(3, 2), (4, 2), (4, 3)])
@pytest.mark.parametrize("kind", ["dense", "zeros in p", "zeros in q", "zeros in both"])
def test_the_flow_has_the_sums_and_the_form_of_the_optimum(kind: str, vocab: int, k: int) -> None:
    """Each token of H* is served in full, each other one as Theorem 6.2 says; shares are as e^alpha of each token.

    Drafts that leave H* are served in full, those within it as far as one token more, of weight 1, leaves room.
    """
    tolerance = 1e-9
    for seed in range(3):
        p, q = (tuple(side.tolist()) for side in first_distributions(kind, vocab, seed))
        inside, drafts = optimal_set(p, q, k), proposed_sets(torch.tensor(q, dtype=torch.float64), k)
        flow, left = transport(p, q, k, tolerance)
        assert flow.keys() == drafts.keys()
        served = [sum(drafts[draft] * shares.get(x, 0.0) for draft, shares in flow.items()) for x in range(vocab)]
        assert left == pytest.approx([max(0.0, a - b) for a, b in zip(p, served, strict=True)], abs=1e-12)
        outside = [x for x in range(vocab) if x not in inside]
        sets = [frozenset(s) for n in range(vocab + 1) for s in combinations(range(vocab), n)]
        psi = {s: mass(p, s) - mass(q, s) ** k for s in sets}
        before = psi[inside | set(outside)]
        for i, x in enumerate(outside):
            after = min(psi[s] for s in sets if inside | set(outside[i + 1 :]) <= s)
            assert served[x] == pytest.approx(max(0.0, p[x] + after - before), abs=1e-7)
            before = after
        for x in inside:
            if q[x] > 0:
                assert served[x] == pytest.approx(p[x], abs=1e-7)
        weights: dict[tuple[int, int], float] = {}
        for draft, shares in flow.items():
            assert shares.keys() <= draft
            if drafts[draft] < 1e-4:
                continue
            if not draft <= inside:
                assert sum(shares.values()) == pytest.approx(1, abs=1e-9)
                assert not shares.keys() & inside
            else:
                assert sum(shares.values()) <= 1 + 1e-9
            for x, y in combinations(sorted(draft if draft <= inside else draft - inside), 2):
                if min(shares.get(x, 0.0), shares.get(y, 0.0)) > 1e-3:  # their ratio is the same in all drafts
                    known = weights.setdefault((x, y), shares[x] / shares[y])
                    assert shares[x] / shares[y] == pytest.approx(known, rel=1e-6)
            if draft <= inside and len(draft) > 1:
                rest = 1 - sum(shares.values())
                for x in draft:
                    alone = flow[frozenset({x})]  # e^alpha / (1 + e^alpha) of a draft of one token
                    if rest > 1e-6 and alone and alone[x] < 1 - 1e-6:
                        assert shares[x] / rest == pytest.approx(alone[x] / (1 - alone[x]), rel=1e-4)


@every_kind
def test_a_plan_accepts_each_token_with_its_share_of_the_draft(kind: str) -> None:
    p, q = first_distributions(kind, 4)
    rule = GlobalResolution(1e-6)
    flow, left = transport(tuple(p.tolist()), tuple(q.tolist()), 3, 1e-6)
    for draft in independent(q, 3):
        plan = rule.plan(p, draft.q, torch.tensor(draft.tokens))
        shares, reach = flow[frozenset(draft.tokens)], 1.0
        for i, x in enumerate(draft.tokens):
            chance = float(plan.accept[i])
            assert 0 <= chance <= 1
            wanted = shares.get(x, 0.0) if x not in draft.tokens[:i] else 0.0
            assert reach * chance == pytest.approx(wanted, abs=1e-9)
            reach *= 1 - chance
        assert plan.recovered.tolist() == pytest.approx(list(left) if sum(left) > 0 else p.tolist(), abs=1e-15)
        assert plan.recovered.sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plans_of_any_leading_shape(dtype: torch.dtype) -> None:
    rule = GlobalResolution(1e-6)
    rows = [first_distributions("dense", 3, seed) for seed in range(6)]
    p, q = (torch.stack(side).to(dtype).reshape(2, 3, 3) for side in zip(*rows, strict=True))
    tokens = torch.tensor([[[0, 1], [2, 2], [1, 0]], [[2, 0], [0, 0], [1, 2]]])
    each = q[..., None, :].expand(2, 3, 2, 3)
    found = rule.plan(p, each, tokens)
    assert found.accept.shape == (2, 3, 2)
    assert found.recovered.shape == (2, 3, 3)
    assert found.accept.dtype == found.recovered.dtype == dtype
    uniforms = torch.full((2, 3, 3), 0.5)
    decided = rule(p, each, tokens, uniforms[..., :2], uniforms[..., 2])
    for row, column in product(range(2), range(3)):
        alone = rule.plan(p[row, column], each[row, column], tokens[row, column])
        assert torch.equal(alone.accept, found.accept[row, column])
        assert torch.equal(alone.recovered, found.recovered[row, column])
        accepted = [i for i in range(2) if float(alone.accept[i]) > 0.5]
        assert int(decided.accepted[row, column]) == (accepted[0] if accepted else -1)


def test_tokens_are_left_out_as_long_as_their_drafts_have_no_more_than_the_tolerance() -> None:
    """Outside H*, the drafts that leave the tokens kept; the most probable tokens are kept first."""
    p, q, k = (0.2, 0.5, 0.2, 0.1), (0.9, 0.06, 0.03, 0.01), 2
    assert optimal_set(p, q, k) == frozenset({0})
    without_two, without_one = 1 - 0.96**2, 1 - 0.99**2  # drafts with a token after the first two, after three
    for tolerance, kept in (
        (without_two + 1e-6, {1}), (without_two - 1e-6, {1, 2}), (without_one + 1e-6, {1, 2}),
        (without_one - 1e-6, {1, 2, 3}), (1 - 0.9**2 + 1e-6, set()),
    ):  # fmt: skip
        flow, _ = transport(p, q, k, tolerance)
        found = {x for draft, shares in flow.items() if not draft <= {0} for x in shares}
        assert found <= kept
        assert {x for draft, shares in flow.items() if shares and not draft <= {0} for x in draft} - {0} <= kept
        assert (flow[frozenset({1})] != {}) == (1 in kept)
        assert (flow[frozenset({3})] != {}) == (3 in kept)
    few_p, few_q = (0.1, 0.1, 0.8), (0.5, 0.3, 0.2)
    inside = optimal_set(few_p, few_q, k)
    assert inside == frozenset({0, 1})
    own = 0.8**2  # within H*, the drafts within it that are not of the tokens kept
    for tolerance, kept in ((own - 0.25 + 1e-6, {0}), (own - 0.25 - 1e-6, {0, 1}), (own + 1e-6, set())):
        flow, _ = transport(few_p, few_q, k, tolerance)
        assert {x for draft, shares in flow.items() if draft <= inside for x in shares} == kept


def test_the_optimal_set_is_taken_in_the_order_of_q_over_p() -> None:
    """Tokens that only q has come first; of equal values the smallest set."""
    assert optimal_set((0.0, 1.0), (0.5, 0.5), 2) == frozenset({0})
    assert optimal_set((1.0, 0.0), (0.5, 0.5), 1) == frozenset({1})
    assert optimal_set((0.5, 0.5), (0.5, 0.5), 1) == frozenset()
    assert optimal_set((0.5, 0.25, 0.25), (0.25, 0.5, 0.25), 1) == frozenset({1})
    assert optimal_set((0.5, 0.25, 0.25), (0.0, 0.75, 0.25), 2) == frozenset({1, 2})
    assert optimal_set((1.0,), (1.0,), 2) == frozenset()


@every_kind
def test_one_draft_token_is_accepted_with_the_overlap(kind: str) -> None:
    p, q = first_distributions(kind, 4)
    emitted, accepted = planned_selection(GlobalResolution(1e-9).plan, p, independent(q, 1))
    assert accepted == pytest.approx(float(overlap(p, q)), abs=1e-8)
    assert distance(emitted, p) < 1e-8


def test_a_rule_cannot_be_changed() -> None:
    assert hash(GlobalResolution(1e-3)) == hash(GlobalResolution(1e-3))
    with pytest.raises(AttributeError):
        GlobalResolution(1e-3).tolerance = 0.1  # type: ignore[misc]
