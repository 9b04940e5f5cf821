"""Three ways to go on when the rows of a batch have accepted different numbers of drafts, behind one interface.

    Padded   every row is moved to the right by what it lacks of the longest, and hidden padding fills its left
    Packed   all rows lie one after the other in a single row, and a token sees only what is its own
    Pointed  nothing moves: each row has a length, and what lies behind it is hidden (`specnb.models.cache.RaggedCache`)

All three hold, of each row, everything but its newest token, and obey one rule of sight: a token sees the entries
of its own text at positions up to its own. `Continuation` is one loop for all of them, written to be read; the loop
that is fast is `specnb.decoding.loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specnb.models.cache import additive_mask, crop
from specnb.models.cached_model import CachedModel
from specnb.models.support import context_limit, require_same_vocabulary, require_supported
from specnb.sampling.distributions import Sampling, sample, standardise
from specnb.sampling.randomness import uniforms
from specnb.sampling.verification import Rule, token_verification

Sequences = Sequence[Sequence[int]]


class Rows(Protocol):
    """A model with the caches of a batch of texts; `lengths` `(batch,)` says how much of each is in them."""

    lengths: Tensor

    def run(self, tokens: Tensor) -> Tensor:
        """Puts `tokens` `(batch, n)` behind each text; returns the logits `(batch, n, vocab)` at them."""

    def crop(self, counts: Tensor) -> None:
        """Takes the last `counts` `(batch,)` tokens of each text back."""

    def sizes(self) -> tuple[int, int]:
        """How many tokens the cache has room for now, and how many entries the last run's mask had."""


Layout = Callable[[PreTrainedModel, Sequences, int], Rows]
"""From a model, the texts to begin with and the most tokens that one of them will have: a batch."""


