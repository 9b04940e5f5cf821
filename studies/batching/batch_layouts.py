"""Three cache layouts for a batch whose rows accept different numbers of draft tokens, behind one
interface.

    padding   `PaddedBatch`: rows end together; padding on the left of the shorter ones is masked
    packing   `PackedBatch`: all rows lie one after the other in a single row; a token sees its own
              sequence only
    pointers  `MaskedBatch`: nothing moves; each row has a length, and slots behind it are masked
              (`specnb.cache.RaggedCache`)

Each holds all tokens of each row but the newest. In each, a token sees the entries of its own
sequence at positions up to its own. `generate` is one readable loop for all three;
`specnb.sampler` is the fast one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specnb.cache import CachedModel, additive_mask, cache_argument
from specnb.distributions import Sampling, sample, standardise, uniforms
from specnb.record import StepRecord
from specnb.rules import Rule, token_verification
from specnb.support import context_limit
from studies.batching.cropping import crop

Sequences = Sequence[Sequence[int]]


class Rows(Protocol):
    """A model with the cache of a batch; `lengths` `(batch,)` is the number of tokens of each
    sequence in it."""

    lengths: Tensor

    def run(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` `(batch, n)` to the sequences; returns the logits `(batch, n, vocab)` at
        them."""

    def crop(self, counts: Tensor) -> None:
        """Removes the last `counts` `(batch,)` tokens of each sequence."""

    def sizes(self) -> tuple[int, int]:
        """The slots of the cache now, and the entries of the mask of the last forward pass."""


Layout = Callable[[PreTrainedModel, Sequences, int], Rows]
"""Makes a batch from a model, the sequences to begin with, and the largest number of tokens that
one will have."""


