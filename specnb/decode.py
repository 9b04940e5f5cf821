"""The decoding loop: draft, verify, emit, for a batch of rows that all stand somewhere else.

Within a step nothing waits for the device: accepting, cropping and appending are tensor operations
and every row's length is an entry of a tensor. So the parts of a step can be compiled as they stand.
gamma = 0 is plain decoding of the target, in the same loop, and the baseline of every comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.draft import Drafter, ModelDraft, Proposal, prefill
from specnb.fast import Compiled
from specnb.law import Sampling, overlap, standardise
from specnb.models import Runner
from specnb.randomness import uniforms
from specnb.record import Recorder, StepRecord
from specnb.request import Tokens, listed, require_models, require_room, require_tokens, require_whole
from specnb.verify import Outcome, Rule, token_verification

ROOM = 128  # compiled steps serve every text that needs up to the next multiple of so many slots


@dataclass(frozen=True)
class Generation:
    """What a call of `generate` produced: the new tokens of each row, and the record of every step."""

    tokens: list[list[int]]
    record: StepRecord


@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    draft: PreTrainedModel | Drafter | None = None,
    *,
    gamma: int = 4,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    rule: Rule = token_verification,
    eos: Tokens = None,
    seed: int = 0,
    rows: Sequence[int] | None = None,
    timed: bool = False,
    compile: bool = False,
    progress: bool = True,
) -> Generation:
    """Continues each prompt by exactly `max_new_tokens` tokens, or up to and with a token of `eos`.

    `draft` is a model, which is then sampled as `sampling` says, or any `Drafter`; without one, or with
    `gamma` = 0, the target decodes alone. With the default `rule` the text has the target's law whatever
    the draft is (Algorithm 1). `rows` numbers the prompts (0, 1, ...): a row's tokens depend on `seed`,
    its number, its prompt and the settings, and not on the batch. `timed` records the seconds of each
    part of a step, and makes the host wait for the device to do so. A progress bar shows after 3 seconds.

    `compile` compiles the parts of a step before the first one: half a minute for a new number of rows, gamma
    or length (in steps of 128), some ten seconds if this machine did it before, nothing if this process did. The law
    stays, the last bits of the logits do not. The last eight settings stay in memory, each with
    weights of its own.

    Raises `ValueError` or `TypeError`, before anything is run, for: no prompts, an empty prompt, tokens
    outside the vocabulary, numbers that are not whole, a negative `gamma`, `seed` or row, `max_new_tokens`
    < 1, a context longer than a model's limit, different vocabularies or devices, a model, cache or
    drafter that the loop cannot run; `RuntimeError` for `compile` without a C++ compiler; and
    `FloatingPointError` as soon as a model is seen to produce NaN.
    """
    drafter = ModelDraft(draft, sampling) if isinstance(draft, PreTrainedModel) else draft
    numbers = list(range(len(prompts))) if rows is None else list(rows)
    require_whole(gamma=(gamma, 0), max_new_tokens=(max_new_tokens, 1), seed=(seed, 0))
    require_models(target, drafter)
    require_tokens(prompts, numbers, eos, target.config.vocab_size)
    require_room(target, drafter, max(map(len, prompts)), max_new_tokens)
    gamma = int(gamma) if drafter is not None else 0
    noise = uniforms(seed, numbers, max_new_tokens, gamma, target.device)
    ends = listed(eos)
    slots = max(map(len, prompts)) + max_new_tokens + gamma + 1
    if compile:
        slots = -(-slots // ROOM) * ROOM
        kept: Any = draft  # by identity
        batch = _compiled(target, kept, sampling, rule, len(prompts), gamma, slots, len(ends))
        batch.warm_up(progress)
    else:
        batch = _Batch(target, drafter, sampling, rule, len(prompts), gamma, slots, len(ends))
    batch.start(prompts, max_new_tokens, ends)
    state, recorder = batch.state, Recorder(timed, target.device)

    fewest_steps = -(-max_new_tokens // (gamma + 1))
    with tqdm(total=max_new_tokens, desc="tokens", delay=3, leave=False, disable=not progress) as bar:
        for step in range(max_new_tokens):
            recorder.start()
            draft_noise, accept, final = (own[:, step].contiguous() for own in (noise.draft, noise.accept, noise.final))
            proposal = batch.propose(draft_noise)
            recorder.lap("draft")
            logits = batch.verify(proposal.drafts)
            recorder.lap("target")
            recorder.add(*batch.settle(logits, *proposal, accept, final))
            recorder.lap("rest")
            # The only wait: whether all rows have ended is asked between steps, and not before it can be.
            if step + 1 >= fewest_steps:
                state.require_healthy()
                bar.update(max_new_tokens - int(state.room.masked_fill(state.done, 0).max()) - bar.n)
                if bool(state.done.all()):
                    break
    state.require_healthy()
    return Generation(state.texts(), recorder.finish())


class _Batch:
    """Rows that are generated together: their state, their caches, and the three parts of a step."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None,
        sampling: Sampling,
        rule: Rule,
        rows: int,
        gamma: int,
        slots: int,
        ends: int,
    ) -> None:
        self.drafter = drafter
        self.sampling, self.rule = sampling, rule
        self.vocab = target.config.vocab_size
        self.state = _State(rows, gamma, slots, ends, target.device)
        self.runner = Runner(target, slots)
        self.cold = False  # whether there is something to compile first

    def start(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: list[int]) -> None:
        """Puts the prompts where those of the batch before were, and runs them."""
        self.state.restart(prompts, max_new_tokens, eos)
        self.runner.clear()
        prefill(self.runner, self.state.tokens, self.state.lengths)
        if self.drafter is not None and self.state.gamma:
            self.drafter.start(self.state.tokens, self.state.lengths)

    def propose(self, noise: Tensor) -> Proposal:
        """The drafts of a step, from its uniforms `(batch, gamma)`."""
        if self.drafter is None or self.state.gamma == 0:
            nothing = noise.new_zeros(*noise.shape, self.vocab, dtype=torch.float32)
            return Proposal(self.state.lengths.new_zeros(noise.shape), nothing)
        return self.drafter.propose(self.state.tokens, self.state.lengths, noise)

    def verify(self, drafts: Tensor) -> Tensor:
        """The target's logits `(batch, gamma + 1, vocab)` at the last token and the drafts."""
        return _verify_logits(self.runner, self.state, drafts)

    def settle(self, logits: Tensor, drafts: Tensor, q: Tensor, accept: Tensor, final: Tensor) -> tuple[Tensor, ...]:
        """Decides and emits; returns what `Recorder.add` keeps of a step."""
        p = standardise(logits, self.sampling, check=False)
        outcome = self.rule(p, q, drafts, accept, final)
        emitted = self.state.append(Proposal(drafts, q), outcome)
        self.state.healthy &= ~(p.sum() + q.sum()).isnan()
        return drafts, *outcome, emitted, overlap(p[:, :-1], q)

    def warm_up(self, progress: bool) -> None:
        """Compiles each part by running it once, on a text of no meaning."""
        if not self.cold:
            return
        rows, gamma = len(self.state.lengths), self.state.gamma
        self.start([[0, 0]] * rows, 1, [0] * len(self.state.eos))
        noise = torch.zeros(rows, gamma, dtype=torch.float64, device=self.state.tokens.device)
        with tqdm(total=3, desc="compiling (half a minute, once)", leave=False, disable=not progress) as bar:
            proposal = self.propose(noise)
            bar.update()
            logits = self.verify(proposal.drafts)
            bar.update()
            self.settle(logits, *proposal, noise, torch.zeros_like(noise[:, :1].sum(1)))
            bar.update()
        self.cold = False


