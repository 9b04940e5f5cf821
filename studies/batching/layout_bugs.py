"""Known bugs of batch layouts, and the check that finds them: each row must get the logits it would
have alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from studies.batching.batch_layouts import Layout, PackedBatch, PaddedBatch


@torch.inference_mode()
def max_logit_difference(
    layout: Layout,
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    n: int = 3,
    rounds: int = 6,
    seed: int = 0,
) -> float:
    """The largest difference of a logit from a forward pass over that sequence alone, without cache
    or batch.

    `rounds` times every row runs over `n` random tokens and is then cropped by 0 to n of them, a
    different number in each row.
    """
    random = torch.Generator().manual_seed(seed)
    known = [list(tokens) for tokens in sequences]
    rows = layout(model, known, max(map(len, known)) + n * rounds)
    worst = 0.0
    for _ in range(rounds):
        tokens = torch.randint(model.config.vocab_size, (len(known), n), generator=random)
        counts = torch.randint(n + 1, (len(known),), generator=random)
        logits = rows.run(tokens.to(model.device))
        rows.crop(counts.to(model.device))
        for prefix, new, cropped, row in zip(known, tokens.tolist(), counts.tolist(), logits, strict=True):
            alone = model(input_ids=torch.tensor([prefix + new], device=model.device), use_cache=False).logits
            worst = max(worst, float((row - alone[0, -n:]).abs().max()))
            prefix += new[: n - cropped]
    return worst


class PaddingVisible(PaddedBatch):
    def is_visible(self, owner: Tensor, position: Tensor, other: Tensor, at: Tensor) -> Tensor:
        return at <= position


class PositionsOfTheLongest(PaddedBatch):
    def position_ids_of(self, positions: Tensor) -> Tensor:
        return positions.amax(dim=0, keepdim=True).expand_as(positions)


class NoBlocks(PackedBatch):
    def is_visible(self, owner: Tensor, position: Tensor, other: Tensor, at: Tensor) -> Tensor:
        return (at >= 0) & (at <= position)


class PositionsNotReset(PackedBatch):
    def position_ids_of(self, positions: Tensor) -> Tensor:
        columns = torch.arange(self.positions.shape[1], device=positions.device)
        return columns[-positions.shape[1] :].expand_as(positions)


class RejectedStays(PaddedBatch):
    def crop(self, counts: Tensor) -> None:
        super().crop((counts - 1).clamp_min(0))


class AcceptedIsLost(PaddedBatch):
    def crop(self, counts: Tensor) -> None:
        super().crop((counts + 1).minimum(self.lengths))


class LayoutBug(NamedTuple):
    """A bug of a batch layout: what is wrong, where it was reported, and the `layout` that has it."""

    name: str
    description: str
    reported_in: str
    layout: Layout


_BUGS = [
    LayoutBug("padding-visible", "short rows attend to their padding",
              "lucidrains/speculative-decoding", PaddingVisible),
    LayoutBug("positions-of-the-longest", "position ids count the padding",
              "batches without position ids", PositionsOfTheLongest),
    LayoutBug("no-blocks", "packed sequences attend to each other", "-", NoBlocks),
    LayoutBug("positions-not-reset", "position ids continue through the packed row", "-", PositionsNotReset),
    LayoutBug("rejected-stays", "one entry too few is removed from the cache",
              "several; mlx-lm#1109", RejectedStays),
    LayoutBug("accepted-is-lost", "one entry too many is removed from the cache", "several", AcceptedIsLost),
]  # fmt: skip

LAYOUT_BUGS = {bug.name: bug for bug in _BUGS}
"""The bugs of batch layouts by name."""
