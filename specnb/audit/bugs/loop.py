"""Known bugs of the decoding loop: end of sequence, uniforms, caches and positions.

While a bug is active, one name of the loop's own code is replaced. The names replaced are `State`, `CachedModel` and
`target_logits` of `specnb.decoding.step`, `uniforms` of `specnb.decoding.scheduler`, `CachedModel` of
`specnb.drafting.model`, `ragged_mask` of `specnb.models.cached_model`, and `_count_leading` of
`specnb.sampling.verification`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.audit.bugs.bug import Bug, SetAttribute
from specnb.decoding import scheduler, step
from specnb.drafting import model as model_drafter
from specnb.drafting.base import Proposal
from specnb.models import cached_model
from specnb.models.cached_model import CachedModel
from specnb.sampling import verification
from specnb.sampling.randomness import Uniforms, uniforms
from specnb.sampling.verification import Outcome


@contextmanager
def active(bug: Bug) -> Iterator[None]:
    """Runs the decoding loop with `bug` inside the `with` block; outside it the loop is as before.

    >>> with active(LOOP_BUGS["always-accepting"]):
    ...     verification._count_leading(torch.tensor([False, True]))
    tensor(2)
    >>> verification._count_leading(torch.tensor([False, True]))
    tensor(0)
    """
    with ExitStack() as stack:
        if bug.patch:
            bug.patch(lambda module, name, value: stack.enter_context(mock.patch.object(module, name, value)))
        yield


# The end of a sequence, and acceptance.


def eos_inside(set_attribute: SetAttribute) -> None:
    class State(step.State):
        def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
            eos, self.eos = self.eos, self.eos[:0]
            emitted = super().append(proposal, outcome)
            self.eos = eos
            last = self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]
            self.remaining.masked_fill_((emitted > 0) & torch.isin(last, eos), step.IDLE)
            return emitted

    set_attribute(step, "State", State)


def after_the_end(set_attribute: SetAttribute) -> None:
    class State(step.State):
        def enter(self, rows: Tensor, *what: Any) -> None:
            if not hasattr(self, "lost"):
                self.lost = torch.zeros_like(self.remaining)  # tokens that a row could still emit when it ended
            self.lost[rows] = 0
            super().enter(rows, *what)

        def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
            ended, before = self.remaining == step.IDLE, self.remaining + self.lost
            self.remaining.copy_(before)
            emitted = super().append(proposal, outcome)
            left = before - emitted
            self.remaining.masked_fill_(ended, step.IDLE)
            self.lost = left - self.remaining
            return emitted

    set_attribute(step, "State", State)


def always_accepting(set_attribute: SetAttribute) -> None:
    set_attribute(verification, "_count_leading", lambda accept: torch.ones_like(accept, dtype=torch.int64).sum(dim=-1))


# Randomness.


def _with_uniforms(set_attribute: SetAttribute, change: Callable[[Uniforms], Uniforms]) -> None:
    set_attribute(scheduler, "uniforms", lambda *settings: change(uniforms(*settings)))


def recovered_reuses_draft_uniform(set_attribute: SetAttribute) -> None:
    _with_uniforms(set_attribute, lambda u: replace(u, final=u.draft[..., 0]))


def reseeded(set_attribute: SetAttribute) -> None:
    """A generator that is seeded again before each acceptance test: the same uniforms from the second test on."""

    def repeated(u: Uniforms) -> Uniforms:
        draft = torch.cat([u.draft[:, :1], u.draft[:, 1:2].expand_as(u.draft[:, 1:])], dim=1)
        accept = u.accept[:, :1, :1].expand_as(u.accept)
        return Uniforms(draft, accept, u.final[:, :1].expand_as(u.final))

    _with_uniforms(set_attribute, repeated)


def rows_share_uniforms(set_attribute: SetAttribute) -> None:
    def first_row(u: Uniforms) -> Uniforms:
        return Uniforms(*(x[:1].expand_as(x) for x in (u.draft, u.accept, u.final)))

    _with_uniforms(set_attribute, first_row)


# Caches and positions.


def _shifted(set_attribute: SetAttribute, shift: Callable[[Tensor, int], Tensor]) -> None:
    """The target's cache slots move by `shift(accepted, gamma)` after each step; positions stay correct."""
    models: list[Shifted] = []

    class Shifted(CachedModel):
        def __init__(self, model: PreTrainedModel, capacity: int) -> None:
            super().__init__(model, 2 * capacity)  # capacity for entries that are never removed
            self.shift = torch.zeros(())
            models.append(self)

        def run(self, tokens: Tensor, slots: Tensor, keep: int, *rest: Any, **more: Any) -> Tensor:
            return super().run(tokens, slots + self.shift.long(), keep, positions=slots)

    class State(step.State):
        def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
            moved = shift(outcome.accepted, proposal.draft_tokens.shape[1])
            models[-1].shift = models[-1].shift + moved[:, None]
            return super().append(proposal, outcome)

    set_attribute(step, "CachedModel", Shifted)
    set_attribute(step, "State", State)


