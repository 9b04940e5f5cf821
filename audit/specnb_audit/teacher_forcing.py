"""Teacher forcing: the distributions that a target gives along existing sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.arguments import token_list
from specnb.cache import cache_argument
from specnb.check import probabilities, probe_tokens, rounding
from specnb.distributions import Sampling, total_variation
from specnb.support import TokenMap, context_limit
from specnb.support import vocabulary as vocabulary_of
from specnb_audit.bets import CutoffGap, Row, steps_between
from specnb_audit.claimed import claimed_probs, cutoff_gap, penalties_of
from specnb_audit.constraints import NO_CONSTRAINTS, Constraints, constrained
from specnb_audit.logit_faults import ROUNDINGS, TIMES, newest_counted
from specnb_audit.penalties import NO_PENALTIES, penalised

NextTokenProbs = Callable[[tuple[int, ...]], Any]
Source = PreTrainedModel | NextTokenProbs

LOGITS = 2**23
"""Logits that one forward pass may return: limits how many sequences share a pass, and cuts long
ones into pieces."""


Factors = Literal["whole", "long", "growing"]
"""Of longrope: by the whole length of a sequence; the long ones for all; or by the length so far, as
with a cache whose keys stay as they were."""
PROBED = 8  # tokens of a sequence by which a model is compared with itself


class Completion(NamedTuple):
    """A prompt and the tokens generated after it; if known the tokens emitted by each step, the
    batch, what was done beside sampling, and the engine's log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    steps: list[int] | None = None
    batch: int | str | None = None
    constraints: Constraints = NO_CONSTRAINTS
    logprobs: list[float | None] | None = None


def vocabulary(source: Source, prompt: Sequence[int]) -> int:
    """The size of the vocabulary of `source`; a function is called once, with `prompt`."""
    if isinstance(source, PreTrainedModel):
        return vocabulary_of(source)
    return len(_probs_after(source, tuple(prompt)))


class Models(NamedTuple):
    """The models that the rows of an audit come from, and the settings claimed for each.

    sampling   penalties in it are those of the target and the suspected model, not of the draft
    suspected  a model that may have been used instead of the target
    ends       end tokens, which `min_tokens` makes impossible
    factors    which rotary factors a target with longrope has (`has_longrope`)
    faults     whether rows come with the faults of `logit_faults`
    """

    target: Source
    sampling: Sampling = Sampling()
    draft: Source | None = None
    draft_sampling: Sampling = Sampling()
    suspected: Source | None = None
    ends: tuple[int, ...] = ()
    factors: Factors = "whole"
    faults: bool = True

    def all(self) -> list[Source]:
        return [one for one in (self.target, self.draft, self.suspected) if one is not None]


def teacher_forced_rows(models: Models, completions: Iterable[Completion | None]) -> Iterator[Row]:
    """The rows of all `completions`, in order; long ones in pieces.

    Several share a forward pass. None among them means that no more are ready: those before it are
    not kept waiting.

    >>> rows = teacher_forced_rows(Models(lambda prefix: [0.5, 0.5]), [Completion([], [1, 0])])
    >>> [(row.tokens, row.p.tolist()) for row in rows]
    [([1, 0], [[0.5, 0.5], [0.5, 0.5]])]
    """
    for batch in _batches(completions, models):
        vocab = vocabulary(models.target, batch[0].prompt)
        rows = _rows(models, [completion for completion in batch if completion.tokens], vocab)
        for completion in batch:
            if not completion.tokens:
                yield Row([], torch.empty(0, vocab), prompt=completion.prompt, batch=completion.batch)
                continue
            yield (row := next(rows))
            while row.more:
                yield (row := next(rows))


def _rows(models: Models, completions: Sequence[Completion], vocab: int) -> Iterator[Row]:
    sources = (models.target, models.draft, models.suspected)
    pieces = [repeat(None) if source is None else _logits(models, source, completions, vocab) for source in sources]
    for piece, drafted, other in zip(*pieces, strict=False):  # repeat has no end
        yield _row(models, piece, drafted and drafted[2], other and other[2])


def teacher_forced_logits(
    models: Models, completions: Iterable[Completion]
) -> Iterator[tuple[Completion, int, Tensor, Tensor | None]]:
    """For each of `completions`, or piece of one: it, the offset of its first token, the target's
    logits, penalised and constrained, and the draft's, if there is one."""
    for batch in _batches((one for one in completions if one.tokens), models):
        vocab = vocabulary(models.target, batch[0].prompt)
        drafts = repeat(None) if models.draft is None else _logits(models, models.draft, batch, vocab)
        for piece, draft in zip(_logits(models, models.target, batch, vocab), drafts, strict=False):
            one, start, logits = piece
            yield one, start, _processed(models, logits, one, start), None if draft is None else draft[2]


