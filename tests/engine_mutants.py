"""Planted bugs of the loop: each changes one thing of the correct code, as it happened somewhere.

`MUTANTS` maps a name to (what plants it, the case that shows it). A plant is a function of pytest's
`monkeypatch`. References are those of the projects where the bug was found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_law import Case
from torch import Tensor

from specnb import decode, draft, models, verify
from specnb.law import Sampling, draw, normalise, one_hot, standardise
from specnb.models import Runner
from specnb.randomness import Uniforms, uniforms

Plant = Callable[[pytest.MonkeyPatch], None]


# What a step emits.


def eos_inside(patch: pytest.MonkeyPatch) -> None:
    """An end-of-text among the accepted tokens is not noticed; only the last one is looked at.

    transformers#47931.
    """

    class State(decode._State):
        def append(self, proposal, outcome):
            eos, self.eos = self.eos, self.eos[:0]
            emitted = super().append(proposal, outcome)
            self.eos = eos
            last = self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]
            self.done |= (emitted > 0) & torch.isin(last, eos)
            return emitted

    patch.setattr(decode, "_State", State)


def always_accepting(patch: pytest.MonkeyPatch) -> None:
    """Every draft is accepted, and the target's token behind them is the bonus token."""
    patch.setattr(verify, "_leading", lambda accept: torch.ones_like(accept, dtype=torch.int64).sum(dim=-1))


def after_the_end(patch: pytest.MonkeyPatch) -> None:
    """A row that has ended goes on while others still run.

    LLMSpeculativeSampling: tokens after the end of the text.
    """

    class State(decode._State):
        def append(self, proposal, outcome):
            done = self.done.clone()
            self.done = torch.zeros_like(done)
            emitted = super().append(proposal, outcome)
            self.done |= done
            return emitted

    patch.setattr(decode, "_State", State)


# Randomness.


def _replaced(patch: pytest.MonkeyPatch, change: Callable[[Uniforms], Uniforms]) -> None:
    patch.setattr(decode, "uniforms", lambda *settings: change(uniforms(*settings)))


def shared_noise(patch: pytest.MonkeyPatch) -> None:
    """The final draw reuses the noise of the draft it replaces.

    vLLM#47386, mended in #54282.
    """
    _replaced(patch, lambda noise: replace(noise, final=noise.draft[..., 0]))


def one_uniform(patch: pytest.MonkeyPatch) -> None:
    """One uniform both rejects a draft and draws what replaces it.

    vllm-ascend#16370.
    """
    _replaced(patch, lambda noise: replace(noise, final=noise.accept[..., 0]))


def zero_uniform(patch: pytest.MonkeyPatch) -> None:
    """The uniforms of acceptance are zero.

    vllm-ascend#13470.
    """
    _replaced(patch, lambda noise: replace(noise, accept=torch.zeros_like(noise.accept)))


def reseeded(patch: pytest.MonkeyPatch) -> None:
    """The generator is seeded anew before each acceptance test, so all tests of a row share one uniform.

    LLMSpeculativeSampling with random_seed.
    """
    _replaced(patch, lambda noise: replace(noise, accept=noise.accept[:, :1, :1].expand_as(noise.accept)))


def rows_share_noise(patch: pytest.MonkeyPatch) -> None:
    """All rows of a batch draw the same uniforms: each has the right law, and together they have not."""

    def first_row(noise: Uniforms) -> Uniforms:
        draft, accept, final = (x[:1].expand_as(x) for x in (noise.draft, noise.accept, noise.final))
        return Uniforms(draft, accept, final)

    _replaced(patch, first_row)


# Caches and positions.


class ShiftedRunner(Runner):
    """Keys and values go `shift` slots behind where they belong; positions stay right."""

    def __init__(self, model, capacity):
        super().__init__(model, capacity + 8)
        self.shift = torch.zeros(())

    def run(self, tokens, slots, keep):
        self.cache.slots = slots + self.shift.long()
        return self.model(
            input_ids=tokens,
            position_ids=slots.clamp_max(self.last_position),
            attention_mask=models.ragged_mask(self.cache.slots, self.capacity, self.model.dtype),
            past_key_values=self.cache,
            logits_to_keep=keep,
        ).logits