class CompactedBatch:
    """What padding and packing share: a `DynamicCache`, and for each entry whose it is and where it stands there.

    owners, positions  (rows of the cache, width)   a position below zero is padding's
    """

    def __init__(self, model: PreTrainedModel, sequences: Sequences, _longest: int = 0) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.lengths = torch.tensor([len(text) for text in sequences], device=model.device)
        self.last_position = (context_limit(model) or torch.iinfo(torch.int64).max) - 1
        tokens, owners, positions = (part.to(model.device) for part in self.initial_entries(sequences))
        self.owners, self.positions = owners[:, :0], positions[:, :0]
        self.mask_entries = 0
        if tokens.numel():
            self.append(tokens, owners, positions)

    def initial_entries(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """The first tokens, their owners and their positions, as they lie in the cache."""
        raise NotImplementedError

    def append(self, tokens: Tensor, owners: Tensor, positions: Tensor) -> Tensor:
        """One run of the model over `tokens`, all of the same shape `(rows of the cache, n)`: their logits."""
        self.owners = torch.cat([self.owners, owners], dim=1)
        self.positions = torch.cat([self.positions, positions], dim=1)
        visible = self.is_visible(
            owners[..., None], positions[..., None], self.owners[:, None], self.positions[:, None]
        )
        self.mask_entries = visible.numel()
        return self.model(
            input_ids=tokens,
            position_ids=self.position_ids_of(positions).clamp(0, self.last_position),
            attention_mask=additive_mask(visible, self.model.dtype),
            past_key_values=self.cache,
            use_cache=True,
        ).logits

    def is_visible(self, owner: Tensor, position: Tensor, other: Tensor, at: Tensor) -> Tensor:
        """Whether a token sees an entry: one of its own text, no padding, not after itself."""
        return (owner == other) & (at >= 0) & (at <= position)

    def position_ids_of(self, positions: Tensor) -> Tensor:
        """The position ids that the model is given."""
        return positions

    def keep(self, columns: Tensor) -> None:
        """Makes a cache of `columns` `(rows of the cache, width)` of this one: a copy of all of it."""
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
    """The walk-through's section 6.3: rows end together, and begin where their padding ends."""

    def initial_entries(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        width = max(map(len, sequences))
        tokens = torch.tensor([[0] * (width - len(text)) + list(text) for text in sequences])
        positions = torch.arange(width) - (width - self.lengths.cpu())[:, None]
        return tokens, torch.zeros_like(positions), positions

    def run(self, tokens: Tensor) -> Tensor:
        positions = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.lengths = self.lengths + tokens.shape[1]
        return self.append(tokens, torch.zeros_like(positions), positions)

    def crop(self, counts: Tensor) -> None:
        """Drops what all rows drop, moves each row right by what it drops more, cuts columns of padding alone."""
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
    """Sequence packing: one row for all texts, entries in the order in which they were run."""

    def initial_entries(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.tensor([[token for text in sequences for token in text]], dtype=torch.int64)
        owners = torch.tensor([[number for number, text in enumerate(sequences) for _ in text]], dtype=torch.int64)
        positions = torch.tensor([[place for text in sequences for place in range(len(text))]], dtype=torch.int64)
        return tokens, owners, positions

    def run(self, tokens: Tensor) -> Tensor:
        batch, n = tokens.shape
        positions = self.lengths[:, None] + torch.arange(n, device=tokens.device)
        owners = torch.arange(batch, device=tokens.device)[:, None].expand(-1, n)
        self.lengths = self.lengths + n
        logits = self.append(*(own.reshape(1, -1) for own in (tokens, owners, positions)))
        return logits.view(batch, n, -1)

    def crop(self, counts: Tensor) -> None:
        """Squeezes out what lies behind the new end of its text."""
        self.lengths = self.lengths - counts
        stays = self.positions < self.lengths[self.owners]
        if not bool(stays.all()):
            self.keep(stays[0].nonzero().T)


class MaskedBatch:
    """The library's own way: `crop` is a subtraction."""

    def __init__(self, model: PreTrainedModel, sequences: Sequences, longest: int) -> None:
        self.runner = CachedModel(model, longest)
        self.lengths = torch.tensor([len(text) for text in sequences], device=model.device)
        self.mask_entries = 0
        width = max(map(len, sequences))
        if width:  # short texts run some tokens that are not theirs; those lie behind their ends
            tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in sequences], device=model.device)
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
    """Texts that are continued together by speculative decoding, each way the same tokens from the same seed.

    `prompts` and settings as in `specnb.decoding.loop.generate`. Raises `ValueError` or `TypeError` for models that the
    loop cannot run, no prompts, and an empty prompt.

    texts  the new tokens of each prompt so far
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
        self.noise = uniforms(seed, range(len(prompts)), max_new_tokens, gamma, target.device)
        longest = max(map(len, prompts)) + max_new_tokens + gamma
        known = [prompt[:-1] for prompt in prompts]
        self.target, self.draft = (layout(model, known, longest) for model in (target, draft))
        self.newest = torch.tensor([[prompt[-1]] for prompt in prompts], device=target.device)
        self.sequences: list[list[int]] = [[] for _ in prompts]
        self.steps = 0

    @property
    def done(self) -> bool:
        """Whether every text has all its tokens."""
        return all(len(text) == self.asked for text in self.sequences)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """Drafts, verifies, emits, crops; returns how many tokens each row got."""
        draft_tokens, q = self._propose(self.noise.draft[:, self.steps])
        logits = self.target.run(torch.cat([self.newest, draft_tokens], dim=1))
        p = standardise(logits, self.sampling, check=False)
        outcome = self.rule(p, q, draft_tokens, self.noise.accept[:, self.steps], self.noise.final[:, self.steps])
        emitted = []
        for text, own, n, x in zip(
            self.sequences, draft_tokens.tolist(), *(part.tolist() for part in outcome), strict=True
        ):
            new = [*own[:n], x][: self.asked - len(text)]
            text += new
            emitted.append(len(new))
        # Both caches got newest and all drafts; all but the newest of what was emitted is to stay.
        counts = self.gamma + 1 - torch.tensor(emitted, device=draft_tokens.device)
        for rows in (self.target, self.draft):
            rows.crop(counts)
        self.newest = torch.tensor([text[-1:] for text in self.sequences], device=draft_tokens.device)
        self.steps += 1
        return emitted

    def _propose(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        draft_tokens, distributions = [self.newest], []
        for uniform in noise.unbind(dim=1):
            distributions.append(standardise(self.draft.run(draft_tokens[-1])[:, -1], self.sampling, check=False))
            draft_tokens.append(sample(distributions[-1], uniform)[:, None])
        self.draft.run(draft_tokens[-1])  # for its entry alone: so both caches hold the same, and crop the same
        return torch.cat(draft_tokens[1:], dim=1), torch.stack(distributions, dim=1)


def generate(
    layout: Layout, target: PreTrainedModel, prompts: Sequences, draft: PreTrainedModel, **settings: Any
) -> list[list[int]]:
    """The new tokens of each prompt, by a `Continuation` with these `settings`."""
    made = BatchContinuation(layout, target, prompts, draft, **settings)
    while not made.done:
        made.step()
    return made.sequences


def slots_needed(layout: str, lengths: Sequence[int], longest: int) -> int:
    """How many tokens a cache has room for that holds texts of these lengths; `longest` as of a `Way`."""
    return {
        "padding": len(lengths) * max(lengths),
        "packing": sum(lengths),
        "pointers": len(lengths) * longest,
    }[layout]


def mask_needed(layout: str, lengths: Sequence[int], longest: int, n: int) -> int:
    """How many entries the mask has of a run after which the texts have these lengths, `n` tokens of each."""
    rows_seen = len(lengths) if layout == "packing" else 1  # there, every token has an entry for every other row too
    return n * rows_seen * slots_needed(layout, lengths, longest)
