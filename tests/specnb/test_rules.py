"""Rules of specnb and of studies: exact by multiplication, carried out as multiplied; every planted bug
of a plan or its execution is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, lenient_distribution
from rule_checks import BUGS, always_accepting, final_reused, off, one_uniform
from tiny import llama
from torch import Tensor

from audit_studies.bugs.cells import integrated_distribution
from specnb import enumeration
from specnb.distributions import Conditional, one_hot, overlap, residual
from specnb.drafters import TreeDrafter
from specnb.enumeration import (
    Emissions,
    completed,
    distribution_of_counts,
    draft_trees,
    step_distribution,
)
from specnb.rules import (
    Outcome,
    Plan,
    PlannedRule,
    Planner,
    Rule,
    block_verification,
    exact_match,
    greedy_verification,
    lenient_greedy_verification,
    lenient_verification,
    recursive_rejection,
    rejection_sampling,
    require_outcome,
    token_verification,
    traversal_verification,
)
from specnb.sampler import Sampler
from specnb.trees import (
    SCHEMES,
    Scheme,
    TokenTree,
    chain,
    distinct_children,
    independent_children,
    node_depths,
    top_children,
)
from studies.rules.published_rules import (
    AtEachNode,
    best_path_block,
    division_factor,
    hierarchical_verification,
    hub_children,
    k_sequential,
    k_sequential_tree,
    spechub,
    spechub_tree,
)


class Method(NamedTuple):
    """A rule, the draft tokens that it verifies, and how they are sampled."""

    rule: Rule
    parents: tuple[int, ...]
    scheme: Scheme = independent_children
    may_miss: bool = True  # whether draft tokens may be -1

    @property
    def length(self) -> int:
        return max(node_depths(self.parents), default=0) + 1


def emitted_by(method: Method, p: Conditional, q: Conditional) -> Emissions:
    return step_distribution(method.rule, p, q, method.parents, scheme=method.scheme)


def error(method: Method, kind: str = "dense", vocab: int = 3, seed: int = 0) -> float:
    p, q = distribution_pair(kind, vocab, seed)
    return off(emitted_by(method, p, q), p, method.length)


def integrated(rule: Rule, method: Method, p: Conditional, q: Conditional) -> Emissions:
    """What `rule` answers in every cell of uniforms between the thresholds of the method's plan."""
    drafts = draft_trees(method.parents, q, method.scheme)
    return integrated_distribution(rule, drafts, p, method.parents, (method.rule,))  # type: ignore[arg-type]


def difference(one: Emissions, other: Emissions) -> float:
    return max(abs(one.get(tokens, 0.0) - other.get(tokens, 0.0)) for tokens in one.keys() | other.keys())


TREE, WIDE, TWO = (-1, -1, 0, 0), (-1, -1, -1), (-1, -1, 0, 1)
EXACT = {
    "token, no draft": Method(token_verification, ()),
    "token": Method(token_verification, chain(3)),
    "rejection sampling": Method(rejection_sampling, chain(2)),
    "exact match": Method(exact_match, chain(2)),
    "block": Method(block_verification, chain(3)),
    "recursive, independent": Method(recursive_rejection, TREE),
    "recursive, without replacement": Method(recursive_rejection, (-1, 0, -1, 0), distinct_children),
    "recursive, top": Method(recursive_rejection, TREE, top_children),
    "recursive, three": Method(recursive_rejection, WIDE, distinct_children),
    "rejection sampling, tree": Method(rejection_sampling, (-1, 0, -1)),
    "q = 1, top": Method(exact_match, TREE, top_children),
    "q = 1, sampled": Method(exact_match, (-1, 0, -1), distinct_children),
    "traversal, independent": Method(traversal_verification, TREE),
    "traversal, without replacement": Method(traversal_verification, (-1, -1, 0, 0), distinct_children),
    "traversal, uneven": Method(traversal_verification, (-1, -1, 0, -1, 2), distinct_children),
    "traversal, top": Method(traversal_verification, TREE, top_children),
    "hierarchical": Method(hierarchical_verification, chain(3)),
    "k-sequential": Method(k_sequential_tree, (-1, -1, -1, 0), may_miss=False),
    "SpecHub": Method(spechub_tree, TREE, hub_children, may_miss=False),
    "SpecHub, top": Method(spechub_tree, (-1, -1), top_children, may_miss=False),
    "best path": Method(best_path_block, TWO, may_miss=False),
    "best path of one token": Method(best_path_block, WIDE, may_miss=False),
}
every_method = pytest.mark.parametrize("name", EXACT)
every_kind = pytest.mark.parametrize("kind", PAIRS)