def _shifted(patch: pytest.MonkeyPatch, shift: Callable[[Tensor, int], Tensor]) -> None:
    """The target's cache moves by `shift(accepted, gamma)` after each step."""
    runners: list[ShiftedRunner] = []

    class Kept(ShiftedRunner):
        def __init__(self, model, capacity):
            super().__init__(model, capacity)
            runners.append(self)

    class State(decode._State):
        def append(self, proposal, outcome):
            moved = shift(outcome.accepted, proposal.drafts.shape[1])
            runners[-1].shift = runners[-1].shift + moved[:, None]
            return super().append(proposal, outcome)

    patch.setattr(decode, "Runner", Kept)
    patch.setattr(decode, "_State", State)


def rejected_stays(patch: pytest.MonkeyPatch) -> None:
    """Crop is one entry short: after a rejection the rejected token stays in the target's cache.

    Several projects; mlx-lm#1109 for caches that cannot be cropped at all.
    """
    _shifted(patch, lambda accepted, gamma: (accepted < gamma).long())


def accepted_is_lost(patch: pytest.MonkeyPatch) -> None:
    """Crop is one entry too long: after a rejection the last accepted token leaves the target's cache."""
    _shifted(patch, lambda accepted, gamma: -((accepted < gamma) & (accepted > 0)).long())


def bonus_wrong_in_target(patch: pytest.MonkeyPatch) -> None:
    """After full acceptance the target never runs the bonus token; the last draft is run in its place.

    vLLM#9730.
    """

    class State(decode._State):
        full = None

        def append(self, proposal, outcome):
            self.full = outcome.accepted == proposal.drafts.shape[1]
            return super().append(proposal, outcome)

    def logits(runner, state, drafts):
        slots = state.lengths[:, None] - 1 + state.offsets
        late = torch.zeros_like(state.done) if state.full is None else state.full
        newest = state.tokens.gather(1, slots[:, :1] - late[:, None].long())
        return runner.run(torch.cat([newest, drafts.clamp_min(0)], dim=1), slots, keep=len(state.offsets))

    patch.setattr(decode, "_State", State)
    patch.setattr(decode, "_verify_logits", logits)


def bonus_missing_in_draft(patch: pytest.MonkeyPatch) -> None:
    """After full acceptance the last draft, which the draft model never ran, is missing from its cache.

    vLLM#9730. The text keeps its law, since q is still what was drawn from: only q gets worse, so it
    is the recorded overlaps that show it.
    """

    class Forgetful(Runner):
        def run(self, tokens, slots, keep):
            newest_only = slots.shape[1] == 2 and keep == 1
            return super().run(tokens[:, -1:], slots[:, -1:], 1) if newest_only else super().run(tokens, slots, keep)

    patch.setattr(draft, "Runner", Forgetful)


def padding_visible(patch: pytest.MonkeyPatch) -> None:
    """Every row sees as far as the longest one: short rows see padding.

    The batch of lucidrains/speculative-decoding is wrong; batch 1 is not.
    """
    mask = models.ragged_mask
    patch.setattr(models, "ragged_mask", lambda slots, *rest: mask(slots.amax(0, keepdim=True).expand_as(slots), *rest))


def positions_of_the_longest(patch: pytest.MonkeyPatch) -> None:
    """Every row gets the positions of the longest one, as with padding and no position ids."""

    class Misplaced(Runner):
        def run(self, tokens, slots, keep):
            self.cache.slots = slots
            return self.model(
                input_ids=tokens,
                position_ids=slots.amax(0, keepdim=True).expand_as(slots).clamp_max(self.last_position),
                attention_mask=models.ragged_mask(slots, self.capacity, self.model.dtype),
                past_key_values=self.cache,
                logits_to_keep=keep,
            ).logits

    patch.setattr(decode, "Runner", Misplaced)


