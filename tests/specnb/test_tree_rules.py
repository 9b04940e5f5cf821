"""Tree rules: the joint distribution of everything a step emits, for every way to sample the children."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import pytest
import rules_by_hand as by_hand
import torch
from distributions_for_tests import PAIRS, distribution_pair
from torch import Tensor

from specnb import rules as traversal
from specnb.distributions import Conditional
from specnb.enumeration import (
    Emissions,
    asked_tree_distribution,
    completed,
    expected_accepted,
    joint_distribution,
    planned_step_distribution,
)
from specnb.multi_draft import (
    SelectionPlan,
    SelectionPlanner,
    k_sequential_plan,
    recursive_plan,
    spechub_plan,
    top_k_plan,
)
from specnb.rules import (
    SelectionTree,
    TreeOutcome,
    TreePlan,
    TreePlanner,
    TreeRule,
    best_path_block,
    best_path_thresholds,
    block_plan,
    block_verification,
    children_of,
    chosen_path,
    exact_match_tree,
    greedy_tree,
    k_sequential_tree,
    leaves_first,
    path_to,
    paths,
    recursive_rejection,
    recursive_thresholds,
    spechub_tree,
    top_k_tree,
    traversal_thresholds,
    traversal_verification,
)
from specnb.trees import (
    Scheme,
    distinct_children,
    draft_trees,
    hub_children,
    independent_children,
    node_depths,
    prefix_of,
    top_children,
)


class Method(NamedTuple):
    rule: TreeRule
    plan: TreePlanner
    scheme: Scheme


def of_selection(plan: SelectionPlanner, scheme: Scheme) -> Method:
    function = SelectionTree(plan)
    return Method(TreeRule(function), function.thresholds, scheme)


def matching_thresholds(p: Tensor, q: Tensor, tokens: Tensor, parents: tuple[int, ...]) -> TreePlan:
    """Node i is followed by a sample of p after it; every uniform meets the sums below and above the tokens' own."""
    return TreePlan(p[..., 1:, :].cumsum(-1)[..., :-1], p[..., :1, :])


METHODS = {
    "recursive, independent": Method(recursive_rejection, recursive_thresholds, independent_children),
    "recursive, without replacement": Method(recursive_rejection, recursive_thresholds, distinct_children),
    "recursive, top-k": Method(recursive_rejection, recursive_thresholds, top_children),
    "recursive plan at every node": of_selection(recursive_plan, distinct_children),
    "q = 1, top-k": of_selection(top_k_plan, top_children),
    "q = 1, sampled": of_selection(top_k_plan, distinct_children),
    "k-sequential": of_selection(k_sequential_plan, independent_children),
    "traversal, independent": Method(traversal_verification, traversal_thresholds, independent_children),
    "traversal, without replacement": Method(traversal_verification, traversal_thresholds, distinct_children),
    "traversal, top-k": Method(traversal_verification, traversal_thresholds, top_children),
    "exact match": Method(exact_match_tree, matching_thresholds, distinct_children),
}


def no_thresholds(p: Tensor, q: Tensor, tokens: Tensor, parents: tuple[int, ...]) -> TreePlan:
    """Greedy verification reads no uniform."""
    return TreePlan(torch.zeros_like(q[..., 0]), p)


TREES = [(-1,), (-1, -1), (-1, 0, -1), (-1, -1, 0, 0), (-1, 0, 1)]
KINDS = ["zeros in p", "zeros in q", "zeros in both", "disjoint", "equal", "one-hot p", "one-hot q"]


def total_variation(emitted: Emissions, p: Conditional, length: int) -> float:
    return float((completed(emitted, p, length) - joint_distribution(p, length)).abs().sum()) / 2


def error(method: Method, parents: tuple[int, ...], kind: str = "dense", vocab: int = 3, seed: int = 0) -> float:
    p, q = distribution_pair(kind, vocab, seed)
    emitted = asked_tree_distribution(*method[:2], p, q, parents, method.scheme)
    return total_variation(emitted, p, max(node_depths(parents)) + 1)


# Exactness


def small(name: str) -> int:
    """A vocabulary for which the enumeration takes a second at most."""
    return 2 if name == "k-sequential" else 3


@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_step_has_the_targets_joint_distribution(name: str, parents: tuple[int, ...]) -> None:
    assert error(METHODS[name], parents, vocab=small(name)) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_degenerate_distributions(name: str, kind: str) -> None:
    assert error(METHODS[name], (-1, 0, 0, -1), kind, vocab=2) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parents", [(-1, -1), (-1, -1, 0, 0)], ids=str)
def test_spechub(kind: str, parents: tuple[int, ...]) -> None:
    assert error(of_selection(spechub_plan, hub_children), parents, kind) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parents", [(-1, -1), (-1, -1, -1), (-1, -1, 0, 1), (-1, 0, 1)], ids=str)
