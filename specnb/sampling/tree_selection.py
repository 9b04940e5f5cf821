"""Tree rules from the root down: at each accepted node one child is chosen, or none, and then the step ends.

`SelectionTree` makes a tree rule of any plan of `specnb.sampling.multi_draft`. Two rules compare tokens only,
`greedy_tree` and `exact_match_tree`; they read no q and serve every tree of draft tokens, also merged ones.

Sources: SpecInfer, Miao et al., arXiv 2305.09781, whose naive sampling is `exact_match_tree`, as Stratos' notes restate
it; those of the plans are in `specnb.sampling.multi_draft`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specnb.sampling.distributions import sample
from specnb.sampling.multi_draft import SelectionPlanner, k_sequential_plan, spechub_plan, top_k_plan
from specnb.sampling.tree_verification import TreeOutcome, TreePlan, TreeRule, node_depths


@dataclass(frozen=True)
class SelectionTree:
    """The function of a tree rule that applies `plan` to the children of the root, of the child accepted, and so on."""

    plan: SelectionPlanner

    def __call__(
        self,
        p: Tensor,
        q: Tensor,
        draft_tokens: Tensor,
        parents: tuple[int, ...],
        accept_uniforms: Tensor,
        final_uniform: Tensor,
    ) -> TreeOutcome:
        current = torch.full_like(final_uniform, -1, dtype=torch.int64)  # the last node accepted; -1 is the root
        target = p[..., 0, :]  # what the last token is sampled from
        for parent, children in children_of(parents).items():  # parents come before their children
            plan = self.plan(p[..., parent + 1, :], q[..., children, :], draft_tokens[..., children])
            passed = (accept_uniforms[..., children] < plan.accept) & (current == parent)[..., None]
            target = plan.recovered.where((current == parent)[..., None], target)
            for i, child in reversed(list(enumerate(children))):  # the first that passes is assigned last
                target = p[..., child + 1, :].where(passed[..., i, None], target)
                current = torch.where(passed[..., i], child, current)
        return path_to(current, parents, sample(target, final_uniform))

    def thresholds(self, p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> TreePlan:
        """What the uniforms are compared with, for `specnb.sampling.threshold_enumeration`."""
        accept, recovered = torch.zeros_like(q[..., 0]), [p]
        for parent, children in children_of(parents).items():
            plan = self.plan(p[..., parent + 1, :], q[..., children, :], draft_tokens[..., children])
            accept[..., children] = plan.accept
            recovered.append(plan.recovered[..., None, :])
        return TreePlan(accept, torch.cat(recovered, dim=-2))


top_k_tree = TreeRule(SelectionTree(top_k_plan))
"""EAGLE's rule for top-k trees, q = 1: accept a child x with r(x), else set r(x) to 0 and renormalise. Exact for trees
whose tokens were chosen without looking at p."""
k_sequential_tree = TreeRule(SelectionTree(k_sequential_plan))
"""SpecTr's k-sequential selection at every node; exact for `tree_schemes.independent_children`, none of them -1."""
spechub_tree = TreeRule(SelectionTree(spechub_plan))
"""SpecHub at every node; exact for `tree_schemes.hub_children`, two at each node that has any."""


def _greedy_tree(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    parents: tuple[int, ...],
    accept_uniforms: Tensor,
    final_uniform: Tensor,
) -> TreeOutcome:
    return _matching(p.argmax(-1), draft_tokens, parents)


def _exact_match_tree(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    parents: tuple[int, ...],
    accept_uniforms: Tensor,
    final_uniform: Tensor,
) -> TreeOutcome:
    uniforms = torch.cat([final_uniform[..., None], accept_uniforms], dim=-1)
    return _matching(sample(p, uniforms), draft_tokens, parents)


greedy_tree = TreeRule(_greedy_tree)
"""Follow the child that is the target's argmax, as long as there is one; then emit the argmax. q is not read."""
exact_match_tree = TreeRule(_exact_match_tree)
"""Follow the child that equals the target's own sample after the node; then emit the sample. Exact; q is not read."""


def children_of(parents: tuple[int, ...]) -> dict[int, list[int]]:
    """The children of each node that has any, in their order; the root is -1. Raises `ValueError` for a later parent.

    >>> children_of((-1, -1, 0))
    {-1: [0, 1], 0: [2]}
    """
    node_depths(parents)
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return dict(sorted(found.items()))


def path_to(node: Tensor, parents: tuple[int, ...], token: Tensor) -> TreeOutcome:
    """The outcome in which `node` `(...,)` is the last one accepted, -1 for none, and `token` follows.

    >>> path_to(torch.tensor([2, -1]), (-1, -1, 1), torch.tensor([5, 6])).path
    tensor([[ 1,  2],
            [-1, -1]])
    """
    depths = node_depths(parents)
    rows = [[-1] * max(depths, default=0)]  # of the root, then of each node
    for i, parent in enumerate(parents):
        rows.append([i if level == depths[i] - 1 else known for level, known in enumerate(rows[parent + 1])])
    paths = torch.tensor(rows, dtype=torch.int64, device=node.device)
    accepted = torch.tensor([0, *depths], device=node.device)
    return TreeOutcome(accepted[node + 1], token, paths[node + 1])


def _matching(target_tokens: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> TreeOutcome:
    """Follows the target's tokens `(..., nodes + 1)`, after the root and each node, as far as the tree has them."""
    current = torch.full_like(target_tokens[..., 0], -1)
    for node, parent in enumerate(parents):
        accept = (current == parent) & (draft_tokens[..., node] == target_tokens[..., parent + 1])
        current = torch.where(accept, node, current)
    token = target_tokens.gather(-1, current[..., None] + 1)[..., 0]
    return path_to(current, parents, token)
