"""A tree of draft tokens from a smaller model: one forward pass for each level of the tree.

The scheme (`specnb.sampling.tree_schemes`) says how the children of a node are sampled, and `EXACT_SCHEMES` which rules
need a certain one. At temperature 0 all schemes but `top_children` propose one token only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.drafting.base import Context, Proposal
from specnb.drafting.model import ModelDrafter
from specnb.models.token_tree import TokenTree
from specnb.sampling.distributions import Sampling, sample, standardise
from specnb.sampling.traversal import best_path_block
from specnb.sampling.tree_schemes import (
    SCHEMES,
    Scheme,
    distinct_children,
    hub_children,
    independent_children,
    top_children,
)
from specnb.sampling.tree_selection import k_sequential_tree, spechub_tree
from specnb.sampling.tree_verification import TreeOutcome, TreeRule, node_depths
from specnb.sampling.verification import Outcome

EXACT_SCHEMES: dict[TreeRule, tuple[Scheme, ...]] = {
    k_sequential_tree: (independent_children,),
    best_path_block: (independent_children,),
    spechub_tree: (hub_children, top_children),
}
"""The schemes that a rule is exact for. `recursive_rejection`, `traversal_verification`, `top_k_tree` and
`exact_match_tree` are exact for all of `SCHEMES`; `greedy_tree` is at temperature 0 only."""


def require_exact(rule: TreeRule, scheme: Scheme, parents: tuple[int, ...]) -> None:
    """Raises `ValueError` for a rule of `EXACT_SCHEMES` and one of `SCHEMES` that it is not exact for.

    A tree in which no node has two children is a chain for every scheme.

    >>> require_exact(best_path_block, independent_children, (-1, -1))
    """
    known = [schemes for other, schemes in EXACT_SCHEMES.items() if other == rule]
    if known and scheme in SCHEMES and scheme not in known[0] and len(set(parents)) < len(parents):
        raise ValueError(
            f"this rule is not exact for children sampled by {scheme.__name__}: the output would not have the target's "
            f"distribution. Give the TreeDrafter scheme={' or '.join(other.__name__ for other in known[0])}, "
            "or another rule, such as recursive_rejection"
        )


class TreeDrafter(ModelDrafter):
    """A tree of the shape `parents`, sampled from `model` as `sampling` and `scheme` say.

    The cache keeps the accepted path, as the target's does. `top_children` looks at the order of the probabilities
    only: it ignores `sampling`. Raises `TypeError` for a model that the loop cannot run, `ValueError` for parents that
    do not come before their children.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> drafter = TreeDrafter(model, (-1, -1, 0), Sampling())
    >>> context = Context(tokens=torch.tensor([[1, 2, 0, 0, 0, 0]]), lengths=torch.tensor([2]))
    >>> drafter.start(context)
    >>> drafter.propose(context, torch.rand(1, 3, dtype=torch.float64)).q.shape
    torch.Size([1, 3, 4])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parents: tuple[int, ...],
        sampling: Sampling = Sampling(),
        scheme: Scheme = distinct_children,
    ) -> None:
        super().__init__(model, Sampling() if scheme is top_children else sampling)
        self.parents: tuple[int, ...] = tuple(parents)
        self.scheme = scheme
        self.tree = TokenTree(self.parents, model.device)
        depths = node_depths(self.parents)
        self.levels = [[node for node, own in enumerate(depths) if own == depth] for depth in range(1, self.tree.depth)]
        self.levels = [[node for node in level if node in self.parents] for level in self.levels]  # without leaves

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        self.first_node = context.lengths[:, None].clone()
        root = context.lengths - 1
        slots, positions = self.tree.slots(root), self.tree.positions(root)
        visible = self.tree.visible(root, self.runner.capacity)
        # A leaf that was accepted in the last step is not in the cache: the first forward pass has the last two tokens.
        last_two = torch.stack([context.lengths - 2, context.lengths - 1], dim=1).clamp_min(0)
        logits = self.runner.run(context.tokens.gather(1, last_two), last_two, keep=1)
        after = {-1: standardise(logits[:, 0], self.sampling, check=False)}  # the model's distribution after a node
        tokens: dict[int, Tensor] = {}
        q: dict[int, Tensor] = {}
        self._sample_children([-1], after, tokens, q, uniforms)
        for level in self.levels:
            entries = [node + 1 for node in level]
            logits = self.runner.run(
                torch.stack([tokens[node] for node in level], dim=1).clamp_min(0),
                slots[:, entries],
                keep=len(level),
                positions=positions[:, entries],
                visible=visible[:, entries],
            )
            probs = standardise(logits, self.sampling, check=False)
            after.update((node, probs[:, i]) for i, node in enumerate(level))
            self._sample_children(level, after, tokens, q, uniforms)
        nodes = range(len(self.parents))
        return Proposal(torch.stack([tokens[i] for i in nodes], dim=1), torch.stack([q[i] for i in nodes], dim=1))

    def update(self, context: Context, outcome: Outcome | TreeOutcome) -> None:
        """Copies the cache entries of the accepted path to where its tokens are; see `Drafter.update`."""
        assert isinstance(outcome, TreeOutcome)
        depth = torch.arange(outcome.path.shape[1], device=outcome.path.device)
        self.runner.move(self.first_node + outcome.path.clamp_min(0), self.first_node + depth)

    def _sample_children(
        self,
        nodes: list[int],
        after: dict[int, Tensor],
        tokens: dict[int, Tensor],
        q: dict[int, Tensor],
        uniforms: Tensor,
    ) -> None:
        """Samples the children of `nodes`; a node without a token (-1) has no children either."""
        for node in nodes:
            siblings: list[Tensor] = []
            for child in (child for child, parent in enumerate(self.parents) if parent == node):
                own = self.scheme(after[node], siblings)
                if node >= 0:
                    own = own.where((tokens[node] >= 0)[:, None], 0.0)
                q[child] = own
                tokens[child] = sample(own, uniforms[:, child]).where(own.sum(-1) > 0, -1)
                siblings.append(tokens[child])
