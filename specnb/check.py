"""Compare the loop's distributions with those of the model's own forward pass.

A model may compute a mask from the length of the cache, count positions differently, or change
beyond some length, without an error. `Check` compares a few tokens before the first step, and then
what was generated; `Comparison` says what of a call is compared. A draft model needs no check,
because the rule makes any q exact.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import CachedModel, cache_argument, free_memory, prefill
from specnb.distributions import Sampling, at_least_float, sample, standardise, stream, total_variation
from specnb.fast import checksum
from specnb.support import context_limit, vocabulary
from specnb.trees import TokenTree

if TYPE_CHECKING:
    from specnb.record import CompletedRow
    from specnb.step import Batch

HALF = 3  # tokens of a sequence of the probe before the pass that is compared, and in it
ROUNDING = 1e-4  # a mean total variation up to this is rounding in 32 bits or more
ROUNDINGS = 1.25  # the loop's other kernels may round so many times as much as the model's own
FALSE_ALARM = 1e-6  # the probability that the mean of equal rounding exceeds its bound
PLACES = (64, 256)  # at which rounding is measured: at least, by adding tokens, and at most beside those compared
DISAGREEING = 0.05  # a model whose passes differ by more disagrees with itself; in 16 bits a copy in 32 decides
PIECES = 4  # of a text
LEAVES = 8  # of a tree, whose paths are compared


class Rounding(NamedTuple):
    """The mean and the standard deviation over places of a total variation that is rounding.

    Examples
    --------
    >>> [round(Rounding(0.0176, 0.0128).most(places), 3) for places in (1, 64, 1024)]
    [0.191, 0.033, 0.025]
    """

    mean: float
    deviation: float

    @classmethod
    def of(cls, off: Tensor) -> Rounding:
        return cls(float(off.mean()), float(off.std(correction=0)))

    def most(self, places: int) -> float:
        """What the mean over `places` exceeds with probability `FALSE_ALARM`, if places round alike.

        Total variations are taken as independent Gamma variables; the loop may round `ROUNDINGS` times
        as much.
        """
        if not self.deviation > 0:
            return ROUNDINGS * self.mean + ROUNDING
        shape = places * (self.mean / self.deviation) ** 2
        return float(ROUNDINGS * stats.gamma.isf(FALSE_ALARM, shape, scale=self.mean / shape)) + ROUNDING


class Check:
    """Compares what a sampler did with forward passes of the user's model; raises `TypeError` if they differ.

    Attributes
    ----------
    rows, longest
        Rows, and tokens of the longest sequence, that were compared; 0 for a new batch.
    outcome
        Checksum of what the model and a step gave for a few tokens when they were compared.

    Notes
    -----
    The mean total variation at n places is compared.

    1. Up to `ROUNDING` it is rounding in every dtype.
    2. In 16 bits it is rounding up to `Rounding.most(n)` of the model's pass in pieces. If it is
       more, or the pieces differ by more than rounding can, a copy of the model in float32 decides:
       what can be repeated with it is compared in float32, and else the loop may be as far from it
       as the model's own pass is. Without memory for it up to `rounding(dtype)` is a warning.
    3. In 32 bits a difference up to that bound shows that passes depend on what else is in them: a
       warning, if the model has one distribution at all.
    """

    def __init__(self, model: PreTrainedModel, gamma: int, sampling: Sampling = Sampling()) -> None:
        self.model, self.gamma, self.sampling = model, gamma, sampling
        self.probe, self.warned = probe_tokens(model), False
        self.rows = self.longest = 0
        self.outcome = 0
        self.copy: PreTrainedModel | None = None

    def new_batch(self, modules: PreTrainedModel, slots: int, tree: bool = False) -> None:
        """Compare a few tokens in a cache of `slots`, run by `modules`, with the model alone."""
        self.rows = self.longest = 0
        length, measured = self.probe.shape[1], None
        half = min(HALF, length // 2)
        for in_the_loop in (_chain, _tree) if tree else (_chain,):
            run = partial(in_the_loop, tokens=self.probe, half=half, slots=max(slots, length + HALF))
            with torch.inference_mode(), failing_clearly(self.model):
                rows = run(modules)
            for number, (text, known, there) in enumerate(rows):
                by_copy = partial(_distributions_of_row, run, number)
                where = "over a few tokens in the loop's cache"
                measured = self._compare(text, known, there, where=where, by_copy=by_copy, measured=measured)

    def begin(self, batch: Batch) -> None:
        """Compare the coming call like a new batch's if the model, or a step, gives other numbers than before."""
        with torch.inference_mode():
            own = self.model(input_ids=self.probe, use_cache=False).logits
        outcome = checksum([own, batch.probe(self.probe.cpu())])
        if outcome != self.outcome:
            self.rows, self.longest, self.copy, self.outcome = 0, 0, None, outcome

    def first_step(
        self,
        prompt: Sequence[int],
        draft_tokens: Sequence[int],
        logits: Tensor,
        parents: Sequence[int] | None = None,
        most: int | None = None,
        measured: Rounding | None = None,
    ) -> None:
        """Compare logits `(nodes + 1, vocab)` along up to `LEAVES` paths of `most` draft tokens."""
        parents = range(-1, len(draft_tokens) - 1) if parents is None else parents
        paths = [[node for node in path if node >= 0] for path in TokenTree(parents).paths.tolist()]
        possible = [path for path in paths if all(draft_tokens[node] >= 0 for node in path)]  # the root's is empty
        longest = [path for path in possible if path not in [other[:-1] for other in possible if other]]
        for path in longest[:LEAVES]:
            path = path[:most]
            tokens = [*prompt, *(draft_tokens[node] for node in path)]
            there = probabilities(logits[[0, *(node + 1 for node in path)]])
            measured = self._compare(tokens, len(prompt), there, where="in the first step", measured=measured)

    def completion(self, prompt: Sequence[int], tokens: Sequence[int], log_probs: Tensor) -> Rounding | None:
        """Compare the log-probability of each token, before temperature and filters; returns the rounding of
        distributions along the completion, if it was measured."""
        return self._compare([*prompt, *tokens[:-1]], len(prompt), log_probs, tokens, where="in a completion")

    def score(self, prompt: Sequence[int], tokens: Sequence[int], total: float) -> None:
        self._compare([*prompt, *tokens[:-1]], len(prompt), torch.tensor([total]), tokens, where="in a beam")

    @torch.inference_mode()
    def _compare(
        self, text: list[int], known: int, there: Tensor, tokens: Sequence[int] = (), where: str = "",
        by_copy: Callable[[PreTrainedModel], Tensor] | None = None, measured: Rounding | None = None,
    ) -> Rounding | None:  # fmt: skip
        """Compare distributions `there`, or log-probabilities of `tokens`, after `text` from token
        number `known` on. What can be made again `by_copy` is compared in float32. Returns the rounding
        of distributions that was `measured` here or before, on a like text."""
        places, in_16_bits = len(text) - known + 1, torch.finfo(self.model.dtype).bits == 16
        emitted = torch.tensor(tokens, dtype=torch.int64, device=self.model.device)
        # In 16 bits rounding is measured, too, at more places.
        most = max(places, PLACES[1]) if in_16_bits and measured is None else places
        own = self._pass(self.model, text, min(len(text), most))
        off = differences(there, own[-places:], emitted)
        found = float(off.mean())
        if found <= ROUNDING:
            return measured
        alike, measured = (measured, measured) if measured else self._rounding(text, own, emitted)
        if found <= alike.most(places) and not in_16_bits:
            self._require_one_distribution(text, known, alike.mean)
            return measured
        if found <= alike.most(places) and alike.mean <= min(DISAGREEING, rounding(self.model.dtype)):
            return measured
        exact = self._made_copy() if in_16_bits else None
        if exact is not None:
            if by_copy is None:
                explained, _ = self._rounding(text, own, emitted, exact)
            else:
                there, explained = by_copy(exact), Rounding(0.0, 0.0)
            if float(differences(there, self._pass(exact, text, places), emitted).mean()) <= explained.most(places):
                return measured
        elif in_16_bits and found <= rounding(self.model.dtype):
            self._warn(found)
            return measured
        begin = int((off > min(alike.most(1), float(off.max()))).int().argmax())
        raise TypeError(
            f"{type(self.model).__name__} was decoded from wrong distributions {where}: they differ by {found:.2g} in "
            f"total variation from those of its own forward pass, beginning {begin} tokens after a prompt of {known}, "
            f"and rounding gives {alike.most(places):.2g} at most; no tokens are returned. It may have been changed "
            "after this sampler was made (then make another), or let a token see those after it (a decoder needs "
            "is_decoder=True), count positions from another number than 0, or make a mask or window of its own from "
            "the length of the cache"
        )

    def _rounding(
        self, text: list[int], own: Tensor, emitted: Tensor, exact: PreTrainedModel | None = None
    ) -> tuple[Rounding, Rounding]:  # fmt: skip
        """The rounding of the model's `own` logits after the last tokens of `text`, measured from its
        pass in pieces or from the `exact` model's: at the tokens `emitted`, and of distributions.

        To few places others are added, with sampled tokens.
        """
        limit = context_limit(self.model) or len(text) + PLACES[0]
        added = probe_tokens(self.model, max(min(PLACES[0], limit) - len(text), 0))[0].tolist()
        longer = [*text, *added]
        one = self._pass(self.model, longer, len(longer)) if added else own
        kept = len(one)
        other = self._in_pieces(longer, kept) if exact is None else self._pass(exact, longer, kept)
        whole = Rounding.of(differences(probabilities(other), one))
        if not len(emitted):
            return whole, whole
        uniforms = torch.from_numpy(stream(0, 0, "final").random(kept)).to(one.device)
        tokens = sample(standardise(one, Sampling(self.sampling.temperature), check=False), uniforms)
        tokens[kept - len(added) - len(emitted) : kept - len(added)] = emitted
        return Rounding.of(differences(log_probs_of(tokens, other), one, tokens)), whole

    def _made_copy(self) -> PreTrainedModel | None:
        """The copy of the model in float32, if there is memory for it and the model can be copied."""
        if self.copy is None and copy_fits(self.model):
            try:
                self.copy = copy.deepcopy(self.model).float()
            except (NotImplementedError, RuntimeError, TypeError, ValueError):
                return None
        return self.copy

    def _require_one_distribution(self, text: list[int], known: int, pieces: float) -> None:
        name = type(self.model).__name__
        whole = probabilities(self._pass(self.model, text, len(text) - known + 1))
        with_row = self._pass(self.model, text, len(text) - known + 1, beside=text[::-1])
        if float(differences(whole, with_row).mean()) > ROUNDING:
            self._warn(pieces)
            return
        first = self._pass(self.model, text[:known], 1)
        if float(differences(whole[:1], first).mean()) > ROUNDING:
            raise TypeError(
                f"a token's distribution depends on the tokens after it in {name}, at {known} tokens: its forward pass "
                "has no distribution to sample from (a decoder needs is_decoder=True); no tokens are returned"
            )
        if pieces > DISAGREEING:
            raise TypeError(
                f"{name} disagrees with itself: the distributions of its own forward pass over {len(text)} tokens "
                f"differ by {pieces:.2g} in total variation from those in pieces; no tokens are returned"
            )
        self._warn(pieces)

    def _warn(self, size: float) -> None:
        if not self.warned:
            warnings.warn(
                f"forward passes of {type(self.model).__name__} differ among themselves: what the sampler does is not "
                f"resolved below a total variation of {size:.2g}",
                RuntimeWarning,
                stacklevel=2,
            )
            self.warned = True

    def _pass(self, model: PreTrainedModel, text: list[int], kept: int, beside: Sequence[int] = ()) -> Tensor:
        """Logits `(kept, vocab)` after the last tokens of `text`, in one pass."""
        ids = torch.tensor([text, beside] if beside else [text], device=model.device)
        return at_least_float(model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0, -kept:])

    def _in_pieces(self, text: list[int], kept: int) -> Tensor:
        """The same, in pieces with a cache of transformers, each as wide as a step at least."""
        ids, name = torch.tensor([text], device=self.model.device), cache_argument(self.model)
        each = max(self.gamma + 1, -(-kept // PIECES))
        parts, cache, begin = [], None, 0
        for end in [*range(len(text) - kept, len(text), each), len(text)]:
            if end > begin:
                output = self.model(input_ids=ids[:, begin:end], use_cache=True, **{name: cache})
                cache, begin = output.get(name), end
                parts.append(at_least_float(output.logits[0, -kept:]))
        return torch.cat(parts)[-kept:]


class Comparison:
    """Which prompts of one call are compared, and when.

    In a new batch, with more rows than before, or after a change of the model: the first step and the
    completion of the shortest and of the longest prompt. In every call: the first prompt that takes
    over a row, and the longest sequence if none as long was compared.
    """

    def __init__(self, check: Check, prompts: Sequence[Sequence[int]], rows: int, max_new_tokens: int) -> None:
        self.check, self.prompts, self.rows, self.max_new_tokens = check, prompts, rows, max_new_tokens
        self.longest, lengths = check.longest, list(map(len, prompts))
        self.is_new = rows > check.rows
        last = len(lengths) - 1
        self.chosen = {lengths.index(min(lengths)), last - lengths[::-1].index(max(lengths))} if self.is_new else set()
        if rows < len(prompts):
            self.chosen.add(rows)
        self.first_steps: dict[int, tuple[list[int], Tensor, tuple[int, ...] | None]] = {}

    def first_step(self, batch: Batch, prompt_of: Mapping[int, int]) -> None:
        """Keep the first step of a call, to be compared with the rounding along the completion."""
        if not self.is_new:
            return
        assert batch.last is not None
        draft_tokens, logits = batch.last
        for row, prompt in prompt_of.items():
            if prompt in self.chosen:
                drafted = draft_tokens[row].clamp_max(batch.vocab - 1).tolist()
                self.first_steps[prompt] = (drafted, logits[row].clone(), batch.parents)

    def completions(self, completed: Mapping[int, CompletedRow]) -> None:
        lengths = {prompt: len(self.prompts[prompt]) + len(row.tokens) for prompt, row in completed.items()}
        longest = max(lengths, key=lambda prompt: lengths[prompt])
        for prompt, row in completed.items():
            if prompt in self.chosen or (prompt == longest and lengths[prompt] > self.longest):
                assert row.log_probs is not None
                measured = self.check.completion(self.prompts[prompt], row.tokens, row.log_probs)
                if first := self.first_steps.pop(prompt, None):
                    self.check.first_step(self.prompts[prompt], *first, self.max_new_tokens - 1, measured)
        self.longest = max(self.longest, lengths[longest])

    def passed(self) -> None:
        """Remember what was compared; not before the end, because a call that failed may be repeated."""
        self.check.longest, self.check.rows = self.longest, max(self.check.rows, self.rows)


def differences(there: Tensor, logits: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Total variations `(places,)` of distributions `there` from those of `logits` `(places, vocab)`.

    With `tokens` `(places,)`, `there` has their log-probabilities, or their sum (means are compared),
    and half of |1 - alone / there|, at most 1, estimates the total variation. NaN, which the loop
    reports where it matters, is no difference.
    """
    if tokens is None or not len(tokens):
        return total_variation(there.to(logits.device), probabilities(logits)).nan_to_num(0)
    there, alone = there.to(logits.device).double(), log_probs_of(tokens, logits).double()
    if len(there) < len(alone):
        there, alone = there / len(alone), alone.mean(dim=0, keepdim=True)
    return ((alone - there).exp() - 1).abs().clamp_max(2).nan_to_num(0) / 2


def probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(at_least_float(logits), dim=-1)


def log_probs_of(tokens: Tensor, logits: Tensor) -> Tensor:
    return torch.log_softmax(at_least_float(logits), dim=-1).gather(-1, tokens[:, None])[:, 0]


def rounding(dtype: torch.dtype) -> float:
    """The largest difference that rounding in `dtype` explains, if nothing can be compared in float32."""
    return ROUNDING if torch.finfo(dtype).bits > 16 else 16 * torch.finfo(dtype).eps


def copy_fits(model: PreTrainedModel) -> bool:
    if getattr(model, "is_quantized", False):
        return False
    return bool(2 * model.num_parameters() * torch.float32.itemsize < free_memory(model.device))


def probe_tokens(model: PreTrainedModel, length: int | None = None) -> Tensor:
    """Two different rows of `length` tokens that mean nothing special, by default those of the probe."""
    if length is None:
        limit = context_limit(model) or 2 * HALF
        length = 2 * max(min(HALF, limit // 2), 1)
    settings = model.config.to_dict() | model.config.get_text_config().to_dict()
    named = {number for name, number in settings.items() if name.endswith(("_token_id", "_token_index"))
             and isinstance(number, int)}  # fmt: skip
    known = range(min(vocabulary(model), 1000))
    plain = torch.tensor([token for token in known if token not in named])
    if len(plain) < 2 * HALF:  # equal tokens would hide what a mask or a position does
        plain = torch.tensor(known)
    chosen = torch.randint(len(plain), (2, length), generator=torch.Generator().manual_seed(0))
    return plain[chosen].to(model.device)


@contextmanager
def failing_clearly(model: PreTrainedModel) -> Iterator[None]:
    """Turn what `model` raises inside, memory apart, into a `TypeError`."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise TypeError(
            f"{type(model).__name__} fails where it gets positions, a mask and a cache with spare slots, as the "
            f"decoding loop runs it ({type(error).__name__}: {error}); choose another model"
        ) from error


# Texts, how many of their tokens are known before, and the loop's distributions from there
Places = list[tuple[list[int], int, Tensor]]


def _distributions_of_row(run: Callable[[PreTrainedModel], Places], number: int, modules: PreTrainedModel) -> Tensor:
    return run(modules)[number][2]


def _chain(modules: PreTrainedModel, tokens: Tensor, half: int, slots: int) -> Places:
    """Two rows of different lengths, whose last `half` tokens are in one pass."""
    before = tokens.shape[1] - half
    lengths = torch.tensor([before + 1, max(before - 1, 1)], device=tokens.device)
    at = lengths[:, None] - 1 + torch.arange(half, device=tokens.device)
    runner = CachedModel(modules, slots)
    runner.cache.shortens = False
    beyond = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
    prefill(runner, tokens.masked_fill(beyond, int(tokens[0, 0])), lengths)
    there = probabilities(runner.run(tokens.gather(1, at), at, keep=half))
    known = lengths.tolist()
    return [(tokens[row, : known[row] + half - 1].tolist(), known[row], there[row]) for row in range(2)]


def _tree(modules: PreTrainedModel, tokens: Tensor, half: int, slots: int) -> Places:
    """One row with two branches."""
    before = tokens.shape[1] - half
    branch = [*range(-1, half - 1)]
    tree = TokenTree([*branch, *[-1 if parent < 0 else parent + half for parent in branch]], tokens.device)
    runner = CachedModel(modules, slots)
    runner.cache.shortens = False
    first = torch.tensor([before - 1], device=tokens.device)
    prefill(runner, tokens[:1], first + 1)
    entries = torch.cat([tokens[:1, before - 1 :], tokens[1:, before:]], dim=1)
    positions, visible = tree.positions(first), tree.visible(first, runner.capacity)
    logits = runner.run(entries, tree.slots(first), keep=2 * half + 1, positions=positions, visible=visible)
    there, root = probabilities(logits[0]), tokens[0, :before].tolist()
    return [
        ([*root, *tokens[row, before:].tolist()], before, there[[0, *range(1 + row * half, 1 + (row + 1) * half)]])
        for row in range(2)
    ]
