"""`generate`: the decoding loop. Makes steps of a batch until every prompt has its completion.

A step drafts, verifies and emits for all rows at once (`specnb.decoding.step`). The host only reads how far the rows
are, and assigns the next prompt to a row that has ended. gamma = 0 is plain decoding of the target in the same loop,
and the baseline of every comparison.

`Study`: what `generate` records or replaces so that its loop can be studied.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import index
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.arguments import require_whole, shown
from specnb.decoding.record import StepRecord, StepTimer, merge_rows
from specnb.decoding.request import (
    Tokens,
    as_list,
    listed_prompts,
    listed_rows,
    require_compile,
    require_context,
    require_flags,
    require_models,
    require_probs,
    require_refill,
    require_tokens,
    rule_for,
    useful_gamma,
)
from specnb.decoding.scheduler import ProgressReader, Scheduler, require_no_nan
from specnb.decoding.step import Batch, TreeBatch
from specnb.distributions import Sampling, require_sampling
from specnb.drafting.base import Drafter
from specnb.drafting.model import as_drafter
from specnb.models.compilation import Captured, Compiled
from specnb.models.memory import Memory, predicted, require_memory, telling_what_fits
from specnb.rules import Rule, TreeRule


@dataclass(frozen=True)
class Study:
    """What is recorded, or replaced, to study the loop of `generate`; nothing by default.

    rows         numbers of the prompts in place of 0, 1, ... The tokens of a prompt depend on the seed, its number, the
                 prompt and the settings, and not on the batch, so one prompt can be generated again alone
    timed        record the seconds of each part of a step; the host then waits for the device after each part
    keep_probs   return the target's distribution of every new token: that many tokens times the vocabulary
    batch_class  what makes the steps, for a loop that differs from this one: a subclass of `Batch`, the default, or of
                 `TreeBatch` for a tree. Known bugs are such classes (`specnb_audit.bugs.loop`)

    `generate` checks the values.

    >>> Study(rows=[3], timed=True)
    Study(rows=[3], timed=True, keep_probs=False, batch_class=None)
    """

    rows: Collection[int] | None = None
    timed: bool = False
    keep_probs: bool = False
    batch_class: type[Batch] | None = None

    def batch_class_for(self, rule: Rule | TreeRule) -> type[Batch]:
        """The class that makes the steps for the kind of draft tokens that `rule` verifies.

        Raises `TypeError` for a `batch_class` that cannot.

        >>> from specnb.rules import token_verification
        >>> Study().batch_class_for(token_verification).__name__
        'Batch'
        """
        given: Any = self.batch_class
        needed: type[Batch] = TreeBatch if isinstance(rule, TreeRule) else Batch
        if given is None:
            return needed
        is_batch = isinstance(given, type) and issubclass(given, Batch)
        if not is_batch or issubclass(given, TreeBatch) != (needed is TreeBatch):
            raise TypeError(f"batch_class is {given!r}; for this rule it must be a subclass of {needed.__name__}")
        chosen: type[Batch] = given
        return chosen


def require_study(study: object) -> None:
    """Raises `TypeError` for anything but a `Study`.

    >>> require_study(True)
    Traceback (most recent call last):
        ...
    TypeError: study is True; it must be a specnb.Study, such as Study(timed=True)
    """
    if not isinstance(study, Study):
        raise TypeError(f"study is {shown(study)}; it must be a specnb.Study, such as Study(timed=True)")


SLOT_MULTIPLE = 128  # a compiled step serves all lengths up to the next multiple of this many slots


@dataclass(frozen=True)
class Generation:
    """What a call of `generate` returns.

    tokens  the new tokens of each prompt
    record  what each step did
    probs   with `Study(keep_probs=True)`, the target's distributions `(len(tokens), vocab)` of each prompt's new tokens

    >>> from studies.speed.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> made = generate(model, [[0], [1, 2]], max_new_tokens=3)
    >>> [len(tokens) for tokens in made.tokens], made.record.target_passes.tolist()
    ([3, 3], [3, 3])
    """

    tokens: list[list[int]]
    record: StepRecord
    probs: list[Tensor] | None = None


@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    prompts: Collection[Collection[int]],
    draft: PreTrainedModel | Drafter | None = None,
    *,
    gamma: int = 4,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    rule: Rule | TreeRule | None = None,
    eos: Tokens = None,
    seed: int = 0,
    batch_size: int | None = None,
    compile: bool | str = False,
    progress: bool = True,
    study: Study = Study(),
) -> Generation:
    """Continues each prompt by `max_new_tokens` tokens, or up to and including a token of `eos`.

    prompts     lists of tokens, or an array or tensor of them; no generators, which may have no end
    draft       a model, which is then sampled as `sampling` says, or any `Drafter`. Without one, or with `gamma` = 0,
                the target decodes alone
    gamma       draft tokens per step. The number of nodes if the drafter proposes a tree. For a chain, a gamma above
                both `max_new_tokens` - 1 and 32 (`request.LARGEST_SPARE_GAMMA`) is reduced to the larger of these
    rule        the acceptance rule. None is `token_verification` (Algorithm 1), or `recursive_rejection` for a tree:
                then completions have exactly the target's distribution, whatever the drafter
    seed        a whole number from 0. The tokens of a prompt depend on it, on the prompt's number (0, 1, ...), the
                prompt and the settings, and not on the batch
    batch_size  how many prompts are generated at a time, all by default. When a sequence ends, the next prompt takes
                its row. Results are in the order of the prompts
    compile     True compiles the parts of a step first: half a minute for a new number of rows, gamma or length (in
                steps of 128), some ten seconds if this machine did it before, nothing if this process did. The last
                bits of the logits change. The last eight settings stay in memory, each with its own weights, until
                `forget_compiled`. On a CUDA device the step is also captured as a graph. "graph" captures it without
                compiling, with the same tokens as the plain step
    progress    show a progress bar after 3 seconds
    study       what is recorded or replaced to study the loop: times, distributions, numbers of the prompts, the step

    Raises, before anything is run, `ValueError` or `TypeError` for: no prompts, an empty prompt, tokens outside the
    vocabulary, numbers that are not whole (truth values among them), flags that are not True or False, a negative
    `gamma`, `seed` or row, `max_new_tokens` or `batch_size` < 1, an invalid `sampling`, `rule` or `compile`, a rule
    that is not exact for the drafter's tree (`specnb.drafting.model.EXACT_SCHEMES`), a context
    beyond a model's limit, different vocabularies or devices, and a model, cache or drafter that the loop cannot run,
    encoder-decoder models among them; `MemoryError`, naming a batch size that would fit (`specnb.models.memory`);
    `RuntimeError` for `compile` without a compiler. Raises during generation `FloatingPointError` for a model that
    produces NaN, `ValueError` or `TypeError` for a drafter whose proposal is not valid (see `Drafter.propose`), and
    `TypeError` for a rule that returns no `Outcome`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2)
    >>> target, draft = (LlamaForCausalLM(config).eval() for _ in range(2))
    >>> made = generate(target, [[0, 1], [2]], draft, gamma=2, max_new_tokens=6)
    >>> [len(tokens) for tokens in made.tokens]
    [6, 6]
    """
    require_sampling(sampling)
    require_study(study)
    timed, keep_probs = study.timed, study.keep_probs
    require_flags(timed=timed, progress=progress, keep_probs=keep_probs)
    prompts, ends = listed_prompts(prompts), as_list(eos)
    numbers = list(range(len(prompts))) if study.rows is None else listed_rows(study.rows)
    batch_size = max(1, len(prompts)) if batch_size is None else batch_size
    require_whole(gamma=(gamma, 0), max_new_tokens=(max_new_tokens, 1), seed=(seed, 0), batch_size=(batch_size, 1))
    gamma, max_new_tokens, seed, batch_size = map(index, (gamma, max_new_tokens, seed, batch_size))
    drafter = as_drafter(draft, sampling)
    require_models(target, drafter)
    gamma = useful_gamma(gamma, max_new_tokens, drafter)
    rule = rule_for(rule, drafter, gamma)
    require_tokens(prompts, numbers, ends, target.config.vocab_size)
    require_context(target, drafter, max(map(len, prompts)), max_new_tokens)
    require_refill(drafter, len(prompts), batch_size)
    require_compile(compile, target.device)
    require_probs(keep_probs, compile)
    batch_class = study.batch_class_for(rule)

    rows_at_once, longest = min(batch_size, len(prompts)), max(map(len, prompts))
    slots = slots_for(longest, max_new_tokens, gamma, compile)
    need = _needed_memory(target, drafter, rows_at_once, longest, slots, gamma, sampling, keep_probs)
    with telling_what_fits(need, rows_at_once, target.device):
        if compile:
            shape = (rows_at_once, gamma, slots, slots, len(ends))
            in_parts = timed and target.device.type == "cuda"
            by_identity: tuple[Any, ...] = (batch_class, target, draft)
            batch = _compiled(*by_identity, sampling, rule, shape, compile, in_parts)
            if batch.cold:
                require_memory(need, rows_at_once, target.device)
                batch.warm_up(progress)
        else:
            require_memory(need, rows_at_once, target.device)
            sizes = (rows_at_once, gamma, slots, max_new_tokens, len(ends))
            batch = batch_class(target, drafter, sampling, rule, *sizes)
        if keep_probs:
            batch.state.record_probs(batch.vocab, _probs_dtype(target))
        batch.clear(ends)
        return _run_to_completion(batch, Scheduler(batch, prompts, numbers, seed, max_new_tokens), timed, progress)


def slots_for(prompt: int, new_tokens: int, gamma: int, compile: bool | str = False) -> int:
    """The number of cache slots of each row, given the longest prompt. Every forward pass attends to all of them.

    >>> slots_for(10, 64, 4), slots_for(10, 64, 4, compile=True)
    (79, 128)
    """
    slots = prompt + new_tokens + gamma + 1
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE if compile else slots


def _run_to_completion(batch: Batch, scheduler: Scheduler, timed: bool, progress: bool) -> Generation:
    """Makes steps until no prompt waits and every row has ended."""
    device = batch.state.tokens.device
    reader, timer = ProgressReader(batch), StepTimer(device)
    with tqdm(total=scheduler.expected, desc="tokens", delay=3, leave=False, disable=not progress) as bar:
        while True:
            if timed:
                timer.start()
                batch.step_in_parts(timer.mark)
                status = reader.read()
                timer.mark("rest")
            else:
                batch.step()
                status = reader.read()
            if status is None:
                continue
            require_no_nan(status)
            bar.update(scheduler.expected - scheduler.tokens_to_come(status) - bar.n)
            if scheduler.replace(status):
                reader.discard()
            elif not any(status):
                break
    rows = scheduler.completed_rows()
    probs = [row.probs for row in rows if row.probs is not None]
    return Generation([row.tokens for row in rows], merge_rows(rows, timer.seconds, batch.parents), probs or None)


def _needed_memory(
    target: PreTrainedModel,
    drafter: Drafter | None,
    rows: int,
    longest: int,
    slots: int,
    gamma: int,
    sampling: Sampling,
    keep_probs: bool,
) -> Memory:
    """`specnb.models.memory.predicted`, and the buffers for hidden states and distributions if they are asked for."""
    model = drafter.draft_model if drafter is not None else None
    new_tokens = slots - longest - gamma - 1
    need = predicted(target, model, rows=rows, prompt=longest, new_tokens=new_tokens, gamma=gamma, sampling=sampling)
    layers = len(drafter.hidden_layers) if drafter is not None and gamma else 0
    hidden = rows * slots * layers * target.config.hidden_size * target.dtype.itemsize if layers else 0
    probs = rows * (new_tokens + gamma + 1) * target.config.vocab_size * _probs_dtype(target).itemsize
    return replace(need, state=need.state + hidden + (probs if keep_probs else 0))


def _probs_dtype(target: PreTrainedModel) -> torch.dtype:
    """The dtype of the target's distributions."""
    return torch.float64 if target.dtype == torch.float64 else torch.float32