# Exact


@every_kind
@every_method
def test_a_step_has_the_targets_joint_distribution(name: str, kind: str) -> None:
    assert error(EXACT[name], kind) < 1e-12


@pytest.mark.parametrize("name", [name for name, method in EXACT.items() if method.may_miss])
def test_where_nothing_is_proposed_it_is_exact_as_well(name: str) -> None:
    """After some contexts the drafter has no token (-1, q = 0); descendants and later siblings are
    missing too."""
    p, q = distribution_pair("dense", vocab=3)
    for silent in ((), (0,), (1,)):

        def drafted(context: tuple[int, ...], silent: tuple[int, ...] = silent) -> Tensor:
            return q(context) * (context != silent)

        emitted = emitted_by(EXACT[name], p, drafted)
        assert off(emitted, p, EXACT[name].length) < 1e-12


@pytest.mark.parametrize("parents", [chain(2), TREE])
@pytest.mark.parametrize("kind", ["one-hot p", "one-hot p and q"])
def test_greedy_verification_is_exact_for_one_hot_p_only(kind: str, parents: tuple[int, ...]) -> None:
    method = Method(greedy_verification, parents)
    assert error(method, kind) < 1e-12
    assert error(method) > 0.01


RULES = (recursive_rejection, traversal_verification, exact_match)
PUBLISHED = (best_path_block, k_sequential_tree, spechub_tree)


