"""Tree rules: the joint distribution of everything a step emits, for every way to sample the children."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from distributions_for_tests import distribution_pair
from torch import Tensor

from specnb.sampling import traversal
from specnb.sampling.block_verification import block_plan, block_verification
from specnb.sampling.enumeration import Conditional, Emissions, completed, joint_distribution
from specnb.sampling.multi_draft import (
    SelectionPlan,
    SelectionPlanner,
    k_sequential_plan,
    recursive_plan,
    spechub_plan,
    top_k_plan,
)
from specnb.sampling.threshold_enumeration import (
    asked_tree_distribution,
    expected_accepted,
    planned_step_distribution,
)
from specnb.sampling.traversal import (
    best_path_block,
    best_path_thresholds,
    paths,
    traversal_thresholds,
    traversal_verification,
)
from specnb.sampling.tree_schemes import (
    Scheme,
    distinct_children,
    draft_trees,
    hub_children,
    independent_children,
    top_children,
)
from specnb.sampling.tree_selection import (
    SelectionTree,
    exact_match_tree,
    greedy_tree,
    k_sequential_tree,
    path_to,
    spechub_tree,
    top_k_tree,
)
from specnb.sampling.tree_verification import (
    TreeOutcome,
    TreePlan,
    TreePlanner,
    TreeRule,
    node_depths,
    recursive_rejection,
    recursive_thresholds,
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
