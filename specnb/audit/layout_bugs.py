"""Do the rows of a batch get the distributions that they would have alone? The check, and the bugs that it has to find."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.batch_layouts import Layout, PackedBatch, PaddedBatch


@torch.inference_mode()
def max_logit_difference(
    layout: Layout,
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    n: int = 3,
    rounds: int = 6,
    seed: int = 0,
) -> float:
    """The largest difference of any logit from what a run of that text alone gives, without cache, mask or batch.

    `rounds` times each row runs `n` random tokens and then loses 0 to n of them, each row another number.
    """
    random = torch.Generator().manual_seed(seed)
    known = [list(text) for text in sequences]
    rows = layout(model, known, max(map(len, known)) + n * rounds)
    worst = 0.0
    for _ in range(rounds):
        tokens = torch.randint(model.config.vocab_size, (len(known), n), generator=random)
        counts = torch.randint(n + 1, (len(known),), generator=random)
        logits = rows.run(tokens.to(model.device))
        rows.crop(counts.to(model.device))
        for text, own, lost, row in zip(known, tokens.tolist(), counts.tolist(), logits, strict=True):
            alone = model(input_ids=torch.tensor([text + own], device=model.device), use_cache=False).logits
            worst = max(worst, float((row - alone[0, -n:]).abs().max()))
            text += own[: n - lost]
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


BUGS: dict[str, tuple[Layout, str]] = {
    "padding-visible": (PaddingVisible, "short rows see their padding"),
    "positions-of-the-longest": (PositionsOfTheLongest, "position ids count the padding"),
    "no-blocks": (NoBlocks, "packed texts see each other"),
    "positions-not-reset": (PositionsNotReset, "position ids run on through the packed row"),
    "rejected-stays": (RejectedStays, "one entry too few leaves the cache"),
    "accepted-is-lost": (AcceptedIsLost, "one entry too many leaves the cache"),
}
"""What batches get wrong, each with one line of a correct way changed."""
