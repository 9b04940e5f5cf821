"""`generate`: the decoding loop. Makes steps of a batch until every prompt has its completion.

A step drafts, verifies and emits for all rows at once (`specnb.step`). The host only reads
how far the rows are, and assigns the next prompt to a row that has ended. gamma = 0 is plain
decoding of the target in the same loop, and the baseline of every comparison.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decoding.auto_gamma import Auto
from specnb.distributions import Sampling
from specnb.fast import Captured, Compiled
from specnb.models.known import known_of, one_at_a_time
from specnb.record import StepRecord, StepTimer, merge_rows
from specnb.rules import Rule
from specnb.sampler import (
    Draft,
    ProgressReader,
    Request,
    Scheduler,
    Tokens,
    as_drafter,
    as_list,
    named_settings,
    padding_tokens,
    require_memory,
    require_no_nan,
    token_lists,
)
from specnb.step import Batch

COMPILED_SETTINGS = 8  # so many compiled batches are kept, each with its own weights
COMPILED = "compiled"  # whether code was compiled for a model as it is


@dataclass(frozen=True)
class Hooks:
    """What is recorded, or replaced, to study the loop of `generate`; nothing by default.

    rows         numbers of the prompts in place of 0, 1, ... The tokens of a prompt depend on the
                 seed, its number, the prompt and the settings, and not on the batch, so one prompt
                 can be generated again alone
    timed        record the seconds of each part of a step; the host then waits for the device after
                 each part
    keep_probs   return the target's distribution of every new token: that many tokens times the
                 vocabulary
    batch_class  what makes the steps, for a loop that differs from this one: a subclass of `Batch`,
                 the default. Known bugs are such classes (`specnb_audit.bugs.loop`)

    >>> Hooks(rows=[3], timed=True)
    Hooks(rows=[3], timed=True, keep_probs=False, batch_class=None)
    """

    rows: Collection[int] | None = None
    timed: bool = False
    keep_probs: bool = False
    batch_class: type[Batch] | None = None


@dataclass(frozen=True)
class Generation:
    """What a call of `generate` returns.

    tokens  the new tokens of each prompt
    record  what each step did
    probs   with `Hooks(keep_probs=True)`, the target's distributions `(len(tokens), vocab)` of each
            prompt's new tokens
    prompts the tokens of each prompt

    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> made = generate(model, [[0], [1, 2]], draft=None, max_new_tokens=3)
    >>> [len(tokens) for tokens in made.tokens], made.record.target_passes.tolist()
    ([3, 3], [3, 3])
    """

    tokens: list[list[int]]
    record: StepRecord
    probs: list[Tensor] | None = None
    prompts: list[list[int]] = field(default_factory=list, repr=False)

    def to_jsonl(self, file: str | Path) -> None:
        """Writes each prompt with its tokens, and how many of them each step emitted, as a line of
        JSON: what `specnb-audit audit` reads."""
        emitted = [[int(n) for n in row if n] for row in self.record.emitted]
        with Path(file).open("w", encoding="utf-8") as lines:
            for prompt, tokens, steps in zip(self.prompts, self.tokens, emitted, strict=True):
                lines.write(json.dumps({"prompt": prompt, "tokens": tokens, "steps": steps}) + "\n")


@named_settings
@one_at_a_time
@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    prompts: Collection[Collection[int]] | Mapping[str, Any],
    draft: Draft = "auto",
    *,
    gamma: int | Literal["auto"] | Auto = "auto",
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    rule: Rule | None = None,
    eos: Tokens = None,
    seed: int = 0,
    batch_size: int | None = None,
    compile: bool | str = False,
    progress: bool = True,
    hooks: Hooks = Hooks(),
) -> Generation:
    """Continues each prompt by `max_new_tokens` tokens, or up to and including a token of `eos`.

    Calls from several threads wait for each other. The models may be changed between calls.

    prompts     lists of tokens, an array or tensor of them, or what a tokenizer returns. Padding is
                left out where the tokenizer's attention_mask says so, and refused where there is
                none
    draft       a model, which is then sampled as `sampling` says, or any `Drafter`. "auto", the
                default, is a `PromptLookupDrafter`, which copies from the text so far: no model,
                and nothing is drafted where nothing is to be copied. With None, or `gamma` = 0, the
                target decodes alone. A model may have more or fewer tokens than the target: those
                of equal numbers should mean the same, as in a family whose embeddings are padded to
                several sizes
    gamma       draft tokens per step. The number of nodes if the drafter proposes a tree. For a
                chain, a gamma above both `max_new_tokens` - 1 and 32
                (`request.LARGEST_SPARE_GAMMA`) is reduced to the larger of these. "auto" chooses it
                for each row before each step, 0 to 10, by costs that follow from the models' sizes;
                `Auto(costs=...)` by others, such as measured ones. With `compile=True` it is 0 or
                4, or as many as there are costs; with "graph" one of 0, 1, 2, 4, 8. Where steps
                cannot differ in width (a tree, a drafter that reads hidden states, a compiled draft
                model, a `batch_class`) both stand for 4, the tree's size, or what the drafter names
                (`Drafter.usual`). On a GPU the choice knows all steps but the last, and "auto" is 4
                for a draft model: a batch pays for its widest row. `Auto(...)` chooses there, too,
                at least one token
    rule        the acceptance rule. None is `token_verification` (Algorithm 1), for a tree with its
                recursion over siblings: then completions have exactly the target's distribution,
                whatever the drafter
    seed        a whole number from 0. The tokens of a prompt depend on it, on the prompt's number
                (0, 1, ...), the prompt and the settings, and not on the batch
    batch_size  how many prompts are generated at a time, all by default. When a sequence ends, the
                next prompt takes its row. Results are in the order of the prompts
    compile     True compiles the parts of a step first: half a minute or more for a new number of
                rows, gamma or length (in steps of 128), some seconds for another sampling, rule or
                drafter. The last bits of the logits change. The last eight settings stay in memory
                until `forget_compiled`, or until a model is changed. On a CUDA device the step is
                also captured as a graph; "graph" does only that, with the same tokens as the plain
                step
    progress    show a progress bar after 3 seconds
    hooks       what is recorded or replaced to study the loop: times, distributions, numbers of the
                prompts, the step

    Raises, before anything is run, `ValueError` or `TypeError` for what `Request` refuses: no
    prompts, an empty prompt, tokens outside the vocabulary, numbers out of range, an invalid
    `sampling`, `rule` or `compile`, a rule that is not exact for the drafter's tree
    (`specnb.rules.PlannedRule.schemes`), a context beyond a model's limit, different vocabularies
    or devices, an encoder-decoder, and another model, cache or drafter that the loop cannot run;
    `MemoryError`, naming a batch size that would fit; `RuntimeError` for `compile` without a
    compiler. Raises during generation `FloatingPointError` for a model that produces NaN,
    `ValueError` or `TypeError` for a drafter whose proposal is not valid (see `Drafter.propose`),
    and `TypeError` for a rule that returns no `Outcome`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2)
    >>> target, draft = (LlamaForCausalLM(config).eval() for _ in range(2))
    >>> made = generate(target, [[0, 1], [2]], draft, gamma=2, max_new_tokens=6)
    >>> [len(tokens) for tokens in made.tokens]
    [6, 6]
    """
    drafter = as_drafter(draft, sampling, target, compile=compile is True)
    numbers: Any = () if hooks.rows is None else hooks.rows
    make = hooks.batch_class or Batch
    request = make.request_class(
        target, token_lists(prompts, padding_tokens(target)), drafter, gamma=gamma, max_new_tokens=max_new_tokens,
        sampling=sampling, rule=rule, eos=as_list(eos), seed=seed, batch_size=batch_size, compile=compile,
        numbers=numbers, keep_probs=hooks.keep_probs, one_width=hooks.batch_class is not None,
    )  # fmt: skip
    if compile:
        batch = _compiled(request, draft, make, hooks.timed and target.device.type == "cuda", progress)
    else:
        batch = _made(request, make)
    batch.clear(request.eos)
    made = _run_to_completion(batch, Scheduler(request, batch), hooks.timed, progress)
    return replace(made, prompts=[list(prompt) for prompt in request.prompts])


def _made(request: Request, make: type[Batch]) -> Batch:
    require_memory(request)
    request.require_agreement()
    return make(request)


def _run_to_completion(batch: Batch, scheduler: Scheduler, timed: bool, progress: bool) -> Generation:
    """Makes steps until no prompt waits and every row has ended."""
    device = batch.state.tokens.device
    reader, timer = ProgressReader(batch), StepTimer(device)
    with tqdm(total=scheduler.expected, desc="tokens", delay=3, leave=False, disable=not progress) as bar:
        while True:
            if timed:
                timer.start()
                batch.choose()
                batch.step_in_parts(timer.mark)
                status = reader.read()
                timer.mark("rest")
            else:
                batch.choose()
                batch.step()
                status = reader.read()
            if status is None:
                continue
            batch.learn(status)
            remaining = status[:, 0].tolist()
            require_no_nan(remaining)
            bar.update(max(scheduler.expected - scheduler.tokens_to_come(remaining) - bar.n, 0))
            if entered := scheduler.replace(remaining):
                reader.entered(entered)
            elif not any(remaining):
                break
    rows = scheduler.completed_rows()
    probs = [row.probs for row in rows if row.probs is not None]
    return Generation([row.tokens for row in rows], merge_rows(rows, timer.seconds, batch.parents), probs or None)


_kept: OrderedDict[tuple[Any, ...], Batch] = OrderedDict()


def _compiled(request: Request, draft: Draft, make: type[Batch], in_parts: bool, progress: bool) -> Batch:
    """A batch whose parts are compiled or captured. It is kept, because compiled code belongs to
    its tensors, for as long as its models are not changed."""
    sizes = (request.rows, request.gamma, request.slots, len(request.eos))
    settings = (_key(draft), request.sampling, _key(request.rule), request.auto, request.compile, in_parts)
    key = (make, request.target, *settings, sizes)
    _forget_changed(_models(request))
    if key not in _kept:
        batch = _made(request, make)
        if request.compile is True:
            _compile(batch)
        if request.target.device.type == "cuda":
            _capture(batch, in_parts)
        batch.warm_up(progress)
        _kept[key] = batch
        if len(_kept) > COMPILED_SETTINGS:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]


def _models(of: Request | Batch) -> list[PreTrainedModel]:
    target = of.target if isinstance(of, Request) else of.runner.model
    draft = None if of.drafter is None else of.drafter.draft_model
    return [target] if draft is None else [target, draft]


def _forget_changed(models: list[PreTrainedModel]) -> None:
    """Forgets the batches of those `models` that were changed since something was compiled for
    them."""
    for model in models:
        if not (known := known_of(model)).get(COMPILED):
            for key in [key for key, batch in _kept.items() if any(model is each for each in _models(batch))]:
                del _kept[key]
            known[COMPILED] = True


def _key(part: Any) -> Any:
    """`part`, a drafter or a rule, or its number if it cannot be a key, as a plain dataclass
    cannot."""
    try:
        hash(part)
    except TypeError:
        return id(part)
    return part


def _compile(batch: Batch) -> None:
    """Compiles a step, but not the target's pass if a kept batch has the same one: then both share
    it and its cache."""
    shareable = type(batch).run_target is Batch.run_target
    compiled = partial(Compiled, dtype=batch.runner.model.dtype)
    batch.wrap(compiled, "rest", *([] if shareable else ["target"]))
    kept = [other for other in _kept.values() if shareable and isinstance(other.target_pass, Compiled)]
    same = [other for other in kept if _pass(other) == _pass(batch)]
    if same:
        batch.runner, batch.target_pass = same[0].runner, same[0].target_pass
    elif shareable:
        batch.target_pass = compiled(batch.target_pass, growing=True)


def _pass(batch: Batch) -> tuple[Any, ...]:
    runner = batch.runner
    return type(runner), runner.model, runner.capacity, len(batch.state.rows), runner.hidden_layers, batch.parents


def forget_compiled() -> None:
    """Forgets everything that was compiled or captured, and frees its memory."""
    _kept.clear()


def _capture(batch: Batch, in_parts: bool) -> None:
    """Captures the whole step as a graph, or its parts if they are timed or the drafter cannot be
    captured."""
    capturable = batch.drafter is None or batch.drafter.capturable
    if capturable and not in_parts:
        batch.wrap(Captured, "step")
    elif capturable and batch.drafter is not None:
        batch.wrap(Captured, "draft", "target", "rest")
    else:
        batch.wrap(Captured, "target", "rest")
