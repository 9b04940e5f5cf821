"""The bug suite of bugs: every bug that one machine can show, running in the real loop.

`MUSEUM` holds the bugs of a step (`specnb.audit.step_bugs`) and, here, those that only a loop can have: ends of text,
noise, caches and positions. A bug of the loop is planted: while it generates, one name of the loop's own code
stands for something else. `generate` writes text with a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.audit.step_bugs import FILTERS, Bug, step_bugs
from specnb.decoding import loop, scheduler, step
from specnb.drafting import model as model_drafter
from specnb.drafting.base import Context, Drafter, Proposal
from specnb.drafting.model import ModelDrafter
from specnb.models import cached_model
from specnb.models.cached_model import CachedModel
from specnb.sampling import verification
from specnb.sampling.distributions import Sampling
from specnb.sampling.randomness import Uniforms, uniforms
from specnb.sampling.verification import Outcome

Set = Callable[[Any, str, Any], None]
"""Sets a name of a module for as long as the bug is planted."""


# What a step emits.


def eos_inside(plant: Set) -> None:
    class State(step.State):
        def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
            eos, self.eos = self.eos, self.eos[:0]
            emitted = super().append(proposal, outcome)
            self.eos = eos
            last = self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]
            self.remaining.masked_fill_((emitted > 0) & torch.isin(last, eos), step.IDLE)
            return emitted

    plant(step, "State", State)


def after_the_end(plant: Set) -> None:
    class State(step.State):
        def enter(self, rows: Tensor, *what: Any) -> None:
            if not hasattr(self, "lost"):
                self.lost = torch.zeros_like(self.remaining)  # room that was taken from a row when its text ended
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

    plant(step, "State", State)


def always_accepting(plant: Set) -> None:
    plant(verification, "_leading", lambda accept: torch.ones_like(accept, dtype=torch.int64).sum(dim=-1))


# Randomness.


def _with_uniforms(plant: Set, change: Callable[[Uniforms], Uniforms]) -> None:
    plant(scheduler, "uniforms", lambda *settings: change(uniforms(*settings)))


def shared_noise(plant: Set) -> None:
    _with_uniforms(plant, lambda noise: replace(noise, final=noise.draft[..., 0]))


def reseeded(plant: Set) -> None:
    """Behind the first test, a generator that is seeded again before each test gives the same numbers each time."""

    def repeated(noise: Uniforms) -> Uniforms:
        draft = torch.cat([noise.draft[:, :1], noise.draft[:, 1:2].expand_as(noise.draft[:, 1:])], dim=1)
        accept = noise.accept[:, :1, :1].expand_as(noise.accept)
        return Uniforms(draft, accept, noise.final[:, :1].expand_as(noise.final))

    _with_uniforms(plant, repeated)


def rows_share_noise(plant: Set) -> None:
    def first_row(noise: Uniforms) -> Uniforms:
        return Uniforms(*(x[:1].expand_as(x) for x in (noise.draft, noise.accept, noise.final)))

    _with_uniforms(plant, first_row)


# Caches and positions.


def _shifted(plant: Set, shift: Callable[[Tensor, int], Tensor]) -> None:
    """The target's cache moves by `shift(accepted, gamma)` after each step; positions stay right."""
    runners: list[Shifted] = []

    class Shifted(CachedModel):
        def __init__(self, model: PreTrainedModel, capacity: int) -> None:
            super().__init__(model, 2 * capacity)  # room for what is left behind, however long the text
            self.shift = torch.zeros(())
            runners.append(self)

        def run(self, tokens: Tensor, slots: Tensor, keep: int, *rest: Any, **more: Any) -> Tensor:
            return super().run(tokens, slots + self.shift.long(), keep, positions=slots)

    class State(step.State):
        def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
            moved = shift(outcome.accepted, proposal.draft_tokens.shape[1])
            runners[-1].shift = runners[-1].shift + moved[:, None]
            return super().append(proposal, outcome)

    plant(step, "CachedModel", Shifted)
    plant(step, "State", State)


def rejected_stays(plant: Set) -> None:
    _shifted(plant, lambda accepted, gamma: (accepted < gamma).long())


def accepted_is_lost(plant: Set) -> None:
    _shifted(plant, lambda accepted, gamma: -((accepted < gamma) & (accepted > 0)).long())


def bonus_wrong_in_target(plant: Set) -> None:
    """The last draft is run in the bonus token's place."""

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

    plant(step, "State", State)
    plant(step, "target_logits", logits)