@pytest.mark.parametrize(
    ("rule", "scheme"),
    [*product(RULES + PUBLISHED, SCHEMES), *product(PUBLISHED, [hub_children])],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_rule_is_refused_for_the_schemes_that_the_enumeration_finds_it_wrong_for(rule: Any, scheme: Scheme) -> None:
    exact = max(error(Method(rule, (-1, -1), scheme), seed=seed) for seed in range(2)) < 1e-12
    assert exact == (scheme in rule.schemes)
    drafter = TreeDrafter(llama(), (-1, -1), scheme=scheme)
    with nullcontext() if exact else pytest.raises(ValueError, match=f"children sampled by {scheme.__name__}"):
        Sampler(llama(), drafter, rule=rule, compile=False)


# What it accepts, and what inexact rules emit


@every_kind
@pytest.mark.parametrize("seed", range(2))
def test_acceptance_has_the_closed_forms(kind: str, seed: int) -> None:
    p_of, q_of = distribution_pair(kind, vocab=4, seed=seed)
    p, q = p_of(()), q_of(())

    def acceptance(rule: Rule, k: int = 1, scheme: Scheme = independent_children) -> float:
        return 1 - float(distribution_of_counts(step_distribution(rule, p_of, q_of, (-1,) * k, None, scheme), 1)[0])

    beta = float(overlap(p, q))
    wanted = {
        beta: (acceptance(token_verification), acceptance(block_verification)),
        min(float(q[x] / p[x]) for x in range(4) if p[x] > 0): (acceptance(rejection_sampling),),
        float(p @ q): (acceptance(exact_match),),
        float(p[q.argsort(descending=True, stable=True)[:2]].sum()): (acceptance(exact_match, 2, top_children),),
    }
    for value, found in wanted.items():
        assert found == pytest.approx((value,) * len(found), abs=1e-12)
    # Theorem 3.5.
    assert max(acceptance(rejection_sampling), acceptance(exact_match)) <= beta + 1e-12
    assert acceptance(k_sequential_tree) == pytest.approx(beta, abs=1e-12)
    of_rho = overlap(p / division_factor(p, q, 3), q)
    assert acceptance(k_sequential_tree, 3) == pytest.approx(float(1 - (1 - of_rho) ** 3), abs=1e-12)


def step_by_formula(p: Conditional, q: Conditional, gamma: int, lenience: float) -> Emissions:
    """The closed form of a whole step: drafts kept along the way, then a replacement or the
    bonus."""
    emitted: Emissions = {}
    for n in range(gamma + 1):
        for draft_tokens in product(range(len(p(()))), repeat=n):
            along = [(p(draft_tokens[:i]), q(draft_tokens[:i]), x) for i, x in enumerate(draft_tokens)]
            chance = float(np.prod([float(torch.minimum(a / lenience, b)[x]) for a, b, x in along]))
            p_next, q_next = p(draft_tokens), q(draft_tokens)
            kept = torch.minimum(p_next / lenience, q_next)
            final = p_next if n == gamma else lenient_distribution(p_next, q_next, lenience) - kept
            emitted |= {(*draft_tokens, x): chance * float(final[x]) for x in range(len(final))}
    return emitted


@every_kind
@pytest.mark.parametrize("lenience", [1.0, 0.9, 0.5, 0.1, 1e-6])
def test_a_lenient_step_has_the_distribution_of_the_closed_form(kind: str, lenience: float) -> None:
    p, q = distribution_pair(kind, vocab=3)
    emitted = step_distribution(lenient_verification(lenience), p, q, 2)
    assert difference(emitted, step_by_formula(p, q, 2, lenience)) < 1e-12


@pytest.mark.parametrize("lenience", [0, 1.0000001, float("nan"), "x"])
@pytest.mark.parametrize("rule", [lenient_verification, lenient_greedy_verification])
def test_a_lenience_outside_its_range_is_refused(rule: Callable[[float], Rule], lenience: Any) -> None:
    with pytest.raises(ValueError, match="lenience is"):
        rule(lenience)


@every_kind
@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_the_lenient_greedy_rule_emits_what_its_formula_says(kind: str, lenience: float) -> None:
    p_of, q_of = distribution_pair(kind, vocab=4)
    p, q = p_of(()), q_of(())
    best = one_hot(p.argmax(), 4, torch.float64)
    passed = (best > 0) | (p > lenience * p.max())
    emitted = step_distribution(lenient_greedy_verification(lenience), p_of, q_of, 1)
    first = completed(emitted, lambda context: one_hot(p_of(context).argmax(), 4, torch.float64), 2).sum(1)
    assert torch.allclose(first, q * passed + best * (q * ~passed).sum(), atol=1e-12, rtol=0)


# Carried out as multiplied

SMALL = {
    "token": Method(token_verification, chain(2)),
    "block": Method(block_verification, chain(2)),
    "greedy": Method(greedy_verification, (-1, -1, 0)),
    "lenient": Method(lenient_verification(0.5), chain(2)),
    "recursive": Method(recursive_rejection, (-1, -1, 0), distinct_children),
    "exact match": Method(exact_match, (-1, -1, 0), distinct_children),
    "traversal": Method(traversal_verification, (-1, -1, 0), distinct_children),
    "traversal, two": Method(traversal_verification, (-1, 0, 0), distinct_children),
    "k-sequential": Method(k_sequential_tree, (-1, -1)),
    "SpecHub": Method(spechub_tree, (-1, -1), hub_children),
    "best path": Method(best_path_block, TWO),
}


@pytest.mark.parametrize("kind", ["dense", "zeros in both"])
@pytest.mark.parametrize("name", SMALL)
def test_the_cells_of_uniforms_have_the_multiplied_probabilities(name: str, kind: str) -> None:
    method, (p, q) = SMALL[name], distribution_pair(kind, vocab=2 if name == "best path" else 3)
    assert difference(integrated(method.rule, method, p, q), emitted_by(method, p, q)) < 1e-12


@pytest.mark.parametrize("name", ["recursive", "traversal"])
def test_a_bug_of_the_multiplication_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft token is reached as if none of those before it had been tested."""
    p, q = distribution_pair("dense", vocab=3)
    wanted = integrated(SMALL[name].rule, SMALL[name], p, q)

    def ends(plan: Plan, tokens: Tensor, tree: TokenTree, up: bool) -> Any:
        yield from ((node + 1, plan.accept[:, node]) for node in range(len(tree.parents)))

    monkeypatch.setattr(enumeration, "_ends", ends)
    assert difference(emitted_by(SMALL[name], p, q), wanted) > 1e-3


def is_found(rule: Rule, method: Method) -> bool:
    """Whether the cells are not as multiplied, or an answer changes inside a cell."""
    for seed in range(3):
        p, q = distribution_pair("dense", 3 if len(method.parents) < 4 else 2, seed)
        try:
            if difference(integrated(rule, method, p, q), emitted_by(method, p, q)) > 1e-3:
                return True
        except ValueError:
            return True
    return False


HARMLESS = {
    # No uniform is read.
    ("greedy", one_uniform), ("greedy", final_reused), ("greedy", always_accepting),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("name", SMALL)
def test_a_bug_of_carrying_a_plan_out_is_found(name: str, bug: Callable[[Rule], Rule]) -> None:
    assert is_found(bug(SMALL[name].rule), SMALL[name]) == ((name, bug) not in HARMLESS)


def test_visiting_in_the_other_direction_is_found() -> None:
    """Stopping at the first failure makes the prefixes that block verification accepts too short;
    and the reverse."""
    for name in ("block", "token", "recursive", "traversal"):
        rule: Any = SMALL[name].rule
        assert is_found(PlannedRule(rule.plan, up=not rule.up), SMALL[name])


# Planted bugs in plans


def changed(plan: Planner, change: Callable[..., Plan]) -> Planner:
    return lambda p, q, x, tree: change(plan(p, q, x, tree), p, q, x, tree)


def from_p(plan: Plan, p: Tensor, *_: Any) -> Plan:
    """After a rejection p itself is sampled."""
    return Plan(plan.accept, p)


def from_the_first_residual(plan: Plan, p: Tensor, q: Tensor, *_: Any) -> Plan:
    """The last token comes from norm(max(0, p - q)) of the first child, whatever was tested after
    it."""
    return Plan(plan.accept, p, less=q)


def one_token_less(plan: Plan, p: Tensor, q: Tensor, x: Tensor, tree: TokenTree) -> Plan:
    """The residual subtracts the rejected token's probability alone (xLLM 2175)."""
    return token_verification.plan(p, q * one_hot(x.clamp_min(0), p.shape[-1], p.dtype), x, tree)


def previous_test(plan: Plan, *_: Any) -> Plan:
    """Each node is tested with the probability of the one before it."""
    return plan._replace(accept=plan.accept.roll(1, -1))


def q_of_the_first(plan: Plan, p: Tensor, q: Tensor, x: Tensor, tree: TokenTree) -> Plan:
    """Every sibling is tested with the q of the first, though samples are without replacement."""
    return token_verification.plan(p, q[..., :1, :].expand_as(q), x, tree)


def soft_q(plan: Plan, p: Tensor, q: Tensor, x: Tensor, tree: TokenTree) -> Plan:
    """A draft model's probability stands where 1 belongs (greedy-draft-soft-q)."""
    return token_verification.plan(p, torch.full_like(q, 1 / q.shape[-1]), x, tree)


def checked_against_p(plan: Plan, p: Tensor, q: Tensor, x: Tensor, tree: TokenTree) -> Plan:
    """Each sibling is tested against p, as if none had been rejected."""
    ratio = p[..., tree.parent_entries, :].gather(-1, x.clamp_min(0)[..., None]) / q.gather(
        -1, x.clamp_min(0)[..., None]
    )
    return plan._replace(accept=ratio[..., 0])


def not_divided(plan: Plan, p: Tensor, q: Tensor, *_: Any) -> Plan:
    """Block verification that accepts with the mass of the residual, not divided by what it
    competes with."""
    accept = torch.cat([plan.after.sum(-1)[..., 1:-1], plan.accept[..., -1:]], -1)
    return plan._replace(accept=accept)


def one_more_draft(*given: Any) -> Plan:
    """k-sequential selection with rho and the residual of k + 1 draft tokens."""

    def select(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        accept, after = k_sequential(p, torch.cat([q, q[..., :1, :]], -2), torch.cat([x, x[..., :1]], -1))
        return accept[..., :-1], after

    return AtEachNode(select)(*given[1:])


def residual_of_tokens(*given: Any) -> Plan:
    return AtEachNode(lambda p, q, x: (k_sequential(p, q, x)[0], residual(p, q[..., 0, :])))(*given[1:])


def hub_takes_all(*given: Any) -> Plan:
    """The hub is accepted whenever the other token is not, beyond p(a)."""

    def select(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        accept, after = spechub(p, q, x)
        return torch.where(x == q[..., 0, :].argmax(-1, keepdim=True), 1.0, accept), after

    return AtEachNode(select)(*given[1:])


PLAN_BUGS = [
    *product(["token", "block", "recursive, independent", "traversal, without replacement", "q = 1, top"], [from_p]),
    *product(["k-sequential", "SpecHub", "best path"], [from_p]), ("SpecHub", hub_takes_all),
    ("k-sequential", one_more_draft), ("k-sequential", residual_of_tokens),
    *product(["block", "recursive, three"], [from_the_first_residual]),
    *product(["token", "recursive, independent", "recursive, without replacement"], [one_token_less, previous_test]),
    ("block", previous_test), ("block", not_divided), ("traversal, without replacement", previous_test),
    ("recursive, three", q_of_the_first), ("recursive, three", checked_against_p),
    ("recursive, independent", checked_against_p), ("q = 1, top", soft_q), ("exact match", soft_q),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bug"), PLAN_BUGS, ids=lambda x: getattr(x, "__name__", x))
def test_a_plan_with_a_bug_is_not_exact(name: str, bug: Callable[..., Plan]) -> None:
    right: Any = EXACT[name].rule
    method = EXACT[name]._replace(rule=PlannedRule(changed(right.plan, bug), right.up))
    assert max(error(method, seed=seed) for seed in range(3)) > 1e-3


# Any tokens, shapes, dtypes, extremes


@cache
def any_case(parents: tuple[int, ...], rows: int = 24, vocab: int = 4) -> tuple[Tensor, ...]:
    """p, q, tokens and uniforms `(rows, ...)`: distributions of every kind, impossible tokens, and
    missing ones."""
    generator, n = torch.Generator().manual_seed(len(parents)), len(parents)
    kinds = [kind for kind in PAIRS if kind != "nearly equal"]
    p, q = torch.zeros(rows, n + 1, vocab).double(), torch.zeros(rows, n, vocab).double()
    tokens = torch.randint(-1, vocab, (rows, n), generator=generator)
    for row in range(rows):
        p_of, q_of = distribution_pair(kinds[row % len(kinds)], vocab, seed=row)
        for entry in range(n + 1):
            p[row, entry] = p_of((entry,))
        for node in range(n):
            own = q_of((parents[node] + 1,))
            if tokens[row, node] > 0:  # mostly a token that can be proposed
                tokens[row, node] = int(torch.multinomial(own, 1, generator=generator))
            q[row, node] = own * (tokens[row, node] >= 0)
    uniforms = torch.rand(rows, n + 1, generator=generator, dtype=torch.float64)
    return p, q, tokens, uniforms[:, :-1], uniforms[:, -1]


ANY_RULES: dict[str, Any] = {
    "token": token_verification, "exact match": exact_match, "rejection": rejection_sampling,
    "greedy": greedy_verification, "lenient": lenient_verification(0.4), "traversal": traversal_verification,
    "lenient greedy": lenient_greedy_verification(0.4),
}  # fmt: skip
every_rule = pytest.mark.parametrize("name", ANY_RULES)
SHAPES = [(), chain(3), (-1, -1, 0, 0, 1), (-1, 0, -1, 1, 2, 1)]


@every_rule
@pytest.mark.parametrize("parents", SHAPES, ids=str)
def test_an_outcome_names_a_path_of_the_tree_and_rows_are_independent(name: str, parents: tuple[int, ...]) -> None:
    rule, case = ANY_RULES[name], any_case(parents)
    outcome = rule(*case, parents)
    assert outcome.path is not None
    for row in range(24):
        path = [node for node in outcome.path[row].tolist() if node >= 0]
        assert len(path) == int(outcome.accepted[row])
        assert all(parents[node] == before for node, before in zip(path, [-1, *path], strict=False))
        assert all(case[2][row, node] >= 0 for node in path)
        alone = rule(*(part[row] for part in case), TokenTree(parents))
        assert alone[:2] == (outcome.accepted[row], outcome.token[row])
        assert torch.equal(alone.path, outcome.path[row])
    shaped = rule(*(part.reshape(2, 3, 4, *part.shape[1:]) for part in case), parents)
    assert torch.equal(shaped.token.flatten(), outcome.token)
    with torch.device("meta"):  # whatever the default device is
        assert torch.equal(rule(*case, parents).token, outcome.token)
    if parents == chain(len(parents)):
        as_chain = rule(*case)
        assert as_chain.path is None
        assert all(map(torch.equal, as_chain[:2], outcome[:2]))
    assert [part.dtype for part in outcome] == [torch.int64] * 3
    floats = rule(case[0].float(), case[1].float(), *case[2:], parents)
    assert torch.equal(floats.token, outcome.token)
    assert torch.equal(rule(case[0].float(), *case[1:], parents).accepted, outcome.accepted)


@every_rule
@pytest.mark.parametrize("parents", SHAPES[1:3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_impossible_is_emitted_for_any_uniform(name: str, parents: tuple[int, ...], dtype: torch.dtype) -> None:
    """Not for 0 and for the largest number below 1 either, where rounding decides."""
    p, q, tokens, accept, final = any_case(parents)
    before = torch.tensor([parent + 1 for parent in parents])
    for one, last in product([0.0, 5e-324, 0.5, 1 - 2**-53], repeat=2):
        uniforms = torch.full_like(accept, one), torch.full_like(final, last)
        outcome = ANY_RULES[name](p.to(dtype), q.to(dtype), tokens, *uniforms, parents)
        assert outcome.path is not None
        nodes = outcome.path.clamp_min(0)
        chances = p[torch.arange(24)[:, None], before[nodes], tokens.gather(1, nodes).clamp_min(0)]
        assert ((chances > 0) | (outcome.path < 0)).all()
        ends = torch.cat([torch.full_like(nodes[:, :1], -1), outcome.path], 1).amax(1) + 1
        assert (p[torch.arange(24), ends, outcome.token] > 0).all()


@pytest.mark.parametrize(
    ("rule", "threshold"),
    [(token_verification, 0.5), (rejection_sampling, 1 / 3), (lenient_verification(0.75), 2 / 3), (exact_match, 0.25)],
)
def test_a_uniform_equal_to_the_acceptance_probability_rejects(rule: Rule, threshold: float) -> None:
    p, q = torch.tensor([[0.25, 0.75], [1.0, 0.0]]).double(), torch.tensor([[0.5, 0.5]]).double()
    for uniform, accepted in ((threshold - 1e-9, 1), (threshold + 1e-9, 0)):
        given_uniforms = torch.tensor([uniform], dtype=torch.float64), torch.tensor(0.9).double()
        assert rule(p, q, torch.tensor([0]), *given_uniforms).accepted == accepted
    exactly = torch.tensor([0.5], dtype=torch.float64), torch.tensor(0.9).double()
    assert token_verification(p, q, torch.tensor([0]), *exactly).accepted == 0


@pytest.mark.parametrize("broken", ["p", "q"])
def test_nan_after_a_token_does_not_change_how_often_it_is_accepted(broken: str) -> None:
    """The token may be the last one that is emitted, such as an end token, so that NaN is not reported."""
    for first in range(3):
        p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], dtype=torch.float64)
        q = torch.tensor([[0.2, 0.2, 0.6], [0.3, 0.3, 0.4]], dtype=torch.float64)
        second = q[1].clone() if broken == "p" else one_hot(torch.tensor(2), 3, q.dtype)
        (p if broken == "p" else q)[1] = torch.nan
        drafts = torch.tensor([[first, token] for token in range(3)])
        accept = block_verification.plan(p.expand(3, 3, 3), q.expand(3, 2, 3), drafts, TokenTree(chain(2))).accept
        kept = accept[:, 1] + (1 - accept[:, 1]) * accept[:, 0]
        assert float(kept @ second) == pytest.approx(min(1, float(p[0, first] / q[0, first])))


def test_rules_are_values() -> None:
    assert lenient_verification(0.5) == lenient_verification(0.5) != lenient_verification(0.4)
    assert hash(lenient_greedy_verification(0.5)) == hash(lenient_greedy_verification(0.5))
    assert lenient_verification(0.5) != lenient_greedy_verification(0.5)


@pytest.mark.parametrize("shapes", [((3, 5), (2, 4), 2), ((3, 4), (3, 4), 3), ((3, 4), (2, 4), 3)])
def test_distributions_that_do_not_go_together_are_refused(
    shapes: tuple[tuple[int, int], tuple[int, int], int],
) -> None:
    p, q, gamma = torch.rand(shapes[0]), torch.rand(shapes[1]), shapes[2]
    with pytest.raises(ValueError, match="they must be"):
        token_verification(p, q, torch.zeros(gamma, dtype=torch.int64), torch.rand(gamma), torch.rand(()))


@pytest.mark.parametrize("part", Plan._fields)
def test_a_part_of_a_plan_that_would_broadcast_is_refused(part: str) -> None:
    def one_of_many(plan: Plan, *_: Any) -> Plan:
        return plan._replace(**{part: getattr(plan, part)[..., :1]})

    rule = PlannedRule(changed(token_verification.plan, one_of_many))
    p, q, x = torch.rand(3, 4), torch.rand(2, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeError, match=f"has .*{part}.* of the shapes"):
        rule(p, q, x, torch.rand(2), torch.rand(()))


def test_a_token_that_was_not_proposed_is_not_accepted() -> None:
    """Though a plan would accept it."""
    p, q, x = torch.rand(2, 3), torch.zeros(1, 3), torch.tensor([-1])
    assert (
        PlannedRule(lambda p, q, x, tree: Plan(torch.ones(1), p))(p, q, x, torch.zeros(1), torch.rand(())).accepted == 0
    )


def test_a_path_of_another_depth_is_refused() -> None:
    numbers, tree = torch.zeros(2, dtype=torch.int64), TokenTree((-1, 0))
    require_outcome(Outcome(numbers, numbers, numbers.expand(2, 2)), 2, tree)
    with pytest.raises(TypeError, match="it must return an Outcome"):
        require_outcome(Outcome(numbers, numbers, numbers[:, None]), 2, tree)