def test_the_best_of_several_paths(kind: str, parents: tuple[int, ...]) -> None:
    method = Method(best_path_block, best_path_thresholds, independent_children)
    assert error(method, parents, kind, vocab=2 if len(parents) > 3 else 3) < 1e-12


# What they reduce to, and how much is accepted


def accepted(method: Method, parents: tuple[int, ...], seed: int = 0) -> float:
    p, q = distribution_pair("dense", 2, seed)
    return expected_accepted(asked_tree_distribution(*method[:2], p, q, parents, method.scheme))


def random_tree(
    parents: tuple[int, ...], rows: int = 300, vocab: int = 4, scheme: Scheme = independent_children
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...], Tensor, Tensor]:
    """p, q, tokens and uniforms of `rows` trees whose distributions depend on the row only."""
    generator = torch.Generator().manual_seed(len(parents))
    p = torch.softmax(2 * torch.randn(rows, len(parents) + 1, vocab, generator=generator).double(), -1)
    base = torch.softmax(2 * torch.randn(rows, len(parents) + 1, vocab, generator=generator).double(), -1)
    tokens: list[Tensor] = []
    q: list[Tensor] = []
    for node, parent in enumerate(parents):
        own = scheme(base[:, parent + 1], [tokens[i] for i in range(node) if parents[i] == parent])
        q.append(own)
        tokens.append(torch.multinomial(own, 1, generator=generator)[:, 0])
    accept, final = torch.rand(rows, len(parents), generator=generator), torch.rand(rows, generator=generator)
    return p, torch.stack(q, 1), torch.stack(tokens, 1), parents, accept.double(), final.double()


@pytest.mark.parametrize("rule", [traversal_verification, best_path_block], ids=["traversal", "best path"])
def test_on_a_chain_they_are_block_verification(rule: TreeRule) -> None:
    p, q, tokens, parents, accept, final = random_tree((-1, 0, 1))
    tree, chain = rule(p, q, tokens, parents, accept, final), block_verification(p, q, tokens, accept, final)
    assert torch.equal(tree.accepted, chain.accepted)
    assert torch.equal(tree.token, chain.token)
    assert torch.equal(tree.path, torch.arange(3).where(torch.arange(3) < chain.accepted[:, None], -1))


@pytest.mark.parametrize("scheme", [independent_children, distinct_children])
def test_at_depth_1_traversal_is_recursive_rejection(scheme: Scheme) -> None:
    case = random_tree((-1, -1, -1), scheme=scheme)
    assert all(map(torch.equal, traversal_verification(*case), recursive_rejection(*case)))


