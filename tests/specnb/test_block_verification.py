"""Block and hierarchical verification: exactness by enumeration, acceptance, and planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import rules_by_hand as by_hand
import torch
from distributions_for_tests import PAIRS, distribution_pair, distributions_along
from torch import Tensor

from specnb.distributions import Conditional, sample, unnormalised_residual
from specnb.enumeration import (
    asked_step_distribution,
    asked_tree_distribution,
    completed,
    expected_accepted,
    joint_distribution,
    planned_step_distribution,
    step_distribution,
)
from specnb.rules import (
    ChainPlan,
    Outcome,
    Planner,
    Rule,
    block_plan,
    block_verification,
    hierarchical_code_plan,
    hierarchical_plan,
    hierarchical_verification,
    hierarchical_verification_code,
    longest_accepted,
    token_verification,
    traversal_thresholds,
    traversal_verification,
)
from specnb.trees import independent_children
from studies.rules.hierarchical_file import hierarchical_file_plan, hierarchical_verification_file

EXACT: dict[str, tuple[Rule, Planner]] = {
    "block": (block_verification, block_plan),
    "hierarchical": (hierarchical_verification, hierarchical_plan),
}
ALL = EXACT | {
    "hierarchical, code": (hierarchical_verification_code, hierarchical_code_plan),
    "hierarchical, file": (hierarchical_verification_file, hierarchical_file_plan),
}
SIZES = [(5, 1), (3, 2), (2, 3)]  # vocabulary, gamma
README = (lambda _: torch.tensor([1, 2]).double() / 3), (lambda _: torch.tensor([2, 1]).double() / 3)

every_kind = pytest.mark.parametrize("kind", PAIRS)
every_exact_rule = pytest.mark.parametrize("name", EXACT)
every_rule = pytest.mark.parametrize("name", ALL)


def total_variation_of_a_step(emitted: dict[tuple[int, ...], float], p: Conditional, gamma: int) -> float:
    return float((completed(emitted, p, gamma + 1) - joint_distribution(p, gamma + 1)).abs().sum()) / 2


# Exactness


@every_kind
@every_exact_rule
@pytest.mark.parametrize(("vocab", "gamma"), [(3, 0), *SIZES])
def test_a_step_has_the_targets_joint_distribution(name: str, kind: str, vocab: int, gamma: int) -> None:
    p, q = distribution_pair(kind, vocab)
    emitted = asked_step_distribution(*EXACT[name], p, q, gamma)
    assert total_variation_of_a_step(emitted, p, gamma) < 1e-12


@every_kind
@pytest.mark.parametrize("name", ["hierarchical, code", "hierarchical, file"])
def test_the_code_of_hierarchical_verification_is_exact_for_one_draft_token_only(name: str, kind: str) -> None:
    p, q = distribution_pair(kind, vocab=4)
    emitted = asked_step_distribution(*ALL[name], p, q, 1)
    assert total_variation_of_a_step(emitted, p, 1) < 1e-12


@pytest.mark.parametrize(("name", "ninths"), [("hierarchical, code", 1), ("hierarchical, file", 3)])
def test_the_smallest_example_where_the_code_is_not_exact(name: str, ninths: int) -> None:
    p, q = README
    emitted = asked_step_distribution(*ALL[name], p, q, 2)
    assert total_variation_of_a_step(emitted, p, 2) == pytest.approx(ninths / 9, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_code_is_not_exact_for_dense_distributions_either(seed: int) -> None:
    p, q = distribution_pair("dense", vocab=3, seed=seed)
    assert total_variation_of_a_step(planned_step_distribution(hierarchical_code_plan, p, q, 3), p, 3) > 1e-3


@every_kind
@every_rule
def test_the_rule_does_what_its_plan_says(name: str, kind: str) -> None:
    p, q = distribution_pair(kind, vocab=3, seed=1)
    asked, planned = (
        asked_step_distribution(*ALL[name], p, q, 2),
        planned_step_distribution(ALL[name][1], p, q, 2),
    )
    assert all(asked.get(key, 0.0) == pytest.approx(chance, abs=1e-12) for key, chance in planned.items())
    assert set(asked) <= set(planned)


def test_another_rules_plan_is_noticed() -> None:
    p, q = distribution_pair("dense", vocab=3)
    with pytest.raises(ValueError, match="pass the plan that the rule follows"):
        asked_step_distribution(token_verification, block_plan, p, q, 2)


# How much is accepted


@pytest.mark.parametrize(
    ("plan", "ninths"),
    [(block_plan, 11), (hierarchical_plan, 11), (hierarchical_code_plan, 12)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_readme_example(plan: Planner, ninths: int) -> None:
    assert expected_accepted(planned_step_distribution(plan, *README, 2)) == pytest.approx(ninths / 9, abs=1e-12)
    assert expected_accepted(step_distribution(token_verification, *README, 2)) == pytest.approx(10 / 9, abs=1e-12)


@every_kind
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("vocab", "gamma"), SIZES)
def test_block_verification_is_never_worse_than_token_verification(
    kind: str, seed: int, vocab: int, gamma: int
) -> None:
    p, q = distribution_pair(kind, vocab, seed)
    block = expected_accepted(planned_step_distribution(block_plan, p, q, gamma))
    assert block >= expected_accepted(step_distribution(token_verification, p, q, gamma)) - 1e-12


@every_kind
@pytest.mark.parametrize("seed", range(3))
def test_hierarchical_verification_with_its_cap_is_block_verification(kind: str, seed: int) -> None:
    p, q = distribution_pair(kind, vocab=3, seed=seed)
    block, capped = (planned_step_distribution(plan, p, q, 3) for plan in (block_plan, hierarchical_plan))
    # Where p and q differ by rounding only, both divide two tiny numbers: only what is emitted is determined.
    assert all(capped[key] == pytest.approx(chance, abs=1e-12) for key, chance in block.items())


# Shapes, types, missing draft tokens


def rows(count: int, vocab: int = 4, gamma: int = 3) -> tuple[Tensor, ...]:
    """p, q, draft tokens and uniforms of `count` rows."""
    generator = torch.Generator().manual_seed(5)
    uniforms = torch.rand(count, 2 * gamma + 1, generator=generator, dtype=torch.float64)
    parts: list[list[Tensor]] = [[], [], []]
    for row in range(count):
        p, q = distribution_pair("dense", vocab, seed=row)
        tokens: tuple[int, ...] = ()
        for i in range(gamma):
            tokens += (int(sample(q(tokens), uniforms[row, i])),)
        along = distributions_along(p, tokens, gamma + 1), distributions_along(q, tokens, gamma)
        for part, value in zip(parts, (*along, torch.tensor(tokens)), strict=True):
            part.append(value)
    return *(torch.stack(part) for part in parts), uniforms[:, gamma:-1], uniforms[:, -1]


@every_rule
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_any_leading_shape(name: str, shape: tuple[int, ...]) -> None:
    rule, case = ALL[name][0], rows(6)
    flat = rule(*case)
    count = int(torch.tensor(shape).prod())
    shaped = rule(*(part[:count].reshape((*shape, *part.shape[1:])) for part in case))
    assert shaped.accepted.shape == shaped.token.shape == shape
    assert torch.equal(shaped.accepted.flatten(), flat.accepted[:count])
    assert torch.equal(shaped.token.flatten(), flat.token[:count])


@every_rule
def test_float32_gives_the_same_answers(name: str) -> None:
    p, q, *rest = rows(200)
    assert all(map(torch.equal, ALL[name][0](p, q, *rest), ALL[name][0](p.float(), q.float(), *rest)))


@every_rule
@pytest.mark.parametrize("missing_from", [0, 1, 2])
def test_a_missing_draft_token_ends_the_chain(name: str, missing_from: int) -> None:
    p, q, tokens, accept, final = rows(100)
    shorter = ALL[name][0](
        p[:, : missing_from + 1], q[:, :missing_from], tokens[:, :missing_from], accept[:, :missing_from], final
    )
    q, tokens = q.clone(), tokens.clone()
    q[:, missing_from], tokens[:, missing_from] = 0.0, -1
    assert all(map(torch.equal, ALL[name][0](p, q, tokens, accept, final), shorter))


@every_kind
@pytest.mark.parametrize("name", [name for name in ALL if name != "hierarchical, file"])
def test_nothing_impossible_is_emitted_at_the_ends_of_the_uniforms(name: str, kind: str) -> None:
    p_probs, q_probs = distribution_pair(kind, vocab=4)
    tokens: tuple[int, ...] = ()
    for _ in range(2):
        tokens += (int(q_probs(tokens).argmax()),)
    p, q = distributions_along(p_probs, tokens, 3), distributions_along(q_probs, tokens, 2)
    ends = torch.tensor([0.0, 5e-324, 1 - 2**-53], dtype=torch.float64)
    for uniforms in torch.cartesian_prod(ends, ends, ends):
        accepted, token = ALL[name][0](p, q, torch.tensor(tokens), uniforms[:2], uniforms[2])
        emitted = [*tokens[: int(accepted)], int(token)]
        assert all(p[i, x] > 0 for i, x in enumerate(emitted))


# Planted bugs


def token_residual(p: Tensor, q: Tensor, tokens: Tensor) -> ChainPlan:
    """The recovered token comes from token verification's residual (vllm-ascend 7807)."""
    padded = torch.cat([q, torch.zeros_like(p[..., :1, :])], dim=-2)
    return ChainPlan(block_plan(p, q, tokens).accept, unnormalised_residual(p, padded))


