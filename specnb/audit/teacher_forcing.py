"""Teacher forcing: the distributions that a target gives along existing sequences, one forward pass for each.

A target is a model of transformers, or a function from all tokens before to a distribution `(vocab,)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.audit.bets import CutoffGap, Row
from specnb.models.support import context_limit
from specnb.sampling.distributions import Sampling, standardise

NextTokenProbs = Callable[[tuple[int, ...]], Any]
Source = PreTrainedModel | NextTokenProbs

LOGITS = 2**23
"""Logits that one forward pass may return: limits how many sequences share a pass, and cuts long ones into pieces."""


class Completion(NamedTuple):
    """A prompt, the tokens generated after it, and the number of tokens emitted by each step, if known."""

    prompt: list[int]
    tokens: list[int]
    steps: list[int] | None = None


def vocabulary(source: Source, prompt: Sequence[int]) -> int:
    """The size of the vocabulary of `source`; a function is called once, with `prompt`."""
    if isinstance(source, PreTrainedModel):
        return int(source.config.vocab_size)
    return len(_probs_after(source, tuple(prompt)))


def teacher_forced_rows(
    target: Source,
    completions: Sequence[Completion],
    sampling: Sampling,
    draft: Source | None,
    draft_sampling: Sampling,
) -> Iterator[Row]:
    """The rows of all `completions`, in order; long ones in pieces. One without tokens needs no forward pass.

    >>> coin = lambda prefix: [0.5, 0.5]
    >>> rows = teacher_forced_rows(coin, [Completion([], [1, 0])], Sampling(), None, Sampling())
    >>> [(row.tokens, row.p.tolist()) for row in rows]
    [([1, 0], [[0.5, 0.5], [0.5, 0.5]])]
    """
    vocab = vocabulary(target, completions[0].prompt)
    for has_tokens, group in groupby(completions, key=lambda completion: bool(completion.tokens)):
        if has_tokens:
            yield from _rows(target, list(group), vocab, sampling, draft, draft_sampling)
        else:
            yield from (Row([], torch.empty(0, vocab), prompt=completion.prompt) for completion in group)


def _rows(
    target: Source,
    completions: Sequence[Completion],
    vocab: int,
    sampling: Sampling,
    draft: Source | None,
    draft_sampling: Sampling,
) -> Iterator[Row]:
    for batch in _batches(completions, vocab):
        pieces = _logits(target, batch, vocab)
        if draft is None:
            yield from (_row(*piece, sampling, None, draft_sampling) for piece in pieces)
        else:
            for piece, draft_piece in zip(pieces, _logits(draft, batch, vocab), strict=True):
                yield _row(*piece, sampling, draft_piece[2], draft_sampling)


def teacher_forced_pass(target: Source, completions: Sequence[Completion]) -> None:
    """Runs `target` over all `completions` as `teacher_forced_rows` does, and keeps nothing; for timing."""
    vocab = vocabulary(target, completions[0].prompt)
    for batch in _batches(completions, vocab):
        for _ in _logits(target, batch, vocab):
            pass


def _row(
    completion: Completion,
    start: int,
    logits: Tensor,
    sampling: Sampling,
    draft_logits: Tensor | None,
    draft_sampling: Sampling,
) -> Row:
    tokens = completion.tokens[start : start + len(logits)]
    p = standardise(logits, sampling)
    q = None if draft_logits is None else standardise(draft_logits, draft_sampling)
    raw = None if draft_logits is None or draft_sampling == Sampling() else standardise(draft_logits)
    zero = (p.gather(-1, torch.as_tensor(tokens, device=p.device)[:, None])[:, 0] == 0).nonzero()[:, 0].tolist()
    gaps = {start + at: cutoff_gap(logits[at], sampling, tokens[at]) for at in zero}
    steps = completion.steps if len(tokens) == len(completion.tokens) else None
    more = start + len(tokens) < len(completion.tokens)
    return Row(tokens, p, q, raw, completion.prompt, steps, gaps, continues=start > 0, more=more)


def cutoff_gap(logits: Tensor, sampling: Sampling, token: int) -> CutoffGap:
    """How far `token` is from the tokens that `sampling` keeps, by `logits` `(vocab,)`; zeros if it is kept.

    >>> cutoff_gap(torch.tensor([2.0, 1.0]), Sampling(temperature=0), 1)
    CutoffGap(logit=1.0, mass=0.0)
    """
    logits = logits.double()
    kept = 1 if sampling.temperature == 0 else sampling.top_k or len(logits)
    weakest = logits.topk(min(kept, len(logits))).values[-1]
    gap = float((weakest - logits[token]).clamp_min(0))
    if sampling.temperature == 0 or sampling.top_p == 1:
        return CutoffGap(gap, 0.0)
    probs = standardise(logits, Sampling(sampling.temperature, sampling.top_k))
    return CutoffGap(gap, max(0.0, float(probs[probs > probs[token]].sum()) - sampling.top_p))


def _batches(completions: Sequence[Completion], vocab: int) -> Iterator[list[Completion]]:
    """The completions, in order, in groups that share a forward pass."""
    longest, batch = 0, list[Completion]()
    for completion in completions:
        longest = max(longest, _length(completion))
        if batch and (len(batch) + 1) * longest * vocab > LOGITS:
            yield batch
            longest, batch = _length(completion), []
        batch.append(completion)
    yield batch


def _length(completion: Completion) -> int:
    return len(completion.prompt) + len(completion.tokens)


def _logits(source: Source, completions: Sequence[Completion], vocab: int) -> Iterator[tuple[Completion, int, Tensor]]:
    """For each completion, or piece of one: the completion, the offset of its first token, and logits `(n, vocab)`."""
    if not isinstance(source, PreTrainedModel):
        for completion in completions:
            yield completion, 0, _function_logits(source, completion, vocab)
    elif len(completions) == 1 and _length(completions[0]) * vocab > LOGITS:
        yield from _in_pieces(source, completions[0], max(1, LOGITS // vocab))
    else:
        yield from batch_logits(source, completions)


def batch_logits(model: PreTrainedModel, completions: Sequence[Completion]) -> Iterator[tuple[Completion, int, Tensor]]:
    """For each completion: the completion, 0, and logits `(n, vocab)`, all from one forward pass without a cache."""
    # Padding is on the right, where causal attention does not see it.
    longest = max(map(_length, completions)) - 1
    rows = [[*completion.prompt, *completion.tokens[:-1]] for completion in completions]
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)
    first = min(len(completion.prompt) for completion in completions) - 1
    logits = _forward(model, ids, keep=longest - first, use_cache=False).logits
    for completion, row in zip(completions, logits, strict=True):
        start = len(completion.prompt) - 1 - first
        yield completion, 0, row[start : start + len(completion.tokens)]


def _in_pieces(model: PreTrainedModel, completion: Completion, size: int) -> Iterator[tuple[Completion, int, Tensor]]:
    ids = torch.tensor([[*completion.prompt, *completion.tokens[:-1]]], device=model.device)
    cache = None
    offset = 1 - len(completion.prompt)  # negative offsets are in the prompt
    for part in ids.split(size, dim=1):
        output = _forward(model, part, keep=part.shape[1], use_cache=True, past_key_values=cache)
        cache = output.past_key_values
        if offset + part.shape[1] > 0:
            yield completion, max(offset, 0), output.logits[0, max(-offset, 0) :]
        offset += part.shape[1]


def _forward(model: PreTrainedModel, ids: Tensor, keep: int, **more: Any) -> Any:
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(input_ids=ids, logits_to_keep=keep, **more)
    output = model(input_ids=ids, **more)
    output.logits = output.logits[:, -keep:]
    return output


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
    row = torch.as_tensor(probs(prefix))
    row = row if row.is_floating_point() else row.double()
    if row.ndim != 1 or not bool((row >= 0).all()) or not abs(float(row.sum()) - 1) < 1e-3:
        raise ValueError(
            f"the distribution after {len(prefix)} tokens has shape {tuple(row.shape)} and sum {float(row.sum()):.6g}; "
            "it must be one row of probabilities that sum to 1"
        )
    return row


def require_completions(source: Source, completions: Sequence[Completion], names: Sequence[str] | None = None) -> None:
    """Raises `ValueError` for a completion that `source` gives no distributions for.

    The message names it by its entry in `names` (default: "sequence 0", "sequence 1", ...).
    """
    if isinstance(source, PreTrainedModel) and source.training:
        raise ValueError(
            "the model is in training mode, where dropout makes its distributions random; call its eval() first"
        )
    vocab = vocabulary(source, completions[0].prompt)
    limit = context_limit(source) if isinstance(source, PreTrainedModel) else None
    for number, completion in enumerate(completions):
        name = f"sequence {number}" if names is None else names[number]
        if isinstance(source, PreTrainedModel) and not completion.prompt:
            raise ValueError(f"{name} has no prompt; a model needs at least one token, such as beginning-of-sequence")
        outside = [token for token in (*completion.prompt, *completion.tokens) if not 0 <= token < vocab]
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
