"""Whether a model, run as the decoding loop runs it, gives its own distributions.

The loop keeps tokens in a cache with spare slots, gives every row its own positions, and hides
slots by a mask. A model may compute a mask from the length of the cache, count positions in another
way, or leave the mask out; it would be decoded from wrong distributions without an error. So a few
tokens are run through the loop's cache, slots and mask, in pieces and in rows of different lengths,
and compared with forward passes of the model alone. A model that differs is refused. The result is
kept for as long as the model is not changed (`specnb.models.known`).

A draft model needs no probe: whatever distribution a token was sampled from, the rule makes it
exact.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import SEEN_MULTIPLE, CachedModel, decoder_config, free_memory, prefill
from specnb.distributions import total_variation
from specnb.models.known import known_of, one_at_a_time
from specnb.support import context_limit, require_supported, sliding_window, vocabulary
from specnb.trees import TokenTree

HALF = 3  # tokens of a sequence before the pass that is compared, and in it
NARROW = 3  # the window while the probe runs, where the model's is too long for it
PROBED_ROWS = 2
LARGEST_ROUNDED = 1024
"""Up to so many slots the probe has the next power of two, so that one probe serves many lengths of
prompts."""
LOWEST, ROUNDINGS = 1e-4, 16
"""A mean total variation up to `LOWEST` is rounding; in 16 bits, where a copy in float32 has no
room, up to so many times the precision of the dtype."""


class Difference(NamedTuple):
    """The mean total variation between the distributions in the loop and the model's own, and how
    much is rounding."""

    found: float
    allowed: float


def require_agreement(model: PreTrainedModel, slots: int, tree: bool = False) -> None:
    """Raises `TypeError`, with the difference and a likely reason, for a model that the loop would
    run wrongly.

    `slots` are those of each row; `tree` asks for trees of draft tokens, too.

    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> require_agreement(model, slots=20)
    """
    slots = max(slots, 2 ** (min(slots, LARGEST_ROUNDED) - 1).bit_length())
    known = known_of(model)
    for kind in KINDS if tree else ("chain",):
        agreed = known.setdefault(kind, [])
        if slots in agreed:
            continue
        if not agreed or not _as_with(model, slots, agreed[0], kind):
            difference = difference_from_itself(model, slots, kind)
            if difference.found > difference.allowed:
                raise TypeError(_refusal(model, difference, kind))
        agreed.append(slots)


@one_at_a_time
def check_model(model: PreTrainedModel, slots: int | None = None) -> dict[str, Difference]:
    """Prints whether `model` can be decoded exactly; returns the difference found for a chain and
    for a tree.

    It is the mean total variation between the model's own next-token distributions and those in the
    decoding loop, over the tokens of a short probe in rows with `slots` (by default 512, or the
    model's limit). `generate` and `beam_search` make the same comparison before the first step.
    Raises `TypeError` for a model that cannot be run.

    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float64)
    >>> found = check_model(model)
    GPTNeoXForCausalLM, float64, sdpa attention, rows of 64 slots
    chain: agrees with the model's own forward pass (difference below 1e-04, which is rounding)
    tree: agrees with the model's own forward pass (difference below 1e-04, which is rounding)
    """
    require_supported(model)
    known_of(model)  # packs again what was changed
    slots = slots or min(512, context_limit(model) or 512)
    dtype, attention = str(model.dtype).removeprefix("torch."), model.config._attn_implementation
    print(f"{type(model).__name__}, {dtype}, {attention} attention, rows of {slots} slots")
    differences = {}
    for kind in KINDS:
        found, allowed = differences[kind] = difference_from_itself(model, slots, kind=kind)
        agrees = f"agrees with the model's own forward pass (difference below {allowed:.0e}, which is rounding)"
        print(f"{kind}: {agrees if found <= allowed else 'refused: ' + _refusal(model, differences[kind], kind)}")
    return differences


def difference_from_itself(model: PreTrainedModel, slots: int, kind: str = "chain") -> Difference:
    """How far the distributions in the loop's cache are from those of the model alone, over a
    "chain" or a "tree".

    Where a model in 16 bits differs, a copy in float32 decides, if there is memory for it: rounding
    in 16 bits is as large as what some models do wrongly. NaN is no difference; the loop reports
    it. Raises `TypeError` if the model fails in the cache.
    """
    # The fewest and the most that a pass of the loop reads.
    sizes = {min(slots, SEEN_MULTIPLE), slots}
    difference = max(mean_difference(*_compared(model, size, kind)) for size in sizes)
    if not difference > LOWEST or torch.finfo(model.dtype).bits > 16:
        return Difference(difference, LOWEST)
    if not _copy_fits(model):
        return Difference(difference, rounding(model.dtype))
    return difference_from_itself(copy.deepcopy(model).float(), slots, kind)


def rounding(dtype: torch.dtype) -> float:
    """The largest mean total variation that rounding in `dtype` explains.

    >>> rounding(torch.float32), rounding(torch.bfloat16)
    (0.0001, 0.125)
    """
    return LOWEST if torch.finfo(dtype).bits > 16 else ROUNDINGS * torch.finfo(dtype).eps


def _copy_fits(model: PreTrainedModel) -> bool:
    if getattr(model, "is_quantized", False):
        return False  # has no copy in float32
    return bool(2 * model.num_parameters() * torch.float32.itemsize < free_memory(model.device))


def _as_with(model: PreTrainedModel, slots: int, others: int, kind: str) -> bool:
    """Whether the distributions with `slots` are those with `others`: spare slots have no
    influence."""
    logits = [_compared(model, number, kind)[0] for number in (slots, others)]
    return mean_difference(*logits) <= LOWEST


def mean_difference(first: Tensor, second: Tensor) -> float:
    """The mean total variation between the distributions of two tensors of logits
    `(..., vocab)`."""
    return float(total_variation(probabilities(first), probabilities(second)).mean())


@torch.inference_mode()
def _compared(model: PreTrainedModel, slots: int, kind: str) -> tuple[Tensor, Tensor]:
    """The logits in the loop's cache, and those of the model alone."""
    half = min(HALF, (context_limit(model) or 2 * HALF) // 2)
    tokens = probe_tokens(model, 2 * half)
    if kind == "tree":
        tokens[1, :half] = tokens[0, :half]
    with _narrow_window(model, 2 * half), failing_clearly(model):
        return KINDS[kind](model, tokens, half, slots)


def probabilities(logits: Tensor) -> Tensor:
    """Softmax of `logits` `(..., vocab)` in float32 or better."""
    return torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def probe_tokens(model: PreTrainedModel, length: int) -> Tensor:
    """Two sequences `(2, length)` without tokens that the configuration names, such as padding and
    images."""
    settings = model.config.to_dict() | model.config.get_text_config().to_dict()
    named = {number for name, number in settings.items() if name.endswith(("_token_id", "_token_index"))
             and isinstance(number, int)}  # fmt: skip
    known = range(min(vocabulary(model), 1000))
    plain = torch.tensor([token for token in known if token not in named])
    if len(plain) < length:  # equal tokens would hide what a mask or a position does
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


@contextmanager
def _narrow_window(model: PreTrainedModel, length: int) -> Iterator[None]:
    """A window that is no shorter than the probe is `NARROW` inside, so that the probe reaches
    across it."""
    config = decoder_config(model)
    kept = sliding_window(config)
    if kept < length:
        yield
        return
    config.sliding_window = NARROW
    try:
        yield
    finally:
        config.sliding_window = kept


def _alone(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]


def _seeing_all(model: PreTrainedModel, slots: int) -> CachedModel:
    runner = CachedModel(model, slots)
    runner.cache.shortens = False
    return runner


def _chain(model: PreTrainedModel, tokens: Tensor, half: int, slots: int) -> tuple[Tensor, Tensor]:
    """Logits in rows of different lengths, after a prompt pass that also saw tokens beyond the
    shorter row."""
    lengths = torch.tensor([half + 1, max(half - 1, 1)], device=tokens.device)
    at = lengths[:, None] - 1 + torch.arange(half, device=tokens.device)
    runner = _seeing_all(model, max(slots, 2 * half))
    beyond = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
    prefill(runner, tokens.masked_fill(beyond, int(tokens[0, 0])), lengths)
    there = runner.run(tokens.gather(1, at), at, keep=half)
    return there, _alone(model, tokens).take_along_dim(at[..., None], dim=1)


def _tree(model: PreTrainedModel, tokens: Tensor, half: int, slots: int) -> tuple[Tensor, Tensor]:
    """Logits of both sequences as branches of one tree after their common first half."""
    branch = [*range(-1, half - 1)]
    tree = TokenTree([*branch, *[-1 if parent < 0 else parent + half for parent in branch]], tokens.device)
    runner = _seeing_all(model, max(slots, 3 * half))
    first = torch.tensor([half - 1], device=tokens.device)
    prefill(runner, tokens[:1], first + 1)
    entries = torch.cat([tokens[:1, half - 1 :], tokens[1:, half:]], dim=1)
    positions, visible = tree.positions(first), tree.visible(first, runner.capacity)
    there = runner.run(entries, tree.slots(first), keep=2 * half, positions=positions, visible=visible)
    return there.reshape(2, half, -1), _alone(model, tokens)[:, half:]


KINDS = {"chain": _chain, "tree": _tree}


def _refusal(model: PreTrainedModel, difference: Difference, kind: str) -> str:
    return (
        f"{type(model).__name__} would be decoded from wrong distributions: in the loop's cache, over a {kind}, they "
        f"differ by {difference.found:.2g} in total variation from those of its own forward pass, and rounding gives "
        f"{difference.allowed:.0e} at most; {_reason(model)}"
    )


@torch.inference_mode()
def _reason(model: PreTrainedModel) -> str:
    """What the model does otherwise, by forward passes of the model alone."""
    tokens = probe_tokens(model, 2 * HALF)
    whole, positions = _alone(model, tokens), torch.arange(2 * HALF, device=tokens.device).expand(2, -1)
    allowed = rounding(model.dtype)
    if mean_difference(whole[:, :HALF], _alone(model, tokens[:, :HALF])) > allowed:
        return "a token's distribution depends on the tokens after it (a decoder needs is_decoder=True)"
    counted = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    if mean_difference(whole, counted) > allowed:
        return "it does not count positions 0, 1, 2, ..."
    return (
        "it makes its attention mask, or its window, from the length of the cache, or leaves out the mask it is given"
    )