def wrong_slice(patch: pytest.MonkeyPatch) -> None:
    """The target's logits are read one position off.

    TensorRT-LLM#15098.
    """
    right = decode._verify_logits
    patch.setattr(decode, "_verify_logits", lambda *given: right(*given).roll(1, dims=1))


# Laws.


def greedy_draft_soft_q(patch: pytest.MonkeyPatch) -> None:
    """Drafts are the argmax of q, and the test uses the soft q.

    transformers#32867 (made so by #30778, undone by #33534); jaymody/speculative-sampling#3.
    """
    patch.setattr(draft, "draw", lambda law, uniform: law.argmax(dim=-1))


def raw_q(patch: pytest.MonkeyPatch) -> None:
    """Drafts are drawn after top-k, and q is reported before it.

    transformers#47932, mended in #48007.
    """

    def drawn(law: Tensor, uniform: Tensor) -> Tensor:
        weakest = law.topk(2, dim=-1).values[..., -1:]
        return draw(normalise(law.where(law >= weakest, 0.0)), uniform)

    patch.setattr(draft, "draw", drawn)


def processors_dropped(patch: pytest.MonkeyPatch) -> None:
    """top-k and temperature are applied when drafting and not when verifying.

    vLLM#18902, #42744; TensorRT-LLM#17701.
    """
    patch.setattr(decode, "standardise", lambda logits, sampling, check: standardise(logits, check=check))


def always_argmax(patch: pytest.MonkeyPatch) -> None:
    """Verification ignores the temperature.

    sglang#31214, #39253.
    """
    patch.setattr(decode, "standardise", lambda logits, *rest, **more: one_hot(logits.argmax(-1), logits.shape[-1]))


def no_residual(patch: pytest.MonkeyPatch) -> None:
    """After a rejection p itself is sampled: common in teaching code."""
    patch.setattr(verify, "residual", lambda p, q: p)


def lenience_left_on(patch: pytest.MonkeyPatch) -> None:
    """Lenience 0.7 by default: drafts are accepted against 0.7 q."""
    right = decode.uniforms
    patch.setattr(decode, "uniforms", lambda *settings: _lenient(right(*settings), 0.7))


def _lenient(noise: Uniforms, lenience: float) -> Uniforms:
    return replace(noise, accept=noise.accept * lenience)


PLAIN = Case("gpt2", "model", 3)
SHARP = Case("llama", "sharp", 3)
NEAR = Case("llama", "near", 3)
ENDING = Case("llama", "model", 3, eos=1)
SHORT = Case("gpt2", "model", 1)

MUTANTS: dict[str, tuple[Plant, Case]] = {
    "eos-inside": (eos_inside, ENDING),
    "after-the-end": (after_the_end, ENDING),
    "always-accepting": (always_accepting, PLAIN),
    "shared-noise": (shared_noise, SHORT),
    "one-uniform": (one_uniform, SHORT),
    "zero-uniform": (zero_uniform, PLAIN),
    "reseeded": (reseeded, PLAIN),
    "rows-share-noise": (rows_share_noise, PLAIN),
    "rejected-stays": (rejected_stays, SHARP),
    "accepted-is-lost": (accepted_is_lost, NEAR),
    "bonus-wrong-in-target": (bonus_wrong_in_target, replace(NEAR, gamma=1)),
    "padding-visible": (padding_visible, SHARP),
    "positions-of-the-longest": (positions_of_the_longest, SHARP),
    "wrong-slice": (wrong_slice, PLAIN),
    "greedy-draft-soft-q": (greedy_draft_soft_q, PLAIN),
    "raw-q": (raw_q, PLAIN),
    "processors-dropped": (processors_dropped, Case("gpt2", "model", 3, sampling=Sampling(0.7, top_k=3))),
    "always-argmax": (always_argmax, PLAIN),
    "no-residual": (no_residual, SHORT),
    "lenience-left-on": (lenience_left_on, SHORT),
}
"""What the joint law shows."""

DRAFT_MUTANTS: dict[str, Plant] = {"bonus-missing-in-draft": bonus_missing_in_draft}
"""What leaves the law alone and makes q another law than the draft model's own."""