def bonus_missing_in_draft(plant: Set) -> None:
    """The draft model never runs the last draft. The text keeps its distribution: q is still what was drawn from."""

    class Forgetful(CachedModel):
        def run(self, tokens: Tensor, slots: Tensor, keep: int, *rest: Any, **more: Any) -> Tensor:
            newest_only = slots.shape[1] == 2 and keep == 1
            return super().run(tokens[:, -1:], slots[:, -1:], 1) if newest_only else super().run(tokens, slots, keep)

    plant(model_drafter, "CachedModel", Forgetful)


def padding_visible(plant: Set) -> None:
    mask = cached_model.ragged_mask
    plant(cached_model, "ragged_mask", lambda slots, *rest: mask(slots.amax(0, keepdim=True).expand_as(slots), *rest))


def positions_of_the_longest(plant: Set) -> None:
    class Misplaced(CachedModel):
        def run(self, tokens: Tensor, slots: Tensor, keep: int, *rest: Any, **more: Any) -> Tensor:
            return super().run(tokens, slots, keep, positions=slots.amax(0, keepdim=True).expand_as(slots))

    plant(step, "CachedModel", Misplaced)


LOOP = [
    Bug("eos-inside", "an end of text among the accepted tokens is not noticed", "transformers#47931",
           plant=eos_inside),
    Bug("after-the-end", "a row that has ended goes on while others run", "LLMSpeculativeSampling",
           plant=after_the_end),
    Bug("always-accepting", "every draft is accepted", "-", plant=always_accepting),
    Bug("shared-noise", "the final draw reuses the noise of the draft it replaces", "vLLM#47386",
           plant=shared_noise),
    Bug("rows-share-noise", "all rows of a batch draw the same uniforms", "-", plant=rows_share_noise),
    Bug("rejected-stays", "crop is one short: the rejected token stays in the target's cache",
           "several; mlx-lm#1109", plant=rejected_stays),
    Bug("accepted-is-lost", "crop is one too many: the last accepted token leaves the target's cache", "several",
           plant=accepted_is_lost),
    Bug("bonus-cache", "the bonus token is never run: the last draft stands in its place in the target's cache",
           "vLLM#9730", plant=bonus_wrong_in_target),
    Bug("bonus-missing-in-draft", "the last draft is missing in the draft's cache", "vLLM#9730",
           plant=bonus_missing_in_draft, lossless=True),
    Bug("padding-visible", "short rows of a batch see padding", "lucidrains/speculative-decoding",
           plant=padding_visible),
    Bug("positions-of-the-longest", "all rows of a batch get the positions of the longest",
           "batches without position ids", plant=positions_of_the_longest),
]  # fmt: skip


def known_bugs(filters: Sampling = FILTERS) -> dict[str, Bug]:
    """Every bug by name: those of a step, asked for `filters` where they need some, and those of the loop."""
    everything = step_bugs(filters) | {bug.name: bug for bug in LOOP}
    everything["reseeded"] = replace(everything["reseeded"], plant=reseeded)
    return everything


KNOWN_BUGS = known_bugs()
EXACT = Bug("exact", "nothing", "-", lossless=True)


class BuggyDrafter(ModelDrafter):
    """A model that draws its drafts from one distribution and reports another, as a bug says."""

    def __init__(self, model: PreTrainedModel, bug: Bug) -> None:
        raw = bug.sampled is not None or bug.q is not None
        super().__init__(model, Sampling() if raw else bug.asked)
        self.bug = bug

    def sample(self, probs: Tensor, uniform: Tensor) -> Tensor:
        return super().sample(self.bug.sampled(probs) if self.bug.sampled else probs, uniform)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        draft_tokens, q = super().propose(context, uniforms)
        return Proposal(draft_tokens, self.bug.q(q) if self.bug.q else q)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Plants a bug of the loop, and takes it out again at the end."""
    with ExitStack() as stack:
        if bug.plant:
            bug.plant(lambda place, name, value: stack.enter_context(mock.patch.object(place, name, value)))
        yield


def generate(
    bug: Bug,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    drafter: PreTrainedModel | Drafter,
    **settings: Any,
) -> loop.Generation:
    """`specnb.decoding.loop.generate` with the bug, in text that should be drawn as `bug.asked` says.

    A bug of where drafts come from needs a model as drafter. `settings` are those of `decode.generate` but for
    sampling and rule. Raises what that raises, and `TypeError` for a drafter that cannot have the bug.
    """
    changes_draft = bug.sampled is not None or bug.q is not None
    if isinstance(drafter, PreTrainedModel):
        drafter = BuggyDrafter(drafter, bug)
    elif changes_draft:
        raise TypeError(f"{bug.name} changes how a draft model is sampled; give the model, not a drafter")

    def rule(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return bug.rule(bug.p(p) if bug.p else p, q, draft_tokens, accept, final)

    sampling = Sampling() if bug.p else bug.asked
    with planted(bug):
        return loop.generate(target, prompts, drafter, sampling=sampling, rule=rule, **settings)
