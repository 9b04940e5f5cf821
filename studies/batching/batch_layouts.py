"""Three cache layouts for a batch whose rows accept different numbers of draft tokens, behind one interface.

    padding   `PaddedBatch`: rows end together; padding on the left of the shorter ones is masked
    packing   `PackedBatch`: all rows lie one after the other in a single row; a token sees its own sequence only
    pointers  `MaskedBatch`: nothing moves; each row has a length, and slots behind it are masked
              (`specnb.models.cache.RaggedCache`)

Each holds all tokens of each row but the newest. In each, a token sees the entries of its own sequence at positions up
to its own. `BatchContinuation` is one readable loop for all three; `specnb.decoding.generate` is the fast one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specnb.distributions import Sampling, sample, standardise, uniforms
from specnb.models.cache import additive_mask, crop
from specnb.models.cached_model import CachedModel
from specnb.models.support import context_limit, require_same_vocabulary, require_supported
from specnb.rules import Rule, token_verification

Sequences = Sequence[Sequence[int]]


class Rows(Protocol):
    """A model with the cache of a batch; `lengths` `(batch,)` is the number of tokens of each sequence in it."""

    lengths: Tensor

    def run(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` `(batch, n)` to the sequences; returns the logits `(batch, n, vocab)` at them."""

    def crop(self, counts: Tensor) -> None:
        """Removes the last `counts` `(batch,)` tokens of each sequence."""

    def sizes(self) -> tuple[int, int]:
        """The slots of the cache now, and the entries of the mask of the last forward pass."""


Layout = Callable[[PreTrainedModel, Sequences, int], Rows]
"""Makes a batch from a model, the sequences to begin with, and the largest number of tokens that one will have."""