def not_renormalised(p: Tensor, q: Tensor, tokens: Tensor) -> ChainPlan:
    """A prefix is accepted with the mass of its residual, not divided by what it competes with."""
    plan = block_plan(p, q, tokens)
    excess = plan.recovered[..., 1:-1, :].sum(-1)
    return ChainPlan(torch.cat([excess, plan.accept[..., -1:]], dim=-1), plan.recovered)


def off_by_one(p: Tensor, q: Tensor, tokens: Tensor) -> ChainPlan:
    """Each prefix is tested with the probability of the one before it."""
    plan = block_plan(p, q, tokens)
    return ChainPlan(plan.accept.roll(1, dims=-1), plan.recovered)


def no_residual(p: Tensor, q: Tensor, tokens: Tensor) -> ChainPlan:
    """The recovered token is sampled from p itself."""
    return ChainPlan(block_plan(p, q, tokens).accept, p)


def no_cap(p: Tensor, q: Tensor, tokens: Tensor) -> ChainPlan:
    """Neither the full draft nor the residuals are capped."""
    index = tokens.unsqueeze(-1)
    ratios = (p[..., :-1, :].gather(-1, index) / q.gather(-1, index)).squeeze(-1).cumprod(-1)
    weights = torch.cat([torch.ones_like(ratios[..., :1]), ratios], dim=-1)
    padded = torch.cat([q, torch.zeros_like(p[..., :1, :])], dim=-2)
    forward = (weights[..., None] * p - padded).clamp_min(0)
    backward = (padded - weights[..., None] * p).clamp_min(0)
    inner = (forward.sum(-1) / torch.maximum(forward.sum(-1), backward.sum(-1)))[..., 1:-1]
    return ChainPlan(
        torch.cat([inner, ratios[..., -1:].clamp_max(1)], dim=-1), forward.where(forward.sum(-1, keepdim=True) > 0, p)
    )


