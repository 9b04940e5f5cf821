"""Rules for several draft tokens: exactness over every tuple of draft tokens, acceptance, and planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import rules_by_hand as by_hand
import torch
from distributions_for_tests import PAIRS, distance, distribution_pair, first_distributions
from torch import Tensor

from specnb import enumeration as threshold_enumeration
from specnb.distributions import normalise, one_hot, overlap, residual
from specnb.draft_schemes import (
    DraftTuple,
    first_appearances,
    from_several,
    hub_pairs,
    independent,
    merged,
    most_probable,
    without_replacement,
)
from specnb.enumeration import (
    MIN_CELL_WIDTH,
    asked_selection,
    asked_tree_distribution,
    expected_accepted,
    planned_selection,
)
from specnb.multi_draft import (
    MultiDraftRule,
    SelectionOutcome,
    SelectionPlan,
    SelectionPlanner,
    division_factor,
    first_accepted,
    k_sequential,
    k_sequential_plan,
    recursive_plan,
    recursive_rejection,
    spechub,
    spechub_code,
    spechub_code_plan,
    spechub_plan,
    top_k_plan,
    top_k_rejection,
)
from specnb.rules import SelectionTree, TreeRule
from specnb.trees import distinct_children
from studies.rules.optimal_acceptance import optimal_selection


def float64(*probs: float) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64)


class Method(NamedTuple):
    rule: MultiDraftRule
    plan: SelectionPlanner
    drafts: list[DraftTuple]


def methods(q: Tensor, k: int) -> dict[str, Method]:
    """Every exact rule with the draft tokens that it is made for."""
    recursive, sequential = (recursive_rejection, recursive_plan), (k_sequential, k_sequential_plan)
    top = (top_k_rejection, top_k_plan)
    distinct = first_appearances(independent(q, k))
    found = {
        "recursive, independent": Method(*recursive, independent(q, k)),
        "recursive, several models": Method(*recursive, from_several(torch.stack([q.roll(i) for i in range(k)]))),
        "recursive, without replacement": Method(*recursive, without_replacement(q, k)),
        "recursive, merged with their own q": Method(*recursive, distinct),
        "k-sequential": Method(*sequential, independent(q, k)),
        "top-k": Method(*top, most_probable(q, k)),
        "top-k rule, sampled tokens": Method(*top, without_replacement(q, k)),
    }
    return found | ({"SpecHub": Method(spechub, spechub_plan, hub_pairs(q))} if k == 2 else {})


NAMES = list(methods(float64(0.5, 0.5), 2))
every_kind = pytest.mark.parametrize("kind", PAIRS)


# Exactness


@pytest.mark.parametrize(("kind", "k"), [*product(PAIRS, [1, 2]), ("dense", 3), ("zeros in both", 3)])
def test_the_emitted_token_has_the_targets_distribution(kind: str, k: int) -> None:
    p, q = first_distributions(kind, vocab=3)
    for name, method in methods(q, k).items():
        emitted, accepted = asked_selection(*method[:2], p, method.drafts)
        assert distance(emitted, p) < 1e-12, name
        planned, by_plan = planned_selection(method.plan, p, method.drafts)
        assert distance(planned, emitted) < 1e-12, name
        assert by_plan == pytest.approx(accepted, abs=1e-12), name


@every_kind
@pytest.mark.parametrize(("vocab", "k"), [(5, 2), (4, 4), (2, 3)])
def test_larger_cases_by_their_plans(kind: str, vocab: int, k: int) -> None:
    p, q = first_distributions(kind, vocab, seed=1)
    for name, method in methods(q, min(k, vocab)).items():
        assert distance(planned_selection(method.plan, p, method.drafts)[0], p) < 1e-12, name


@every_kind
def test_no_rule_accepts_more_than_the_optimum(kind: str) -> None:
    p, q = first_distributions(kind, vocab=4)
    for name, method in methods(q, 2).items():
        accepted = planned_selection(method.plan, p, method.drafts)[1]
        best = optimal_selection(p, method.drafts).value
        assert accepted <= best + 1e-9, name
        if name == "SpecHub":
            assert accepted == pytest.approx(best, abs=1e-9)


@every_kind
def test_one_draft_token_is_accepted_with_the_overlap(kind: str) -> None:
    p, q = first_distributions(kind, vocab=4)
    for name in ("recursive, independent", "recursive, without replacement", "k-sequential"):
        method = methods(q, 1)[name]
        accepted = planned_selection(method.plan, p, method.drafts)[1]
        assert accepted == pytest.approx(float(overlap(p, q)), abs=1e-12), name


# Rules and schemes that are not exact


@pytest.mark.parametrize("shuffled", [False, True])
def test_merging_repeats_is_not_exact(shuffled: bool) -> None:
    """After a rejection of (x, x) the token is sampled from p_1 instead of p_2. Smallest: 3 tokens, 2 draft tokens."""
    p, q = float64(1, 3) / 4, float64(3, 1) / 4
    emitted, _ = asked_selection(recursive_rejection, recursive_plan, p, merged(independent(q, 2), shuffled))
    assert distance(emitted, p) < 1e-12  # with two tokens p_1 and p_2 are the same one-hot distribution
    p, q = float64(0, 3, 7) / 10, float64(3, 1, 1) / 5
    emitted, _ = asked_selection(recursive_rejection, recursive_plan, p, merged(independent(q, 2), shuffled))
    # (x, x) is drafted with probability 9/25; p_1 = (0, 1/6, 5/6) and p_2 = (0, 0, 1)
    assert distance(emitted, p) == pytest.approx(9 / 25 / 6, abs=1e-12)


def test_merged_children_in_random_order_are_wrong_even_where_p_is_q() -> None:
    """With three draft tokens the first child tested is not distributed as q: rare tokens come first too often."""
    p = float64(0.7, 0.3)
    shuffled, _ = asked_selection(recursive_rejection, recursive_plan, p, merged(independent(p, 3), shuffled=True))
    in_order, _ = asked_selection(recursive_rejection, recursive_plan, p, merged(independent(p, 3), shuffled=False))
    assert distance(shuffled, p) == pytest.approx(0.042, abs=1e-9)  # p(a) p(b) (p(a) - p(b)) / 2
    assert distance(in_order, p) < 1e-12


def test_the_shortcut_in_the_code_of_spechub() -> None:
    q = float64(0.5, 0.3, 0.2)
    for rare, deviation in [(0.9e-3, 0.9e-3), (1.1e-3, 0.0)]:
        p = float64(1 - rare, rare / 2, rare / 2)
        emitted, _ = asked_selection(spechub_code, spechub_code_plan, p, hub_pairs(q))
        assert distance(emitted, p) == pytest.approx(deviation, abs=1e-12)


def test_spechub_takes_two_draft_tokens() -> None:
    q = float64(0.5, 0.5)
    with pytest.raises(ValueError, match="2 draft tokens; it was given 3"):
        spechub_plan(q, q.expand(3, -1), torch.tensor([0, 1, 0]))


@every_kind
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_division_factor_solves_its_equation(kind: str, k: int) -> None:
    p, q = first_distributions(kind, vocab=5)
    rho = division_factor(p, q, k)
    beta = torch.minimum(p / rho, q).sum()
    assert 1 <= rho <= k
    assert float(1 - (1 - beta) ** k) == pytest.approx(float(rho * beta), abs=1e-9)


# Shapes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_a_batch_do_not_depend_on_each_other(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    cases = []
    for seed in range(12):
        p, q = first_distributions("dense", 4, seed)
        draft = methods(q, 2)[name].drafts
        chosen = draft[int(torch.randint(len(draft), (), generator=generator))]
        uniforms = torch.rand(3, generator=generator, dtype=torch.float64)
        cases.append((p.to(dtype), chosen.q.to(dtype), torch.tensor(chosen.tokens), uniforms[:2], uniforms[2]))
    rule = methods(q, 2)[name].rule
    shaped = rule(*(torch.stack(part).reshape(3, 4, *part[0].shape) for part in zip(*cases, strict=True)))
    assert shaped.accepted.shape == shaped.token.shape == (3, 4)
    for row, case in enumerate(cases):
        alone = rule(*case)
        assert (alone.accepted, alone.token) == (shaped.accepted.flatten()[row], shaped.token.flatten()[row])


@every_kind
def test_no_impossible_token_is_emitted_at_the_ends_of_the_uniforms(kind: str) -> None:
    p, q = first_distributions(kind, vocab=3)
    ends = torch.tensor([0.0, 5e-324, 1 - 2**-53], dtype=torch.float64)
    uniforms = torch.cartesian_prod(ends, ends, ends)
    for name, method in methods(q, 2).items():
        for draft in method.drafts:
            tokens = torch.tensor(draft.tokens).expand(len(uniforms), 2)
            accepted, token = method.rule(
                p.expand(len(uniforms), -1),
                draft.q.expand(len(uniforms), -1, -1),
                tokens,
                uniforms[:, :2],
                uniforms[:, 2],
            )
            assert (p[token] > 0).all(), name
            taken = accepted >= 0
            assert torch.equal(tokens[taken].gather(-1, accepted[taken, None])[:, 0], token[taken]), name


# The plans beside their definitions in plain Python

BY_HAND: dict[str, tuple[SelectionPlanner, Callable[..., by_hand.Selection]]] = {
    "recursive": (recursive_plan, by_hand.recursive),
    "top-k": (top_k_plan, by_hand.top_k),
    "k-sequential": (k_sequential_plan, by_hand.k_sequential),
}
WELL_CONDITIONED = [kind for kind in PAIRS if kind != "nearly equal"]  # there rounding decides


def any_tokens(k: int, vocab: int = 4, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """p, q and tokens `(kinds, rows, ...)`: any tokens, also those that neither distribution has; one q for all k."""
    generator = torch.Generator().manual_seed(k)
    pairs = [first_distributions(kind, vocab, seed) for kind in WELL_CONDITIONED for seed in range(rows)]
    p, q = (torch.stack(side).unflatten(0, (-1, rows)) for side in zip(*pairs, strict=True))
    tokens = torch.randint(vocab, (len(WELL_CONDITIONED), rows, k), generator=generator)
    return p, q[..., None, :].expand(-1, -1, k, -1).clone(), tokens


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", BY_HAND)
def test_a_plan_is_its_definition(name: str, k: int) -> None:
    """For k independent samples, where some are missing, and for draft models that differ."""
    plan, definition = BY_HAND[name]
    p, q, tokens = any_tokens(k)
    if name != "k-sequential":
        q = torch.stack([q[..., i, :].roll(i, dims=-1) for i in range(k)], -2)
        missing = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(9)) < 0.15
        q, tokens = q.where(~missing[..., None], 0.0), tokens.where(~missing, -1)
    found = plan(p, q, tokens)
    assert found.accept.shape == tokens.shape
    assert found.recovered.shape == p.shape
    for row in product(*map(range, p.shape[:2])):
        if name == "k-sequential" and torch.equal(p[row], q[row][0]):
            continue  # rho is then a root of order k of its equation, where rounding decides
        accept, left = definition(p[row].tolist(), q[row].tolist(), tokens[row].tolist())
        assert found.accept[row].tolist() == pytest.approx(accept, abs=1e-9)
        share = normalise(found.recovered[row]).tolist()
        assert share == pytest.approx(by_hand.scaled(left), abs=1e-7)  # what is left may be little


@pytest.mark.parametrize("kind", WELL_CONDITIONED)
def test_the_plan_of_spechub_has_the_flows_of_its_definition(kind: str) -> None:
    for seed in range(6):
        p, q = first_distributions(kind, 4, seed)
        for draft in hub_pairs(q):
            plan = spechub_plan(p, draft.q, torch.tensor(draft.tokens))
            first, second = plan.accept.tolist()
            emitted = {draft.tokens[0]: first, draft.tokens[1]: (1 - first) * second}
            want = by_hand.spechub(p.tolist(), draft.q.tolist(), draft.tokens)
            for token, chance in want.items():
                assert emitted[token] == pytest.approx(chance, abs=1e-9), draft.tokens


EVERY_PLAN = {
    "recursive": recursive_plan,
    "top-k": top_k_plan,
    "k-sequential": k_sequential_plan,
    "SpecHub": spechub_plan,
    "SpecHub, code": spechub_code_plan,
}


@pytest.mark.parametrize("name", EVERY_PLAN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_plan_has_probabilities_of_the_shape_and_dtype_of_p(name: str, dtype: torch.dtype) -> None:
    """Each row is as if it were alone."""
    p, q, tokens = any_tokens(2, rows=3)
    p, q = p.to(dtype), q.to(dtype)
    if name.startswith("SpecHub"):  # a pair has the hub in it
        hub = q[..., 0, :].argmax(-1)
        tokens[..., 1] = hub.where(tokens[..., 0] != hub, (hub + 1) % 4)
    accept, recovered = EVERY_PLAN[name](p, q, tokens)
    assert accept.shape == tokens.shape
    assert recovered.shape == p.shape
    assert accept.dtype == recovered.dtype == dtype
    assert accept.min() >= 0
    assert accept.max() <= 1
    assert recovered.min() >= 0
    assert recovered.sum(-1).min() > 0
    for row in product(*map(range, p.shape[:2])):
        alone = EVERY_PLAN[name](p[row], q[row], tokens[row])
        assert torch.equal(alone.accept, accept[row])
        assert torch.equal(alone.recovered, recovered[row])


def test_the_division_factor_is_the_smallest_that_serves_no_token_too_often() -> None:
    p, q, _ = any_tokens(1)
    for k in (1, 2, 4):
        rho = division_factor(p, q[..., 0, :], k)
        assert rho.shape == p.shape[:2]
        assert rho.dtype == torch.float64
        beta = torch.minimum(p / rho[..., None], q[..., 0, :]).sum(-1)
        assert torch.equal(rho[beta == 0], torch.ones_like(rho[beta == 0]))  # without common support
        less = (rho - 1e-6).clamp_min(1)
        served = torch.minimum(p / less[..., None], q[..., 0, :]).sum(-1)
        too_often = 1 - (1 - served.clamp_max(1)) ** k - less * served
        differ = (p != q[..., 0, :]).any(-1)  # otherwise rounding decides
        assert (too_often[(rho > 1 + 1e-6) & (beta > 0) & differ] > 0).all()
    assert division_factor(float64(0.5, 0.5), float64(0.5, 0.5), 3) == pytest.approx(1, abs=1e-12)


def test_the_first_draft_token_below_its_threshold_is_accepted() -> None:
    """Strictly below: a uniform equal to the threshold rejects, so 0 accepts nothing impossible."""
    plan = SelectionPlan(torch.tensor([0.5, 0.0, 0.25]), torch.tensor([0.0, 0.0, 1.0, 0.0]))
    tokens = torch.tensor([3, 1, 0])
    table = {
        (0.5, 0.0, 0.25): (-1, 2), (0.4375, 0.0, 0.0): (0, 3), (0.75, 0.0, 0.125): (2, 0), (0.75, 0.5, 0.5): (-1, 2),
    }  # fmt: skip
    for uniforms, want in table.items():
        accepted, token = first_accepted(plan, tokens, torch.tensor(uniforms), torch.tensor(0.5))
        assert (int(accepted), int(token)) == want
        assert accepted.dtype == token.dtype == torch.int64


@pytest.mark.parametrize("name", NAMES)
def test_with_one_possible_token_the_first_draft_token_is_accepted(name: str) -> None:
    one = torch.ones(1, dtype=torch.float64)
    method = methods(one, 1)[name] if name != "SpecHub" else Method(spechub, spechub_plan, hub_pairs(one))
    for draft in method.drafts:
        k = len(draft.tokens)
        found = method.rule(one, draft.q, torch.tensor(draft.tokens), torch.full((k,), 0.9), torch.tensor(0.9))
        assert (int(found.accepted), int(found.token)) == (0, 0)


def test_the_shortcut_of_spechub_begins_above_its_limit() -> None:
    """p(a) = 1 - 1e-3 is not certain yet; from the next number on the hub is accepted and nothing else."""
    q = float64(0.5, 0.3, 0.2).expand(2, -1)
    certain = torch.tensor(1 - 1e-3, dtype=torch.float64)
    for hub, shortcut in ((certain, False), (torch.nextafter(certain, torch.ones(())), True)):
        p = torch.stack([hub, (1 - hub) / 2, (1 - hub) / 2])
        for tokens, only_hub in (([1, 0], [0.0, 1.0]), ([0, 2], [1.0, 0.0])):
            plan, exact = (of(p, q, torch.tensor(tokens)) for of in (spechub_code_plan, spechub_plan))
            assert plan.accept.tolist() == (only_hub if shortcut else exact.accept.tolist())
            assert torch.equal(plan.recovered, exact.recovered)
    for k in (1, 3):
        with pytest.raises(ValueError, match=f"SpecHub verifies 2 draft tokens; it was given {k}"):
            spechub_code(q[0], q[:1].expand(k, -1), torch.zeros(k).long(), torch.zeros(k), torch.tensor(0.5))


# How a rule is enumerated


def recording(plan: SelectionPlan, asked: list[Tensor]) -> tuple[MultiDraftRule, SelectionPlanner]:
    """A rule that follows `plan`, whatever p and q are, and notes the uniforms that it is asked with."""

    def rule(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, final: Tensor) -> SelectionOutcome:
        asked.append(torch.cat([accept, final[:, None]], -1))
        rows = SelectionPlan(*(part.expand(len(accept), -1) for part in plan))
        return first_accepted(rows, tokens, accept, final)

    return rule, lambda p, q, tokens: plan


def test_a_rule_is_asked_at_the_centre_and_in_both_corners_of_every_cell() -> None:
    asked: list[Tensor] = []
    plan = SelectionPlan(float64(0.25, 0.75), float64(2, 4, 2))  # the recovered token's shares are 1/4, 1/2, 1/4
    rule, planner = recording(plan, asked)
    draft = DraftTuple((2, 1), 1.0, torch.full((2, 3), 1 / 3).double())
    emitted, accepted = asked_selection(rule, planner, draft.q[0], [draft])
    recovers = 0.75 * 0.25
    assert emitted.tolist() == pytest.approx([recovers / 4, 0.75 * 0.75 + recovers / 2, 0.25 + recovers / 4], abs=1e-15)
    assert accepted == pytest.approx(0.25 + 0.75 * 0.75, abs=1e-15)
    intervals = [[(0, 0.25), (0.25, 1)], [(0, 0.75), (0.75, 1)], [(0, 0.25), (0.25, 0.75), (0.75, 1)]]
    cells = torch.tensor(list(product(*intervals)), dtype=torch.float64)  # (cells, uniforms, 2)
    centres, lower, upper = asked
    assert torch.equal(centres, cells.mean(-1))
    for inset in (lower - cells[..., 0], cells[..., 1] - upper):
        assert (inset > 0).all()
        assert (inset < MIN_CELL_WIDTH).all()


@pytest.mark.parametrize(
    ("threshold", "cells"),
    [(0.5, 2), (0.0, 1), (1e-14, 1), (2e-13, 2), (1 - 2e-13, 2), (1 - 1e-14, 1), (1.0, 1), (1.5, 1), (-0.5, 1)],
)
def test_thresholds_outside_and_next_to_the_ends_make_no_cells(threshold: float, cells: int) -> None:
    asked: list[Tensor] = []
    rule, planner = recording(SelectionPlan(float64(threshold), float64(1.0)), asked)
    draft = DraftTuple((0,), 1.0, float64(1.0)[None])
    _, accepted = asked_selection(rule, planner, float64(1.0), [draft])
    assert [len(uniforms) for uniforms in asked] == [cells] * 3
    assert accepted == pytest.approx(min(max(threshold, 0.0), 1.0), abs=1e-13)


def test_thresholds_that_differ_by_rounding_are_one() -> None:
    asked: list[Tensor] = []
    rule, planner = recording(SelectionPlan(float64(0.0), float64(0.25, 2e-14, 0.75)), asked)
    asked_selection(rule, planner, float64(0.25, 0.0, 0.75), [DraftTuple((0,), 1.0, float64(0.25, 0.0, 0.75)[None])])
    assert [len(uniforms) for uniforms in asked] == [2] * 3


def test_the_cells_of_a_batch_are_asked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are added to a batch until it has more than `CELLS` cells; the result does not depend on it."""
    p, q = BUGGY_P, BUGGY_Q
    drafts = independent(q, 2)
    whole = asked_selection(recursive_rejection, recursive_plan, p, drafts)
    sizes: list[int] = []

    def noting(*given: Tensor) -> SelectionOutcome:
        sizes.append(len(given[0]))
        return recursive_rejection(*given)

    each = []
    for draft in drafts:
        asked_selection(noting, recursive_plan, p, [draft])
        each.append(sizes[-1])
    for most in (each[0], each[0] + each[1] - 1, 40, sum(each), 10**6):
        monkeypatch.setattr(threshold_enumeration, "CELLS", most)
        want: list[int] = []
        size = 0
        for cells in each:
            size += cells
            if size > most:
                want, size = [*want, size], 0
        sizes.clear()
        emitted, accepted = asked_selection(noting, recursive_plan, p, drafts)
        assert sizes == [count for count in [*want, size] if count for _ in range(3)]
        assert torch.allclose(emitted, whole[0], atol=1e-14, rtol=0)
        assert accepted == pytest.approx(whole[1], abs=1e-14)