@lru_cache(maxsize=8)
def _compiled(target: PreTrainedModel, draft: Any, sampling: Sampling, *settings: Any) -> _Batch:
    """A batch whose parts are compiled; kept, because what is compiled belongs to its tensors."""
    drafter: Any = ModelDraft(draft, sampling, compile=True) if isinstance(draft, PreTrainedModel) else draft
    batch = _Batch(target, drafter, sampling, *settings)
    batch.cold = True
    batch.verify = Compiled(batch.verify)  # type: ignore[assignment, method-assign]
    batch.settle = Compiled(batch.settle)  # type: ignore[assignment, method-assign]
    return batch


def _verify_logits(runner: Runner, state: _State, drafts: Tensor) -> Tensor:
    """One target run over the last token and the drafts: logits `(batch, gamma + 1, vocab)`."""
    slots = state.lengths[:, None] - 1 + state.offsets
    newest = state.tokens.gather(1, slots[:, :1])
    return runner.run(torch.cat([newest, drafts.clamp_min(0)], dim=1), slots, keep=state.gamma + 1)


class _State:
    """Each row's text, how far it is, and whether it has ended: tensors, changed in place by `append`."""

    def __init__(self, rows: int, gamma: int, slots: int, ends: int, device: torch.device) -> None:
        self.gamma = gamma
        self.tokens = torch.zeros(rows, slots, dtype=torch.int64, device=device)
        self.lengths, self.starts, self.room = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3))
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self.healthy = torch.tensor(True, device=device)
        self.eos = torch.zeros(ends, dtype=torch.int64, device=device)
        self.offsets = torch.arange(gamma + 1, device=device)

    def restart(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: list[int]) -> None:
        """New texts in the same tensors."""
        slots = self.tokens.shape[1]
        self.tokens.copy_(torch.tensor([[*prompt, *[0] * (slots - len(prompt))] for prompt in prompts]))
        self.lengths.copy_(torch.tensor([len(prompt) for prompt in prompts]))
        self.starts.copy_(self.lengths)
        self.room.fill_(max_new_tokens)
        self.done.fill_(False)
        self.healthy.fill_(True)
        self.eos.copy_(torch.tensor(eos, dtype=torch.int64))

    def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
        """Puts what a step emits behind each row; returns how many tokens `(batch,)` that was.

        Tokens after an end-of-text, or beyond the number asked for, are not emitted; what is cut off
        at the end of a text changes nothing about the law of what stands before.
        """
        block = torch.cat([proposal.drafts, outcome.token[:, None]], dim=1)
        at_last = self.offsets == outcome.accepted[:, None]
        block = torch.where(at_last, outcome.token[:, None], block)
        # Positions up to and with the first end-of-text: no end-of-text before them.
        ends = torch.isin(block, self.eos)
        open_before = (ends.cumsum(dim=1) - ends.to(torch.int64)) == 0
        keep = (self.offsets <= outcome.accepted[:, None]) & open_before
        keep &= (self.offsets < self.room[:, None]) & ~self.done[:, None]

        slots = self.lengths[:, None] + self.offsets
        emitted = keep.sum(dim=1)
        self.tokens.scatter_(1, slots, torch.where(keep, block, self.tokens.gather(1, slots)))
        self.lengths += emitted
        self.room -= emitted
        self.done |= (keep & ends).any(dim=1) | (self.room <= 0)
        return emitted

    def require_healthy(self) -> None:
        if not bool(self.healthy):
            raise FloatingPointError(
                "a model produced NaN, or a row without a finite logit: try another dtype, or look at its weights"
            )

    def texts(self) -> list[list[int]]:
        rows = zip(self.tokens.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True)
        return [row[start:end] for row, start, end in rows]