def rejected_stays(set_attribute: SetAttribute) -> None:
    _shifted(set_attribute, lambda accepted, gamma: (accepted < gamma).long())


def accepted_is_lost(set_attribute: SetAttribute) -> None:
    _shifted(set_attribute, lambda accepted, gamma: -((accepted < gamma) & (accepted > 0)).long())


def bonus_wrong_in_target(set_attribute: SetAttribute) -> None:
    """After full acceptance the target runs over the last draft token in place of the bonus token."""

    class State(step.State):
        full = None

        def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
            self.full = outcome.accepted == proposal.draft_tokens.shape[1]
            return super().append(proposal, outcome)

    def logits(runner: CachedModel, state: State, draft_tokens: Tensor) -> Tensor:
        slots = state.lengths[:, None] - 1 + state.offsets
        late = torch.zeros_like(state.has_nan) if state.full is None else state.full
        newest = state.tokens.gather(1, slots[:, :1] - late[:, None].long())
        return runner.run(torch.cat([newest, draft_tokens.clamp_min(0)], dim=1), slots, keep=len(state.offsets))

    set_attribute(step, "State", State)
    set_attribute(step, "target_logits", logits)


def bonus_missing_in_draft(set_attribute: SetAttribute) -> None:
    """The draft model never runs over the last draft token. Lossless: q is still the distribution sampled from."""

    class WithoutLastToken(CachedModel):
        def run(self, tokens: Tensor, slots: Tensor, keep: int, *rest: Any, **more: Any) -> Tensor:
            newest_only = slots.shape[1] == 2 and keep == 1
            return super().run(tokens[:, -1:], slots[:, -1:], 1) if newest_only else super().run(tokens, slots, keep)

    set_attribute(model_drafter, "CachedModel", WithoutLastToken)


def padding_visible(set_attribute: SetAttribute) -> None:
    mask = cached_model.ragged_mask  # type: ignore[attr-defined]  # the name that CachedModel uses
    set_attribute(
        cached_model, "ragged_mask", lambda slots, *rest: mask(slots.amax(0, keepdim=True).expand_as(slots), *rest)
    )


def positions_of_the_longest(set_attribute: SetAttribute) -> None:
    class WithPositionsOfLongest(CachedModel):
        def run(self, tokens: Tensor, slots: Tensor, keep: int, *rest: Any, **more: Any) -> Tensor:
            return super().run(tokens, slots, keep, positions=slots.amax(0, keepdim=True).expand_as(slots))

    set_attribute(step, "CachedModel", WithPositionsOfLongest)


_bug = partial(Bug, kind="loop")
_BUGS = [
    _bug("eos-inside", "an end token among the accepted tokens is ignored", "transformers#47931", patch=eos_inside),
    _bug(
        "after-the-end",
        "a row that has ended continues while others run",
        "LLMSpeculativeSampling",
        patch=after_the_end,
    ),
    _bug("always-accepting", "every draft token is accepted", "-", patch=always_accepting),
    _bug(
        "shared-noise",
        "the recovered token reuses the uniform of the draft token it replaces",
        "vLLM#47386",
        patch=recovered_reuses_draft_uniform,
    ),
    _bug("rows-share-noise", "all rows of a batch use the same uniforms", "-", patch=rows_share_uniforms),
    _bug("rejected-stays", "the target's cache keeps one rejected token", "several; mlx-lm#1109", patch=rejected_stays),
    _bug(
        "accepted-is-lost",
        "the last accepted token is removed from the target's cache",
        "several",
        patch=accepted_is_lost,
    ),
    _bug(
        "bonus-cache",
        "the target's cache has the last draft token in place of the bonus token",
        "vLLM#9730",
        patch=bonus_wrong_in_target,
    ),
    _bug(
        "bonus-missing-in-draft",
        "the last draft token is missing in the draft model's cache",
        "vLLM#9730",
        patch=bonus_missing_in_draft,
        lossless=True,
    ),
    _bug(
        "padding-visible",
        "short rows of a batch attend to padding",
        "lucidrains/speculative-decoding",
        patch=padding_visible,
    ),
    _bug(
        "positions-of-the-longest",
        "all rows of a batch get the position ids of the longest",
        "batches without position ids",
        patch=positions_of_the_longest,
    ),
]

LOOP_BUGS = {bug.name: bug for bug in _BUGS}
"""The bugs of the loop by name."""
