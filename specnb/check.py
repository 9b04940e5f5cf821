"""Does a sampler do what the model would: its distributions compared with the model's own.

The decoding loop keeps tokens in a cache with spare slots, gives every row its own positions, hides
slots by a mask, and may use compiled layers and copies of weights. A model may compute a mask from
the length of the cache, count positions in another way, or change its computation beyond some
length; it would be decoded from wrong distributions without an error. No list of names shows that
this does not happen. So what the loop did is compared with forward passes of the model alone, on
the sequences that it generated: all logits of the first step, and the log-probability of every token
of some rows at the end (`Check`). Before the first step a few tokens are run through the loop, near
the lengths at which the configuration says that the model changes (`require_agreement`).

How much is rounding is measured, not assumed: by the model in pieces, with transformers' own cache,
against the model in one pass. In 16 bits, where rounding is as large as what some models do
wrongly, a copy of the model in float32 decides.

A draft model needs no check: whatever distribution a token was sampled from, the rule makes it
exact.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import CachedModel, cache_argument, free_memory, prefill
from specnb.distributions import total_variation
from specnb.support import context_limit, require_supported, vocabulary
from specnb.trees import TokenTree

HALF = 3  # tokens of a sequence of the probe before the pass that is compared, and in it
ROUNDING = 1e-4
"""A mean total variation up to this is rounding in 32 bits or more."""
ROUNDINGS = 2
"""The loop may be off by so many times what the model in pieces is."""
DISAGREEING = 0.05
"""A model in 32 bits or more whose own passes differ by more than this disagrees with itself."""
PIECES = 8  # of a completion, beside its prompt
LEAVES = 8  # of a tree, whose paths are compared
THRESHOLDS = re.compile(r"window|chunk|floor|top_?k|keep|original_max|block_size|context_length|n_?ctx|local")
"""Names of the numbers in a configuration at which a model may change what it computes."""


class Difference(NamedTuple):
    """A mean total variation from the model's own distributions, and how much rounding explains."""

    found: float
    allowed: float