@pytest.mark.parametrize(
    "plan",
    [token_residual, not_renormalised, off_by_one, no_residual, no_cap],
    ids=lambda f: f.__name__,
)
def test_a_plan_with_a_bug_is_not_exact(plan: Planner) -> None:
    p, q = distribution_pair("dense", vocab=5, seed=2)
    assert total_variation_of_a_step(planned_step_distribution(plan, p, q, 2), p, 2) > 1e-3


def stops_at_the_first_rejection(plan: ChainPlan, accept_uniforms: Tensor, final_uniform: Tensor) -> Outcome:
    """A wrong fix that a review of vllm-ascend 11985 asked for."""
    passed = (accept_uniforms < plan.accept).cumprod(-1)
    return longest_accepted(plan._replace(accept=passed.double()), torch.full_like(accept_uniforms, 0.5), final_uniform)


def one_uniform(plan: ChainPlan, accept_uniforms: Tensor, final_uniform: Tensor) -> Outcome:
    """All tests read the first uniform: they are not independent."""
    return longest_accepted(plan, accept_uniforms[..., :1].expand_as(accept_uniforms), final_uniform)


def one_token_too_many(plan: ChainPlan, accept_uniforms: Tensor, final_uniform: Tensor) -> Outcome:
    """The recovered token is sampled for the position after the accepted prefix's own."""
    shifted = torch.cat([plan.recovered[..., 1:, :], plan.recovered[..., -1:, :]], dim=-2)
    return longest_accepted(plan._replace(recovered=shifted), accept_uniforms, final_uniform)