class CompactedBatch:
    """What padding and packing share: a `DynamicCache`, and the sequence and position of each of
    its entries.

    owners     (rows of the cache, width)  the number of the sequence that an entry belongs to
    positions  (rows of the cache, width)  its position there; negative for padding
    """

    def __init__(self, model: PreTrainedModel, sequences: Sequences, _longest: int = 0) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.lengths = torch.tensor([len(sequence) for sequence in sequences], device=model.device)
        self.last_position = (context_limit(model) or torch.iinfo(torch.int64).max) - 1
        tokens, owners, positions = (part.to(model.device) for part in self.initial_entries(sequences))
        self.owners, self.positions = owners[:, :0], positions[:, :0]
        self.mask_entries = 0
        if tokens.numel():
            self.append(tokens, owners, positions)

    def initial_entries(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """The first tokens, their owners and their positions, in the order of the cache."""
        raise NotImplementedError

    def append(self, tokens: Tensor, owners: Tensor, positions: Tensor) -> Tensor:
        """Logits of one forward pass over `tokens`; all arguments have the shape
        `(rows of the cache, n)`."""
        self.owners = torch.cat([self.owners, owners], dim=1)
        self.positions = torch.cat([self.positions, positions], dim=1)
        visible = self.is_visible(
            owners[..., None], positions[..., None], self.owners[:, None], self.positions[:, None]
        )
        self.mask_entries = visible.numel()
        logits: Tensor = self.model(
            input_ids=tokens,
            position_ids=self.position_ids_of(positions).clamp(0, self.last_position),
            attention_mask=additive_mask(visible, self.model.dtype),
            use_cache=True,
            **{cache_argument(self.model): self.cache},
        ).logits
        return logits

    def is_visible(self, owner: Tensor, position: Tensor, other: Tensor, at: Tensor) -> Tensor:
        """Whether a token sees an entry: one of its own sequence, no padding, not after itself."""
        return (owner == other) & (at >= 0) & (at <= position)

    def position_ids_of(self, positions: Tensor) -> Tensor:
        """The position ids that the model is given."""
        return positions

    def keep(self, columns: Tensor) -> None:
        """Keeps only `columns` `(rows of the cache, width)` of the cache, by copying them."""
        self.owners, self.positions = (own.take_along_dim(columns, dim=1) for own in (self.owners, self.positions))
        for layer in self.cache.layers:
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None and layer.values is not None  # noqa: PT018
            layer.keys = layer.keys.take_along_dim(columns[:, None, :, None], dim=2)
            layer.values = layer.values.take_along_dim(columns[:, None, :, None], dim=2)

    def sizes(self) -> tuple[int, int]:
        return self.positions.numel(), self.mask_entries


class PaddedBatch(CompactedBatch):
    """Left padding (section 6.3 of the walk-through): rows end together."""

    def initial_entries(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        width = max(map(len, sequences))
        tokens = torch.tensor([[0] * (width - len(sequence)) + list(sequence) for sequence in sequences])
        positions = torch.arange(width) - (width - self.lengths.cpu())[:, None]
        return tokens, torch.zeros_like(positions), positions

    def run(self, tokens: Tensor) -> Tensor:
        positions = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.lengths = self.lengths + tokens.shape[1]
        return self.append(tokens, torch.zeros_like(positions), positions)

    def crop(self, counts: Tensor) -> None:
        """Shifts each row right so that all end together again, and drops columns that hold padding
        only."""
        self.lengths = self.lengths - counts
        old, width = self.positions.shape[1], int(self.lengths.max())
        ends = old - counts
        if bool((ends == width).all()):  # nothing has to move
            crop(self.cache, old - width)
            self.owners, self.positions = self.owners[:, :width], self.positions[:, :width]
            return
        columns = ends[:, None] - width + torch.arange(width, device=counts.device)
        self.keep(columns.clamp_min(0))
        self.positions = torch.arange(width, device=counts.device) - (width - self.lengths)[:, None]


class PackedBatch(CompactedBatch):
    """Sequence packing: one row of the cache for all sequences, entries in the order of the forward
    passes."""

    def initial_entries(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        entries = [(x, row, at) for row, sequence in enumerate(sequences) for at, x in enumerate(sequence)]
        tokens, owners, positions = torch.tensor(entries, dtype=torch.int64).reshape(-1, 3).T[:, None]
        return tokens, owners, positions

    def run(self, tokens: Tensor) -> Tensor:
        batch, n = tokens.shape
        positions = self.lengths[:, None] + torch.arange(n, device=tokens.device)
        owners = torch.arange(batch, device=tokens.device)[:, None].expand(-1, n)
        self.lengths = self.lengths + n
        logits = self.append(*(own.reshape(1, -1) for own in (tokens, owners, positions)))
        return logits.view(batch, n, -1)

    def crop(self, counts: Tensor) -> None:
        """Removes the entries behind the new end of their sequence."""
        self.lengths = self.lengths - counts
        stays = self.positions < self.lengths[self.owners]
        if not bool(stays.all()):
            self.keep(stays[0].nonzero().T)


class MaskedBatch:
    """The layout of `specnb.sampler`: `crop` subtracts from the lengths."""

    def __init__(self, model: PreTrainedModel, sequences: Sequences, longest: int) -> None:
        self.runner = CachedModel(model, longest)
        self.lengths = torch.tensor([len(sequence) for sequence in sequences], device=model.device)
        self.mask_entries = 0
        width = max(map(len, sequences))
        # Shorter sequences get some tokens that are not theirs; those lie behind their ends,
        # masked.
        if width:
            tokens = torch.tensor(
                [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences], device=model.device
            )
            self.runner.run(tokens, torch.arange(width, device=model.device).expand(len(sequences), -1), keep=1)

    def run(self, tokens: Tensor) -> Tensor:
        slots = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.lengths = self.lengths + tokens.shape[1]
        self.mask_entries = slots.numel() * self.runner.capacity
        return self.runner.run(tokens, slots, keep=tokens.shape[1])

    def crop(self, counts: Tensor) -> None:
        self.lengths = self.lengths - counts

    def sizes(self) -> tuple[int, int]:
        return len(self.lengths) * self.runner.capacity, self.mask_entries


LAYOUTS: dict[str, Layout] = {"padding": PaddedBatch, "packing": PackedBatch, "pointers": MaskedBatch}


@torch.inference_mode()
def generate(
    layout: Layout, target: PreTrainedModel, prompts: Sequences, draft: PreTrainedModel, *, gamma: int = 4,
    max_new_tokens: int = 64, sampling: Sampling = Sampling(), rule: Rule = token_verification, seed: int = 0,
) -> list[list[int]]:  # fmt: skip
    """The new tokens of each prompt: speculative decoding of a batch, the same tokens in every
    layout from one seed.

    Settings as in `specnb.sampler.generate`.
    """
    noise = uniforms(seed, range(len(prompts)), max_new_tokens, gamma, target.device)
    longest = max(map(len, prompts)) + max_new_tokens + gamma
    known = [prompt[:-1] for prompt in prompts]
    verified, drafted = (layout(model, known, longest) for model in (target, draft))
    newest = torch.tensor([[prompt[-1]] for prompt in prompts], device=target.device)
    sequences: list[list[int]] = [[] for _ in prompts]
    step = 0
    while any(len(sequence) < max_new_tokens for sequence in sequences):
        draft_tokens, q = _propose(drafted, newest, noise.draft[:, step], sampling)
        p = standardise(verified.run(torch.cat([newest, draft_tokens], dim=1)), sampling, check=False)
        outcome = rule(p, q, draft_tokens, noise.accept[:, step], noise.final[:, step])
        emitted = []
        for sequence, own, n, x in zip(
            sequences, draft_tokens.tolist(), outcome.accepted.tolist(), outcome.token.tolist(), strict=True
        ):
            new = [*own[:n], x][: max_new_tokens - len(sequence)]
            sequence += new
            emitted.append(len(new))
        # Both caches got the newest token and all draft tokens; of what was emitted, all but the
        # newest stays.
        counts = gamma + 1 - torch.tensor(emitted, device=target.device)
        for rows in (verified, drafted):
            rows.crop(counts)
        newest = torch.tensor([sequence[-1:] for sequence in sequences], device=target.device)
        step += 1
    return sequences


def _propose(rows: Rows, newest: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    draft_tokens, distributions = [newest], []
    for uniform in uniforms.unbind(dim=1):
        distributions.append(standardise(rows.run(draft_tokens[-1])[:, -1], sampling, check=False))
        draft_tokens.append(sample(distributions[-1], uniform)[:, None])
    rows.run(draft_tokens[-1])  # so that both caches hold the same tokens, and are cropped alike
    return torch.cat(draft_tokens[1:], dim=1), torch.stack(distributions, dim=1)


def slots_needed(layout: str, lengths: Sequence[int], longest: int) -> int:
    """The slots of a cache in `layout` that holds sequences of these lengths; `longest` as of a
    `Layout`.

    >>> [slots_needed(layout, [3, 5], longest=8) for layout in LAYOUTS]
    [10, 8, 16]
    """
    slots = {"padding": len(lengths) * max(lengths), "packing": sum(lengths), "pointers": len(lengths) * longest}
    return slots[layout]


def mask_needed(layout: str, lengths: Sequence[int], longest: int, n: int) -> int:
    """The mask entries of a forward pass over `n` tokens of each sequence, after which they have
    these lengths.

    >>> [mask_needed(layout, [3, 5], longest=8, n=2) for layout in LAYOUTS]
    [20, 32, 32]
    """
    # Every token has entries for all other rows too.
    rows_seen = len(lengths) if layout == "packing" else 1
    return n * rows_seen * slots_needed(layout, lengths, longest)


def steps_of(
    layout: Layout, model: PreTrainedModel, prompts: Sequences, record: StepRecord, new_tokens: int
) -> Iterator[Callable[[], None]]:
    """Of each step of `record` in which no row has ended, `model`'s forward pass and the crop, as a
    function.

    `record` is of a generation of `new_tokens` tokens after `prompts` and perhaps more prompts
    behind them.
    """
    newest = torch.tensor([prompt[-1:] for prompt in prompts], device=model.device)
    most = max(map(len, prompts)) + new_tokens + record.gamma
    rows = layout(model, [prompt[:-1] for prompt in prompts], most)
    for step in range(int(record.active.all(axis=0).sum())):
        draft_tokens, token, emitted = (
            torch.from_numpy(own[: len(prompts), step]).to(model.device)
            for own in (record.draft_tokens, record.token, record.emitted)
        )
        yield partial(_pass_and_crop, rows, torch.cat([newest, draft_tokens], dim=1), record.gamma + 1 - emitted)
        newest = token[:, None]


def _pass_and_crop(rows: Rows, tokens: Tensor, counts: Tensor) -> None:
    rows.run(tokens)
    rows.crop(counts)
