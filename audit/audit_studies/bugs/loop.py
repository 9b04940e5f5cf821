"""Known bugs of the decoding loop: end of sequence, uniforms, caches and positions.

Each is a `Batch` with a wrong part: a state, a target with its cache, or uniforms.
`audit_studies.bugs.known_bugs.generate` runs the loop with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from audit_studies.bugs.bug import Bug
from specnb.cache import CachedModel
from specnb.distributions import Uniforms
from specnb.drafters import Proposal
from specnb.rules import Outcome, token_verification
from specnb.step import IDLE, Batch, State

# The end of a sequence, and acceptance.


class IgnoresInnerEnd(State):
    def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
        eos, self.eos = self.eos, self.eos[:0]
        emitted = super().append(proposal, outcome)
        self.eos = eos
        last = self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]
        self.remaining.masked_fill_((emitted > 0) & torch.isin(last, eos), IDLE)
        return emitted


class GoesOn(State):
    def enter(self, rows: Tensor, *what: Any) -> None:
        if not hasattr(self, "lost"):
            # Tokens that a row could still emit when it ended.
            self.lost = torch.zeros_like(self.remaining)
        self.lost[rows] = 0
        super().enter(rows, *what)

    def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
        ended, before = self.remaining == IDLE, self.remaining + self.lost
        self.remaining.copy_(before)
        emitted = super().append(proposal, outcome)
        left = before - emitted
        self.remaining.masked_fill_(ended, IDLE)
        self.lost = left - self.remaining
        return emitted


class EosInside(Batch):
    state_class = IgnoresInnerEnd


class AfterTheEnd(Batch):
    state_class = GoesOn


def always_accepting(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The token after the last draft token is sampled from p; nothing is rejected."""
    return token_verification(p, q, draft_tokens, torch.full_like(accept, -1), final)


# Randomness.


class SharedNoise(Batch):
    def uniforms_of(self, *settings: Any) -> Uniforms:
        own = super().uniforms_of(*settings)
        return replace(own, final=own.draft[..., 0])


class Reseeded(Batch):
    """A generator that is seeded again before each acceptance test: the same uniforms from the
    second test on."""

    def uniforms_of(self, *settings: Any) -> Uniforms:
        own = super().uniforms_of(*settings)
        draft = torch.cat([own.draft[:, :1], own.draft[:, 1:2].expand_as(own.draft[:, 1:])], dim=1)
        accept = own.accept[:, :1, :1].expand_as(own.accept)
        return Uniforms(draft, accept, own.final[:, :1].expand_as(own.final))


class RowsShareNoise(Batch):
    def uniforms_of(self, seed: int, numbers: Sequence[int], max_new_tokens: int) -> Uniforms:
        return super().uniforms_of(seed, [numbers[0]] * len(numbers), max_new_tokens)


# Caches and positions.


class Shifted(CachedModel):
    """A target whose cache slots have moved by `shift` `(batch, 1)`; positions are correct."""

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        super().__init__(model, 2 * capacity)  # capacity for entries that are never removed
        self.shift = torch.zeros(())

    def run(self, tokens: Tensor, slots: Tensor, keep: int, *rest: Any, **more: Any) -> Tensor:
        return super().run(tokens, slots + self.shift.long(), keep, positions=slots)


class ShiftedBatch(Batch):
    """After each step the target's cache slots move by `shift_after` `(batch,)`."""

    runner_class = Shifted
    runner: Shifted

    def shift_after(self, rejected: Tensor, accepted: Tensor) -> Tensor:
        raise NotImplementedError

    def verify_and_emit(self, *step: Any) -> Any:
        outcome = super().verify_and_emit(*step)
        self.runner.shift = (
            self.runner.shift + self.shift_after(outcome.accepted < self.state.gamma, outcome.accepted)[:, None]
        )
        return outcome


class RejectedStays(ShiftedBatch):
    def shift_after(self, rejected: Tensor, accepted: Tensor) -> Tensor:
        return rejected.long()


class AcceptedIsLost(ShiftedBatch):
    def shift_after(self, rejected: Tensor, accepted: Tensor) -> Tensor:
        return -(rejected & (accepted > 0)).long()


class BonusCache(Batch):
    """After full acceptance the target runs over the last draft token in place of the bonus
    token."""

    full: Tensor | None = None

    def run_target(self, draft_tokens: Tensor) -> Tensor:
        slots = self.state.lengths[:, None] - 1 + self.state.offsets
        late = torch.zeros_like(self.state.remaining, dtype=torch.bool) if self.full is None else self.full
        newest = self.state.tokens.gather(1, slots[:, :1] - late[:, None].long())
        tokens = torch.cat([newest, draft_tokens.clamp(0, self.vocab - 1)], dim=1)
        return self.runner.run(tokens, slots, keep=len(self.state.offsets))

    def verify_and_emit(self, *step: Any) -> Any:
        outcome = super().verify_and_emit(*step)
        self.full = outcome.accepted == self.state.gamma
        return outcome


class WithoutLastToken(CachedModel):
    """The draft model never runs over the last draft token. Lossless: q is still the distribution
    sampled from."""

    def run(self, tokens: Tensor, slots: Tensor, keep: int, *rest: Any, **more: Any) -> Tensor:
        newest_only = slots.shape[1] == 2 and keep == 1
        return super().run(tokens[:, -1:], slots[:, -1:], 1) if newest_only else super().run(tokens, slots, keep)


class SeesPadding(CachedModel):
    def mask(self, slots: Tensor) -> Tensor:
        return super().mask(slots.amax(0, keepdim=True).expand_as(slots))


class PaddingVisible(Batch):
    runner_class = SeesPadding


class PositionsOfLongest(CachedModel):
    def run(self, tokens: Tensor, slots: Tensor, keep: int, *rest: Any, **more: Any) -> Tensor:
        return super().run(tokens, slots, keep, positions=slots.amax(0, keepdim=True).expand_as(slots))


class PositionsOfTheLongest(Batch):
    runner_class = PositionsOfLongest


_BUGS = [
    Bug("eos-inside", "an end token among the accepted tokens is ignored", "transformers#47931", batch=EosInside),
    Bug("after-the-end", "a row that has ended continues while others run", "LLMSpeculativeSampling",
         batch=AfterTheEnd),
    Bug("always-accepting", "every draft token is accepted", "-", rule=always_accepting),
    Bug("shared-noise", "the recovered token reuses the uniform of the draft token it replaces", "vLLM#47386",
         batch=SharedNoise),
    Bug("rows-share-noise", "all rows of a batch use the same uniforms", "-", batch=RowsShareNoise),
    Bug("rejected-stays", "the target's cache keeps one rejected token", "several; mlx-lm#1109", batch=RejectedStays),
    Bug("accepted-is-lost", "the last accepted token is removed from the target's cache", "several",
         batch=AcceptedIsLost),
    Bug("bonus-cache", "the target's cache has the last draft token in place of the bonus token", "vLLM#9730",
         batch=BonusCache),
    Bug("bonus-missing-in-draft", "the last draft token is missing in the draft model's cache", "vLLM#9730",
         draft_class=WithoutLastToken, lossless=True),
    Bug("padding-visible", "short rows of a batch attend to padding", "lucidrains/speculative-decoding",
         batch=PaddingVisible, draft_class=SeesPadding),
    Bug("positions-of-the-longest", "all rows of a batch get the position ids of the longest",
         "batches without position ids", batch=PositionsOfTheLongest),
]  # fmt: skip

LOOP_BUGS = {bug.name: bug for bug in _BUGS}
"""The bugs of the loop by name."""
