"""Drafters: whatever proposes tokens, together with the exact law each of them was drawn from.

The contract of losslessness is here: `Proposal.q` is the law after every processor, in the dtype that
was used to draw. A deterministic drafter's law is one-hot; where it has nothing to propose, the draft
is -1 and its law zero, and the step goes on without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.fast import Compiled
from specnb.law import Sampling, draw, standardise
from specnb.models import Runner, require_supported


class Proposal(NamedTuple):
    """Drafted tokens `(batch, gamma)`, -1 for none, and the law q `(batch, gamma, vocab)` of each."""

    drafts: Tensor
    q: Tensor


@runtime_checkable
class Drafter(Protocol):
    """What the decoding loop asks of a drafter. `tokens` `(batch, slots)` hold each row's text so far in
    its first `lengths` `(batch,)` entries; entries behind that mean nothing."""

    vocab: int

    def start(self, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Forget what went before; a new batch begins. Raises before anything is generated. Or only the texts in
        `rows` `(n,)` are new, and the others go on: that is asked only where texts follow each other in a row."""

    def propose(self, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Proposal:
        """One draft for each of the `uniforms` `(batch, gamma)`, which are all the randomness there is.

        Drafts are int64, each in the vocabulary or -1. Their q is float32 or float64, 0 or more everywhere, and sums
        to 1 for each draft, to 0 where it is -1. The loop raises `TypeError` or `ValueError` for anything else.
        """


class ModelDraft:
    """A smaller model of transformers, sampled one token after the other; with `compile`, in one compiled piece."""

    runner: Runner

    def __init__(self, model: PreTrainedModel, sampling: Sampling = Sampling(), *, compile: bool = False) -> None:
        require_supported(model)
        self.model = model
        self.sampling = sampling
        self.vocab = model.config.vocab_size
        self.compile = compile
        self.room: tuple[Any, ...] = ()

    def start(self, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Fills the cache with the prompts; see `Drafter.start`."""
        if rows is not None:
            prefill(self.runner, tokens, lengths, rows)
            return
        if self.room != self._room_for(*tokens.shape):
            self.make_room(*tokens.shape)
        self.runner.clear()
        prefill(self.runner, tokens, lengths)

    def make_room(self, rows: int, slots: int) -> None:
        """A cache for so many rows and slots, kept while it serves: what is compiled or captured belongs to it."""
        self.room = self._room_for(rows, slots)
        self.runner = Runner(self.model, slots)
        self.drafts = Compiled(self._drafts) if self.compile else self._drafts

    def _room_for(self, rows: int, slots: int) -> tuple[Any, ...]:
        return rows, slots, self.model.dtype, self.model.device

    def propose(self, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        return Proposal(*self.drafts(tokens, lengths, uniforms))

    def _drafts(self, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        # After a full acceptance the last draft was never run, otherwise it was: running the last two
        # tokens each time serves both cases with one shape.
        slots = torch.stack([lengths - 2, lengths - 1], dim=1).clamp_min(0)
        newest = tokens.gather(1, slots)
        drafts, laws = [], []
        for uniform in uniforms.unbind(dim=1):
            logits = self.runner.run(newest, slots, keep=1)[:, -1]
            laws.append(standardise(logits, self.sampling, check=False))
            drafts.append(self.draw(laws[-1], uniform))
            newest, slots = drafts[-1][:, None], slots[:, -1:] + 1
        return torch.stack(drafts, dim=1), torch.stack(laws, dim=1)

    def draw(self, law: Tensor, uniform: Tensor) -> Tensor:
        """One draft `(batch,)` from its `law` `(batch, vocab)`."""
        return draw(law, uniform)


def prefill(runner: Runner, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
    """Runs the prompts, all or those in `rows`, through a model, but for the last token of the longest.

    Shorter rows run some tokens that are not theirs; those lie behind the row's length, invisible
    until they are overwritten.
    """
    if rows is not None:
        tokens, lengths = tokens[rows], lengths[rows]
    longest = int(lengths.max())
    if longest > 1:
        slots = torch.arange(longest - 1, device=tokens.device).expand(len(tokens), -1)
        runner.run(tokens[:, : longest - 1], slots, keep=1, rows=rows)