@lru_cache(maxsize=8)
def _compiled(
    batch_class: type[Batch],
    target: PreTrainedModel,
    draft: PreTrainedModel | Drafter | None,
    sampling: Sampling,
    rule: Rule | TreeRule,
    shape: tuple[int, int, int, int, int],
    how: bool | str,
    in_parts: bool,
) -> Batch:
    """A batch whose parts are compiled or captured. It is kept, because compiled code belongs to its tensors."""
    drafter = as_drafter(draft, sampling, compile=how is True)
    batch = batch_class(target, drafter, sampling, rule, *shape)
    if how is True:
        batch.wrap(Compiled, "target", "rest")
    if target.device.type == "cuda":
        _capture(batch, in_parts)
    return batch


def forget_compiled() -> None:
    """Forgets everything that was compiled or captured, and frees its memory."""
    _compiled.cache_clear()


def _capture(batch: Batch, in_parts: bool) -> None:
    """Captures the whole step as a graph, or its parts if they are timed or the drafter cannot be captured."""
    capturable = batch.drafter is None or batch.drafter.capturable
    if capturable and not in_parts:
        batch.wrap(Captured, "step")
    elif capturable and batch.drafter is not None:
        batch.wrap(Captured, "draft", "target", "rest")
    else:
        batch.wrap(Captured, "target", "rest")
