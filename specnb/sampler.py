"""`Sampler` decodes prompts speculatively, again and again; `generate` does so once.

A sampler owns what outlives a call: its private copy of the model's modules, caches, packed
weights, compiled layers, the captured graph, and the answer of its check. A call makes steps of a
batch (`specnb.step`) until every prompt has its completion. The host only reads how far the rows
are, and assigns the next prompt to a row that has ended. gamma = 0 is plain decoding of the target
in the same loop, and the baseline of every comparison.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.cache import cache_bytes, decoder_config, free_memory, require_hidden_layers
from specnb.check import Check, require_agreement
from specnb.distributions import Sampling, require_sampling
from specnb.drafters import Drafter, ModelDrafter, require_exact
from specnb.fast import Compile, PrivateModel
from specnb.loading import Pair, encoded
from specnb.ngram import PromptLookupDrafter
from specnb.number_checks import require_whole, shown, whole, whole_numbers
from specnb.record import CompletedRow, StepRecord, StepTimer, merge_rows
from specnb.rules import Rule, require_rule, token_verification
from specnb.step import IDLE, IMPROPER, NAN, Batch, Setup
from specnb.support import context_limit, require_same_vocabulary, require_supported, require_whole_head, vocabulary
from specnb.trees import node_depths

Draft = PreTrainedModel | Drafter | Literal["auto"] | None
Tokens = int | Collection[int] | None
Prompts = str | Collection[Any] | Mapping[str, Any]
Settings = ParamSpec("Settings")
Result = TypeVar("Result")

SLOT_MULTIPLE, LEAST_SLOTS, LEAST_EOS = 128, 512, 4  # of what is compiled or captured: few sizes
GB = 1e9
ELSEWHERE = {name: f"sampling=Sampling({name}=...)" for name in ("temperature", "top_k", "top_p", "min_p")} | {
    "do_sample": "sampling=Sampling(temperature=0) for argmax",
    "eos_token_id": "eos",
    "assistant_model": "draft",
    "num_assistant_tokens": "gamma",
    "prompt_lookup_num_tokens": "a PromptLookupDrafter as draft",
    "num_beams": "specnb.beam_search",
}


@dataclass(frozen=True)
class Hooks:
    """What is recorded, or replaced, to study the loop; nothing by default.

    timed        record the seconds of each part of a step; the host then waits for the device after
                 each part
    keep_probs   return the target's distribution of every new token: that many tokens times the
                 vocabulary
    trace        record p(x), q(x) and r of every draft token x, which `Generation.show` prints
    batch_class  what makes the steps, for a loop that differs from this one: a subclass of `Batch`,
                 the default. Known bugs are such classes

    >>> Hooks(timed=True)
    Hooks(timed=True, keep_probs=False, trace=False, batch_class=None)
    """

    timed: bool = False
    keep_probs: bool = False
    trace: bool = False
    batch_class: type[Batch] | None = None


@dataclass(frozen=True, repr=False)
class Generation:
    """What a call returns; printed, it is a few lines.

    tokens  the new tokens of each prompt
    record  what each step did
    probs   with `Hooks(keep_probs=True)`, the target's distributions `(len(tokens), vocab)` of each
            prompt's new tokens
    prompts the tokens of each prompt
    texts   the new tokens as text, if the sampler has a tokenizer
    tokenizer  that of the sampler

    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> made = generate(model, [[0], [1, 2]], draft=None, max_new_tokens=3)
    >>> [len(tokens) for tokens in made.tokens], made.record.target_passes.tolist()
    ([3, 3], [3, 3])
    >>> made
    2 completions, 6 tokens
    1.00 tokens per step in 6 steps of 2 rows; nothing drafted
    """

    tokens: list[list[int]]
    record: StepRecord
    probs: list[Tensor] | None = None
    prompts: list[list[int]] = field(default_factory=list)
    texts: list[str] | None = None
    tokenizer: Any = None

    def __repr__(self) -> str:
        lines = [f"{len(self.tokens)} completions, {sum(map(len, self.tokens))} tokens", str(self.record)]
        lines += [shown(text) for text in (self.texts or [])[:3]]
        return "\n".join(lines)

    def show(self, row: int, step: int) -> str:
        """What a step of a row drafted, accepted and emitted, to print: with `Hooks(trace=True)` also
        p, q and r of each draft token; see `StepRecord.show`."""
        text = str if self.tokenizer is None else lambda token: repr(self.tokenizer.decode([token]))
        return self.record.show(row, step, len(self.prompts[row]), text)

    def to_jsonl(self, file: str | Path) -> None:
        """Writes each prompt with its tokens, and how many of them each step emitted, as a line of
        JSON: what `specnb-audit audit` reads."""
        emitted = [[int(n) for n in row if n] for row in self.record.emitted]
        with Path(file).open("w", encoding="utf-8") as lines:
            for prompt, tokens, steps in zip(self.prompts, self.tokens, emitted, strict=True):
                lines.write(json.dumps({"prompt": prompt, "tokens": tokens, "steps": steps}) + "\n")


def named_settings(function: Callable[Settings, Result]) -> Callable[Settings, Result]:
    """`function`, whose `TypeError` for an argument that it has not says what stands for it.

    >>> named_settings(lambda target, sampling=None: sampling)("model", temperature=0.5)
    Traceback (most recent call last):
    TypeError: there is no argument temperature; give sampling=Sampling(temperature=...)
    """
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: Settings.args, **settings: Settings.kwargs) -> Result:
        for name in settings:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                known = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
                advice = f"give {ELSEWHERE[name]}" if name in ELSEWHERE else known
                raise TypeError(f"there is no argument {name}; {advice}")
        return function(*args, **settings)

    return checked


class Sampler:
    """Decode prompts with exactly the target's distribution, whatever the drafter.

    A sampler belongs to one thread; several samplers of one model may run in several threads. The
    models are never changed. If their weights are replaced, or changed where the sampler has copies
    of them, a call raises `RuntimeError`; everything else about a model and a rule (hooks,
    attributes, settings of theirs) is as it was when the sampler was made. Make another one to see
    such a change.

    Parameters
    ----------
    target
        A model of transformers, or a `Pair`, whose draft model and tokenizer are then used.
    draft
        A model, which is then sampled as `sampling` says, or any `Drafter`. "auto" copies from the
        text so far (`PromptLookupDrafter`) on a CPU, and is None on a GPU. With None, or
        `gamma` = 0, the target decodes alone. A draft model may have more or fewer tokens than the
        target: those of equal numbers should mean the same, as in a family whose embeddings are
        padded to several sizes.
    gamma
        Draft tokens per step. "auto" is what the drafter names: 4 for a model, 10 for copies, the
        size of a tree.
    sampling
        Temperature, top-k, top-p and min-p. The default is temperature 1.
    rule
        The acceptance rule. None is `token_verification` (Algorithm 1), for a tree with its
        recursion over siblings.
    compile
        "auto" does what is faster: on a CPU other products of linear layers, or compiled layers for
        a model in 16 bits that is large enough to gain (`specnb.fast`); on a GPU it captures the
        step as a graph. False runs the modules as they are. True compiles layers of any model, and
        captures on a GPU. "graph" captures only. Copies and compiled code change the last bits of
        the logits; a graph does not.
    check
        Compare what was done with the model's own forward passes: before the first step on a few
        tokens, after the first step of a new batch, and at the end of its shortest, its longest and
        its first refilled row (`specnb.check`). False for those who time.
    tokenizer
        Then prompts may be texts, and completions have texts.
    rows, slots
        Sequences and tokens of a sequence for which there is room from the first call on: calls up
        to these sizes then compile and capture nothing. By default room is made for each call.
    hooks
        What is recorded or replaced to study the loop.
    progress
        Show a progress bar after 3 seconds, and say what is compiled.

    Raises
    ------
    TypeError, ValueError
        For a model, drafter, rule or setting that the loop cannot run exactly, before anything is
        run.

    Examples
    --------
    >>> from specnb import load_pair
    >>> sampler = Sampler(load_pair(dtype="float64"), gamma=4, compile=False)
    >>> made = sampler.generate(["def area(", "import "], max_new_tokens=8, seed=1)
    >>> [len(tokens) for tokens in made.tokens], [type(text) for text in made.texts]
    ([8, 8], [<class 'str'>, <class 'str'>])
    """

    batch: Batch | None = None

    @named_settings
    def __init__(
        self,
        target: PreTrainedModel | Pair,
        draft: Draft = "auto",
        *,
        gamma: int | Literal["auto"] = "auto",
        sampling: Sampling = Sampling(),
        rule: Rule | None = None,
        compile: Compile = "auto",
        check: bool = True,
        tokenizer: Any = None,
        rows: int | None = None,
        slots: int | None = None,
        hooks: Hooks | None = None,
        progress: bool = True,
    ) -> None:
        if isinstance(target, Pair):
            draft = target.draft if isinstance(draft, str) and draft == "auto" else draft
            tokenizer, target = tokenizer or target.tokenizer, target.target
        require_sampling(sampling)
        _require_compile(compile, target)
        self.target, self.sampling, self.tokenizer = target, sampling, tokenizer
        self.hooks, self.progress = hooks or Hooks(), progress
        drafter = self.drafter_of(draft, compile)
        self.require_models(drafter)
        self.gamma = _gamma_of(gamma, drafter)
        self.drafter = drafter if self.gamma else None
        self.made_drafter = drafter is not draft  # whether its cache belongs to the batch of this sampler
        self.rule = _rule_for(rule, self.drafter)
        self.rows, self.slots = rows or 0, slots or 0
        self.compile = compile
        self.private = PrivateModel(target, compile)
        # A loop that differs is not compared: known bugs are such loops.
        self.check = Check(target, self.gamma) if check and self.hooks.batch_class is None else None
        self.checked = 0  # tokens of the longest sequence that was compared

    def drafter_of(self, draft: Draft, compile: Compile) -> Drafter | None:
        """The drafter that the argument `draft` stands for."""
        if isinstance(draft, str):
            if draft != "auto":
                raise ValueError(f'draft is {draft!r}; it must be "auto", a model, a Drafter or None')
            usable = isinstance(self.target, PreTrainedModel) and self.target.device.type == "cpu"
            return PromptLookupDrafter(vocabulary(self.target)) if usable else None
        if isinstance(draft, PreTrainedModel) and isinstance(self.target, PreTrainedModel):
            vocab = vocabulary(self.target)
            return ModelDrafter(draft, self.sampling, vocab=vocab, compile=compile, capturable=True)
        return draft  # anything else is refused

    def require_models(self, drafter: Drafter | None) -> None:
        """Raises `TypeError` or `ValueError` for models and drafters that the loop cannot run
        together."""
        require_models(self.target, drafter)

    @named_settings
    @torch.inference_mode()
    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 64,
        eos: Tokens = None,
        seed: int = 0,
        batch_size: int | None = None,
        numbers: Collection[int] | None = None,
    ) -> Generation:
        """Continue each prompt by `max_new_tokens` tokens, or up to and including a token of `eos`.

        Parameters
        ----------
        prompts
            Lists of tokens, an array or tensor of them, what a tokenizer returns, or with a
            tokenizer texts; one prompt or several. Padding is left out where the tokenizer's
            attention_mask says so, and refused where there is none.
        max_new_tokens
            Tokens of a completion, at most.
        eos
            A token that ends a completion, or several; none by default.
        seed
            A whole number from 0. The tokens of a prompt depend on it, on the prompt's number, the
            prompt and the settings, and not on the batch.
        batch_size
            How many prompts are generated at a time, all by default. When a sequence ends, the next
            prompt takes its row.
        numbers
            The numbers of the prompts, 0, 1, ... by default, so that one prompt can be generated
            again alone.

        Returns
        -------
        Generation
            Tokens, in the order of the prompts, and the record of every step.

        Raises
        ------
        TypeError
            If the check finds that the loop had other distributions than the model's own forward
            pass; then no tokens are returned. For prompts that are no tokens.
        ValueError
            For an empty prompt, tokens outside the vocabulary, a context beyond a model's limit, and
            a drafter whose proposal is not valid (see `Drafter.propose`).
        MemoryError
            If caches do not fit; it names a batch size that would.
        RuntimeError
            If the weights of a model were changed after the sampler was made.
        FloatingPointError
            If a token rests on NaN. It names the prompt, and its `finished` has the completions
            of the prompts that had ended.
        """
        given = self.token_lists(prompts)
        ends = as_list(eos)
        require_whole(max_new_tokens=(max_new_tokens, 1), seed=(seed, 0))
        max_new_tokens, seed = int(max_new_tokens), int(seed)
        require_tokens(given, ends, vocabulary(self.target))
        require_whole(batch_size=(len(given) if batch_size is None else batch_size, 1))
        longest = max(map(len, given))
        require_context(self.target, self.drafter, longest, max_new_tokens)
        own_numbers = _numbers_of(len(given), numbers)
        rows = len(given) if batch_size is None else min(int(batch_size), len(given))
        if rows < len(given) and self.drafter is not None and not self.drafter.can_refill:
            raise TypeError(
                f"{len(given)} prompts take turns in {rows} rows, and {type(self.drafter).__name__} cannot restart "
                "single rows (can_refill is False); leave batch_size out"
            )
        self.private.require_unchanged()
        batch = self._batch(rows, longest, max_new_tokens, len(ends))
        batch.clear(ends)
        call = _Call(self, batch, given, own_numbers, rows, max_new_tokens, seed)
        made = call.run(self.progress)
        texts = None if self.tokenizer is None else self.tokenizer.batch_decode(made.tokens)
        return replace(made, prompts=given, texts=texts, tokenizer=self.tokenizer)

    def token_lists(self, prompts: Any) -> list[list[int]]:
        """The tokens of each prompt; see `generate`."""
        return token_lists(prompts, padding_tokens(self.target), self.tokenizer)

    def _batch(self, rows: int, longest: int, max_new_tokens: int, eos: int) -> Batch:
        """The batch of the last call, if it has room, or a new one."""
        fast = self.private.compiled is not None or self._captures
        slots, steps = max(slots_for(longest, max_new_tokens, self.gamma), self.slots), max_new_tokens
        rows = max(rows, self.rows)
        if self.batch is not None:
            kept = self.batch.setup
            if kept.rows == rows and kept.slots >= slots and kept.steps >= steps and kept.eos >= eos:
                return self.batch
        # Freed before there is another; no graph of it holds the drafter's cache from here on.
        self.batch = None
        if self.made_drafter and isinstance(self.drafter, ModelDrafter):
            self.drafter.allocated = ()
        if fast:
            slots = -(-max(slots, LEAST_SLOTS) // SLOT_MULTIPLE) * SLOT_MULTIPLE
        if fast or self.slots:
            steps, eos = slots, max(eos, LEAST_EOS)
        setup = Setup(
            self.private.modules, self.drafter, self.gamma, rows, slots, steps, sampling=self.sampling, rule=self.rule,
            eos=eos, keep_probs=self.hooks.keep_probs, log_probs=self.check is not None,
            two_widths=self.private.compiled is not None, trace=self.hooks.trace,
        )  # fmt: skip
        require_memory(setup)
        if self.check is not None:
            tree = self.drafter is not None and self.drafter.parents is not None
            require_agreement(self.target, self.private.modules, longest, longest + max_new_tokens, slots, tree)
        batch = (self.hooks.batch_class or Batch)(setup)
        self._prepare(batch)
        self.batch, self.checked = batch, 0
        return batch

    @property
    def _captures(self) -> bool:
        return self.target.device.type == "cuda" and self.compile is not False

    def _prepare(self, batch: Batch) -> None:
        """Compiles the layers for the widths of `batch`, or captures its step."""
        if self.private.compiled is None and not self._captures:
            return
        if self.private.compiled is not None:
            self.private.compiled.widths |= frozenset(width + 1 for width in batch.widths)
        if self._captures:
            batch.capture(self.hooks.timed)
        doing = "capturing a step" if self._captures else "compiling a layer, some seconds once"
        with tqdm(total=1, desc=doing, leave=False, disable=not self.progress, delay=1) as bar:
            batch.warm_up()
            bar.update()


class _Call:
    """One call of `Sampler.generate`: which prompt has which row, and what is still to be compared.

    Continuous batching: a row whose sequence has ended takes the next waiting prompt.
    """

    def __init__(
        self, sampler: Sampler, batch: Batch, prompts: list[list[int]], numbers: Sequence[int], rows: int,
        max_new_tokens: int, seed: int,
    ) -> None:  # fmt: skip
        self.sampler, self.batch, self.prompts, self.numbers = sampler, batch, prompts, numbers
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.ended: dict[int, CompletedRow] = {}
        self.entered = 0  # prompts that have, or had, a row
        self.prompt_of: dict[int, int] = {}
        lengths = list(map(len, prompts))
        self.longest = max(lengths) + max_new_tokens
        # A batch is compared when it is new, and again when sequences are twice as long.
        new = sampler.check is not None and self.longest > 2 * sampler.checked
        self.to_compare = set[int]()
        if new:
            self.to_compare = {lengths.index(min(lengths)), lengths.index(max(lengths)), min(rows, len(prompts) - 1)}
        self._enter(list(range(rows)))

    def run(self, progress: bool) -> Generation:
        """Makes steps until no prompt waits and every row has ended."""
        batch, hooks = self.batch, self.sampler.hooks
        reader, timer = ProgressReader(batch), StepTimer(batch.state.tokens.device)
        expected = len(self.prompts) * self.max_new_tokens
        first = bool(self.to_compare)
        with tqdm(total=expected, desc="tokens", delay=3, leave=False, disable=not progress) as bar:
            while True:
                if hooks.timed:
                    timer.start()
                    batch.step(timer.mark)
                    status = reader.read()
                    timer.mark("rest")
                else:
                    batch.step()
                    status = reader.read()
                if first:
                    self._compare_step()
                    first = False
                if status is None:
                    continue
                self._require_proper(status)
                waiting = (len(self.prompts) - self.entered) * self.max_new_tokens
                bar.update(max(expected - sum(status) - waiting - bar.n, 0))
                if entered := self._replace(status):
                    reader.entered(entered)
                elif not any(status):
                    break
        self._collect(list(self.prompt_of))
        if self.to_compare:
            self.sampler.checked = self.longest
        rows = [self.ended[number] for number in range(len(self.prompts))]
        probs = [row.probs for row in rows if row.probs is not None]
        return Generation([row.tokens for row in rows], merge_rows(rows, timer.seconds, batch.parents), probs or None)

    def _compare_step(self) -> None:
        """Compares the logits of the step that was just made with the model's own."""
        assert self.sampler.check is not None
        assert self.batch.last is not None
        draft_tokens, logits = self.batch.last
        for row, number in self.prompt_of.items():
            if number in self.to_compare:
                drafted = draft_tokens[row].clamp_max(self.batch.vocab - 1).tolist()
                self.sampler.check.first_step(
                    self.prompts[number], drafted, logits[row], self.batch.parents, self.max_new_tokens - 1
                )

    def _replace(self, status: Sequence[int]) -> list[int]:
        """Assigns waiting prompts to rows that have ended; returns these rows."""
        waiting = len(self.prompts) - self.entered
        rows = [row for row in self.prompt_of if status[row] == IDLE][:waiting]
        if rows:
            self._collect(rows)
            self._enter(rows)
        return rows

    def _enter(self, rows: list[int]) -> None:
        chosen = range(self.entered, self.entered + len(rows))
        self.entered += len(rows)
        self.prompt_of.update(zip(rows, chosen, strict=True))
        own = self.batch.uniforms(self.seed, [self.numbers[one] for one in chosen], self.max_new_tokens)
        self.batch.enter(rows, [self.prompts[one] for one in chosen], own, self.max_new_tokens)

    def _collect(self, rows: list[int]) -> None:
        completed = self.batch.state.completed_rows(rows)
        for row, one in zip(rows, completed, strict=True):
            number = self.prompt_of.pop(row)
            self.ended[number] = one
            if number in self.to_compare:
                assert self.sampler.check is not None
                assert one.log_probs is not None
                self.sampler.check.completion(self.prompts[number], one.tokens, one.log_probs)

    def _require_proper(self, status: Sequence[int]) -> None:
        """Raises `FloatingPointError` if a token rests on NaN, `ValueError` if a drafter's token or q
        was improper."""
        if IMPROPER in status:
            raise ValueError(
                "a drafter proposed a token outside the vocabulary, or a q that is no distribution: q must be 0 or "
                "more everywhere, above 0 at the draft token, and sum to 1 for each, and to 0 where the token is -1; "
                "see Drafter.propose"
            )
        if NAN in status:
            self._collect([row for row in self.prompt_of if status[row] == IDLE])
            wrong = [number for row, number in self.prompt_of.items() if status[row] == NAN]
            error = FloatingPointError(
                f"a model produced NaN, or a row without a finite logit, for prompt {wrong[0]}: try another dtype, or "
                f"look at its weights; the completions of {len(self.ended)} prompts that ended are in its `finished`"
            )
            error.finished = {number: row.tokens for number, row in self.ended.items()}  # type: ignore[attr-defined]
            raise error


