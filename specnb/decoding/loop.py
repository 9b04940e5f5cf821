"""The decoding loop: steps of a batch, until every prompt has its text.

Each step is draft, verify, emit for all rows at once (`specnb.decoding.step`). What is left to the host is who takes part:
it looks at how far the rows are, and puts the next prompt where a text has ended. gamma = 0 is plain decoding of
the target, in the same loop, and the baseline of every comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decoding.record import StepRecord, merge_rows
from specnb.decoding.request import (
    Tokens,
    as_list,
    listed_prompts,
    listed_rows,
    require_compile,
    require_context,
    require_models,
    require_refill,
    require_sampling,
    require_tokens,
    require_whole,
    useful_gamma,
)
from specnb.decoding.scheduler import ProgressReader, Scheduler, require_no_nan
from specnb.decoding.step import Batch
from specnb.decoding.timing import StepTimer
from specnb.drafting.base import Drafter
from specnb.drafting.model import ModelDrafter
from specnb.models.compilation import Captured, Compiled
from specnb.models.memory import predicted, require_memory, telling_what_fits
from specnb.sampling.distributions import Sampling
from specnb.sampling.verification import Rule, token_verification

SLOT_MULTIPLE = 128  # compiled steps serve every text that needs up to the next multiple of so many slots


@dataclass(frozen=True)
class Generation:
    """What a call of `generate` produced: the new tokens of each prompt, and the record of every step."""

    tokens: list[list[int]]
    record: StepRecord


@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    prompts: Iterable[Iterable[int]],
    draft: PreTrainedModel | Drafter | None = None,
    *,
    gamma: int = 4,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    rule: Rule = token_verification,
    eos: Tokens = None,
    seed: int = 0,
    rows: Iterable[int] | None = None,
    batch_size: int | None = None,
    timed: bool = False,
    compile: bool | str = False,
    progress: bool = True,
) -> Generation:
    """Continues each prompt by exactly `max_new_tokens` tokens, or up to and with a token of `eos`.

    `draft` is a model, which is then sampled as `sampling` says, or any `Drafter`; without one, or with
    `gamma` = 0, the target decodes alone. With the default `rule` the text has the target's distribution whatever
    the draft is (Algorithm 1). `rows` numbers the prompts (0, 1, ...): a row's tokens depend on `seed`,
    its number, its prompt and the settings, and not on the batch. `seed` and `rows` are any whole numbers from 0.
    A step emits at most the tokens that are left, so a `gamma` above both `max_new_tokens` - 1 and
    32 (`request.LARGEST_SPARE_GAMMA`) is taken as the larger of these two. `timed` records the seconds of each
    part of a step, and makes the host wait for the device to do so. A progress bar shows after 3 seconds.

    `batch_size` is how many prompts are under way at a time (all of them if None): where one's text ends, the
    next takes its place. Results are in the order of the prompts.

    `compile` compiles the parts of a step before the first one: half a minute for a new number of rows, gamma
    or length (in steps of 128), some ten seconds if this machine did it before, nothing if this process did.
    The distribution stays, the last bits of the logits do not. The last eight settings stay in memory, each with weights
    of its own, until `forget_compiled`. On a CUDA device the compiled step is also captured as a graph and
    replayed; "graph" captures it without compiling, and gives the tokens of the plain step to the last bit.

    Raises `ValueError` or `TypeError`, before anything is run, for: no prompts, an empty prompt, tokens
    outside the vocabulary, numbers that are not whole (truth values among them), a negative `gamma`, `seed` or row,
    `max_new_tokens` or `batch_size` < 1, no `Sampling`, a context longer than a model's limit, different vocabularies
    or devices, a model, cache or drafter that the loop cannot run, a way to compile that there is not, a graph without
    CUDA; `MemoryError`, naming a batch size that would fit, where the device has not enough memory
    (`specnb.models.memory`); `RuntimeError` for `compile` without a compiler; and as soon as it is seen,
    `FloatingPointError` for a model that produces NaN, and `ValueError` for a drafter whose proposal is not what
    `Drafter.propose` asks for.
    """
    require_sampling(sampling, rule)
    prompts, ends = listed_prompts(prompts), as_list(eos)
    numbers = list(range(len(prompts))) if rows is None else listed_rows(rows)
    batch_size = max(1, len(prompts)) if batch_size is None else batch_size
    require_whole(gamma=(gamma, 0), max_new_tokens=(max_new_tokens, 1), seed=(seed, 0), batch_size=(batch_size, 1))
    gamma, max_new_tokens, seed, batch_size = map(index, (gamma, max_new_tokens, seed, batch_size))
    drafter = ModelDrafter(draft, sampling) if isinstance(draft, PreTrainedModel) else draft
    require_models(target, drafter)
    require_tokens(prompts, numbers, ends, target.config.vocab_size)
    require_context(target, drafter, max(map(len, prompts)), max_new_tokens)
    require_refill(drafter, len(prompts), batch_size)
    require_compile(compile, target.device)
    rows_at_once, longest = min(batch_size, len(prompts)), max(map(len, prompts))
    gamma = useful_gamma(gamma, max_new_tokens) if drafter is not None else 0
    slots = slots_for(longest, max_new_tokens, gamma, compile)
    model = drafter.model if isinstance(drafter, ModelDrafter) else None
    sizes = {"rows": rows_at_once, "prompt": longest, "new_tokens": slots - longest - gamma - 1, "gamma": gamma}
    need = predicted(target, model, **sizes, sampling=sampling)
    with telling_what_fits(need, rows_at_once, target.device):
        if compile:
            kept: Any = draft  # by identity
            shape = (rows_at_once, gamma, slots, slots, len(ends))
            in_parts = timed and target.device.type == "cuda"
            batch = _compiled(target, kept, sampling, rule, shape, compile, in_parts)
            if batch.cold:
                require_memory(need, rows_at_once, target.device)
                batch.warm_up(progress)
        else:
            require_memory(need, rows_at_once, target.device)
            batch = Batch(target, drafter, sampling, rule, rows_at_once, gamma, slots, max_new_tokens, len(ends))
        batch.clear(ends)
        return _run_to_completion(batch, Scheduler(batch, prompts, numbers, seed, max_new_tokens), timed, progress)


def slots_for(prompt: int, new_tokens: int, gamma: int, compile: bool | str = False) -> int:
    """How many slots of cache each row gets where the longest prompt has so many tokens. A run attends to them all."""
    slots = prompt + new_tokens + gamma + 1
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE if compile else slots


def _run_to_completion(batch: Batch, scheduler: Scheduler, timed: bool, progress: bool) -> Generation:
    """Step after step, until no prompt waits and every row has ended."""
    device = batch.state.tokens.device
    reader, timer = ProgressReader(batch), StepTimer(device)
    with tqdm(total=scheduler.expected, desc="tokens", delay=3, leave=False, disable=not progress) as bar:
        while True:
            if timed:
                timer.start()
            batch.step(*([timer.mark] if timed else []))
            status = reader.read()
            if timed:
                timer.mark("rest")
            if status is None:
                continue
            require_no_nan(status)
            bar.update(scheduler.expected - scheduler.tokens_to_come(status) - bar.n)
            if scheduler.replace(status):
                reader.discard()
            elif not any(status):
                break
    completed_rows = scheduler.completed_rows()
    return Generation([one.text for one in completed_rows], merge_rows(completed_rows, timer.seconds))


@lru_cache(maxsize=8)
def _compiled(
    target: PreTrainedModel,
    draft: Any,
    sampling: Sampling,
    rule: Rule,
    shape: tuple[int, int, int, int, int],
    how: bool | str,
    in_parts: bool,
) -> Batch:
    """A batch whose parts are compiled; kept, because what is compiled belongs to its tensors."""
    built = how is True
    drafter: Any = ModelDrafter(draft, sampling, compile=built) if isinstance(draft, PreTrainedModel) else draft
    batch: Any = Batch(target, drafter, sampling, rule, *shape)
    if built:
        batch.run_target, batch.verify_and_emit = Compiled(batch.run_target), Compiled(batch.verify_and_emit)
    if target.device.type == "cuda":
        own = isinstance(draft, PreTrainedModel)  # another's drafter may look at the host, and serve other batches too
        _capture(batch, whole=not in_parts and (own or draft is None), draft_tokens=own)
    return batch


def forget_compiled() -> None:
    """Lets go of everything that was compiled or captured, and of the memory that it keeps."""
    _compiled.cache_clear()


def _capture(batch: Any, whole: bool, draft_tokens: bool) -> None:
    """The `whole` step as a graph; or target and rest as one each, and the `drafts` too where they can be."""
    if whole:
        batch.step = Captured(batch.step)
        return
    batch.run_target, batch.verify_and_emit = Captured(batch.run_target), Captured(batch.verify_and_emit)
    if draft_tokens:
        batch.propose = Captured(batch.propose)
