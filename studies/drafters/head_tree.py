"""Medusa (Cai et al., arXiv:2401.10774) with its tree: the most probable tokens of each head,
verified in one pass.

Two verifications: an exact rule, and the authors' typical acceptance, which keeps a token that is
probable enough and does not keep the target's distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.distributions import Sampling, sample
from specnb.drafters import Context
from specnb.rules import Plan, PlannedRule
from specnb.trees import Scheme, TokenTree, node_depths, top_children
from studies.drafters.heads import Head, ParallelHeadsDrafter

# 9 tokens, 4 deep: more children where a prefix is more probable.
TREE = (-1, -1, -1, 0, 0, 1, 3, 3, 6)
TYPICAL, TYPICAL_OF_ENTROPY = 0.09, 0.3  # the authors' thresholds


class HeadTreeDrafter(ParallelHeadsDrafter):
    """A tree of the shape `parents` from `ParallelHeads`; the children of all nodes of one depth
    are of one head.

    `scheme` says how children are sampled from the head's distribution. `top_children` takes the
    most probable tokens, as Medusa does, whatever `sampling` is. Raises what `HeadDrafter` does,
    and `ValueError` for a tree deeper than there are heads.
    """

    def __init__(
        self,
        target: object,
        head: Head,
        parents: tuple[int, ...] = TREE,
        sampling: Sampling = Sampling(),
        scheme: Scheme = top_children,
    ) -> None:
        own = Sampling() if scheme is top_children else sampling
        super().__init__(target, head, own)  # type: ignore[arg-type]  # checked there
        self.parents, self.scheme, self.depths = tuple(parents), scheme, node_depths(parents)
        if max(self.depths) > self.head.settings["count"]:
            raise ValueError(f"the tree is {max(self.depths)} deep, and there are {self.head.settings['count']} heads")

    def drafted(self, tokens: Tensor, lengths: Tensor, states: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.first_state(Context(tokens, lengths, states), 0)
        chosen: list[Tensor] = []
        distributions: list[Tensor] = []
        assert self.parents is not None
        for node, (parent, depth) in enumerate(zip(self.parents, self.depths, strict=True)):
            siblings = [chosen[other] for other in range(node) if self.parents[other] == parent]
            q = self.scheme(heads[:, depth - 1], siblings)  # type: ignore[misc]  # it is set
            distributions.append(q)
            chosen.append(sample(q, uniforms[:, node]).where(q.sum(dim=-1) > 0, -1))
        return torch.stack(chosen, dim=1), torch.stack(distributions, dim=1)


@PlannedRule
def typical_verification(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Accept x where p(x) > min(epsilon, delta exp(-H(p))), Medusa's typical acceptance; then
    sample from p. Not exact.

    epsilon is 0.09 and delta 0.3, as the authors have them. q and the uniforms of acceptance are
    not read.

    >>> p = torch.tensor([[0.95, 0.05], [0.5, 0.5]])
    >>> typical_verification(p, p[:1], torch.tensor([1]), torch.tensor([0.9]), torch.tensor(0.1)).accepted
    tensor(0)
    """
    before = p[..., tree.parent_entries, :]
    threshold = (TYPICAL_OF_ENTROPY * torch.exp(-torch.special.entr(before).sum(dim=-1))).clamp_max(TYPICAL)
    chosen = before.gather(-1, draft_tokens.clamp_min(0)[..., None])[..., 0]
    return Plan(((chosen > threshold) & (draft_tokens >= 0)).double(), p)