class CompactedBatch:
    """What padding and packing share: a `DynamicCache`, and the sequence and position of each of its entries.

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
        """Logits of one forward pass over `tokens`; all arguments have the shape `(rows of the cache, n)`."""
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
            past_key_values=self.cache,
            use_cache=True,
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
            assert layer.keys is not None
            assert layer.values is not None
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
        """Shifts each row right so that all end together again, and drops columns that hold padding only."""
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
    """Sequence packing: one row of the cache for all sequences, entries in the order of the forward passes."""

    def initial_entries(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.tensor([[token for sequence in sequences for token in sequence]], dtype=torch.int64)
        owners = torch.tensor(
            [[number for number, sequence in enumerate(sequences) for _ in sequence]], dtype=torch.int64
        )
        positions = torch.tensor(
            [[place for sequence in sequences for place in range(len(sequence))]], dtype=torch.int64
        )
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
    """The layout of `specnb.decoding.generate`: `crop` subtracts from the lengths."""

    def __init__(self, model: PreTrainedModel, sequences: Sequences, longest: int) -> None:
        self.runner = CachedModel(model, longest)
        self.lengths = torch.tensor([len(sequence) for sequence in sequences], device=model.device)
        self.mask_entries = 0
        width = max(map(len, sequences))
        if width:  # shorter sequences get some tokens that are not theirs; those lie behind their ends, masked
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


class BatchContinuation:
    """Speculative decoding of a batch in any layout; the same tokens in each, from the same seed.

    `prompts` and settings as in `specnb.decoding.generate.generate`. Raises `ValueError` or `TypeError` for models that
    the loop cannot run, no prompts, and an empty prompt.

    sequences  the new tokens of each prompt so far
    steps      steps made so far
    """

    @torch.inference_mode()
    def __init__(
        self,
        layout: Layout,
        target: PreTrainedModel,
        prompts: Sequences,
        draft: PreTrainedModel,
        *,
        gamma: int = 4,
        max_new_tokens: int = 64,
        sampling: Sampling = Sampling(),
        rule: Rule = token_verification,
        seed: int = 0,
    ) -> None:
        for model in (target, draft):
            require_supported(model)
        require_same_vocabulary(target, draft.config.vocab_size)
        if not prompts or not all(prompts):
            raise ValueError(f"prompts are {prompts!r}; give at least one, and at least one token in each")
        self.gamma, self.asked, self.sampling, self.rule = gamma, max_new_tokens, sampling, rule
        self.uniforms = uniforms(seed, range(len(prompts)), max_new_tokens, gamma, target.device)
        longest = max(map(len, prompts)) + max_new_tokens + gamma
        known = [prompt[:-1] for prompt in prompts]
        self.target, self.draft = (layout(model, known, longest) for model in (target, draft))
        self.newest = torch.tensor([[prompt[-1]] for prompt in prompts], device=target.device)
        self.sequences: list[list[int]] = [[] for _ in prompts]
        self.steps = 0

    @property
    def done(self) -> bool:
        """Whether every sequence has all its tokens."""
        return all(len(sequence) == self.asked for sequence in self.sequences)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """Drafts, verifies, emits, crops; returns the number of tokens that each row got."""
        draft_tokens, q = self._propose(self.uniforms.draft[:, self.steps])
        logits = self.target.run(torch.cat([self.newest, draft_tokens], dim=1))
        p = standardise(logits, self.sampling, check=False)
        outcome = self.rule(p, q, draft_tokens, self.uniforms.accept[:, self.steps], self.uniforms.final[:, self.steps])
        emitted = []
        for sequence, own, n, x in zip(
            self.sequences, draft_tokens.tolist(), outcome.accepted.tolist(), outcome.token.tolist(), strict=True
        ):
            new = [*own[:n], x][: self.asked - len(sequence)]
            sequence += new
            emitted.append(len(new))
        # Both caches got the newest token and all draft tokens; of what was emitted, all but the newest stays.
        counts = self.gamma + 1 - torch.tensor(emitted, device=draft_tokens.device)
        for rows in (self.target, self.draft):
            rows.crop(counts)
        self.newest = torch.tensor([sequence[-1:] for sequence in self.sequences], device=draft_tokens.device)
        self.steps += 1
        return emitted

    def _propose(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        draft_tokens, distributions = [self.newest], []
        for uniform in uniforms.unbind(dim=1):
            distributions.append(standardise(self.draft.run(draft_tokens[-1])[:, -1], self.sampling, check=False))
            draft_tokens.append(sample(distributions[-1], uniform)[:, None])
        self.draft.run(draft_tokens[-1])  # so that both caches hold the same tokens, and are cropped alike
        return torch.cat(draft_tokens[1:], dim=1), torch.stack(distributions, dim=1)


def generate(
    layout: Layout, target: PreTrainedModel, prompts: Sequences, draft: PreTrainedModel, **settings: Any
) -> list[list[int]]:
    """The new tokens of each prompt, by a `BatchContinuation` with these `settings`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2)
    >>> target, draft = (LlamaForCausalLM(config).eval() for _ in range(2))
    >>> made = [generate(layout, target, [[1], [2, 3]], draft, max_new_tokens=5) for layout in LAYOUTS.values()]
    >>> made[0] == made[1] == made[2]
    True
    """
    made = BatchContinuation(layout, target, prompts, draft, **settings)
    while not made.done:
        made.step()
    return made.sequences


def slots_needed(layout: str, lengths: Sequence[int], longest: int) -> int:
    """The slots of a cache in `layout` that holds sequences of these lengths; `longest` as of a `Layout`.

    >>> [slots_needed(layout, [3, 5], longest=8) for layout in LAYOUTS]
    [10, 8, 16]
    """
    return {
        "padding": len(lengths) * max(lengths),
        "packing": sum(lengths),
        "pointers": len(lengths) * longest,
    }[layout]


def mask_needed(layout: str, lengths: Sequence[int], longest: int, n: int) -> int:
    """The mask entries of a forward pass over `n` tokens of each sequence, after which they have these lengths.

    >>> [mask_needed(layout, [3, 5], longest=8, n=2) for layout in LAYOUTS]
    [20, 32, 32]
    """
    rows_seen = len(lengths) if layout == "packing" else 1  # every token has entries for all other rows too
    return n * rows_seen * slots_needed(layout, lengths, longest)
