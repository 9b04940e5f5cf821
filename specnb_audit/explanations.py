"""What may explain a finding, tried once there is one: another order of the filters, rounding in bfloat16, dependence.

None of this changes how likely an exact sampler is to be rejected: nothing here is asked unless it was rejected, or
tokens are impossible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb_audit.alternatives import DEPENDENCE
from specnb_audit.auditor import Auditor
from specnb_audit.bets import steps_between
from specnb_audit.claimed import claimed_probs, is_active, other_orders
from specnb_audit.numerics import Numerics, crossing, in_dtype
from specnb_audit.report import Report
from specnb_audit.teacher_forcing import Completion, Models, Source, teacher_forced_rows

REMEMBERED = 100_000
"""Tokens of sequences, prompts included, that are kept for explanations."""
TRIED = 4_000
BETTER = 20.0
DEPENDENT = (100.0, 10.0)
"""A sequence whose e-value for dependence exceeds this is taken to share its noise with an earlier one; the second is
tried where the first leaves evidence for dependence, because independent sequences are seldom taken for dependent."""


class Remembered:
    """Passes completions on, and keeps the first of them, up to `REMEMBERED` tokens.

    >>> one = Completion([1], [2])
    >>> kept = Remembered([one, None])
    >>> list(kept) == [one, None], kept.completions == [one]
    (True, True)
    """

    def __init__(self, completions: Iterable[Completion | None]) -> None:
        self._source = completions
        self.completions: list[Completion] = []
        self._left = REMEMBERED

    def __iter__(self) -> Iterator[Completion | None]:
        for completion in self._source:
            if completion is not None and self._left > 0:
                self._left -= len(completion.prompt) + len(completion.tokens)
                self.completions.append(completion)
            yield completion


def order_note(
    target: Source, sampling: Sampling, completions: Sequence[Completion], suspicious: set[int], delta: float
) -> list[str]:
    """A note if another order of the filters explains the tokens better by a likelihood ratio above 1/delta.

    Tried on `TRIED` tokens, those of the `suspicious` sequences first.
    """
    orders = other_orders(sampling)
    if not orders:
        return []
    chosen, size = list[Completion](), 0
    for number in sorted(range(len(completions)), key=lambda number: number not in suspicious):
        if size < TRIED:
            chosen.append(completions[number])
            size += len(completions[number].tokens)
    claimed, *others = _log_likelihoods(target, chosen, [sampling, *orders.values()])
    best = int(np.argmax(others))
    engine = list(orders)[best]
    if others[best] == -math.inf or others[best] - claimed < math.log(len(others) / delta):
        return []
    order = [name for name in orders[engine].order if is_active(sampling, name)]
    return [
        f"another order of the filters explains the tokens: {', '.join(order)}, as in {engine}; if the engine applies "
        f"them so, claim it (--filter-order {engine})"
    ]


def _log_likelihoods(target: Source, completions: Sequence[Completion], settings: Sequence[Sampling]) -> list[float]:
    totals = np.zeros(len(settings))
    for row in teacher_forced_rows(Models(target), completions):
        if len(row.tokens) == 0:
            continue
        logits, at = row.p.double().log(), row.p.new_tensor(row.tokens).long()[:, None]
        for number, sampling in enumerate(settings):
            totals[number] += float(claimed_probs(logits, sampling).gather(-1, at).log().sum())
    return [float(total) for total in totals]


@torch.inference_mode()
def bfloat16_note(
    report: Report, measured: Numerics | None, target: Source, sampling: Sampling, completions: Sequence[Completion]
) -> list[str]:
    """A note if the e-value is no more than the numerics of bfloat16 explain, and they do explain the tokens.

    The first holds for any small deviation. So a copy of the target in bfloat16 is compared with the target: its
    likelihood of the tokens (`TRIED` at most) must be `BETTER` times as large. For tokens that deviate in another way,
    such as the temperature, it is smaller on average.
    """
    if measured is None or report.violations or not len(report.running) or not isinstance(target, PreTrainedModel):
        return []
    if crossing(report.running * np.log(10), report.delta, measured.nats) is not None:
        return []
    if _bfloat16_gain(target, sampling, completions) < math.log(BETTER):
        return []
    return [
        f"numerics as large as those of bfloat16 would explain the e-value (error rate {report.delta:g}), and the "
        "target in bfloat16 fits the tokens better; if the engine computes in bfloat16, give its dtype "
        "(--engine-dtype bfloat16)"
    ]


def _bfloat16_gain(target: PreTrainedModel, sampling: Sampling, completions: Sequence[Completion]) -> float:
    """The log-likelihood of the first tokens under the target in bfloat16, minus that under the target itself.

    Tokens that either makes impossible are left out.
    """
    gain, left = 0.0, TRIED
    rounded = in_dtype(target, torch.bfloat16)
    for row in teacher_forced_rows(Models(target, sampling, suspected=rounded), completions):
        if left <= 0:
            break
        if row.suspected is not None:
            at = row.p.new_tensor(row.tokens).long()[:, None]
            logs = (row.suspected.gather(-1, at).double() / row.p.gather(-1, at).double()).log()
            gain += float(logs[logs.isfinite()].sum())
        left -= len(row.tokens)
    return gain


def prompt_note(completions: Sequence[Completion]) -> list[str]:
    """A note if most sequences have their prompt in the tokens too.

    >>> prompt_note([Completion([5, 7], [5, 7, 1])])
    ['the tokens of 1 of 1 sequences begin with their prompt; give the new tokens only']
    """
    twice = sum(len(one.prompt) > 1 and one.tokens[: len(one.prompt)] == one.prompt for one in completions)
    if 2 * twice <= len(completions):
        return []
    return [
        f"the tokens of {twice:,} of {len(completions):,} sequences begin with their prompt; give the new tokens only"
    ]


def end_token_note(target: Source, completions: Sequence[Completion]) -> list[str]:
    """A note where sequences continue after the model's own end token; asked where `eos` was not given."""
    if not isinstance(target, PreTrainedModel):
        return []
    own = getattr(target.config, "eos_token_id", None)
    ends = {own} if isinstance(own, int) else set(own or ())
    count = sum(any(token in ends for token in one.tokens[:-1]) for one in completions)
    some = "1 sequence continues" if count == 1 else f"{count:,} sequences continue"
    return [f"{some} after the end token {sorted(ends)}; give eos if it ends them"] if count else []