class Check:
    """Compares what a sampler did with forward passes of the model alone.

    Parameters
    ----------
    model
        The user's model; nothing of the sampler's is used.
    gamma
        Draft tokens of a step, which says in what pieces the loop evaluates a sequence.
    """

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
        """Compare the logits of a step with the model's own.

        Parameters
        ----------
        prompt
            The tokens before the step.
        draft_tokens
            What was drafted: a chain, or the nodes of a tree; -1 where nothing was.
        logits
            `(nodes + 1, vocab)`, after the prompt and after each draft token.
        parents
            Of a tree, of which up to `LEAVES` paths are compared; None for a chain.
        most
            Draft tokens of a path that can be emitted with a token after them.

        Raises
        ------
        TypeError
            If the difference is more than rounding.
        """
        parents = range(-1, len(draft_tokens) - 1) if parents is None else parents
        proposed: list[int] = []  # those that can be accepted
        for node, token in enumerate(draft_tokens):
            if token >= 0 and (parents[node] < 0 or parents[node] in proposed):
                proposed.append(node)
        leaves = [node for node in proposed if not any(parents[other] == node for other in proposed)]
        for leaf in leaves[:LEAVES] or [-1]:
            path: list[int] = []
            while leaf >= 0:
                path.insert(0, leaf)
                leaf = parents[leaf]
            path = path[:most]
            tokens = [*prompt, *(draft_tokens[node] for node in path)]
            there = logits[[0, *(node + 1 for node in path)]]
            self._compare(tokens, len(prompt), there=probabilities(there), where="in the first step")

    def completion(self, prompt: Sequence[int], tokens: Sequence[int], log_probs: Tensor) -> None:
        """Compare the log-probability `(len(tokens),)` that each token of a completion had in the
        loop, before temperature and filters, with the model's own.

        Raises
        ------
        TypeError
            If the difference is more than rounding.
        """
        self._compare([*prompt, *tokens[:-1]], len(prompt), tokens, log_probs, where="in a completion")

    def score(self, prompt: Sequence[int], tokens: Sequence[int], total: float) -> None:
        """Compare the log-probability `total` of a whole beam with the model's own; raise `TypeError`
        if the difference is more than rounding."""
        self._compare([*prompt, *tokens[:-1]], len(prompt), tokens, torch.tensor([total]), where="in a beam")

    def _compare(
        self, text: list[int], known: int, tokens: Sequence[int] = (), there: Tensor = torch.empty(0), where: str = ""
    ) -> None:  # fmt: skip
        """Compare distributions `there`, or log-probabilities of `tokens`, after the tokens of `text`
        from number `known` on."""

        def compared(other: Tensor, one: Tensor = there) -> Tensor:
            return differences(one, other, tokens)

        own = self._own(self.model, text, known, tokens)
        found = compared(own)
        if not (mean := float(found.mean())) > ROUNDING:  # NaN is reported by the loop
            return
        pieces = float(compared(self._own(self.model, text, known, tokens, pieces=True), own).mean())
        in_16_bits = torch.finfo(self.model.dtype).bits == 16
        if mean > ROUNDINGS * pieces + ROUNDING:
            if not (in_16_bits and copy_fits(self.model)):
                if in_16_bits and mean <= rounding(self.model.dtype):
                    self._warn(mean)
                    return
                raise TypeError(self._refusal(mean, pieces, found, known, where))
            exact = self._own(copy.deepcopy(self.model).float(), text, known, tokens)
            if float(compared(exact).mean()) > ROUNDINGS * float(compared(exact, own).mean()) + ROUNDING:
                raise TypeError(self._refusal(mean, pieces, found, known, where))
        elif not in_16_bits:
            self._require_one_law(text, known, pieces)

    def _require_one_law(self, text: list[int], known: int, pieces: float) -> None:
        """Raise `TypeError` for a model whose passes differ by more than rounding, unless they depend
        on what else is in the pass, as with dynamic quantisation: then warn."""
        name = type(self.model).__name__
        whole, other = self._own(self.model, text, known), self._own(self.model, text, known, beside=text[::-1])
        if float(differences(other, whole).mean()) > ROUNDING:
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
        """The model's own distributions after the tokens of `text` from number `known` on, or the
        log-probabilities of `tokens` there: in one pass, in `pieces`, or `beside` another row."""
        given = torch.tensor([text] if beside is None else [text, beside], device=model.device)
        kept = len(text) - known + 1
        if not pieces:
            logits = model(input_ids=given, use_cache=False, logits_to_keep=kept).logits[0]
        else:
            name = cache_argument(model)
            each = max(self.gamma + 1, -(-kept // PIECES))
            ends = [*([known - 1] if known > 1 else []), *range(known - 1 + each, len(text), each), len(text)]
            made, cache, begin = [], None, 0
            for end in ends:
                output = model(input_ids=given[:, begin:end], use_cache=True, **{name: cache})
                cache, begin = output[name], end
                made.append(output.logits[0])
            logits = torch.cat(made)
        logits = logits[-kept:]
        if not len(tokens):
            return probabilities(logits)
        chosen = torch.tensor(tokens, device=model.device)[:, None]
        return torch.log_softmax(at_least_float(logits), dim=-1).gather(-1, chosen)[:, 0]

    def _refusal(self, mean: float, pieces: float, found: Tensor, known: int, where: str) -> str:
        begin = int((found > ROUNDINGS * pieces + ROUNDING).int().argmax())
        return (
            f"{type(self.model).__name__} was decoded from wrong distributions {where}: they differ by {mean:.2g} in "
            f"total variation from those of its own forward pass, beginning {begin} tokens after a prompt of {known}, "
            f"and those of its forward pass in pieces by {pieces:.2g}; no tokens are returned"
        )


def differences(there: Tensor, own: Tensor, tokens: Sequence[int] = ()) -> Tensor:
    """The total variation at each place of two tensors of distributions `(places, vocab)`; or an
    estimate of it from the log-probabilities `(places,)` of sampled `tokens`: half of |1 - own /
    there|, at most 1. Where `there` is the sum of these, it is compared with their mean.

    >>> differences(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]]))
    tensor([0.2500])
    """
    if not len(tokens):
        return total_variation(there.to(own.device), own)
    there, own = there.to(own.device).double(), own.double()
    if len(there) < len(own):
        there, own = there / len(own), own.mean(dim=0, keepdim=True)
    return ((own - there).exp() - 1).abs().clamp_max(2) / 2


def probabilities(logits: Tensor) -> Tensor:
    """Softmax of `logits` `(..., vocab)` in float32 or better."""
    return torch.softmax(at_least_float(logits), dim=-1)


def at_least_float(logits: Tensor) -> Tensor:
    """`logits` in float32 or better."""
    return logits if logits.dtype == torch.float64 else logits.float()


def rounding(dtype: torch.dtype) -> float:
    """The largest mean total variation that rounding in `dtype` is taken to explain where nothing
    can be compared in float32.

    >>> rounding(torch.float32), rounding(torch.bfloat16)
    (0.0001, 0.125)
    """
    return ROUNDING if torch.finfo(dtype).bits > 16 else 16 * torch.finfo(dtype).eps


def copy_fits(model: PreTrainedModel) -> bool:
    """Whether there is memory for a copy of `model` in float32; a quantised model has none."""
    if getattr(model, "is_quantized", False):
        return False
    return bool(2 * model.num_parameters() * torch.float32.itemsize < free_memory(model.device))


def require_agreement(
    model: PreTrainedModel, modules: PreTrainedModel, longest: int, total: int, slots: int, tree: bool = False
) -> None:
    """Raise `TypeError`, with the difference, for a model that the loop would run wrongly.

    Parameters
    ----------
    model, modules
        The user's model, and the modules that the loop runs.
    longest, total
        Tokens of the longest prompt, and with its completion: thresholds between them are probed.
    slots
        Cache slots of a row.
    tree
        Whether trees of draft tokens are to be verified, too.

    Examples
    --------
    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> require_agreement(model, model, longest=5, total=15, slots=20)
    """
    limit = context_limit(model) or 2 * HALF
    half = max(min(HALF, limit // 2), 1)
    crossed = [at for at in thresholds(model) if longest < at < total and at + HALF <= limit]
    for length in [2 * half, *(at + HALF for at in crossed)]:
        for kind in KINDS if tree and length == 2 * half else ("chain",):
            difference = difference_from_itself(model, modules, max(slots, length + HALF), kind, length)
            if difference.found > difference.allowed:
                raise TypeError(_refusal(model, difference, kind, length))


def thresholds(model: PreTrainedModel) -> list[int]:
    """The numbers of tokens at which the configuration says that `model` changes what it
    computes."""
    config = model.config.get_text_config(decoder=True).to_dict()
    flat = config | (config.get("rope_parameters") or config.get("rope_scaling") or {})
    found = {value for name, value in flat.items() if isinstance(value, int) and THRESHOLDS.search(name)}
    return sorted(value for value in found if value > 2 * HALF)


def check_model(model: PreTrainedModel, slots: int | None = None) -> dict[str, Difference]:
    """Print whether `model` can be decoded exactly.

    A few tokens are run through the loop's cache and compared with the model's own forward passes,
    as a sampler does before its first step.

    Parameters
    ----------
    model
        A model of transformers.
    slots
        Cache slots of a row; by default 512, or the model's limit.

    Returns
    -------
    dict
        The difference found for a chain and for a tree of draft tokens.

    Raises
    ------
    TypeError
        For a model that cannot be run.

    Examples
    --------
    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float64)
    >>> found = check_model(model)
    GPTNeoXForCausalLM, float64, sdpa attention, rows of 64 slots
    chain: agrees with the model's own forward pass (difference below 1e-04, which is rounding)
    tree: agrees with the model's own forward pass (difference below 1e-04, which is rounding)
    """
    require_supported(model)
    limit = context_limit(model) or 512
    slots = min(512, limit) if slots is None else slots
    if not slots >= 3 * HALF:
        raise ValueError(f"slots is {slots}; the comparison needs at least {3 * HALF}")
    dtype, attention = str(model.dtype).removeprefix("torch."), model.config._attn_implementation
    print(f"{type(model).__name__}, {dtype}, {attention} attention, rows of {slots} slots")
    found = {}
    for kind in KINDS:
        found[kind] = difference_from_itself(model, model, slots, kind, 2 * max(min(HALF, limit // 2), 1))
        difference, allowed = found[kind]
        agrees = f"agrees with the model's own forward pass (difference below {allowed:.0e}, which is rounding)"
        refused = "refused: " + _refusal(model, found[kind], kind, 2 * HALF) if difference > allowed else ""
        print(f"{kind}: {refused or agrees}")
    return found


def difference_from_itself(
    model: PreTrainedModel, modules: PreTrainedModel, slots: int, kind: str, length: int
) -> Difference:
    """How far the distributions in the loop's cache are from those of the model alone, over a
    "chain" or a "tree" that ends a sequence of `length` tokens.

    Where a model in 16 bits differs, a copy in float32 decides, if there is memory for it.
    """
    tokens = probe_tokens(model, length)
    half = min(HALF, length // 2)
    with torch.inference_mode(), failing_clearly(model):
        there, own = KINDS[kind](modules, model, tokens, half, slots)
        found = float(total_variation(probabilities(there), probabilities(own)).mean())
    if not found > ROUNDING or torch.finfo(model.dtype).bits > 16:
        return Difference(found, ROUNDING)
    if not copy_fits(model):
        return Difference(found, rounding(model.dtype))
    in_float = copy.deepcopy(model).float()
    return difference_from_itself(in_float, in_float, slots, kind, length)


def probe_tokens(model: PreTrainedModel, length: int) -> Tensor:
    """Two sequences `(2, length)` without tokens that the configuration names, such as padding and
    images."""
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
    """Whatever `model` raises inside, memory apart, is a `TypeError` that names it."""
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
    """Logits in rows of different lengths, after a prompt pass that also saw tokens beyond the
    shorter row; and the model's own."""
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
    """Logits of both sequences as branches of one tree after their common beginning; and the
    model's own."""
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


def _refusal(model: PreTrainedModel, difference: Difference, kind: str, length: int) -> str:
    return (
        f"{type(model).__name__} would be decoded from wrong distributions: in the loop's cache, over a {kind} at "
        f"{length} tokens, they differ by {difference.found:.2g} in total variation from those of its own forward "
        f"pass, and rounding gives {difference.allowed:.0e} at most; {_reason(model)}"
    )


@torch.inference_mode()
def _reason(model: PreTrainedModel) -> str:
    """What the model does otherwise, by forward passes of the model alone."""
    tokens = probe_tokens(model, 2 * HALF)
    whole, positions = _alone(model, tokens), torch.arange(2 * HALF, device=tokens.device).expand(2, -1)

    def differ(one: Tensor, other: Tensor) -> bool:
        found = float(total_variation(probabilities(one), probabilities(other)).mean())
        return found > rounding(model.dtype)

    if differ(whole[:, :HALF], _alone(model, tokens[:, :HALF])):
        return "a token's distribution depends on the tokens after it (a decoder needs is_decoder=True)"
    if differ(whole, model(input_ids=tokens, position_ids=positions, use_cache=False).logits):
        return "it does not count positions 0, 1, 2, ..."
    return (
        "it makes its attention mask, or its window, from the length of the cache, or leaves out the mask it is given"
    )
