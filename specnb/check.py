"""Compare the loop's distributions with those of the model's own forward pass.

A model may compute a mask from the length of the cache, count positions differently, or change
beyond some length, without an error. So `require_agreement` probes it before the first step, and
`Check` compares what was generated. Rounding is measured, by the model in pieces; in 16 bits a copy
in float32 decides. A draft model needs no check, because the rule makes any q exact.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import CachedModel, cache_argument, free_memory, prefill
from specnb.distributions import total_variation
from specnb.support import context_limit, vocabulary
from specnb.trees import TokenTree

HALF = 3  # tokens of a sequence of the probe before the pass that is compared, and in it
ROUNDING = 1e-4  # a mean total variation up to this is rounding in 32 bits or more
ROUNDINGS = 2  # the loop may be off by so many times what the model in pieces is
DISAGREEING = 0.05  # a model whose passes differ by more disagrees with itself; in 16 bits a copy in 32 decides
PIECES = 8  # of a completion, beside its prompt
LEAVES = 8  # of a tree, whose paths are compared


class Difference(NamedTuple):
    """A mean total variation, and how much of it rounding explains."""

    found: float
    allowed: float


class Check:
    """Compares what a sampler with `gamma` did with forward passes of the user's model; raises
    `TypeError` if they differ."""

    def __init__(self, model: PreTrainedModel, gamma: int) -> None:
        self.model, self.gamma = model, gamma
        self.warned = False

    def first_step(
        self,
        prompt: Sequence[int],
        draft_tokens: Sequence[int],
        logits: Tensor,
        parents: Sequence[int] | None = None,
        most: int | None = None,
    ) -> None:
        """Compare the logits `(nodes + 1, vocab)` of a step, along up to `LEAVES` paths of `most` draft tokens."""
        parents = range(-1, len(draft_tokens) - 1) if parents is None else parents
        paths = [[node for node in path if node >= 0] for path in TokenTree(parents).paths.tolist()]
        possible = [path for path in paths if all(draft_tokens[node] >= 0 for node in path)]  # the root's is empty
        longest = [path for path in possible if path not in [other[:-1] for other in possible if other]]
        for path in longest[:LEAVES]:
            path = path[:most]
            tokens = [*prompt, *(draft_tokens[node] for node in path)]
            there = logits[[0, *(node + 1 for node in path)]]
            self._compare(tokens, len(prompt), there=probabilities(there), where="in the first step")

    def completion(self, prompt: Sequence[int], tokens: Sequence[int], log_probs: Tensor) -> None:
        """Compare the log-probability of each token of a completion, before temperature and filters."""
        self._compare([*prompt, *tokens[:-1]], len(prompt), tokens, log_probs, where="in a completion")

    def score(self, prompt: Sequence[int], tokens: Sequence[int], total: float) -> None:
        self._compare([*prompt, *tokens[:-1]], len(prompt), tokens, torch.tensor([total]), where="in a beam")

    def _compare(
        self, text: list[int], known: int, tokens: Sequence[int] = (), there: Tensor = torch.empty(0), where: str = ""
    ) -> None:  # fmt: skip
        """Compare distributions `there`, or log-probabilities of `tokens`, after `text` from token
        number `known` on."""

        def compared(other: Tensor, one: Tensor = there) -> Tensor:
            return differences(one, other, tokens)

        alone = self._own(self.model, text, known, tokens)
        off = compared(alone)
        if not (mean := float(off.mean())) > ROUNDING:  # NaN is reported by the loop
            return
        pieces = float(compared(self._own(self.model, text, known, tokens, pieces=True), alone).mean())
        in_16_bits = torch.finfo(self.model.dtype).bits == 16
        explained = mean <= ROUNDINGS * pieces + ROUNDING
        if explained and not in_16_bits:
            self._require_one_distribution(text, known, pieces)
        elif explained and pieces <= min(DISAGREEING, rounding(self.model.dtype)):
            return
        elif in_16_bits and copy_fits(self.model):
            exact = self._own(copy.deepcopy(self.model).float(), text, known, tokens)
            if float(compared(exact).mean()) > ROUNDINGS * float(compared(exact, alone).mean()) + ROUNDING:
                raise TypeError(self._refusal(mean, pieces, off, known, where))
        elif in_16_bits and mean <= rounding(self.model.dtype):
            self._warn(mean)
        else:
            raise TypeError(self._refusal(mean, pieces, off, known, where))

    def _require_one_distribution(self, text: list[int], known: int, pieces: float) -> None:
        name = type(self.model).__name__
        whole, with_row = self._own(self.model, text, known), self._own(self.model, text, known, beside=text[::-1])
        if float(differences(with_row, whole).mean()) > ROUNDING:
            self._warn(pieces)
            return
        first = self._own(self.model, text[:known], known)
        if float(differences(first, whole[:1]).mean()) > ROUNDING:
            raise TypeError(
                f"a token's distribution depends on the tokens after it in {name}, at {known} tokens: its forward pass "
                "has no distribution that a sampler could have; no tokens are returned"
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

    @torch.inference_mode()
    def _own(
        self, model: PreTrainedModel, text: list[int], known: int, tokens: Sequence[int] = (), pieces: bool = False,
        beside: list[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """The model's distributions, or log-probabilities of `tokens`: in one pass, in `pieces`, or
        `beside` another row."""
        ids = torch.tensor([text] if beside is None else [text, beside], device=model.device)
        kept = len(text) - known + 1
        if not pieces:
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0]
        else:
            name = cache_argument(model)
            each = max(self.gamma + 1, -(-kept // PIECES))
            ends = [*([known - 1] if known > 1 else []), *range(known - 1 + each, len(text), each), len(text)]
            parts, cache, begin = [], None, 0
            for end in ends:
                output = model(input_ids=ids[:, begin:end], use_cache=True, **{name: cache})
                cache, begin = output[name], end
                parts.append(output.logits[0])
            logits = torch.cat(parts)
        logits = logits[-kept:]
        if not len(tokens):
            return probabilities(logits)
        chosen = torch.tensor(tokens, device=model.device)[:, None]
        return torch.log_softmax(at_least_float(logits), dim=-1).gather(-1, chosen)[:, 0]

    def _refusal(self, mean: float, pieces: float, off: Tensor, known: int, where: str) -> str:
        begin = int((off > ROUNDINGS * pieces + ROUNDING).int().argmax())
        return (
            f"{type(self.model).__name__} was decoded from wrong distributions {where}: they differ by {mean:.2g} in "
            f"total variation from those of its own forward pass, beginning {begin} tokens after a prompt of {known}, "
            f"and those of its forward pass in pieces by {pieces:.2g}; no tokens are returned"
        )


def differences(there: Tensor, alone: Tensor, tokens: Sequence[int] = ()) -> Tensor:
    """Total variations `(places,)` of distributions, or estimates from the log-probabilities of `tokens`.

    An estimate is half of |1 - alone / there|, at most 1. If `there` is a sum of log-probabilities,
    means are compared.
    """
    if not len(tokens):
        return total_variation(there.to(alone.device), alone)
    there, alone = there.to(alone.device).double(), alone.double()
    if len(there) < len(alone):
        there, alone = there / len(alone), alone.mean(dim=0, keepdim=True)
    return ((alone - there).exp() - 1).abs().clamp_max(2) / 2


def probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(at_least_float(logits), dim=-1)


def at_least_float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def rounding(dtype: torch.dtype) -> float:
    """The largest difference that rounding in `dtype` explains, if nothing can be compared in float32."""
    return ROUNDING if torch.finfo(dtype).bits > 16 else 16 * torch.finfo(dtype).eps


def copy_fits(model: PreTrainedModel) -> bool:
    if getattr(model, "is_quantized", False):
        return False
    return bool(2 * model.num_parameters() * torch.float32.itemsize < free_memory(model.device))


def require_agreement(model: PreTrainedModel, modules: PreTrainedModel, slots: int, tree: bool = False) -> None:
    """Raise `TypeError` if `modules` in the loop have other distributions over a few tokens than `model` alone."""
    limit = context_limit(model) or 2 * HALF
    length = 2 * max(min(HALF, limit // 2), 1)
    for kind in ("chain", "tree") if tree else ("chain",):
        found, allowed = difference_from_itself(model, modules, max(slots, length + HALF), kind, length)
        if found > allowed:
            raise TypeError(
                f"{type(model).__name__} would be decoded from wrong distributions: in the loop's cache, over a {kind} "
                f"at {length} tokens, they differ by {found:.2g} in total variation from those of its own forward "
                f"pass, and rounding gives {allowed:.0e} at most. It may let a token see those after it (a decoder "
                "needs is_decoder=True), count positions from another number than 0, or make a mask or window of its "
                "own from the length of the cache"
            )


def difference_from_itself(
    model: PreTrainedModel, modules: PreTrainedModel, slots: int, kind: str, length: int
) -> Difference:
    """The difference over a "chain" or "tree" at the end of `length` tokens."""
    tokens = probe_tokens(model, length)
    half = min(HALF, length // 2)
    with torch.inference_mode(), failing_clearly(model):
        there, alone = KINDS[kind](modules, model, tokens, half, slots)
        size = float(total_variation(probabilities(there), probabilities(alone)).mean())
    if not size > ROUNDING or torch.finfo(model.dtype).bits > 16:
        return Difference(size, ROUNDING)
    if not copy_fits(model):
        return Difference(size, rounding(model.dtype))
    in_float = copy.deepcopy(model).float()
    return difference_from_itself(in_float, in_float, slots, kind, length)


def probe_tokens(model: PreTrainedModel, length: int) -> Tensor:
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


def _seeing_all(modules: PreTrainedModel, slots: int) -> CachedModel:
    runner = CachedModel(modules, slots)
    runner.cache.shortens = False
    return runner


def _chain(
    modules: PreTrainedModel, model: PreTrainedModel, tokens: Tensor, half: int, slots: int
) -> tuple[Tensor, Tensor]:
    before = tokens.shape[1] - half
    lengths = torch.tensor([before + 1, max(before - 1, 1)], device=tokens.device)
    at = lengths[:, None] - 1 + torch.arange(half, device=tokens.device)
    runner = _seeing_all(modules, max(slots, tokens.shape[1]))
    beyond = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
    prefill(runner, tokens.masked_fill(beyond, int(tokens[0, 0])), lengths)
    there = runner.run(tokens.gather(1, at), at, keep=half)
    return there, _alone(model, tokens).take_along_dim(at[..., None], dim=1)


def _tree(
    modules: PreTrainedModel, model: PreTrainedModel, tokens: Tensor, half: int, slots: int
) -> tuple[Tensor, Tensor]:
    before = tokens.shape[1] - half
    tokens = tokens.clone()
    tokens[1, :before] = tokens[0, :before]
    branch = [*range(-1, half - 1)]
    tree = TokenTree([*branch, *[-1 if parent < 0 else parent + half for parent in branch]], tokens.device)
    runner = _seeing_all(modules, max(slots, before + 2 * half))
    first = torch.tensor([before - 1], device=tokens.device)
    prefill(runner, tokens[:1], first + 1)
    entries = torch.cat([tokens[:1, before - 1 :], tokens[1:, before:]], dim=1)
    positions, visible = tree.positions(first), tree.visible(first, runner.capacity)
    there = runner.run(entries, tree.slots(first), keep=2 * half, positions=positions, visible=visible)
    return there.reshape(2, half, -1), _alone(model, tokens)[:, before:]


KINDS = {"chain": _chain, "tree": _tree}


def _alone(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]