class ProgressReader:
    """Reads `State.status`: on the CPU at once, on a CUDA device one step late, so that the host
    does not wait for the step in progress."""

    def __init__(self, batch: Batch) -> None:
        self.state = batch.state
        self.ahead = batch.state.tokens.is_cuda
        self.pending: tuple[Tensor, torch.cuda.Event] | None = None
        self.new: list[int] = []  # rows whose status on its way is that of their last sequence

    def read(self) -> list[int] | None:
        """The status of each row; None if none has arrived yet."""
        if not self.ahead:
            return self.state.status.tolist()
        before, status = self.pending, self.state.status
        copy = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
        copy.copy_(status, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self.pending = (copy, done)
        if before is None:
            return None
        before[1].synchronize()
        found: list[int] = before[0].tolist()
        for row in self.new:
            found[row] = 1  # it has begun, so it has not ended
        self.new = []
        return found

    def entered(self, rows: list[int]) -> None:
        """New sequences have begun in `rows`."""
        self.new = rows


@named_settings
def generate(
    target: PreTrainedModel | Pair,
    prompts: Prompts,
    draft: Draft = "auto",
    *,
    gamma: int | Literal["auto"] = "auto",
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    rule: Rule | None = None,
    eos: Tokens = None,
    seed: int = 0,
    batch_size: int | None = None,
    numbers: Collection[int] | None = None,
    compile: Compile = False,
    check: bool = True,
    tokenizer: Any = None,
    hooks: Hooks | None = None,
    progress: bool = True,
) -> Generation:
    """Continue each prompt with a `Sampler` that is made for this one call, by default without
    packing or compiling.

    The arguments are those of `Sampler` and of `Sampler.generate`. Whoever generates several times,
    or asks how fast it is, makes a `Sampler`.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2)
    >>> target, draft = (LlamaForCausalLM(config).eval() for _ in range(2))
    >>> made = generate(target, [[0, 1], [2]], draft, gamma=2, max_new_tokens=6)
    >>> [len(tokens) for tokens in made.tokens]
    [6, 6]
    """
    sampler = Sampler(
        target, draft, gamma=gamma, sampling=sampling, rule=rule, compile=compile, check=check, tokenizer=tokenizer,
        hooks=hooks, progress=progress,
    )  # fmt: skip
    return sampler.generate(
        prompts, max_new_tokens=max_new_tokens, eos=eos, seed=seed, batch_size=batch_size, numbers=numbers
    )


def token_lists(prompts: Any, padding: Collection[int] = (), tokenizer: Any = None) -> list[list[int]]:
    """The tokens of each prompt, as lists.

    Parameters
    ----------
    prompts
        One prompt or several: texts, where there is a `tokenizer`; lists, arrays or tensors of
        tokens; what a tokenizer returns, of which the attention_mask leaves some tokens.
    padding
        Tokens that pad prompts where no mask says so.
    tokenizer
        What makes tokens of texts: begin tokens are what it does, and there is no second one where
        a text, such as that of a chat template, begins with one.

    Raises
    ------
    TypeError
        For anything else.
    ValueError
        Where some prompts, but not all, begin or end with a token of `padding`: in a tensor or an
        array, and in equally long lists with two or more of it; for a mask that is not 0 and 1.

    Examples
    --------
    >>> token_lists(torch.tensor([[1, 2]])), token_lists([1, 2])
    ([[1, 2]], [[1, 2]])
    >>> token_lists({"input_ids": [[0, 1], [2, 3]], "attention_mask": [[0, 1], [1, 1]]})
    [[1], [2, 3]]
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        if (mask := prompts.get("attention_mask")) is None:
            return token_lists(prompts["input_ids"], padding)
        return _unpadded(token_lists(prompts["input_ids"]), mask)
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Collection) or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(f"prompts is {shown(prompts)}; it must be a list of prompts, each a list of tokens or a text")
    single = whole_numbers(prompts)
    if single:
        return [single]
    lists = [_token_list(number, prompt, tokenizer) for number, prompt in enumerate(prompts)]
    if len({len(tokens) for tokens in lists}) == 1:
        for token in padding:
            _require_no_padding(lists, token, least=1 if hasattr(prompts, "shape") else 2)
    return lists


def _token_list(number: int, prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(
                f"prompt {number} is the text {shown(prompt)}; give a tokenizer, Sampler(..., tokenizer=...), or tokens"
            )
        return encoded(tokenizer, prompt)
    tokens = whole_numbers(prompt)
    if tokens is None:
        raise TypeError(f"prompt {number} is {shown(prompt)}; each prompt is a list of tokens, which are whole numbers")
    return tokens


def _unpadded(lists: list[list[int]], mask: Any) -> list[list[int]]:
    rows = mask.tolist() if hasattr(mask, "tolist") else list(mask)
    kept = rows if rows and isinstance(rows[0], Sequence) else [rows]
    if not all(value in (0, 1) for row in kept for value in row):
        raise ValueError(f"attention_mask is {shown(mask)}; it must hold 0 and 1")
    if list(map(len, kept)) != list(map(len, lists)):
        raise ValueError(
            "input_ids and attention_mask of the prompts differ in shape; give both from one tokenizer call"
        )
    return [[token for token, keep in zip(*pair, strict=True) if keep] for pair in zip(lists, kept, strict=True)]


def _require_no_padding(lists: list[list[int]], padding: int, least: int) -> None:
    """A model would read the padding of rows that a tokenizer has made equally long, as if it were
    text."""
    for end, some in (("begins", slice(least)), ("ends", slice(-least, None))):
        padded = [number for number, tokens in enumerate(lists) if tokens[some] == [padding] * least]
        if 0 < len(padded) < len(lists):
            raise ValueError(
                f"prompt {padded[0]} {end} with the padding token {padding}, which the model "
                "would read; give what the tokenizer returned, with its attention_mask, or lists without padding"
            )


def padding_tokens(model: Any) -> set[int]:
    """The token that pads the prompts of `model`; where its configuration names none, those that
    tokenizers take instead, which end a text."""
    named = model.config.get_text_config()
    for given in (getattr(named, "pad_token_id", None), getattr(model.generation_config, "pad_token_id", None)):
        if given is not None:
            return set(as_list(given))
    return set(as_list(getattr(named, "eos_token_id", None)))


def as_list(eos: Any) -> list[int]:
    """No token, one, or several, as a list. Raises `TypeError` for anything else.

    >>> as_list(None), as_list(3), as_list((3, 4))
    ([], [3], [3, 4])
    """
    if eos is None:
        return []
    one = whole(eos)
    tokens = [one] if one is not None else whole_numbers(list(eos) if isinstance(eos, Set) else eos)
    if tokens is None:
        raise TypeError(f"eos is {shown(eos)}; it must be a token, which is a whole number, a list of tokens, or None")
    return tokens


def slots_for(prompt: int, new_tokens: int, gamma: int) -> int:
    """The cache slots of a row that its longest prompt needs.

    >>> slots_for(10, 64, 4)
    79
    """
    return prompt + new_tokens + gamma + 1


def require_models(target: PreTrainedModel, drafter: Drafter | None) -> None:
    """Models that the loop can run, on one device and with one vocabulary; a `Drafter`."""
    require_supported(target)
    require_whole_head(target)
    if target.device.type not in ("cpu", "cuda"):
        raise ValueError(f"the target is on {target.device}; the loop runs on cpu and cuda: move it, target.to('cpu')")
    if drafter is None:
        return
    if not isinstance(drafter, Drafter):
        raise TypeError(f'draft is {shown(drafter)}; it must be a model of transformers, a Drafter, "auto" or None')
    node_depths(drafter.parents or ())  # raises for parents that are no tree
    require_hidden_layers(target, drafter.hidden_layers)
    require_same_vocabulary(target, type(drafter).__name__, drafter.vocab)
    model = drafter.draft_model
    if model is not None and model.device != target.device:
        raise ValueError(f"the target is on {target.device} and the draft on {model.device}; move one of them")


def require_tokens(prompts: Sequence[Sequence[int]], eos: Sequence[int], vocab: int) -> None:
    """At least one prompt, none empty, and all tokens in the vocabulary."""
    if not prompts:
        raise ValueError("there are no prompts; give at least one list of tokens")
    for name, tokens in (("eos", eos), *((f"prompt {number}", prompt) for number, prompt in enumerate(prompts))):
        if not len(tokens) and name != "eos":
            raise ValueError(f"{name} is empty; give at least one token, such as the begin-of-text token")
        for token in tokens:
            if not 0 <= token < vocab:
                raise ValueError(f"{name} has the token {token}; the vocabulary has the tokens 0 to {vocab - 1}")


def require_context(target: PreTrainedModel, drafter: Drafter | None, longest: int, max_new_tokens: int) -> None:
    """Enough positions in both models."""
    needed = longest + max_new_tokens
    for model in (target, drafter.draft_model if drafter is not None else None):
        limit = context_limit(model) if model is not None else None
        if limit is not None and needed > limit:
            raise ValueError(
                f"a prompt of {longest} and {max_new_tokens} new tokens need {needed} positions, and "
                f"{type(model).__name__} has {limit}; shorten the prompt or ask for fewer tokens"
            )


def require_memory(setup: Setup) -> None:
    """Raises `MemoryError`, naming the batch size that would fit, if caches and state are more than
    what is free.

    Hidden states and distributions count where they are kept. What a forward pass needs besides
    does not.
    """
    target, drafter, slots = setup.target, setup.drafter, setup.slots
    row = slots * cache_bytes(target) + 8 * (slots + (setup.steps + 1) * (4 * setup.gamma + 4))
    if drafter is not None:
        row += slots * len(drafter.hidden_layers) * decoder_config(target).hidden_size * target.dtype.itemsize
        row += slots * cache_bytes(drafter.draft_model) if drafter.draft_model is not None else 0
    row += 8 * (setup.steps + 1) * 3 * setup.gamma * setup.trace
    if setup.keep_probs:
        row += (setup.steps + setup.gamma + 1) * vocabulary(target) * setup.probs_dtype.itemsize
    free = free_memory(target.device)
    if setup.rows * row > free:
        fitting = free // row
        advice = f"batch_size={fitting} would fit" if fitting else "not even one row fits; ask for fewer tokens"
        raise MemoryError(
            f"{setup.rows} rows need {setup.rows * row / GB:.3g} GB for caches and state, and {target.device} has "
            f"{free / GB:.3g} GB left: {advice}"
        )


def _numbers_of(prompts: int, numbers: Collection[int] | None) -> Sequence[int]:
    if numbers is None:
        return range(prompts)
    if len(numbers) != prompts:
        raise ValueError(f"there are {prompts} prompts and {len(numbers)} numbers; each prompt has one")
    for number in numbers:
        require_whole(numbers=(number, 0))
    return [int(number) for number in numbers]


def _gamma_of(gamma: Any, drafter: Drafter | None) -> int:
    """Draft tokens of a step."""
    nodes = None if drafter is None or drafter.parents is None else len(drafter.parents)
    if isinstance(gamma, str) and gamma == "auto":
        return 0 if drafter is None else drafter.gamma if nodes is None else nodes
    require_whole(gamma=(gamma, 0))
    if drafter is None:
        return 0
    if nodes is not None and gamma not in (0, nodes):
        raise ValueError(
            f"gamma is {gamma}, and the tree of {type(drafter).__name__} has {nodes} nodes; give gamma={nodes}, or 0 "
            "to decode without draft tokens"
        )
    return int(gamma)


def _rule_for(rule: Any, drafter: Drafter | None) -> Any:
    """`rule`, or for None the exact default, `token_verification`; its recursion over siblings is
    that for trees."""
    if rule is None:
        return token_verification
    require_rule(rule, with_tree=drafter is not None and drafter.parents is not None)
    if drafter is not None and drafter.parents is not None and drafter.scheme is not None:
        require_exact(rule, drafter.scheme, drafter.parents)
    return rule


def _require_compile(compile: Any, target: Any) -> None:
    if not isinstance(compile, bool) and compile not in ("auto", "graph"):
        raise ValueError(f'compile is {shown(compile)}; it must be False, True, "auto" or "graph"')
    if compile == "graph" and target.device.type != "cuda":
        raise ValueError(f"a graph needs a CUDA device, and the target is on {target.device}; leave compile out")