def audited(auditor: Auditor, completions: Sequence[Completion]) -> list[Completion]:
    """The `completions`, in their order, as far as `auditor` has audited them.

    Left out are those that were read ahead when it stopped, what a stop has left of a sequence in pieces, and tokens
    after an end token.
    """
    sequence = np.concatenate([np.empty(0, np.int64), *(place[0] for place in auditor.places)])
    lengths = np.bincount(sequence, minlength=auditor.sequences).tolist()
    return [
        one._replace(tokens=one.tokens[:n], steps=None if one.steps is None else steps_between(one.steps, 0, n))
        for one, n in zip(completions, lengths, strict=False)
    ]


def dependent_sequences(report: Report, lengths: Sequence[int]) -> set[int] | None:
    """The sequences that share noise with an earlier one, by their own part of the evidence for dependence.

    `lengths` are the tokens of each sequence, in the order of the audit. None where the others still reject
    independence at `report.delta`: a short sequence has too little evidence of its own.
    """
    ends = np.cumsum([0, *lengths])
    kinds = [report.running_by_alternative[name] for name in DEPENDENCE if name in report.running_by_alternative]
    gains = np.stack([np.diff(np.concatenate([[0.0], running])[ends]) for running in kinds])
    for least in DEPENDENT:
        shared = (gains > math.log10(least)).any(axis=0)
        if gains[:, ~shared].sum(axis=1).max() < -math.log10(report.delta):
            return set(np.flatnonzero(shared).tolist())
    return None


def rows_alone(report: Report, models: Models, completions: Sequence[Completion], auditor: Auditor) -> Report | None:
    """The report on those sequences alone that share no noise with an earlier one; None without dependence, and where
    it cannot be said which they are.

    Asked where an alternative of `DEPENDENCE` has the largest e-value. Bets on single rows are misled there: what one
    row does by chance is repeated by all that share its noise. `completions` must have been `audited`; `auditor` is a
    fresh one that ignores dependence, and lengths, because a stop may have cut the last sequence.
    """
    if report.diagnosis not in DEPENDENCE:
        return None
    shared = dependent_sequences(report, [len(one.tokens) for one in completions])
    if shared is None:
        return None
    kept = [completion for number, completion in enumerate(completions) if number not in shared]
    for row in teacher_forced_rows(models, kept):
        auditor.add(row)
    return auditor.report() if auditor.tokens else None
