"""Rules for several draft tokens: exactness over every tuple of draft tokens, acceptance, and planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from distributions_for_tests import PAIRS, distance, first_distributions
from torch import Tensor

from specnb.sampling.distributions import normalise, one_hot, overlap, residual
from specnb.sampling.draft_schemes import (
    DraftTuple,
    first_appearances,
    from_several,
    hub_pairs,
    independent,
    merged,
    most_probable,
    without_replacement,
)
from specnb.sampling.multi_draft import (
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
from specnb.sampling.optimal_acceptance import optimal_selection
from specnb.sampling.threshold_enumeration import asked_selection, planned_selection


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
