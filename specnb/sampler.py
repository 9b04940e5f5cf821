"""`Sampler` decodes prompts speculatively, again and again; `generate` does so once.

A call makes steps of a batch (`specnb.step`); when a row ends, the next prompt takes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, NoReturn

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.arguments import require_whole, shown, whole_numbers
from specnb.cache import LEAST_SLOTS, slots_for
from specnb.check import Check, Comparison
from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling, require_sampling
from specnb.drafters import Drafter, ModelDrafter, require_exact
from specnb.fast import Compile, PrivateModel, has_code_of_its_own
from specnb.loading import Pair
from specnb.prompts import Prompts, Tokens, as_list, require_tokens, texts_of, token_lists
from specnb.record import CompletedRow, Generation, StepTimer, merge_rows
from specnb.rules import Rule, token_verification
from specnb.step import IDLE, IMPROPER, NAN_IN_P, NAN_IN_Q, Batch, ProgressReader, Setup, require_memory
from specnb.support import require_context, require_same_vocabulary, require_supported, require_whole_head, vocabulary
from specnb.trees import node_depths

Draft = PreTrainedModel | Drafter | Literal["auto"] | None
# Of a sampler, because its batches keep them
FIXED = ("target", "drafter", "gamma", "sampling", "rule", "compile")

SLOT_MULTIPLE, LEAST_EOS = 128, 4  # few sizes are compiled or captured


@dataclass(frozen=True)
class Instruments:
    """What to record or replace to study the loop.

    Attributes
    ----------
    timed
        Record the seconds of each part of a step; the host then waits after each part.
    keep_probs
        Return the target's distribution of every new token.
    trace
        Record p(x), q(x) and r of every draft token x, which `Generation.show` prints.
    batch_class
        A subclass of `Batch` to make the steps, such as a known bug; it is not compared with the model.

    Examples
    --------
    >>> Instruments(timed=True).trace
    False
    """

    timed: bool = False
    keep_probs: bool = False
    trace: bool = False
    batch_class: type[Batch] | None = None


class Sampler:
    """Decode with exactly the target's distribution, whatever the drafter.

    A sampler owns what outlives a call: a copy of the model's modules that shares the weights, caches,
    packed weights, compiled layers and the captured graph. It makes one call at a time; several
    samplers of one model may run in several threads. After a change of the model make another one: the
    next call raises an error only if the change shows in a few tokens.

    Parameters
    ----------
    target
        A model of transformers, or a `Pair`.
    draft
        A model, sampled as `sampling` says, or any `Drafter`; None for the target alone. "auto" is the
        draft of a `Pair`; with a model alone it copies from the text so far (`PromptLookupDrafter`) on a
        CPU, and is None on a GPU. Tokens of equal numbers should mean the same to both models.
    gamma
        Draft tokens per step; 0 is plain decoding. "auto" is the drafter's choice: 4 for a model,
        10 for copies, the size of a tree.
    rule
        The acceptance rule, by default `token_verification`.
    compile
        "auto": on a CPU packs weights (`specnb.fast`); on a GPU captures the step as a graph. True
        compiles layers, too. Packing and compiling change the last bits of the logits.
    check
        Compare the loop with the model's own forward passes (`specnb.check`).
    tokenizer
        With one, prompts may be texts, and completions have texts, without end tokens.
    rows, slots
        Room for so many sequences, of so many tokens and gamma + 1 more: calls up to these sizes
        compile and capture once.
    progress
        Show progress bars, and say what is compiled.

    Raises
    ------
    TypeError, ValueError
        For a model, drafter, rule or setting that the loop cannot run exactly.

    Examples
    --------
    >>> from specnb import load_pair
    >>> sampler = Sampler(load_pair(dtype="float64"), gamma=4, compile=False)
    >>> generation = sampler.generate(["def area(", "import "], max_new_tokens=8, seed=1)
    >>> [len(tokens) for tokens in generation.tokens]
    [8, 8]
    """

    batch: Batch | None = None

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
        instruments: Instruments | None = None,
        progress: bool = True,
    ) -> None:
        if isinstance(target, Pair):
            draft = target.draft if isinstance(draft, str) and draft == "auto" else draft
            tokenizer, target = tokenizer or target.tokenizer, target.target
        require_sampling(sampling)
        self.target, self.sampling, self.tokenizer = target, sampling, tokenizer
        self.instruments, self.progress, self.in_a_call = instruments or Instruments(), progress, Lock()
        drafter = self.drafter_of(draft, compile)
        self.require_models(drafter)
        self.gamma = _gamma_of(gamma, drafter)
        self.drafter = drafter if self.gamma else None
        self.made_drafter = drafter is not draft  # then no other batch uses its cache
        self.rule = token_verification if rule is None else rule
        if self.drafter is not None and self.drafter.parents is not None:
            require_exact(self.rule, self.drafter.scheme, self.drafter.parents)
        require_whole(rows=(1 if rows is None else rows, 1), slots=(1 if slots is None else slots, 1))
        self.rows, self.slots = rows or 0, slots or 0
        self.compile = compile
        # A graph would keep the numbers that the user's hooks read when it was captured.
        self.captures = target.device.type == "cuda" and compile is not False and not has_code_of_its_own(target)
        self.private = PrivateModel(target, compile)
        self.check = Check(target, self.gamma, sampling) if check else None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and name in vars(self):
            raise AttributeError(f"{name} of a sampler cannot be changed; make another sampler")
        super().__setattr__(name, value)
        if name == "instruments":
            self.batch = None  # a new one has them

    @property
    def active_check(self) -> Check | None:
        """None with a batch class of the user's, because known bugs are such classes."""
        return self.check if self.instruments.batch_class is None else None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a sampler, which owns caches and compiled code, cannot be copied or pickled; make another one")

    def drafter_of(self, draft: Draft, compile: Compile) -> Drafter | None:
        if isinstance(draft, str) and draft == "auto":
            usable = isinstance(self.target, PreTrainedModel) and self.target.device.type == "cpu"
            return PromptLookupDrafter(vocabulary(self.target)) if usable else None
        if isinstance(draft, PreTrainedModel) and isinstance(self.target, PreTrainedModel):
            return ModelDrafter(draft, self.sampling, vocab=vocabulary(self.target), compile=compile, capturable=True)
        return draft  # anything else is refused

    def require_models(self, drafter: Drafter | None) -> None:
        require_models(self.target, drafter)

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
            One or several: lists, arrays or tensors of tokens, what a tokenizer returns, or, with a
            tokenizer, texts. Padding needs an attention_mask.
        seed, numbers
            The tokens of a prompt depend on the seed and its number, by default 0, 1, ..., and not on the
            batch.
        batch_size
            Prompts generated at a time, by default all.

        Raises
        ------
        TypeError
            If the check finds other distributions than the model's own.
        ValueError
            For tokens outside the vocabulary, a context beyond a model's limit, and an invalid proposal.
        MemoryError, RuntimeError
            If caches do not fit; if the weights of a model were changed, or another call is made within this one.
        FloatingPointError
            If a token rests on NaN; its `finished` has the completions of prompts that had ended.
        """
        prompts, eos = self.token_lists(prompts), as_list(eos)
        require_tokens(prompts, eos, vocabulary(self.target))
        batch_size = len(prompts) if batch_size is None else batch_size
        require_whole(max_new_tokens=(max_new_tokens, 1), batch_size=(batch_size, 1), seed=(seed, 0))
        numbers = whole_numbers(range(len(prompts)) if numbers is None else numbers) or []
        if len(numbers) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(numbers)} numbers; give one for each")
        if wrong := [one for one in (int(seed), *numbers) if not 0 <= one < 2**64]:
            raise ValueError(f"seed and numbers have {wrong[0]}; each must be a whole number from 0, and below 2^64")
        rows, lengths, max_new_tokens = min(int(batch_size), len(prompts)), list(map(len, prompts)), int(max_new_tokens)
        draft = None if self.drafter is None else self.drafter.draft_model
        require_context(lengths, max_new_tokens, target=self.target, draft=draft)
        if rows < len(prompts) and self.drafter is not None and not self.drafter.can_refill:
            raise TypeError(f"{type(self.drafter).__name__} cannot restart single rows; leave batch_size out")
        if not self.in_a_call.acquire(blocking=False):
            raise RuntimeError("this sampler is in a call, and another would share its batch; make a sampler for each")
        try:
            self.require_models(self.drafter)
            self.private.require_unchanged()
            batch = self._batch(rows, max(lengths), max_new_tokens, len(eos))
            if (check := self.active_check) is not None:
                check.begin(batch)
            batch.clear(eos)
            return _Call(self, batch, prompts, numbers, rows, max_new_tokens, int(seed)).run()
        finally:
            self.in_a_call.release()

    def token_lists(self, prompts: Any) -> list[list[int]]:
        return token_lists(prompts, self.target, self.tokenizer)

    def _batch(self, rows: int, longest: int, max_new_tokens: int, eos: int) -> Batch:
        """The batch of the last call, if it has room, or a new one."""
        fast, check = self.private.compiled is not None or self.captures, self.active_check
        slots, steps = slots_for(max(longest + max_new_tokens, self.slots), 0, self.gamma), max_new_tokens
        rows = max(rows, self.rows)
        if self.batch is not None:
            kept = self.batch.setup
            if kept.max_rows == rows and kept.slots >= slots and kept.max_steps >= steps and kept.max_eos >= eos:
                return self.batch
        # Frees the old batch before the new one is made, and the graph that may hold the drafter's cache.
        self.batch = None
        if self.made_drafter and isinstance(self.drafter, ModelDrafter):
            self.drafter.allocated = ()
        if fast:
            slots = -(-max(slots, LEAST_SLOTS) // SLOT_MULTIPLE) * SLOT_MULTIPLE
        if fast or self.slots:
            steps, eos = slots, max(eos, LEAST_EOS)
        setup = Setup(
            self.private.modules, self.drafter, self.gamma, rows, slots, steps, sampling=self.sampling, rule=self.rule,
            max_eos=eos, keep_probs=self.instruments.keep_probs, log_probs=check is not None,
            trace=self.instruments.trace,
        )  # fmt: skip
        require_memory(setup)
        if check is not None:
            tree = self.drafter is not None and self.drafter.parents is not None
            check.new_batch(self.private.modules, slots, tree)
        batch = (self.instruments.batch_class or Batch)(setup)
        if fast:
            self._prepare(batch)
        self.batch = batch
        return batch

    def _prepare(self, batch: Batch) -> None:
        if self.private.compiled is not None:
            self.private.compiled.widths |= frozenset(width + 1 for width in batch.widths)
        if self.captures:
            batch.capture(self.instruments.timed)
        doing = "capturing a step" if self.captures else "compiling a layer, some seconds once"
        with tqdm(total=1, desc=doing, leave=False, disable=not self.progress, delay=1) as bar:
            batch.warm_up()
            bar.update()


class _Call:
    """One call of `Sampler.generate`: which prompt has which row."""

    def __init__(
        self, sampler: Sampler, batch: Batch, prompts: list[list[int]], numbers: Sequence[int], rows: int,
        max_new_tokens: int, seed: int,
    ) -> None:  # fmt: skip
        self.sampler, self.batch, self.prompts, self.numbers = sampler, batch, prompts, numbers
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.ended: dict[int, CompletedRow] = {}
        self.entered = 0  # prompts that have, or had, a row
        self.prompt_of: dict[int, int] = {}
        check = sampler.active_check
        self.comparison = None if check is None else Comparison(check, prompts, rows, max_new_tokens)
        self._enter(list(range(rows)))

    def run(self) -> Generation:
        """Make steps until no prompt waits and every row has ended."""
        batch, timed, progress = self.batch, self.sampler.instruments.timed, self.sampler.progress
        reader, timer = ProgressReader(batch), StepTimer(batch.state.tokens.device)
        expected = len(self.prompts) * self.max_new_tokens
        with tqdm(total=expected, desc="tokens", delay=3, leave=False, disable=not progress) as bar:
            for step in itertools.count():
                if timed:
                    timer.start()
                batch.step(timer.mark if timed else None)
                status = reader.read()
                if timed:
                    timer.mark("rest")
                if self.comparison is not None and step == 0:
                    self.comparison.first_step(batch, self.prompt_of)
                if status is None:
                    continue
                self._require_proper(status)
                if not batch.on_host:  # a pass on a CPU looks at the slots themselves
                    going = [(at, status[row]) for row, at in self.prompt_of.items() if status[row] > IDLE]
                    batch.bound.hear(len(self.prompts[at]) + self.max_new_tokens - left for at, left in going)
                waiting = (len(self.prompts) - self.entered) * self.max_new_tokens
                bar.update(max(expected - sum(status) - waiting - bar.n, 0))
                if entered := self._replace(status):
                    reader.new = entered
                elif not any(status):
                    break
        self._collect(list(self.prompt_of))
        if self.comparison is not None:
            self.comparison.passed()
        completed = [self.ended[at] for at in range(len(self.prompts))]
        probs = [row.probs for row in completed if row.probs is not None]
        record = merge_rows(completed, timer.seconds, batch.parents)
        tokens, tokenizer = [row.tokens for row in completed], self.sampler.tokenizer
        return Generation(tokens, record, probs or None, self.prompts, texts_of(tokens, tokenizer), tokenizer)

    def _replace(self, status: Sequence[int]) -> list[int]:
        """Give waiting prompts the rows that have ended; return these rows."""
        waiting = len(self.prompts) - self.entered
        rows = [row for row in self.prompt_of if status[row] == IDLE][:waiting]
        if rows:
            self._collect(rows)
            self._enter(rows)
        return rows

    def _enter(self, rows: list[int]) -> None:
        entering = range(self.entered, self.entered + len(rows))
        self.entered += len(rows)
        self.prompt_of.update(zip(rows, entering, strict=True))
        uniforms = self.batch.uniforms_of(self.seed, [self.numbers[at] for at in entering], self.max_new_tokens)
        self.batch.enter(rows, [self.prompts[at] for at in entering], uniforms, self.max_new_tokens)

    def _collect(self, rows: list[int]) -> None:
        places = [self.prompt_of.pop(row) for row in rows]
        completed = dict(zip(places, self.batch.state.completed_rows(rows), strict=True))
        self.ended.update(completed)
        if self.comparison is not None and completed:
            self.comparison.completions(completed)

    def _require_proper(self, status: Sequence[int]) -> None:
        """Raise `FloatingPointError` if a token rests on NaN, `ValueError` if a proposal or an outcome was invalid."""
        if IMPROPER in status:
            raise ValueError(
                "a drafter proposed a token outside the vocabulary, or a q that is no distribution: q must be 0 or "
                "more everywhere, above 0 at the draft token, and sum to 1 for each, and to 0 where the token is -1 "
                "(see Drafter.propose); or a rule accepted a token of -1"
            )
        if wrong := [(at, status[row]) for row, at in self.prompt_of.items() if status[row] in (NAN_IN_P, NAN_IN_Q)]:
            self._collect([row for row in self.prompt_of if status[row] == IDLE])
            at, fault = wrong[0]
            error = FloatingPointError(
                f"the {'target' if fault == NAN_IN_P else 'draft'} produced NaN, or a row without a finite logit, for "
                f"prompt {at}: try another dtype, or look at its weights; the completions of {len(self.ended)} prompts "
                "that ended are in its `finished`"
            )
            error.finished = {at: row.tokens for at, row in self.ended.items()}  # type: ignore[attr-defined]
            raise error


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
    instruments: Instruments | None = None,
    progress: bool = True,
) -> Generation:
    """Continue each prompt with a `Sampler` that is made for this call, by default without packing or compiling.

    The arguments are those of `Sampler` and of its `generate`.

    Examples
    --------
    >>> from specnb import load_pair
    >>> len(generate(load_pair(), "def area(", gamma=2, max_new_tokens=6).tokens[0])
    6
    """
    sampler = Sampler(
        target, draft, gamma=gamma, sampling=sampling, rule=rule, compile=compile, check=check, tokenizer=tokenizer,
        instruments=instruments, progress=progress,
    )  # fmt: skip
    return sampler.generate(
        prompts, max_new_tokens=max_new_tokens, eos=eos, seed=seed, batch_size=batch_size, numbers=numbers
    )


def require_models(target: PreTrainedModel, drafter: Drafter | None) -> None:
    require_supported(target)
    require_whole_head(target)
    if drafter is None:
        return
    if not isinstance(drafter, Drafter):
        raise TypeError(f'draft is {shown(drafter)}; it must be a model of transformers, a Drafter, "auto" or None')
    node_depths(drafter.parents or ())  # raises for parents that are no tree
    require_same_vocabulary(target, type(drafter).__name__, getattr(drafter, "vocab", None))


def _gamma_of(gamma: Any, drafter: Drafter | None) -> int:
    nodes = None if drafter is None or drafter.parents is None else len(drafter.parents)
    if isinstance(gamma, str) and gamma == "auto":
        return 0 if drafter is None else drafter.gamma if nodes is None else nodes
    require_whole(', or "auto"', gamma=(gamma, 0))
    if nodes and gamma not in (0, nodes):
        raise ValueError(f"gamma is {gamma}, and the drafter's tree has {nodes} nodes; leave gamma out")
    return 0 if drafter is None else int(gamma)