@pytest.mark.parametrize("kind", ["dense", "zeros in q", "one-hot q"])
def test_a_tree_of_one_level_is_a_selection(kind: str) -> None:
    p, q = distribution_pair(kind, vocab=3)
    selected, accepted = asked_selection(recursive_rejection, recursive_plan, p(()), without_replacement(q(()), 2))
    tree = SelectionTree(recursive_plan)
    emitted = asked_tree_distribution(TreeRule(tree), tree.thresholds, p, q, (-1, -1), distinct_children)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    assert expected_accepted(emitted) == pytest.approx(accepted, abs=1e-12)
    for x in range(3):
        first = sum(chance for tokens, chance in emitted.items() if tokens[0] == x)
        assert first == pytest.approx(float(selected[x]), abs=1e-12)
        taken = sum(chance for tokens, chance in emitted.items() if len(tokens) == 2 and tokens[0] == x)
        for y in range(3):
            assert emitted.get((x, y), 0.0) == pytest.approx(taken * float(p((x,))[y]), abs=1e-12)


def test_a_tree_rule_that_does_not_follow_its_plan_is_refused() -> None:
    p, q = distribution_pair("dense", vocab=3)
    tree = SelectionTree(recursive_plan)
    with pytest.raises(ValueError, match="the rule changes its answer inside a cell between its plan's thresholds"):
        asked_tree_distribution(TreeRule(tree), SelectionTree(top_k_plan).thresholds, p, q, (-1, -1), distinct_children)