def test_a_selection_tree_of_the_recursive_plan_is_recursive_rejection() -> None:
    case = random_tree((-1, -1, 0, 0, 1, 3), scheme=distinct_children)
    assert all(map(torch.equal, TreeRule(SelectionTree(recursive_plan))(*case), recursive_rejection(*case)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("parents", [(-1, 0, -1), (-1, -1, 0, 1)], ids=str)
def test_traversal_accepts_at_least_as_many_as_recursive_rejection(parents: tuple[int, ...], seed: int) -> None:
    recursive, traversing = METHODS["recursive, without replacement"], METHODS["traversal, without replacement"]
    assert accepted(traversing, parents, seed) >= accepted(recursive, parents, seed) - 1e-12


def test_a_second_path_raises_what_block_verification_accepts() -> None:
    p, q = distribution_pair("dense", 2)
    block = expected_accepted(planned_step_distribution(block_plan, p, q, 2))
    best = Method(best_path_block, best_path_thresholds, independent_children)
    assert accepted(best, (-1, 0)) == pytest.approx(block, abs=1e-12)
    assert accepted(best, (-1, -1, 0, 1)) > block + 0.05


def test_the_greedy_rule_follows_the_argmax() -> None:
    p = torch.eye(3)[[1, 0, 2, 1]]
    outcome = greedy_tree(p, p[:3], torch.tensor([0, 1, 2]), (-1, -1, 1), torch.zeros(3), torch.tensor(0.0))
    assert (int(outcome.accepted), int(outcome.token), outcome.path.tolist()) == (2, 1, [1, 2])


def test_at_most_one_child_is_the_argmax_so_the_longest_path_is_found() -> None:
    """Over distinct children: no other path of the tree agrees with the target's argmax for longer."""
    p, q, tokens, parents, accept, final = random_tree((-1, -1, 0, 0, 1, 1), scheme=distinct_children)
    best, found = p.argmax(-1), greedy_tree(p, q, tokens, parents, accept, final)
    agree = torch.ones(len(p), len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents):
        agree[:, node + 1] = agree[:, parent + 1] & (tokens[:, node] == best[:, parent + 1])
    depths = torch.tensor([0, *node_depths(parents)])
    assert torch.equal(found.accepted, (agree * depths).amax(-1))


# Values, shapes, missing tokens

RULES = {
    "greedy": greedy_tree,
    "exact match": exact_match_tree,
    "q = 1": top_k_tree,
    "k-sequential": k_sequential_tree,
    "recursive": recursive_rejection,
    "traversal": traversal_verification,
    "best path": best_path_block,
}


def test_rules_are_values() -> None:
    assert TreeRule(SelectionTree(top_k_plan)) == top_k_tree
    assert hash(TreeRule(SelectionTree(spechub_plan))) == hash(spechub_tree)
    assert top_k_tree != k_sequential_tree


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_a_batch_do_not_depend_on_each_other(name: str, dtype: torch.dtype) -> None:
    p, q, tokens, parents, accept, final = random_tree((-1, -1, 0, 1), rows=12)
    p, q = p.to(dtype), q.to(dtype)
    together = RULES[name](p, q, tokens, parents, accept, final)
    for row in range(12):
        alone = RULES[name](p[row], q[row], tokens[row], parents, accept[row], final[row])
        assert all(torch.equal(one, every[row]) for one, every in zip(alone, together, strict=True))


@pytest.mark.parametrize("name", ["q = 1", "recursive", "traversal", "greedy", "exact match"])
def test_a_missing_node_is_passed_over(name: str) -> None:
    """With its descendants; the others are verified as in the tree without it."""
    p, q, tokens, _, accept, final = random_tree((-1, -1, 0, 1))
    q[:, [0, 2]], tokens[:, [0, 2]] = 0.0, -1
    whole = RULES[name](p, q, tokens, (-1, -1, 0, 1), accept, final)
    smaller = RULES[name](p[:, [0, 2, 4]], q[:, [1, 3]], tokens[:, [1, 3]], (-1, 0), accept[:, [1, 3]], final)
    assert torch.equal(whole.accepted, smaller.accepted)
    assert torch.equal(whole.token, smaller.token)


def test_the_best_path_needs_separate_chains() -> None:
    assert paths((-1, 0, -1, 2)) == [[0, 1], [2, 3]]
    for parents in [(-1, -1, 0), (-1, 0, 0)]:
        with pytest.raises(ValueError, match="this rule needs separate chains of one length"):
            best_path_block(*random_tree(parents))


def test_spechub_has_no_third_child() -> None:
    with pytest.raises(ValueError, match="SpecHub proposes 2 children; child 3 was asked for"):
        draft_trees((-1, -1, -1), lambda _: torch.tensor([0.5, 0.5]).double(), hub_children)


# Planted bugs of every rule


def sorted_children(rule: TreeRule) -> TreeRule:
    """The two children of the root are tested by their token ids."""
    return TreeRule(
        lambda p, q, tokens, *rest: rule(p, q, torch.cat([tokens[..., :2].sort().values, tokens[..., 2:]], -1), *rest)
    )


def first_child_twice(rule: TreeRule) -> TreeRule:
    """The first child stands in place of the second, too."""
    return TreeRule(lambda p, q, tokens, *rest: rule(p, q, tokens[..., [0, 0, *range(2, tokens.shape[-1])]], *rest))


def path_off_by_one(rule: TreeRule) -> TreeRule:
    """The path names the next node."""

    def shifted(p: Tensor, q: Tensor, tokens: Tensor, parents: tuple[int, ...], *uniforms: Tensor) -> TreeOutcome:
        outcome = rule(p, q, tokens, parents, *uniforms)
        return outcome._replace(path=torch.where(outcome.path >= 0, (outcome.path + 1) % len(parents), -1))

    return TreeRule(shifted)


def accepted_off_by_one(rule: TreeRule) -> TreeRule:
    """The last node of the path is not counted, and its token is lost."""

    def fewer(*given: Any) -> TreeOutcome:
        outcome = rule(*given)
        return outcome._replace(accepted=(outcome.accepted - 1).clamp_min(0))

    return TreeRule(fewer)


def one_uniform(rule: TreeRule) -> TreeRule:
    """All nodes are tested with the first uniform."""
    return TreeRule(lambda p, q, tokens, parents, accept, final: rule(
        p, q, tokens, parents, accept[..., :1].expand_as(accept), final
    ))  # fmt: skip


def final_from_the_root(rule: TreeRule) -> TreeRule:
    """The last token is sampled from p after the root, wherever the path ends."""
    return TreeRule(lambda p, q, tokens, parents, accept, final: rule(p, q, tokens, parents, accept, final)._replace(
        token=(p[..., 0, :].cumsum(-1) <= final[..., None]).sum(-1).clamp_max(p.shape[-1] - 1)
    ))  # fmt: skip


BUGGY = METHODS | {
    "SpecHub": of_selection(spechub_plan, hub_children),
    "best path": Method(best_path_block, best_path_thresholds, independent_children),
    "greedy": Method(greedy_tree, no_thresholds, distinct_children),
}
BUGS = [sorted_children, first_child_twice, path_off_by_one, accepted_off_by_one, one_uniform, final_from_the_root]
HARMLESS = {  # what a rule does not depend on
    ("exact match", sorted_children), ("exact match", first_child_twice),  # tokens at fixed nodes may be anything
    ("q = 1, top-k", sorted_children), ("recursive, top-k", sorted_children), ("traversal, top-k", sorted_children),
    ("q = 1, sampled", sorted_children),  # any tokens will do
    ("k-sequential", sorted_children), ("best path", sorted_children),
    ("best path", one_uniform),  # chains of one token have one test
    ("greedy", one_uniform), ("greedy", first_child_twice),  # the second child is missed, and what is emitted is right
}  # fmt: skip


def is_found(method: Method, parents: tuple[int, ...], vocab: int = 3, kind: str = "dense") -> bool:
    """Whether the distribution is off for one of a few pairs, or an answer changes inside a cell."""
    try:
        return any(error(method, parents, kind, vocab, seed) > 1e-3 for seed in range(6))
    except ValueError:
        return True


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("name", ["recursive, without replacement", "q = 1, top-k", "k-sequential", "SpecHub",
                                  "traversal, without replacement", "best path", "exact match", "greedy"])  # fmt: skip
def test_a_bug_of_the_rule_is_found(name: str, bug: Callable[[TreeRule], TreeRule]) -> None:
    method, kind = BUGGY[name], "one-hot p" if name == "greedy" else "dense"
    assert len([other for other in BUGS if (name, other) not in HARMLESS]) >= 3
    if (name, bug) not in HARMLESS:
        assert is_found(method._replace(rule=bug(method.rule)), (-1, -1), kind=kind)


# Planted bugs of traversal verification and of the choice of a path


def root_first(monkeypatch: pytest.MonkeyPatch) -> Method:
    """Parents are tested before their children."""
    monkeypatch.setattr(traversal, "leaves_first", lambda parents: tuple(range(len(parents))))
    return METHODS["traversal, without replacement"]


def residual_of_the_token_rule(monkeypatch: pytest.MonkeyPatch) -> Method:
    """After a rejected subtree max(0, r - q) is kept, without the weight."""
    monkeypatch.setattr(traversal, "_remaining", lambda weight, left, own: (left - own).clamp_min(0))
    return METHODS["traversal, without replacement"]


def draft_distribution_not_skewed(monkeypatch: pytest.MonkeyPatch) -> Method:
    """The chosen path is verified as if it had not been chosen."""
    monkeypatch.setattr(traversal, "_power_sum", lambda a, b, k: torch.ones_like(a))
    return BUGGY["best path"]


def one_path_fewer(monkeypatch: pytest.MonkeyPatch) -> Method:
    """The chosen path's distribution is that of the best of k - 1."""
    power_sum = traversal._power_sum
    monkeypatch.setattr(traversal, "_power_sum", lambda a, b, k: power_sum(a, b, k - 1))
    return BUGGY["best path"]


def weights_not_renormalised(monkeypatch: pytest.MonkeyPatch) -> Method:
    """The conditional distributions of the chosen path are not divided by its probability so far."""
    power_sum = traversal._power_sum
    monkeypatch.setattr(
        traversal, "_power_sum", lambda a, b, k: power_sum(a, b, k) if a.dim() == 1 else torch.ones_like(a)
    )
    return BUGGY["best path"]


@pytest.mark.parametrize(
    "bug",
    [root_first, residual_of_the_token_rule, draft_distribution_not_skewed, one_path_fewer, weights_not_renormalised],
)
def test_a_bug_of_the_recursion_is_found(
    bug: Callable[[pytest.MonkeyPatch], Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    if bug is residual_of_the_token_rule:  # of few tokens, a residual is one-hot
        assert is_found(bug(monkeypatch), (-1, 0), vocab=4)
    else:
        assert is_found(bug(monkeypatch), (-1, -1, 0, 1), vocab=2)


@pytest.mark.parametrize("take", ["first child of each node", "p after the parent"])
def test_a_bug_of_the_selection_is_found(take: str) -> None:
    """The second level of the tree is looked up at the wrong entry."""

    class Wrong(SelectionTree):
        def __call__(
            self, p: Tensor, q: Tensor, tokens: Tensor, parents: tuple[int, ...], accept: Tensor, final: Tensor
        ) -> TreeOutcome:
            if take == "p after the parent":
                p = p[..., [0, *(parent + 1 for parent in parents)], :]
            else:
                tokens = tokens[..., [0, 1, 2, 2]]
            return super().__call__(p, q, tokens, parents, accept, final)

    for plan in (top_k_plan, recursive_plan):
        method = of_selection(plan, distinct_children)
        assert is_found(method._replace(rule=TreeRule(Wrong(plan))), (-1, -1, 0, 0))


def test_the_path_to_a_node() -> None:
    outcome = path_to(torch.tensor([4, -1, 1]), (-1, -1, 0, 0, 2), torch.tensor([7, 8, 9]))
    assert outcome.path.tolist() == [[0, 2, 4], [-1, -1, -1], [1, -1, -1]]
    assert outcome.accepted.tolist() == [3, 0, 1]


def test_a_plan_of_a_selection_is_followed_at_every_node() -> None:
    """`SelectionTree` calls its plan with the children of one node only."""
    sizes = []

    def noting(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
        sizes.append(tokens.shape[-1])
        return recursive_plan(p, q, tokens)

    TreeRule(SelectionTree(noting))(*random_tree((-1, -1, 0, 0, 0, 4)))
    assert sizes == [2, 3, 1]


# The rules, their plans and the schemes beside their definitions in plain Python

SHAPES = [(-1,), (-1, -1, -1), (-1, -1, 1, 0), (-1, 0, -1, 1, 0), (-1, -1, 0, 0, 1, 3)]
WELL_CONDITIONED = [kind for kind in PAIRS if kind != "nearly equal"]  # there rounding decides
KIND_COUNT, SEEDS = len(WELL_CONDITIONED), 4
every_shape = pytest.mark.parametrize("parents", SHAPES, ids=str)


def float64(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def any_trees(
    parents: tuple[int, ...], missing: float, vocab: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """p, q, tokens and uniforms of trees `(kinds, seeds)` with any tokens, also impossible ones, and some missing."""
    generator = torch.Generator().manual_seed(len(parents))
    cases: list[list[Tensor]] = [[], [], []]
    for kind, seed in product(WELL_CONDITIONED, range(SEEDS)):
        p, q = distribution_pair(kind, vocab, seed)
        tokens: list[int] = []
        for parent in parents:
            absent = (parent >= 0 and tokens[parent] < 0) or float(torch.rand((), generator=generator)) < missing
            tokens.append(-1 if absent else int(torch.randint(vocab, (), generator=generator)))
        along = [prefix_of(node, parents, tokens) for node in range(-1, len(parents))]
        cases[0].append(torch.stack([p(path) if -1 not in path else p(()) for path in along]))
        before = [along[parent + 1] for parent in parents]
        absent_row = torch.zeros(vocab, dtype=torch.float64)
        rows = [q(path) if x >= 0 else absent_row for path, x in zip(before, tokens, strict=True)]
        cases[1].append(torch.stack(rows))
        cases[2].append(torch.tensor(tokens))
    uniforms = torch.rand(KIND_COUNT, SEEDS, len(parents) + 1, generator=generator, dtype=torch.float64)
    p_all, q_all, tokens_all = (torch.stack(part).unflatten(0, (KIND_COUNT, SEEDS)) for part in cases)
    return p_all, q_all, tokens_all, uniforms[..., :-1], uniforms[..., -1]


def matched(p: Any, q: Any, tokens: Any, parents: tuple[int, ...], uniforms: Any, final: Any) -> by_hand.Path:
    every = [final, *uniforms]
    return by_hand.following(lambda node: by_hand.sampled(p[node + 1], every[node + 1]), tokens, parents)


def greedily(p: Any, q: Any, tokens: Any, parents: tuple[int, ...], uniforms: Any, final: Any) -> by_hand.Path:
    return by_hand.following(lambda node: p[node + 1].index(max(p[node + 1])), tokens, parents)


BY_HAND: dict[str, tuple[TreeRule, Callable[..., by_hand.Path]]] = {
    "recursive": (recursive_rejection, partial(by_hand.selection_tree, by_hand.recursive)),
    "q = 1": (top_k_tree, partial(by_hand.selection_tree, by_hand.top_k)),
    "k-sequential": (k_sequential_tree, partial(by_hand.selection_tree, by_hand.k_sequential)),
    "traversal": (traversal_verification, by_hand.traversal),
    "exact match": (exact_match_tree, matched),
    "greedy": (greedy_tree, greedily),
}


@every_shape
@pytest.mark.parametrize("name", BY_HAND)
def test_a_rule_decides_as_its_definition(name: str, parents: tuple[int, ...]) -> None:
    rule, definition = BY_HAND[name]
    p, q, tokens, accept, final = any_trees(parents, missing=0.0 if name == "k-sequential" else 0.15)
    found = rule(p, q, tokens, parents, accept, final)
    depth = max(node_depths(parents))
    assert found.path.shape == (*final.shape, depth)
    assert found.accepted.dtype == found.token.dtype == found.path.dtype == torch.int64
    for row in product(range(KIND_COUNT), range(SEEDS)):
        one = (p[row].tolist(), q[row].tolist(), tokens[row].tolist(), parents, accept[row].tolist(), float(final[row]))
        path, token = definition(*one)
        padded = path + [-1] * (depth - len(path))
        got = int(found.accepted[row]), int(found.token[row]), found.path[row].tolist()
        if name in ("greedy", "exact match") and got[2] != padded:  # of equal children any may be followed
            assert [tokens[row][i] for i in got[2] if i >= 0] == [tokens[row][i] for i in path]
            continue
        assert got == (len(path), token, padded), (row, one)


@pytest.mark.parametrize("shape", [(2, 3), (3, 1, 1), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plans_of_any_leading_shape_have_the_dtype_of_the_distributions(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parents = (-1, -1, 0, 1)
    p, q, tokens, *_ = random_tree(parents, rows=prod(shape))
    p, q = p.to(dtype), q.to(dtype)
    for thresholds in (
        recursive_thresholds,
        traversal_thresholds,
        best_path_thresholds,
        SelectionTree(recursive_plan).thresholds,
        SelectionTree(k_sequential_plan).thresholds,
    ):
        shaped_p, shaped_q, shaped_tokens = (part.reshape(*shape, *part.shape[1:]) for part in (p, q, tokens))
        shaped = thresholds(shaped_p, shaped_q, shaped_tokens, parents)
        assert shaped.accept.shape == (*shape, 4)
        assert shaped.accept.dtype == shaped.recovered.dtype == dtype
        for row, place in enumerate(product(*map(range, shape))):
            alone = thresholds(p[row], q[row], tokens[row], parents)
            assert all(torch.equal(one, every[place]) for one, every in zip(alone, shaped, strict=True))


@every_shape
def test_the_thresholds_of_recursive_rejection_are_those_of_its_definition(parents: tuple[int, ...]) -> None:
    """Those of a selection tree with the recursive plan too; and all that the last token can be sampled from."""
    p, q, tokens, *_ = any_trees(parents, missing=0.15)
    found, selected = (
        recursive_thresholds(p, q, tokens, parents),
        SelectionTree(recursive_plan).thresholds(p, q, tokens, parents),
    )
    for row in product(range(KIND_COUNT), range(SEEDS)):
        p_row, q_row, tokens_row = p[row].tolist(), q[row].tolist(), tokens[row].tolist()
        accept, recovered, after = [0.0] * len(parents), [], {}
        for node in range(-1, len(parents)):
            below = by_hand.children(parents, node)
            for at, child in enumerate(below, start=1):
                chances, left = by_hand.recursive(
                    p_row[node + 1], [q_row[i] for i in below[:at]], [tokens_row[i] for i in below[:at]]
                )
                accept[child], after[child] = chances[-1], left
            if below:
                recovered.append(after[below[-1]])
        for plan in (found, selected):
            assert plan.accept[row].clamp_max(1).tolist() == pytest.approx(accept, abs=1e-12)
        every = float64([*p_row, *(after[node] for node in range(len(parents)))])
        assert torch.allclose(found.recovered[row], every, atol=1e-12, rtol=0)
        last = float64([*p_row, *recovered])
        assert torch.allclose(selected.recovered[row], last, atol=1e-12, rtol=0)


PLANNED: dict[str, tuple[TreeRule, TreePlanner]] = {
    "traversal": (traversal_verification, traversal_thresholds),
    "best path": (best_path_block, best_path_thresholds),
    "q = 1": (top_k_tree, SelectionTree(top_k_plan).thresholds),
    "recursive plan": (TreeRule(SelectionTree(recursive_plan)), SelectionTree(recursive_plan).thresholds),
}


@pytest.mark.parametrize("name", PLANNED)
def test_a_uniform_equal_to_its_threshold_rejects(name: str) -> None:
    """The thresholds are probabilities, and so is 0: a uniform of 0 accepts no impossible token."""
    rule, plan = PLANNED[name]
    for parents in [(-1,), (-1, -1, 0, 1)]:
        p, q, tokens, accept, final = any_trees(parents, missing=0.0)
        if name == "best path":
            tokens = tokens.where(q.gather(-1, tokens[..., None])[..., 0] > 0, q.argmax(-1))
        thresholds = plan(p, q, tokens, parents)
        assert thresholds.accept.min() >= 0
        assert thresholds.accept.max() <= 1 + 1e-12
        assert thresholds.recovered.min() >= 0
        assert thresholds.recovered.sum(-1).min() > 0
        found = rule(p, q, tokens, parents, thresholds.accept, final)
        assert not found.accepted.any()
        assert (found.path == -1).all()
        assert (p[..., 0, :].gather(-1, found.token[..., None]) > 0).all()
        below = torch.nextafter(thresholds.accept, torch.zeros_like(accept))
        possible = thresholds.accept > 0
        if name == "best path":  # uniforms after those of one path are not read
            possible = possible[..., : max(node_depths(parents))]
        elif name != "traversal":  # the root's children are tested first
            possible = possible[..., : parents.count(-1)]
        assert torch.equal(rule(p, q, tokens, parents, below, final).accepted > 0, possible.any(-1))


@pytest.mark.parametrize("parents", [(-1, -1, 0, 1), (-1, 0, -1, 2), (-1, -1, 1, 0), (-1, -1, -1), (-1, 0)], ids=str)
def test_the_best_path_is_verified_with_the_distribution_of_the_best_of_all_paths(parents: tuple[int, ...]) -> None:
    """That distribution is counted here over every chain that a drafter could propose."""
    nodes, vocab = paths(parents), 3
    k, depth = len(nodes), len(nodes[0])
    generator = torch.Generator().manual_seed(len(parents))
    kinds = [kind for kind in WELL_CONDITIONED if not kind.startswith("equal")]  # there rounding decides here
    for kind, seed in product(kinds, range(2)):
        p, q = distribution_pair(kind, vocab, seed)
        chains: list[tuple[int, ...]] = []
        for _ in range(k):
            chain: tuple[int, ...] = ()
            for _ in range(depth):
                chain += (int(torch.multinomial(q(chain), 1, generator=generator)),)
            chains.append(chain)
        tokens = [0] * len(parents)
        along: list[tuple[int, ...]] = [()] * (len(parents) + 1)
        for chain, own in zip(chains, nodes, strict=True):
            for level, node in enumerate(own):
                tokens[node], along[node + 1] = chain[level], chain[: level + 1]
        p_tree = torch.stack([p(path) for path in along])
        q_tree = torch.stack([q(along[parent + 1]) for parent in parents])
        best, rows = by_hand.chosen_chain(lambda c: p(c).tolist(), lambda c: q(c).tolist(), chains)  # noqa: B023
        p_along = [p(chains[best][:n]).tolist() for n in range(depth + 1)]
        accept, recovered = by_hand.block(p_along, rows, chains[best])

        plan, chosen = chosen_path(p_tree, q_tree, torch.tensor(tokens), parents)
        assert [tokens[node] for node in chosen.tolist()] == list(chains[best])
        assert chosen.tolist() == nodes[best]
        assert plan.accept.tolist() == pytest.approx(accept, abs=1e-9)
        assert torch.allclose(plan.recovered, float64(recovered), atol=1e-9, rtol=0)
        thresholds = best_path_thresholds(p_tree, q_tree, torch.tensor(tokens), parents)
        assert torch.equal(thresholds.accept, torch.cat([plan.accept, torch.zeros(len(parents) - depth).double()]))
        assert torch.equal(thresholds.recovered, plan.recovered)


def test_of_many_tokens_with_equal_ratios_the_lowest_is_chosen() -> None:
    """Torch keeps the order of more than 16 equal numbers in a stable sort only."""
    probs = torch.full((4, 40), 1 / 40, dtype=torch.float64)
    tokens = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:3] for seed in range(30)])
    plan, nodes = chosen_path(probs.expand(30, 4, 40), probs[:3].expand(30, 3, 40), tokens, (-1, -1, -1))
    assert torch.equal(nodes[:, 0], tokens.argmin(-1))
    place = tokens.amin(-1).double()
    own = ((40 - place) ** 3 - (39 - place) ** 3) / 40**3  # the lowest of three tokens is this one
    assert torch.allclose(plan.accept[:, 0], (1 / 40 / own).clamp_max(1), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", [name for name in RULES if name != "best path"])
def test_without_nodes_the_token_is_sampled_from_the_target(name: str) -> None:
    """Of the argmax, where the rule is greedy."""
    p = torch.tensor([[[0.25, 0.75]], [[0.5, 0.5]], [[1.0, 0.0]]])
    no_nodes = p[:, :0], torch.zeros(3, 0, dtype=torch.int64), (), torch.zeros(3, 0)
    found = RULES[name](p, *no_nodes, torch.tensor([0.25, 0.5, 0.75]))
    assert found.accepted.tolist() == [0, 0, 0]
    assert found.token.tolist() == [1, 0 if name == "greedy" else 1, 0]
    assert found.path.shape == (3, 0)


@pytest.mark.parametrize("name", RULES)
def test_with_one_possible_token_a_whole_path_is_accepted(name: str) -> None:
    ones, tokens = torch.ones(2, 5, 1), torch.zeros(2, 4, dtype=torch.int64)
    found = RULES[name](ones, ones[:, :4], tokens, (-1, -1, 0, 1), torch.full((2, 4), 0.9), torch.zeros(2))
    assert found.accepted.tolist() == [2, 2]
    assert found.token.tolist() == [0, 0]
    assert found.path.tolist() in ([[0, 2]] * 2, [[1, 3]] * 2)


def test_a_uniform_equal_to_the_ratio_rejects_in_recursive_rejection_too() -> None:
    p, q = torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
    for uniform, accepted in ((0.5, 0), (0.4375, 1)):
        found = recursive_rejection(p, q, torch.tensor([0]), (-1,), torch.tensor([uniform]), torch.tensor(0.9))
        assert int(found.accepted) == accepted


def test_children_are_listed_by_parent_and_the_order_of_the_tree() -> None:
    assert list(children_of((-1, -1, 1, 0, 0)).items()) == [(-1, [0, 1]), (0, [3, 4]), (1, [2])]
    assert children_of(()) == {}
    assert paths((-1, -1, 1, 0)) == [[0, 3], [1, 2]]
    assert leaves_first((-1, -1, 1, 0)) == (3, 0, 2, 1)
    for wrong in ((0,), (-2,), (-1, 1)):
        with pytest.raises(ValueError, match="it must be an earlier node, or -1"):
            children_of(wrong)
        with pytest.raises(ValueError, match="it must be an earlier node, or -1"):
            draft_trees(wrong, lambda _: torch.tensor([0.5, 0.5]), independent_children)


def test_the_next_child_has_the_distribution_of_its_scheme() -> None:
    """For a batch of two axes, with earlier children of which some are missing."""
    q = float64([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], [[0.0, 1.0, 0.0], [0.25, 0.5, 0.25]]])
    first, second = torch.tensor([[0, 2], [1, 1]]), torch.tensor([[2, -1], [-1, 0]])
    assert independent_children(q, [first, second]) is q
    want = {
        (): q.tolist(),
        (first,): [[[0, 0.6, 0.4], [0.5, 0.5, 0]], [[0, 0, 0], [0.5, 0, 0.5]]],
        (first, second): [[[0, 1, 0], [0.5, 0.5, 0]], [[0, 0, 0], [0, 0, 1]]],
    }
    for earlier, rows in want.items():
        assert torch.allclose(distinct_children(q, earlier), float64(rows), atol=1e-12, rtol=0)
    top: dict[int, list[list[int | None]]] = {  # without the ties
        0: [[0, 2], [1, 1]], 1: [[1, None], [None, None]], 2: [[2, None], [None, None]]
    }  # fmt: skip
    for rank, tokens in top.items():
        found = top_children(q, [first] * rank)
        assert found.dtype == q.dtype
        assert torch.equal(found.sum(-1), torch.ones(2, 2).double())
        for row, column in product(range(2), range(2)):
            if tokens[row][column] is not None:
                assert int(found[row, column].argmax()) == tokens[row][column]
    assert not top_children(q, [first] * 3).any()
    assert torch.equal(hub_children(q, []), q)
    hub = hub_children(q, [first])  # after the most probable token one of the others, after another one the former
    assert torch.allclose(
        hub, float64([[[0, 0.6, 0.4], [0.5, 0.5, 0]], [[0, 0, 0], [0.5, 0, 0.5]]]), atol=1e-12, rtol=0
    )
    assert torch.equal(hub_children(q, [1 - first.clamp_max(1)])[1, 0], float64([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("scheme", [independent_children, distinct_children, top_children, hub_children])
@pytest.mark.parametrize("kind", ["dense", "zeros in q", "one-hot q"])
def test_a_tree_has_the_product_of_its_rows_and_each_row_its_scheme(kind: str, scheme: Scheme) -> None:
    parents = (-1, -1, 0, 0, 1)
    _, q = distribution_pair(kind, vocab=3)
    trees = draft_trees(parents, q, scheme)
    assert sum(tree.probability for tree in trees) == pytest.approx(1, abs=1e-12)
    assert len({tree.tokens for tree in trees}) == len(trees)
    for tree in trees:
        assert tree.q.shape == (5, 3)
        assert tree.q.dtype == torch.float64
        chance = 1.0
        for node, parent in enumerate(parents):
            prefix, x = prefix_of(parent, parents, tree.tokens), tree.tokens[node]
            earlier = [torch.tensor(tree.tokens[i]) for i in range(node) if parents[i] == parent]
            row = torch.zeros(3).double() if -1 in prefix else scheme(q(prefix), earlier)
            assert torch.equal(tree.q[node], row)
            assert (x == -1) == (not row.any())
            chance *= float(row[x]) if x >= 0 else 1.0
        assert tree.probability == pytest.approx(chance, abs=1e-15)
        assert chance > 0


def test_the_tokens_from_the_root_to_a_node() -> None:
    assert [prefix_of(node, (-1, -1, 1, 0), (5, 6, 7, 8)) for node in (-1, 0, 2, 3)] == [(), (5,), (6, 7), (5, 8)]


@pytest.mark.parametrize("name", RULES)
def test_everything_is_calculated_on_the_device_of_the_arguments(name: str) -> None:
    """Whatever the default device is."""
    case = random_tree((-1, -1, 0, 1), rows=5)
    want = RULES[name](*case)
    with torch.device("meta"):
        found = RULES[name](*case)
    assert all(map(torch.equal, found, want))
