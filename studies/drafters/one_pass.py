"""One forward pass of the target for verifying and for drafting: extra tokens after the draft
tokens.

The pass that verifies the draft tokens of a step also evaluates *extra tokens*, from which the
drafter makes those of the next step. Draft tokens and extra tokens are the nodes of one tree, whose
mask and positions keep each from seeing what does not come before it: no extra token is an ancestor
of a draft token, so the target's distributions at the draft tokens are those of a pass without
extra tokens.

    studies.drafters.lookahead             extra tokens are a window of guesses, which the target
                                           itself improves
    studies.drafters.lookahead_embeddings  extra tokens are trained embeddings

Give the drafter to `generate` with `instruments=ONE_PASS`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.drafters import Context, Drafter
from specnb.sampler import Instruments
from specnb.step import Batch, Setup
from specnb.trees import TokenTree


class OnePassDrafter(Drafter):
    """A drafter with extra tokens. `parents` is always set: (-1, 0, 1, ...) for a chain.

    extra_parents  the parent of each extra token: a node of the tree of draft tokens, an earlier
                   extra token (numbered after all nodes), or -1 for the newest token
    """

    parents: tuple[int, ...]
    extra_parents: tuple[int, ...]

    def extra_tokens(self, context: Context) -> Tensor:
        """The extra tokens `(rows, extra)` of this step's pass."""
        raise NotImplementedError(f"{type(self).__name__} has no extra_tokens(context)")

    def read(self, logits: Tensor) -> None:
        """Called after the pass, with the target's logits `(rows, extra, vocab)` at the extra
        tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no read(logits)")


class OnePassBatch(Batch):
    """A batch whose target passes evaluate a drafter's extra tokens, in slots after those of the
    draft tokens."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if not isinstance(setup.drafter, OnePassDrafter):
            given = type(setup.drafter).__name__
            raise TypeError(f"a step of one pass needs a OnePassDrafter and gamma > 0, and the drafter is {given}")
        self.extra = setup.drafter
        self.whole = TokenTree((*self.extra.parents, *self.extra.extra_parents), setup.target.device)
        slots = setup.slots + len(self.extra.extra_parents)
        self.runner = self.runner_class(setup.target, slots)

    def run_target(self, draft_tokens: Tensor) -> Tensor:
        """See `Batch.run_target`; the extra tokens' logits go to the drafter."""
        first = self.state.lengths - 1
        newest = self.state.tokens.gather(1, first[:, None])
        nodes = draft_tokens.clamp(0, self.vocab - 1)
        logits = self.runner.run(
            torch.cat([newest, nodes, self.extra.extra_tokens(self.context)], dim=1),
            self.whole.slots(first),
            keep=len(self.whole.depths),
            positions=self.whole.positions(first),
            visible=self.whole.visible(first, self.runner.capacity),
        )
        entries = 1 + draft_tokens.shape[1]
        self.extra.read(logits[:, entries:])
        return logits[:, :entries]


ONE_PASS = Instruments(batch_class=OnePassBatch)