Decision = Callable[[ChainPlan, Tensor, Tensor], Outcome]


@pytest.mark.parametrize("plan", [block_plan, hierarchical_plan], ids=lambda f: f.__name__)
@pytest.mark.parametrize("decide", [stops_at_the_first_rejection, one_uniform, one_token_too_many])
def test_a_decision_with_a_bug_is_found(plan: Planner, decide: Decision) -> None:
    """Either the distribution is off, or the rule does not keep to the cells of its plan."""

    def rule(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return decide(plan(p, q, tokens), accept, final)

    p, q = distribution_pair("dense", vocab=3)
    try:
        emitted = asked_step_distribution(rule, plan, p, q, 2)
    except ValueError:
        return
    assert total_variation_of_a_step(emitted, p, 2) > 1e-3


# The plans beside their definitions in plain Python

BY_HAND: dict[str, Callable[..., by_hand.Chain]] = {
    "block": by_hand.block,
    "hierarchical": by_hand.hierarchical,
    "hierarchical, code": partial(by_hand.hierarchical, variant="code"),
    "hierarchical, file": partial(by_hand.hierarchical, variant="file"),
}
WELL_CONDITIONED = [kind for kind in PAIRS if kind != "nearly equal"]  # there rounding decides


def any_chains(gamma: int, missing: float, possible: bool, vocab: int = 3, seeds: int = 4) -> tuple[Tensor, ...]:
    """p, q, tokens and uniforms `(kinds, seeds, ...)`: any tokens, or those that q has; some are missing."""
    generator = torch.Generator().manual_seed(gamma)
    cases: list[list[Tensor]] = [[], [], []]
    for kind, seed in product(WELL_CONDITIONED, range(seeds)):
        p, q = distribution_pair(kind, vocab, seed)
        tokens: tuple[int, ...] = ()
        for _ in range(gamma):
            weights = q(tokens) if possible else torch.ones(vocab)
            tokens += (int(torch.multinomial(weights, 1, generator=generator)),)
        absent = torch.rand(gamma, generator=generator) < missing
        cases[0].append(distributions_along(p, tokens, gamma + 1))
        cases[1].append(distributions_along(q, tokens, gamma).where(~absent[:, None], 0.0))
        cases[2].append(torch.tensor(tokens, dtype=torch.int64).where(~absent, -1))
    uniforms = torch.rand(len(WELL_CONDITIONED), seeds, gamma + 1, generator=generator, dtype=torch.float64)
    p_all, q_all, tokens_all = (torch.stack(part).unflatten(0, (-1, seeds)) for part in cases)
    return p_all, q_all, tokens_all, uniforms[..., :-1], uniforms[..., -1]


@every_rule
@pytest.mark.parametrize("gamma", [1, 2, 4])
@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_a_plan_and_its_decisions_are_the_definition(name: str, gamma: int, missing: float) -> None:
    """For any tokens in block verification; the others say nothing of several tokens that q excludes."""
    p, q, tokens, accept, final = any_chains(gamma, missing, possible=name != "block")
    found, decided = ALL[name][1](p, q, tokens), ALL[name][0](p, q, tokens, accept, final)
    assert found.accept.shape == tokens.shape
    assert found.recovered.shape == p.shape
    assert decided.accepted.dtype == decided.token.dtype == torch.int64
    assert found.accept.min() >= 0
    assert found.accept.max() <= 1 + 1e-12
    for row in product(*map(range, tokens.shape[:2])):
        want = BY_HAND[name](p[row].tolist(), q[row].tolist(), tokens[row].tolist())
        assert found.accept[row].tolist() == pytest.approx(want[0], abs=1e-9)
        assert found.recovered[row].flatten().tolist() == pytest.approx([x for mass in want[1] for x in mass], abs=1e-9)
        outcome = by_hand.longest(want, accept[row].tolist(), float(final[row]))
        assert (int(decided.accepted[row]), int(decided.token[row])) == outcome


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_token_that_q_excludes_leaves_both_exact_rules_the_same(dtype: torch.dtype) -> None:
    """A drafter that reports another q than it samples from: the first ratio is infinite, the plan is not NaN."""
    p, q, tokens, *_ = (part[0] for part in any_chains(2, 0.0, possible=True))
    q = torch.cat([torch.eye(3).double()[(tokens[:, :1] + 1) % 3], q[:, 1:]], dim=1)
    block, capped = (plan(p.to(dtype), q.to(dtype), tokens) for plan in (block_plan, hierarchical_plan))
    assert (block.accept[:, 0] == 1).any()
    assert torch.allclose(capped.accept, block.accept, atol=1e-5, rtol=0)
    assert torch.allclose(capped.recovered, block.recovered, atol=1e-5, rtol=0)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_plan_has_the_dtype_of_p_and_rows_of_their_own(name: str, dtype: torch.dtype) -> None:
    p, q, tokens, *_ = any_chains(2, 0.1, possible=True)
    p, q = p.to(dtype), q.to(dtype)
    found = ALL[name][1](p, q, tokens)
    assert found.accept.dtype == found.recovered.dtype == dtype
    for row in product(*map(range, tokens.shape[:2])):
        alone = ALL[name][1](p[row], q[row], tokens[row])
        assert torch.equal(alone.accept, found.accept[row])
        assert torch.equal(alone.recovered, found.recovered[row])


@every_rule
def test_a_uniform_equal_to_its_threshold_rejects(name: str) -> None:
    """So a uniform of 0 accepts nothing that the target never samples."""
    rule, plan = ALL[name]
    p, q, tokens, _, final = any_chains(3, 0.1, possible=True)
    thresholds = plan(p, q, tokens).accept
    found = rule(p, q, tokens, thresholds, final)
    assert not found.accepted.any()
    below = torch.nextafter(thresholds, torch.zeros_like(thresholds))
    longest = (torch.arange(1, 4) * (thresholds > 0)).amax(-1)
    assert torch.equal(rule(p, q, tokens, below, final).accepted, longest)


@every_rule
def test_of_one_possible_token_everything_is_accepted(name: str) -> None:
    for gamma in (0, 1, 3):
        ones, uniforms = torch.ones(2, gamma + 1, 1), torch.full((2, gamma), 0.9)
        tokens = torch.zeros(2, gamma, dtype=torch.int64)
        found = ALL[name][0](ones, ones[:, :gamma], tokens, uniforms, torch.zeros(2))
        assert (found.accepted.tolist(), found.token.tolist()) == ([gamma, gamma], [0, 0])


@every_rule
def test_everything_is_calculated_on_the_device_of_the_arguments(name: str) -> None:
    """Whatever the default device is."""
    case = any_chains(2, 0.0, possible=True)
    want = ALL[name][0](*case)
    with torch.device("meta"):
        found = ALL[name][0](*case)
    assert all(map(torch.equal, found, want))


def test_the_longest_prefix_that_passes_and_the_token_after_it() -> None:
    recovered = torch.eye(4, dtype=torch.float64)[[2, 0, 3, 1]]  # after 0, 1, 2 and 3 accepted tokens
    plan = ChainPlan(torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64), recovered)
    table = {(0.6, 0.6, 0.9): (0, 2), (0.4, 0.6, 0.9): (1, 0), (0.6, 0.2, 0.9): (2, 3), (0.6, 0.6, 0.7): (3, 1),
             (0.4, 0.2, 0.9): (2, 3), (0.4, 0.6, 0.7): (3, 1), (0.5, 0.25, 0.75): (0, 2)}  # fmt: skip
    for uniforms, want in table.items():
        found = longest_accepted(plan, torch.tensor(uniforms, dtype=torch.float64), torch.tensor(0.5))
        assert (int(found.accepted), int(found.token)) == want