def _processed(models: Models, logits: Tensor, one: Completion, start: int) -> Tensor:
    """Logits of the target before temperature and filters: with penalties, and constraints."""
    penalties = penalties_of(models.sampling)
    return _constrained(models, penalised(logits, penalties, one.prompt, one.tokens, start), one, start)


def _constrained(models: Models, logits: Tensor, one: Completion, start: int) -> Tensor:
    return constrained(logits, one.constraints, one.tokens, start, models.ends)


def _faults(models: Models, logits: Tensor, one: Completion, start: int) -> dict[str, Tensor]:
    """The probabilities `(m, n)` of the tokens from `start` on under the faults of `logit_faults`; of
    a function as target no logits are known."""
    if not models.faults or not isinstance(models.target, PreTrainedModel):
        return {}
    penalties, before = penalties_of(models.sampling), (one.prompt, one.tokens, start)
    found = {"rounded-logits": [penalised(rounded(logits), penalties, *before) for rounded in ROUNDINGS.values()]}
    if penalties != NO_PENALTIES:
        found["last-token"] = [newest_counted(logits, penalties, *before, times) for times in TIMES]
        found["avoids"] = [penalised(penalised(logits, penalties, *before), penalties, *before)]
    tokens = torch.as_tensor(one.tokens[start : start + len(logits)], device=logits.device)[:, None]

    def at_tokens(changed: Tensor) -> Tensor:
        return claimed_probs(_constrained(models, changed, one, start), models.sampling).gather(-1, tokens)[:, 0]

    return {name: torch.stack([at_tokens(one) for one in each]) for name, each in found.items()}


def _row(
    models: Models, piece: tuple[Completion, int, Tensor], draft_logits: Tensor | None, suspected_logits: Tensor | None
) -> Row:
    completion, start, logits = piece
    tokens = completion.tokens[start : start + len(logits)]

    faults = _faults(models, logits, completion, start)
    logits = _processed(models, logits, completion, start)
    if suspected_logits is not None:
        suspected_logits = _processed(models, suspected_logits, completion, start)
    p = claimed_probs(logits, models.sampling)

    def as_p(other: Tensor | None, sampling: Sampling) -> Tensor | None:
        """The distributions of another model in the dtype of p, which alone decides whether the
        audit is valid."""
        return None if other is None else claimed_probs(other, sampling).to(p.dtype)

    return Row(
        tokens,
        p,
        as_p(draft_logits, models.draft_sampling),
        raw=as_p(draft_logits, Sampling()) if models.draft_sampling != Sampling() else None,
        suspected=as_p(suspected_logits, models.sampling),
        faults=faults,
        prompt=completion.prompt,
        batch=completion.batch,
        steps=completion.steps and steps_between(completion.steps, start, start + len(tokens)),
        cutoff_gaps={start + at: gap for at, gap in cutoff_gaps(tokens, p, logits, models.sampling).items()},
        continues=start > 0,
        more=start + len(tokens) < len(completion.tokens),
    )


def cutoff_gaps(tokens: Sequence[int], p: Tensor, logits: Tensor, sampling: Sampling) -> dict[int, CutoffGap]:
    """The places of the impossible `tokens` `(n,)`, and how far each is from being kept, by the
    `logits` that p was made from."""
    impossible = p.gather(-1, torch.as_tensor(tokens, device=p.device)[:, None])[:, 0] == 0
    return {at: cutoff_gap(logits[at], sampling, tokens[at]) for at in impossible.nonzero()[:, 0].tolist()}


def _batches(completions: Iterable[Completion | None], models: Models) -> Iterator[list[Completion]]:
    """The completions, in order, in groups that share a forward pass; None ends a group, and so does
    a completion on the other side of a longrope's original length."""
    longest, vocab, batch = 0, 0, list[Completion]()
    for completion in completions:
        if completion is not None:
            vocab = vocab or vocabulary(models.target, completion.prompt)
            longest = max(longest, _length(completion))
        full = (len(batch) + 1) * longest * vocab > LOGITS
        if batch and (completion is None or full or _sides(models, completion) != _sides(models, batch[0])):
            yield batch
            longest, batch = 0 if completion is None else _length(completion), []
        if completion is not None:
            batch.append(completion)
    if batch:
        yield batch


