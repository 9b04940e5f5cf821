"""The decoding loop: draft, verify, emit, for a batch of rows that all stand somewhere else.

Within a step nothing waits for the device: accepting, cropping and appending are tensor operations
and every row's length is an entry of a tensor. gamma = 0 is plain decoding of the target, in the same
loop, and the baseline of every comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.draft import Drafter, ModelDraft, Proposal, prefill
from specnb.law import Sampling, overlap, standardise
from specnb.models import Runner, context_limit, require_same_vocabulary, require_supported
from specnb.randomness import uniforms
from specnb.record import Recorder, StepRecord
from specnb.verify import Outcome, Rule, token_verification

Tokens = int | Sequence[int] | None


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
    progress: bool = True,
) -> Generation:
    """Continues each prompt by exactly `max_new_tokens` tokens, or up to and with a token of `eos`.

    `draft` is a model, which is then sampled as `sampling` says, or any `Drafter`; without one, or with
    `gamma` = 0, the target decodes alone. With the default `rule` the text has the target's law whatever
    the draft is (Algorithm 1). `rows` numbers the prompts (0, 1, ...): a row's tokens depend on `seed`,
    its number, its prompt and the settings, and not on the batch. `timed` records the seconds of each
    part of a step, and makes the host wait for the device to do so. A progress bar shows after 3 seconds.

    Raises `ValueError` or `TypeError`, before anything is run, for: no prompts, an empty prompt, tokens
    outside the vocabulary, numbers that are not whole, a negative `gamma`, `seed` or row, `max_new_tokens`
    < 1, a context longer than a model's limit, different vocabularies or devices, a model, cache or
    drafter that the loop cannot run; and `FloatingPointError` as soon as a model is seen to produce NaN.
    """
    drafter = ModelDraft(draft, sampling) if isinstance(draft, PreTrainedModel) else draft
    numbers = list(range(len(prompts))) if rows is None else list(rows)
    for name, value, least in (("gamma", gamma, 0), ("max_new_tokens", max_new_tokens, 1), ("seed", seed, 0)):
        if not _whole(value) or value < least:
            raise ValueError(f"{name} is {value}; it must be a whole number from {least}")
    _require_models(target, drafter)
    _require_tokens(prompts, numbers, eos, target.config.vocab_size)
    _require_room(target, drafter, max(map(len, prompts)), max_new_tokens)
    gamma = gamma if drafter is not None else 0
    device = target.device

    state = _State(prompts, gamma, max_new_tokens, eos, device)
    runner = Runner(target, state.tokens.shape[1])
    noise = uniforms(seed, numbers, max_new_tokens, gamma, device)
    recorder = Recorder(timed, device)
    prefill(runner, state.tokens, state.lengths)
    if drafter is not None and gamma:
        drafter.start(state.tokens, state.lengths)

    fewest_steps = -(-max_new_tokens // (gamma + 1))
    with tqdm(total=max_new_tokens, desc="tokens", delay=3, leave=False, disable=not progress) as bar:
        for step in range(max_new_tokens):
            recorder.start()
            proposal = _propose(drafter, state, noise.draft[:, step], target.config.vocab_size)
            recorder.lap("draft")
            p = standardise(_verify_logits(runner, state, proposal.drafts), sampling, check=False)
            recorder.lap("target")
            outcome = rule(p, proposal.q, proposal.drafts, noise.accept[:, step], noise.final[:, step])
            emitted = state.append(proposal, outcome)
            state.healthy &= ~(p.isnan().any() | proposal.q.isnan().any())
            recorder.add(proposal.drafts, *outcome, emitted, overlap(p[:, :-1], proposal.q))
            recorder.lap("rest")
            # The only wait: whether all rows have ended is asked between steps, and not before it can be.
            if step + 1 >= fewest_steps:
                state.require_healthy()
                bar.update(int(state.produced.masked_fill(state.done, max_new_tokens).min()) - bar.n)
                if bool(state.done.all()):
                    break
    state.require_healthy()
    return Generation(state.texts(), recorder.finish())


def _propose(drafter: Drafter | None, state: _State, noise: Tensor, vocab: int) -> Proposal:
    if drafter is None or noise.shape[1] == 0:
        nothing = noise.new_zeros(*noise.shape, vocab, dtype=torch.float32)
        return Proposal(state.lengths.new_zeros(noise.shape), nothing)
    return drafter.propose(state.tokens, state.lengths, noise)


def _verify_logits(runner: Runner, state: _State, drafts: Tensor) -> Tensor:
    """One target run over the last token and the drafts: logits `(batch, gamma + 1, vocab)`."""
    slots = state.lengths[:, None] - 1 + state.offsets
    newest = state.tokens.gather(1, slots[:, :1])
    return runner.run(torch.cat([newest, drafts.clamp_min(0)], dim=1), slots, keep=len(state.offsets))


def _require_models(target: PreTrainedModel, drafter: Drafter | None) -> None:
    require_supported(target)
    if drafter is None:
        return
    if not isinstance(drafter, Drafter):
        raise TypeError(f"draft is a {type(drafter).__name__}; it must be a model, a Drafter, or None")
    require_same_vocabulary(target, drafter.vocab)
    if isinstance(drafter, ModelDraft) and drafter.model.device != target.device:
        raise ValueError(f"the target is on {target.device} and the draft on {drafter.model.device}; move one of them")


def _require_tokens(prompts: Sequence[Sequence[int]], numbers: list[int], eos: Tokens, vocab: int) -> None:
    if len(prompts) == 0:
        raise ValueError("there are no prompts; give at least one list of tokens")
    if len(numbers) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(numbers)} rows; each prompt has one number")
    if not all(_whole(number) and number >= 0 for number in numbers):
        raise ValueError(f"rows are {numbers}; they must be whole numbers from 0")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, Iterable) or not all(map(_whole, prompt)):
            raise TypeError(f"prompt {number} is {prompt!r}; each prompt is a list of tokens, which are whole numbers")
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} is empty; begin with at least one token, the begin-of-text one say")
        _require_in_vocabulary(f"prompt {number}", prompt, vocab)
    _require_in_vocabulary("eos", _listed(eos), vocab)


def _whole(value: Any) -> bool:
    return hasattr(value, "__index__")  # also of numpy and torch; isinstance with SupportsIndex is slow


def _require_in_vocabulary(name: str, tokens: Sequence[int], vocab: int) -> None:
    outside = [token for token in tokens if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"{name} has the token {outside[0]}; the vocabulary has the tokens 0 to {vocab - 1}")


def _require_room(target: PreTrainedModel, drafter: Drafter | None, longest: int, max_new_tokens: int) -> None:
    for model in [target, *([drafter.model] if isinstance(drafter, ModelDraft) else [])]:
        limit = context_limit(model)
        if limit is not None and longest + max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} and {max_new_tokens} new tokens need {longest + max_new_tokens} positions, "
                f"and {type(model).__name__} has {limit}; shorten the prompt or ask for fewer tokens"
            )


def _listed(eos: Tokens) -> list[int]:
    return [eos] if isinstance(eos, int) else list(() if eos is None else eos)


class _State:
    """Each row's text, how far it is, and whether it has ended: tensors, changed in place by `append`."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        gamma: int,
        max_new_tokens: int,
        eos: Tokens,
        device: torch.device,
    ) -> None:
        lengths = [len(prompt) for prompt in prompts]
        slots = max(lengths) + max_new_tokens + gamma + 1
        padded = [[*prompt, *[0] * (slots - len(prompt))] for prompt in prompts]
        self.tokens = torch.tensor(padded, device=device)
        self.lengths = torch.tensor(lengths, device=device)
        self.starts = self.lengths.clone()
        self.produced = torch.zeros_like(self.lengths)
        self.done = torch.zeros_like(self.lengths, dtype=torch.bool)
        self.healthy = torch.tensor(True, device=device)
        self.max_new_tokens = max_new_tokens
        self.eos = torch.tensor(_listed(eos), device=device, dtype=torch.int64)
        self.offsets = torch.arange(gamma + 1, device=device)

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
        room = self.max_new_tokens - self.produced
        keep = (self.offsets <= outcome.accepted[:, None]) & open_before
        keep &= (self.offsets < room[:, None]) & ~self.done[:, None]

        slots = self.lengths[:, None] + self.offsets
        emitted = keep.sum(dim=1)
        self.tokens.scatter_(1, slots, torch.where(keep, block, self.tokens.gather(1, slots)))
        self.lengths += emitted
        self.produced += emitted
        self.done |= (keep & ends).any(dim=1) | (self.produced >= self.max_new_tokens)
        return emitted

    def require_healthy(self) -> None:
        if not bool(self.healthy):
            raise FloatingPointError(
                "a model produced NaN, or a row without a finite logit: try another dtype, or look at its weights"
            )

    def texts(self) -> list[list[int]]:
        rows = zip(self.tokens.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True)
        return [row[start:end] for row, start, end in rows]