def test_the_plans_of_a_selection_are_multiplied_out() -> None:
    """P(accepted) and the emitted distribution of two drafts, by hand; -1 is accepted with 0."""
    drafts = [
        DraftTuple((1, 0), 0.75, torch.zeros(2, 3).double()),
        DraftTuple((2, -1), 0.25, torch.zeros(2, 3).double()),
    ]

    def plan(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
        assert p.shape == (2, 3)
        assert q.shape == (2, 2, 3)
        assert tokens.tolist() == [[1, 0], [2, -1]]
        return SelectionPlan(
            torch.tensor([[0.5, 0.25], [0.5, 0.0]]).double(), torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 0.0]]).double()
        )

    emitted, accepted = planned_selection(plan, torch.full((3,), 1 / 3).double(), drafts)
    # 0.75 of (1/2 token 1, 1/8 token 0, 3/8 recovered) and 0.25 of (1/2 token 2, 1/2 recovered)
    assert emitted.tolist() == pytest.approx([0.75 / 8 + 0.125, 0.75 * 19 / 32, 0.75 * 9 / 32 + 0.125], abs=1e-15)
    assert accepted == pytest.approx(0.75 * 5 / 8 + 0.125, abs=1e-15)


# Planted bugs: plans


def residual_of_the_first(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """The recovered token comes from norm(max(0, p - q)) of token verification, whatever was tested after it."""
    return recursive_plan(p, q, tokens)._replace(recovered=residual(p, q[..., 0, :]))


def never_renormalised(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """p - q is clamped and not divided by its sum before the next test."""
    left, accept = p, []
    for i in range(tokens.shape[-1]):
        x = tokens[..., i : i + 1]
        accept.append((left.gather(-1, x) / q[..., i, :].gather(-1, x)).clamp_max(1).squeeze(-1))
        left = (left - q[..., i, :]).clamp_min(0)
    return SelectionPlan(torch.stack(accept, -1), left)


def drafted_token_only(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """The residual subtracts the rejected token's probability alone (xLLM 2175)."""
    return recursive_plan(p, q * one_hot(tokens, p.shape[-1], p.dtype), tokens)


def off_by_one(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """Each token is tested against the residual before the last one: p, p, p_1."""
    plan = recursive_plan(p, q, tokens)
    stale = recursive_plan(p, q[..., 1:, :], tokens[..., 1:]).accept
    return plan._replace(accept=torch.cat([plan.accept[..., :1], stale], -1))


def q_not_renormalised(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """Without replacement, but every token is tested with the q of the first."""
    return recursive_plan(p, q[..., :1, :].expand_as(q), tokens)


def no_division(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """k-sequential selection with rho = 1."""
    beta = overlap(p, q[..., 0, :])[..., None]
    share = (1 - (1 - beta) ** q.shape[-2]) / beta
    x = tokens.unsqueeze(-1)
    accept = (p.unsqueeze(-2).expand_as(q).gather(-1, x) / q.gather(-1, x)).squeeze(-1).clamp_max(1)
    return SelectionPlan(accept, (p - torch.minimum(p, q[..., 0, :]) * share).clamp_min(0))


def sequential_with_token_residual(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    return k_sequential_plan(p, q, tokens)._replace(recovered=residual(p, q[..., 0, :]))


def sequential_for_one_more(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """rho and the residual are those of k + 1 draft tokens."""
    longer = torch.cat([q, q[..., :1, :]], -2), torch.cat([tokens, tokens[..., :1]], -1)
    plan = k_sequential_plan(p, *longer)
    return plan._replace(accept=plan.accept[..., :-1])


def top_k_with_soft_q(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """The draft model's probability stands where 1 belongs (greedy-draft-soft-q)."""
    soft = normalise(torch.arange(1, p.shape[-1] + 1).flip(0).to(p.dtype))
    return recursive_plan(p, soft.expand_as(q), tokens)


def top_k_not_renormalised(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    return top_k_plan(p, q, tokens)._replace(accept=p.gather(-1, tokens))


def top_k_recovers_from_p(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    return top_k_plan(p, q, tokens)._replace(recovered=p)


def hub_with_token_residual(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    return spechub_plan(p, q, tokens)._replace(recovered=residual(p, q[..., 0, :]))


def hub_tested_as_recursive(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """SpecHub's pairs, verified as if they were two independent samples."""
    return recursive_plan(p, q, tokens)


def hub_takes_all(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """The hub is accepted whenever the other token is not, beyond p(a)."""
    is_hub = tokens == q[..., 0, :].argmax(-1, keepdim=True)
    plan = spechub_plan(p, q, tokens)
    return plan._replace(accept=torch.where(is_hub, 1.0, plan.accept))


PLAN_BUGS: list[tuple[str, SelectionPlanner]] = [
    ("recursive, independent", residual_of_the_first),
    ("recursive, independent", never_renormalised),
    ("recursive, independent", drafted_token_only),
    ("recursive, independent", off_by_one),
    ("recursive, without replacement", residual_of_the_first),
    ("recursive, without replacement", q_not_renormalised),
    ("recursive, without replacement", never_renormalised),
    ("k-sequential", no_division),
    ("k-sequential", sequential_with_token_residual),
    ("k-sequential", sequential_for_one_more),
    ("top-k", top_k_with_soft_q),
    ("top-k", top_k_not_renormalised),
    ("top-k", top_k_recovers_from_p),
    ("SpecHub", hub_with_token_residual),
    ("SpecHub", hub_tested_as_recursive),
    ("SpecHub", hub_takes_all),
]
BUGGY_P, BUGGY_Q = float64(0.05, 0.35, 0.2, 0.4), float64(0.4, 0.3, 0.2, 0.1)


@pytest.mark.parametrize(("name", "plan"), PLAN_BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_a_plan_with_a_bug_is_not_exact(name: str, plan: SelectionPlanner) -> None:
    emitted, _ = planned_selection(plan, BUGGY_P, methods(BUGGY_Q, 2)[name].drafts)
    assert distance(emitted, BUGGY_P) > 1e-3


# Planted bugs: which tokens are tested, and how


def in_sorted_order(drafts: list[DraftTuple]) -> list[DraftTuple]:
    """The children are tested by their token ids."""
    return [draft._replace(tokens=tuple(sorted(draft.tokens))) for draft in drafts]


def first_tested_twice(drafts: list[DraftTuple]) -> list[DraftTuple]:
    return [draft._replace(tokens=(draft.tokens[0], *draft.tokens[:-1])) for draft in drafts]


def most_probable_first(drafts: list[DraftTuple]) -> list[DraftTuple]:
    """The children are tested by their probability under the target."""
    return [draft._replace(tokens=tuple(sorted(draft.tokens, key=lambda x: -BUGGY_P[x]))) for draft in drafts]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *product(
            ["recursive, independent", "recursive, without replacement"],
            [in_sorted_order, first_tested_twice, most_probable_first],
        ),
        ("k-sequential", first_tested_twice),  # its order does not matter: every test has the same threshold
    ],
)
def test_draft_tokens_in_a_wrong_order_are_found(name: str, change: Callable[..., Any]) -> None:
    method = methods(BUGGY_Q, 2)[name]
    emitted, _ = asked_selection(*method[:2], BUGGY_P, change(method.drafts))
    assert distance(emitted, BUGGY_P) > 1e-3


def test_one_uniform_for_two_tests_is_found() -> None:
    def one_uniform(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, final: Tensor) -> SelectionOutcome:
        return first_accepted(recursive_plan(p, q, tokens), tokens, accept[..., :1].expand_as(accept), final)

    drafts = independent(BUGGY_Q, 2)
    with pytest.raises(ValueError, match="let each uniform serve one comparison"):
        asked_selection(one_uniform, recursive_plan, BUGGY_P, drafts)