# What is enumerated


@pytest.mark.parametrize("kind", ["dense", "zeros in q", "one-hot q", "zeros in p"])
def test_a_chain_is_a_tree(kind: str) -> None:
    """On a chain traversal verification is block verification; what a step emits is enumerated either way."""
    p, q = distribution_pair(kind, vocab=3)
    for gamma, parents in ((1, (-1,)), (2, (-1, 0))):
        chain = asked_step_distribution(block_verification, block_plan, p, q, gamma)
        tree = asked_tree_distribution(
            traversal_verification, traversal_thresholds, p, q, parents, independent_children
        )
        for tokens in chain.keys() | tree.keys():
            assert tree.get(tokens, 0.0) == pytest.approx(chain.get(tokens, 0.0), abs=1e-12)


@every_rule
@pytest.mark.parametrize("kind", ["zeros in q", "one-hot q"])
def test_drafts_that_q_excludes_are_not_enumerated(name: str, kind: str) -> None:
    p, q = distribution_pair(kind, vocab=3)
    drafted: list[tuple[int, ...]] = []

    def noting(*given: Tensor) -> Outcome:
        drafted.extend(map(tuple, given[2].tolist()))
        return ALL[name][0](*given)

    emitted = asked_step_distribution(noting, ALL[name][1], p, q, 2)
    possible = {x for x in product(range(3), repeat=2) if float(q(())[x[0]] * q(x[:1])[x[1]]) > 0}
    assert set(drafted) == possible
    assert min(emitted.values()) > 0
    planned = planned_step_distribution(ALL[name][1], p, q, 2)
    assert sum(planned.values()) == pytest.approx(1, abs=1e-12)
    assert {tokens[:2] for tokens in planned if len(tokens) == 3} == possible


def test_the_added_token_is_not_counted_as_accepted() -> None:
    assert expected_accepted({(0,): 0.5, (1, 0): 0.25, (1, 1, 2): 0.25}) == 0.75


@every_rule
def test_without_draft_tokens_the_target_is_sampled(name: str) -> None:
    p, q = distribution_pair("dense", vocab=3)

    def noting(*given: Tensor) -> Outcome:
        assert [tuple(part.shape[1:]) for part in given] == [(1, 3), (0, 3), (0,), (0,), ()]
        assert given[2].dtype == torch.int64
        return ALL[name][0](*given)

    def planning(p: Tensor, q: Tensor, tokens: Tensor) -> ChainPlan:
        assert (p.shape, q.shape, tokens.shape, tokens.dtype) == ((1, 3), (0, 3), (0,), torch.int64)
        return ALL[name][1](p, q, tokens)

    want = {(x,): chance for x, chance in enumerate(p(()).tolist())}
    assert asked_step_distribution(noting, planning, p, q, 0) == pytest.approx(want, abs=1e-12)
    assert planned_step_distribution(planning, p, q, 0) == pytest.approx(want, abs=1e-12)