def _sides(models: Models, completion: Completion) -> list[bool]:
    return [is_beyond(source, completion) for source in models.all()]


def has_longrope(model: PreTrainedModel) -> bool:
    """Whether its rotary factors change with the length of a sequence: its own bound is not that of its
    positions."""
    return context_limit(model) != getattr(model.config.get_text_config(), "max_position_embeddings", None)


def is_beyond(source: Source, completion: Completion) -> bool:
    """Whether a completion is longer than a longrope's original length: then all its positions, and
    those of all that share its pass, have other factors."""
    limit = context_limit(source) if isinstance(source, PreTrainedModel) else None
    return limit is not None and _length(completion) - 1 > limit


def _length(completion: Completion) -> int:
    return len(completion.prompt) + len(completion.tokens)


def _logits(
    models: Models, source: Source, completions: Sequence[Completion], vocab: int
) -> Iterator[tuple[Completion, int, Tensor]]:
    """For each completion, or piece of one, which is the same for all of `models`: it, the offset of its first
    token, and logits `(n, vocab)` of `source`."""
    if not isinstance(source, PreTrainedModel):
        for completion in completions:
            yield completion, 0, _function_logits(source, completion, vocab)
    elif models.factors != "whole" and has_longrope(source):
        limit = context_limit(source)
        assert limit is not None
        for completion in completions:
            if models.factors == "long":
                yield from batch_logits(source, [completion], vocab, least=limit + 1)
            else:
                yield from _in_pieces(source, completion, limit, vocab)
    elif (
        len(completions) == 1
        and _length(completions[0]) * vocab > LOGITS
        # The first piece of one beyond a longrope's length would have other factors.
        and all(
            isinstance(one, PreTrainedModel) and not is_beyond(one, completions[0]) and agrees_in_pieces(one)
            for one in models.all()
        )
    ):
        yield from _in_pieces(source, completions[0], max(1, LOGITS // vocab), vocab)
    else:
        yield from batch_logits(source, completions, vocab)


def batch_logits(
    model: PreTrainedModel, completions: Sequence[Completion], vocab: int | None = None, least: int = 0
) -> Iterator[tuple[Completion, int, Tensor]]:
    """For each completion: it, 0, and logits `(n, vocab)`, all from one forward pass without a
    cache over `least` tokens or more; `vocab` is the target's."""
    # Padding is on the right, where causal attention does not see it.
    longest = max(least, *(_length(completion) - 1 for completion in completions))
    rows = [[*completion.prompt, *completion.tokens[:-1]] for completion in completions]
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)
    first = min(len(completion.prompt) for completion in completions) - 1
    logits, _ = forward(model, ids, vocab, keep=longest - first, use_cache=False)
    for completion, row in zip(completions, logits, strict=True):
        start = len(completion.prompt) - 1 - first
        yield completion, 0, row[start : start + len(completion.tokens)]


def _in_pieces(
    model: PreTrainedModel, completion: Completion, size: int, vocab: int
) -> Iterator[tuple[Completion, int, Tensor]]:
    ids = torch.tensor([[*completion.prompt, *completion.tokens[:-1]]], device=model.device)
    name = cache_argument(model)
    cache = None
    offset = 1 - len(completion.prompt)  # negative offsets are in the prompt
    for part in ids.split(size, dim=1):
        logits, cache = forward(model, part, vocab, keep=part.shape[1], use_cache=True, **{name: cache})
        if offset + part.shape[1] > 0:
            yield completion, max(offset, 0), logits[0, max(-offset, 0) :]
        offset += part.shape[1]


def forward(model: PreTrainedModel, ids: Tensor, vocab: int | None, keep: int, **more: Any) -> tuple[Tensor, Any]:
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        more["logits_to_keep"] = keep
    token_map = TokenMap(model, vocab)
    output = model(input_ids=token_map.inputs(ids), **more)
    return token_map.logits(output.logits[:, -keep:]), output.get(cache_argument(model))


def _function_logits(probs: NextTokenProbs, completion: Completion, vocab: int) -> Tensor:
    distributions = []
    for at in range(len(completion.tokens)):
        distributions.append(_probs_after(probs, (*completion.prompt, *completion.tokens[:at])))
        if len(distributions[-1]) != vocab:
            raise ValueError(
                f"a distribution has {len(distributions[-1])} entries and the target's vocabulary {vocab}; target and "
                "draft must share a vocabulary that never changes"
            )
    return torch.stack(distributions).log()


def _probs_after(probs: NextTokenProbs, prefix: tuple[int, ...]) -> Tensor:
    given: Any = probs(prefix)
    row = torch.as_tensor(given, dtype=None if hasattr(given, "dtype") else torch.float64)
    row = row if row.is_floating_point() else row.double()
    if row.ndim != 1 or not bool((row >= 0).all()) or not abs(float(row.sum()) - 1) < 1e-3:
        raise ValueError(
            f"the distribution after {len(prefix)} tokens has shape {tuple(row.shape)} and sum {float(row.sum()):.6g}; "
            "it must be one row of probabilities that sum to 1"
        )
    return row


_causal: WeakSet[PreTrainedModel] = WeakSet()
_in_pieces_as_whole: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


@torch.inference_mode()
def require_causal(model: PreTrainedModel) -> None:
    """Raises `ValueError` unless a sequence has the same distributions alone, beside others and
    without its end; compared once for a model."""
    if model in _causal:
        return
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; the audit reads decoder-only models")
    long, short = _probes(model)
    (alone,), (own,) = _read(model, [long]), _read(model, [short])
    (begun,) = _read(model, [long._replace(tokens=long.tokens[:4])])
    ways = {
        "depend on the tokens after it (a decoder needs is_decoder=True)": (begun, alone[:4]),
        "depend on the sequences beside it": (torch.cat(_read(model, [long, short])), torch.cat([alone, own])),
    }
    for reason, pair in ways.items():
        difference = _mean_difference(*pair)
        if difference > rounding(model.dtype):
            raise ValueError(
                f"{type(model).__name__} cannot be audited: the distributions of a sequence {reason}, by "
                f"{difference:.2g} in total variation"
            )
    _causal.add(model)


@torch.inference_mode()
def agrees_in_pieces(model: PreTrainedModel) -> bool:
    """Whether `model` gives the same distributions piece by piece, with its cache, as at once."""
    if model not in _in_pieces_as_whole:
        long, _ = _probes(model)
        try:
            pieces = torch.cat([logits for _, _, logits in _in_pieces(model, long, 3, vocabulary_of(model))])
            agrees = _mean_difference(pieces, *_read(model, [long])) <= rounding(model.dtype)
        except Exception:  # a state that cannot be continued
            agrees = False
        _in_pieces_as_whole[model] = agrees
    return _in_pieces_as_whole[model]


def _mean_difference(logits: Tensor, other: Tensor) -> float:
    return float(total_variation(probabilities(logits), probabilities(other)).mean())


def _probes(model: PreTrainedModel) -> tuple[Completion, Completion]:
    length = min(PROBED, context_limit(model) or PROBED)
    long, short = (Completion([first], rest) for first, *rest in probe_tokens(model, length).tolist())
    return long, short._replace(tokens=short.tokens[:4])


def _read(model: PreTrainedModel, completions: Sequence[Completion]) -> list[Tensor]:
    return [logits for _, _, logits in batch_logits(model, completions)]


def require_completions(
    source: Source, completions: Sequence[Completion], names: Sequence[str] | None = None, vocab: int | None = None
) -> None:
    """Raises `ValueError`, with the entry of `names`, for a completion that `source` gives no
    distributions for; `vocab` is the target's."""
    if isinstance(source, PreTrainedModel) and source.training:
        raise ValueError(
            "the model is in training mode, where dropout makes its distributions random; call its eval() first"
        )
    if isinstance(source, PreTrainedModel):
        require_causal(source)
    vocab = vocabulary(source, completions[0].prompt) if vocab is None else vocab
    config = source.config.get_text_config() if isinstance(source, PreTrainedModel) else None
    limit = getattr(config, "max_position_embeddings", None)
    for number, completion in enumerate(completions):
        name = f"sequence {number}" if names is None else names[number]
        if isinstance(source, PreTrainedModel) and not completion.prompt:
            raise ValueError(f"{name} has no prompt; a model needs at least one token, such as beginning-of-sequence")
        tokens = token_list(name, [*completion.prompt, *completion.tokens])
        outside = [token for token in tokens if not 0 <= token < vocab]
        if outside:
            raise ValueError(
                f"{name} has the token {outside[0]}; the vocabulary has the tokens 0 to {vocab - 1}: "
                "was another tokenizer used?"
            )
        if limit is not None and _length(completion) - 1 > limit:
            raise ValueError(
                f"{name} has {_length(completion)} tokens with its prompt, and the model has "
                f"{limit} positions; cut the sequence, or generate shorter ones"
            )
