"""A step whose draft tokens form a tree: one forward pass verifies all nodes, and the accepted path becomes a chain.

The nodes occupy the slots behind the row, whatever their depth. After verification the cache entries of the accepted
path are copied to consecutive slots, so that the next step finds them as if a chain had been accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.step import Batch, require_outcome
from specnb.drafting.base import Drafter, Proposal
from specnb.models.token_tree import TokenTree
from specnb.sampling.distributions import Sampling, overlap, standardise
from specnb.sampling.tree_verification import TreeOutcome, TreeRule
from specnb.sampling.verification import Outcome


class TreeBatch(Batch):
    """A `Batch` for the static tree `drafter.parents` of gamma nodes."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None,
        sampling: Sampling,
        rule: TreeRule,
        rows: int,
        gamma: int,
        slots: int,
        steps: int,
        ends: int,
    ) -> None:
        self.tree = TokenTree((drafter.parents or ()) if drafter is not None and gamma else (), target.device)
        super().__init__(target, drafter, sampling, rule, rows, gamma, slots, steps, ends)
        self.state.record_path(self.tree.depth)

    @property
    def parents(self) -> tuple[int, ...]:
        """The tree of draft tokens."""
        return self.tree.parents

    def run_target(self, draft_tokens: Tensor) -> Tensor:
        """The target's logits `(rows, gamma + 1, vocab)` at the newest token and at each node."""
        first = self.state.lengths - 1
        newest = self.state.tokens.gather(1, first[:, None])
        return self.runner.run(
            torch.cat([newest, draft_tokens.clamp(0, self.vocab - 1)], dim=1),
            self.tree.slots(first),
            keep=len(self.tree.depths),
            positions=self.tree.positions(first),
            visible=self.tree.visible(first, self.runner.capacity),
        )

    def verify_and_emit(self, logits: Tensor, draft_tokens: Tensor, q: Tensor) -> TreeOutcome:
        """Applies the rule, makes the accepted path a chain, appends it, and records the step."""
        if self.drafter is not None:
            draft_tokens = self.checked(draft_tokens, q)
        p = standardise(logits, self.sampling, check=False)
        outcome: TreeOutcome = self.rule(p, q, draft_tokens, self.tree.parents, *self.verification_uniforms())
        require_outcome(outcome, len(p))
        beta = overlap(p.index_select(1, self.tree.parent_entry), q)
        self.state.has_nan |= (p[..., 0].sum(dim=1) + beta.sum(dim=1)).isnan()

        # Entries of the path after the last accepted node are -1. What they select lies behind the row's new length.
        path = outcome.path.clamp_min(0)
        root = torch.zeros_like(self.state.lengths)[:, None]
        self.state.keep_probs(p.take_along_dim(torch.cat([root, outcome.path + 1], dim=1)[..., None], dim=1))
        first_node = self.state.lengths[:, None]
        self.runner.move(first_node + path, first_node + self.state.offsets[: self.tree.depth])
        accepted_chain = Proposal(draft_tokens.gather(1, path), q)
        emitted = self.state.append(accepted_chain, Outcome(outcome.accepted, outcome.token))
        self.state.keep_path(outcome.path)
        self.state.remember(Proposal(draft_tokens, q), outcome, emitted, beta)
        self.state.prepare_next_step()
        return outcome
