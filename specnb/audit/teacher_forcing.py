"""The distributions that a target gives to texts that exist already: one run over each text (teacher forcing).

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

from specnb.audit.bets import Margin, Row
from specnb.models.support import context_limit
from specnb.sampling.distributions import Sampling, standardise

NextTokenProbs = Callable[[tuple[int, ...]], Any]
Source = PreTrainedModel | NextTokenProbs

LOGITS = 2**23
"""Logits that one run may give: it decides how many texts run at once, and cuts long ones into pieces."""


class Completion(NamedTuple):
    """A prompt, what was generated after it, and the tokens emitted by each step, if known."""

    prompt: list[int]
    tokens: list[int]
    steps: list[int] | None = None


def vocabulary(source: Source, prompt: Sequence[int]) -> int:
    """The number of tokens that `source` gives distributions about."""
    return int(source.config.vocab_size) if isinstance(source, PreTrainedModel) else len(_asked(source, tuple(prompt)))


def teacher_forced_rows(
    target: Source,
    completions: Sequence[Completion],
    sampling: Sampling,
    draft: Source | None,
    draft_sampling: Sampling,
) -> Iterator[Row]:
    """The rows of all `texts`, in order; long ones in pieces. One without tokens needs no forward pass."""
    vocab = vocabulary(target, completions[0].prompt)
    for some, group in groupby(completions, key=lambda text: bool(text.tokens)):
        if some:
            yield from _rows(target, list(group), vocab, sampling, draft, draft_sampling)
        else:
            yield from (Row([], torch.empty(0, vocab), prompt=text.prompt) for text in group)


def _rows(
    target: Source,
    completions: Sequence[Completion],
    vocab: int,
    sampling: Sampling,
    draft: Source | None,
    draft_sampling: Sampling,
) -> Iterator[Row]:
    for chosen in _together(completions, vocab):
        targets = _logits(target, chosen, vocab)
        if draft is None:
            yield from (_row(*logits, sampling, None, draft_sampling) for logits in targets)
        else:
            for logits, drafted in zip(targets, _logits(draft, chosen, vocab), strict=True):
                yield _row(*logits, sampling, drafted[2], draft_sampling)


def teacher_forced_pass(target: Source, completions: Sequence[Completion]) -> None:
    """Runs `target` over all `texts` as `forced_rows` does, and keeps nothing."""
    vocab = vocabulary(target, completions[0].prompt)
    for chosen in _together(completions, vocab):
        for _ in _logits(target, chosen, vocab):
            pass


def _row(
    text: Completion, start: int, logits: Tensor, sampling: Sampling, drafted: Tensor | None, drafting: Sampling
) -> Row:
    tokens = text.tokens[start : start + len(logits)]
    p = standardise(logits, sampling)
    q = None if drafted is None else standardise(drafted, drafting)
    raw = None if drafted is None or drafting == Sampling() else standardise(drafted)
    zero = (p.gather(-1, torch.as_tensor(tokens, device=p.device)[:, None])[:, 0] == 0).nonzero()[:, 0].tolist()
    margins = {start + at: margin(logits[at], sampling, tokens[at]) for at in zero}
    steps = text.steps if len(tokens) == len(text.tokens) else None
    more = start + len(tokens) < len(text.tokens)
    return Row(tokens, p, q, raw, text.prompt, steps, margins, continues=start > 0, more=more)


def margin(logits: Tensor, sampling: Sampling, token: int) -> Margin:
    """How far `token` is from what `sampling` keeps of `logits` `(vocab,)`; both numbers are 0 if it keeps it."""
    logits = logits.double()
    kept = 1 if sampling.temperature == 0 else sampling.top_k or len(logits)
    weakest = logits.topk(min(kept, len(logits))).values[-1]
    gap = float((weakest - logits[token]).clamp_min(0))
    if sampling.temperature == 0 or sampling.top_p == 1:
        return Margin(gap, 0.0)
    probs = standardise(logits, Sampling(sampling.temperature, sampling.top_k))
    return Margin(gap, max(0.0, float(probs[probs > probs[token]].sum()) - sampling.top_p))


def _together(completions: Sequence[Completion], vocab: int) -> Iterator[list[Completion]]:
    """The texts, in order, in groups that run at once."""
    longest, chosen = 0, list[Completion]()
    for text in completions:
        longest = max(longest, len(text.prompt) + len(text.tokens))
        if chosen and (len(chosen) + 1) * longest * vocab > LOGITS:
            yield chosen
            longest, chosen = len(text.prompt) + len(text.tokens), []
        chosen.append(text)
    yield chosen


def _logits(source: Source, completions: Sequence[Completion], vocab: int) -> Iterator[tuple[Completion, int, Tensor]]:
    """Of each text, or piece of one: the text, the place of its first token here, and logits `(n, vocab)`."""
    if not isinstance(source, PreTrainedModel):
        for text in completions:
            yield text, 0, _function_logits(source, text, vocab)
    elif len(completions) == 1 and (len(completions[0].prompt) + len(completions[0].tokens)) * vocab > LOGITS:
        yield from _in_pieces(source, completions[0], max(1, LOGITS // vocab))
    else:
        yield from _at_once(source, completions)


def _at_once(model: PreTrainedModel, completions: Sequence[Completion]) -> Iterator[tuple[Completion, int, Tensor]]:
    # Padding stands behind each text, where causal attention does not look.
    longest = max(len(text.prompt) + len(text.tokens) for text in completions) - 1
    rows = [[*text.prompt, *text.tokens[:-1]] for text in completions]
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)
    first = min(len(text.prompt) for text in completions) - 1
    logits = _run(model, ids, keep=longest - first, use_cache=False).logits
    for text, row in zip(completions, logits, strict=True):
        start = len(text.prompt) - 1 - first
        yield text, 0, row[start : start + len(text.tokens)]


def _in_pieces(model: PreTrainedModel, text: Completion, piece: int) -> Iterator[tuple[Completion, int, Tensor]]:
    ids = torch.tensor([[*text.prompt, *text.tokens[:-1]]], device=model.device)
    cache = None
    done = 1 - len(text.prompt)  # places before 0 belong to the prompt
    for part in ids.split(piece, dim=1):
        output = _run(model, part, keep=part.shape[1], use_cache=True, past_key_values=cache)
        cache = output.past_key_values
        if done + part.shape[1] > 0:
            yield text, max(done, 0), output.logits[0, max(-done, 0) :]
        done += part.shape[1]


def _run(model: PreTrainedModel, ids: Tensor, keep: int, **more: Any) -> Any:
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(input_ids=ids, logits_to_keep=keep, **more)
    output = model(input_ids=ids, **more)
    output.logits = output.logits[:, -keep:]
    return output


def _function_logits(probs: NextTokenProbs, text: Completion, vocab: int) -> Tensor:
    distributions = []
    for at in range(len(text.tokens)):
        distributions.append(_asked(probs, (*text.prompt, *text.tokens[:at])))
        if len(distributions[-1]) != vocab:
            raise ValueError(
                f"a distribution has {len(distributions[-1])} entries and the target's vocabulary {vocab}; target and draft must "
                "share a vocabulary that never changes"
            )
    return torch.stack(distributions).log()


def _asked(probs: NextTokenProbs, prefix: tuple[int, ...]) -> Tensor:
    asked = torch.as_tensor(probs(prefix))
    asked = asked if asked.is_floating_point() else asked.double()
    if asked.ndim != 1 or not bool((asked >= 0).all()) or not abs(float(asked.sum()) - 1) < 1e-3:
        raise ValueError(
            f"the distribution after {len(prefix)} tokens has shape {tuple(asked.shape)} and sum {float(asked.sum()):.6g}; "
            "it must be one row of probabilities that sum to 1"
        )
    return asked


def require_completions(source: Source, completions: Sequence[Completion], names: Sequence[str] | None = None) -> None:
    """Raises `ValueError` for a text that `source` cannot judge, by its entry in `names` (default: "text 0", ...)."""
    if isinstance(source, PreTrainedModel) and source.training:
        raise ValueError(
            "the model is in training mode, where dropout makes its distributions random; call its eval() first"
        )
    vocab = vocabulary(source, completions[0].prompt)
    limit = context_limit(source) if isinstance(source, PreTrainedModel) else None
    for number, text in enumerate(completions):
        name = f"text {number}" if names is None else names[number]
        if isinstance(source, PreTrainedModel) and not text.prompt:
            raise ValueError(
                f"{name} has no prompt; a model needs at least one token before, the begin-of-text one say"
            )
        outside = [token for token in (*text.prompt, *text.tokens) if not 0 <= token < vocab]
        if outside:
            raise ValueError(
                f"{name} has the token {outside[0]}; the vocabulary has the tokens 0 to {vocab - 1}: "
                "was it written with another tokenizer?"
            )
        if limit is not None and len(text.prompt) + len(text.tokens) - 1 > limit:
            raise ValueError(
                f"{name} has {len(text.prompt) + len(text.tokens)} tokens with its prompt, and the model has "
                f"{limit} positions; cut it, or generate shorter ones"
            )
