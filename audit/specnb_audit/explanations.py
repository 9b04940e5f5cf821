"""What may explain a finding: sequences that are wrong themselves, other settings, dependence.

Nothing here is asked unless exactness was rejected or tokens are impossible, so no level changes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb.support import context_limit
from specnb_audit.alternatives import DEPENDENCE, LEARNED
from specnb_audit.auditor import Auditor
from specnb_audit.bets import steps_between
from specnb_audit.claimed import (
    Claimed,
    claimed_probs,
    is_active,
    other_orders,
    penalties_of,
    twice_each,
    without_each,
)
from specnb_audit.control import found_kinds
from specnb_audit.distant_noise import noise_within
from specnb_audit.fitted_settings import fitted_settings
from specnb_audit.report import Report
from specnb_audit.teacher_forcing import (
    Completion,
    Factors,
    Models,
    Source,
    has_longrope,
    is_beyond,
    teacher_forced_rows,
)

PLACES = 8  # at most so many are taken to be forced
REMEMBERED = 100_000
"""Tokens of sequences, prompts included, that are kept for explanations."""
TRIED = 4_000
EDGE = 6
"""So many of the first and of the last tokens of the prompts are tried to be missing."""
NOISE = (*DEPENDENCE, "noise-of-steps")
DEPENDENT = (100.0, 10.0)
"""A sequence whose e-value for dependence exceeds this is taken to share its noise with an earlier
one; the second is tried where the first leaves evidence for dependence, because independent
sequences are seldom taken for dependent."""


def remembering(completions: Iterable[Completion | None], kept: list[Completion]) -> Iterator[Completion | None]:
    """Passes completions on, and adds the first of them to `kept`, up to `REMEMBERED` tokens."""
    left = REMEMBERED
    for completion in completions:
        if completion is not None and left > 0:
            left -= len(completion.prompt) + len(completion.tokens)
            kept.append(completion)
        yield completion


def beginning(completions: Sequence[Completion], first: Collection[int] = ()) -> list[Completion]:
    """About `TRIED` tokens of the `completions`, chosen from those numbered in `first` before others, in their
    order: an order by what was generated would itself be a deviation."""
    chosen, size = list[int](), 0
    for number in sorted(range(len(completions)), key=lambda number: number not in first):
        if size < TRIED:
            chosen.append(number)
            size += len(completions[number].tokens)
    return [completions[number] for number in sorted(chosen)]


def _explain(models: Models, completions: Iterable[Completion], auditor: Auditor) -> bool:
    """Whether `auditor`, a fresh one, does not reject `completions`; stops where it does."""
    for row in teacher_forced_rows(models, completions):
        auditor.add(row)
        if auditor.found_after is not None:
            return False
    return True


def likelier_settings(
    models: Models, completions: Sequence[Completion], suspicious: set[int], auditor: Auditor
) -> tuple[str, list[str]]:
    """A cause and a note if other settings explain the tokens: another order of the filters, one
    setting left out, or a penalty applied twice.

    They must do so better than those claimed by a likelihood ratio above 1/delta, and a fresh
    `auditor` must not reject them. Tried on `TRIED` tokens, those of the `suspicious` sequences
    first. Empty where none do.
    """
    orders = {(name, "order"): one for name, one in other_orders(models.sampling).items()}
    fewer = {(name, "not"): one for name, one in without_each(models.sampling).items()}
    more = {(name, "twice"): one for name, one in twice_each(models.sampling).items()}
    tried, chosen = {**orders, **fewer, **more}, beginning(completions, suspicious)
    if not tried:
        return "", []
    claimed, *others = _log_likelihoods(models, chosen, [models.sampling, *tried.values()])
    name, how = list(tried)[int(np.argmax(others))]
    if max(others) == -math.inf or max(others) - claimed < math.log(len(others) / auditor.delta):
        return "", []
    if not _explain(models._replace(sampling=tried[name, how]), chosen, auditor):
        return "", []
    if how == "not":
        return f"it looks as if {name} is not applied: without it the tokens are explained", []
    if how == "twice":
        return f"it looks as if {name} is applied twice: so the tokens are explained", []
    order = ", ".join(one for one in orders[name, how].order if is_active(models.sampling, one))
    return f"the filters look as if applied in another order: {order}, as in {name}", [
        f"if the engine applies the filters in the order {order}, claim it (--filter-order {name})"
    ]


def unapplied_constraint(
    models: Models, completions: Sequence[Completion], suspicious: set[int], fresh: Callable[[], Auditor]
) -> str:
    """A cause if `TRIED` tokens, those of the `suspicious` sequences first, are explained without `min_tokens`,
    or without the tokens allowed, and not with them; empty where neither is declared."""
    chosen = beginning(completions, suspicious)
    fewer: dict[str, dict[str, Any]] = {"min_tokens": {"min_tokens": 0}, "allowed_token_ids": {"allowed": None}}
    ways = {
        name: [one._replace(constraints=replace(one.constraints, **off)) for one in chosen]
        for name, off in fewer.items()
    }
    ways = {name: without for name, without in ways.items() if without != chosen}
    if not ways or _explain(models, chosen, fresh()):  # a later token was rejected, and these say nothing
        return ""
    for name, without in ways.items():
        if _explain(models, without, fresh()):
            return f"it looks as if {name} is not applied: without it the tokens are explained"
    return ""


class Candidate(NamedTuple):
    """What may explain tokens: how many nats better than the claim, a cause, a note or none, and the
    models and completions that a fresh auditor must not reject."""

    gain: float
    cause: str
    note: str
    models: Models
    completions: list[Completion]


def other_settings_or_prompts(
    models: Models, completions: Sequence[Completion], fresh_auditor: Callable[[], Auditor]
) -> tuple[str, list[str]]:
    """The likeliest cause, with a note or none, among settings that nobody claimed and other prompts;
    empty if none explains the tokens."""
    chosen = beginning(completions)
    candidates = [unclaimed_settings(models, chosen, fresh_auditor().delta)]
    candidates.append(likelier_prompts(models, chosen, fresh_auditor().delta))
    for one in sorted((one for one in candidates if one is not None), key=lambda one: -one.gain):
        if _explain(one.models, one.completions, fresh_auditor()):
            return one.cause, [one.note] * bool(one.note)
    return "", []


def unclaimed_settings(models: Models, completions: list[Completion], delta: float) -> Candidate | None:
    """Another temperature, or a filter with or without one, if they fit better (`fitted_settings`)."""
    fit = fitted_settings(models, completions, delta)
    if fit is None:
        return None
    read = sum(len(one.tokens) for one in completions)
    note = f"if the engine is meant to, claim it ({fit.options}); values are read from {read:,} tokens"
    cause = f"it looks as if the engine applies {fit.words}, which is not claimed"
    return Candidate(fit.gain, cause, note, models._replace(sampling=fit.sampling), completions)


def likelier_prompts(models: Models, completions: list[Completion], delta: float) -> Candidate | None:
    """Prompts with one begin-of-text token more, or without one of their first or last tokens, if they
    fit better by a likelihood ratio above 1/`delta`."""
    if not isinstance(models.target, PreTrainedModel):
        return None
    config, target = models.target.config.get_text_config(), Models(models.target, models.sampling, ends=models.ends)
    bos, limit = config.bos_token_id, getattr(config, "max_position_embeddings", math.inf)
    given = [one for one in completions if len(one.prompt) + len(one.tokens) < limit]
    tried = dict[str, list[Completion]]()
    if given and isinstance(bos, int):
        tried[f"saw one more begin-of-text token ({bos})"] = [one._replace(prompt=[bos, *one.prompt]) for one in given]
    for place in (*range(EDGE), *range(-EDGE, 0)):
        if given and all(len(one.prompt) > abs(place + (place < 0)) + 1 for one in given):
            seen = {one.prompt[place] for one in given}
            which = f"token {place + 1}" if place >= 0 else f"token {-place} from the end"
            name = f"did not see {which} of the prompts" + (f" ({seen.pop()} in all)" if len(seen) == 1 else "")
            if place == 0 and all(one.prompt[0] == bos for one in given):
                name = f"did not see the begin-of-text token ({bos})"
            tried[name] = [
                one._replace(prompt=[token for at, token in enumerate(one.prompt) if at != place % len(one.prompt)])
                for one in given
            ]
    if not tried:
        return None

    def fits(some: Sequence[Completion]) -> float:
        return _log_likelihoods(target, some, [models.sampling])[0]

    few = slice(max(1, len(given) // 4))  # enough to say which is likeliest
    name = max(tried, key=lambda name: fits(tried[name][few]))
    gain = fits(tried[name]) - fits(given)
    if not gain > math.log(len(tried) / delta):  # both may be impossible
        return None
    return Candidate(gain, f"it looks as if the engine {name}: so the tokens are explained", "", target, tried[name])


def other_rotary_factors(
    models: Models, completions: Sequence[Completion], fresh_auditor: Callable[[], Auditor]
) -> str:
    """A cause if a target with longrope explains the tokens with other factors than those for the
    whole length of each sequence; empty for other targets."""
    if not isinstance(models.target, PreTrainedModel) or not has_longrope(models.target):
        return ""
    limit = context_limit(models.target)
    beyond = [number for number, one in enumerate(completions) if is_beyond(models.target, one)]
    chosen, alone = beginning(completions, beyond), models._replace(draft=None, suspected=None)
    if not beyond or _explain(alone, chosen, fresh_auditor()):
        return ""
    ways: dict[Factors, str] = {
        "long": f"those for more than {limit} tokens in every sequence",
        "growing": f"those for up to {limit} tokens for as many, which stay in the cache, and the others from there on",
    }
    for factors, words in ways.items():
        if _explain(alone._replace(factors=factors), chosen, fresh_auditor()):
            return f"the target has longrope, and it looks as if the engine takes its factors in another way: {words}"
    return ""


def only_after_rejections(
    report: Report, models: Models, completions: Sequence[Completion], fresh_auditor: Callable[[], Auditor]
) -> str:
    """A cause if tokens deviate only after the first rejection of their sequence, as steps tell; empty
    where the tokens up to there are too few to say so."""
    longest = max((max(one.steps, default=0) for one in completions if one.steps), default=0)
    begun = list[Completion]()
    for one in completions:
        size = 0
        for step in one.steps or ():
            size += step
            if step < longest:
                break
        begun.append(one._replace(tokens=one.tokens[:size], steps=steps_between(one.steps or (), 0, size)))
    tokens = sum(len(one.tokens) for one in begun)
    found = tokens * report.log10_e / max(report.tokens, 1) > -2 * math.log10(report.delta)
    if longest == 0 or not found or not _explain(models, begun, fresh_auditor()):
        return ""
    return (
        f"tokens deviate only after the first rejection in their sequence, and not in the {tokens:,} up to there: "
        "rejected tokens stay in the cache, or positions are off after them"
    )


def bonus_of_draft(report: Report) -> str:
    """A cause if only the last token of the longest steps deviates, which is a bonus token, and it is the
    draft's; empty where steps are unknown."""
    place, longest = _place_in_steps(report)
    if report.diagnosis != "draft-leak" or place != longest:
        return ""
    return f"the last token of steps of {longest + 1} follows the draft's distribution: a bonus token of the draft"


def first_of_steps(report: Report) -> str:
    """A cause if only the first token of a step deviates; empty where steps are unknown."""
    if report.diagnosis == "first-token" or _place_in_steps(report)[0] != 0:
        return ""
    return (
        f"only the first token of a step deviates ({report.diagnosis}): it is sampled otherwise, or the step before "
        "left a cache or positions that are wrong"
    )


def _place_in_steps(report: Report) -> tuple[int | None, int]:
    """The position in the steps that has nine tenths of the evidence, if one has, and the last position."""
    gains = {int(position): gain for position, _, gain in report.breakdown.get("position in the step", [])}
    longest, most = max(gains, default=0), 0.9 * sum(map(abs, gains.values()))
    return next((place for place, gain in gains.items() if longest > 0 and gain > most), None), longest


def suspected_explains(models: Models, completions: Sequence[Completion], impossible: int, auditor: Auditor) -> bool:
    """Whether a fresh `auditor` does not reject the suspected model as the target, with at most a tenth
    of the `impossible` tokens."""
    if models.suspected is None:
        return False
    return (
        _explain(models._replace(target=models.suspected, suspected=None), completions, auditor)
        and 10 * len(auditor.impossible.gaps) <= impossible
    )


def _log_likelihoods(models: Models, completions: Sequence[Completion], settings: Sequence[Sampling]) -> list[float]:
    totals = np.zeros(len(settings))
    for penalties in dict.fromkeys(map(penalties_of, settings)):
        alike = [number for number, sampling in enumerate(settings) if penalties_of(sampling) == penalties]
        for row in teacher_forced_rows(
            Models(models.target, Claimed(penalties=penalties), ends=models.ends, faults=False), completions
        ):
            if len(row.tokens) == 0:
                continue
            logits, at = row.p.double().log(), row.p.new_tensor(row.tokens).long()[:, None]
            for number in alike:
                totals[number] += float(claimed_probs(logits, settings[number]).gather(-1, at).log().sum())
    return [float(total) for total in totals]


def forced_places(models: Models, completions: Sequence[Completion], auditor: Auditor) -> tuple[str, list[str]]:
    """A cause and a note if tokens at a few places deviate, over all sequences, and nothing else
    does.

    At each place the three commonest tokens are counted; Chernoff's bound says how likely so many
    are. A fresh `auditor` then reads all sequences with those places declared as forced. Empty if
    it rejects.
    """
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for one in completions:
        for place, token in enumerate(one.tokens):
            counts[place][token] += 1
    common = {place: [token for token, _ in counted.most_common(3)] for place, counted in counts.items()}
    expected, start, tried = defaultdict[tuple[int, int], float](float), 0, 1
    for row in teacher_forced_rows(models, completions):
        start = start if row.continues else 0
        for at in range(len(row.tokens)):
            for token in common[start + at]:
                expected[start + at, token] += float(row.p[at, token])
        start, tried = start + len(row.tokens), row.p.shape[1] * len(common)
    found: dict[int, int] = {}
    for (place, token), mean in expected.items():
        count = counts[place][token]
        surprise = count * math.log(count / mean) - count + mean if count > mean > 0 else math.inf * (mean == 0)
        if place not in found and surprise > math.log(tried / auditor.delta):
            found[place] = token
    if not 0 < len(found) <= min(PLACES, len(common) / 4):
        return "", []
    if not _explain(models, [_with_forced(one, found) for one in completions], auditor):
        return "", []
    some = ", ".join(
        f"token {token} at position {place} in {counts[place][token]:,} of {counts[place].total():,} sequences, where "
        f"{expected[place, token]:.3g} are expected"
        for place, token in sorted(found.items())[:3]
    )
    return f"{some}: is it forced there? Nothing else deviates", [
        f'declare what the engine forces, "forced": {sorted(found)} in those lines of the file; or split a sequence '
        "there: the forced token ends the prompt of a line of its own"
    ]


def _with_forced(one: Completion, places: Iterable[int]) -> Completion:
    inside = [place for place in places if place < len(one.tokens)]
    return one._replace(constraints=replace(one.constraints, forced=sorted({*one.constraints.forced, *inside})))


def checks_of(source: Source, completions: Sequence[Completion], finding: bool) -> list[str]:
    """What is wrong with the sequences themselves; `finding`: whether anything has to be explained.

    >>> uniform = lambda prefix: [0.25] * 4
    >>> checks_of(uniform, [Completion([1, 2], [1, 2, 3])], False)
    ['the tokens of 1 of 1 sequences begin with their prompt; give the new tokens only']
    """
    config, limit, most = None, None, None
    if isinstance(source, PreTrainedModel):
        config, limit = source.config, context_limit(source)
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
    bos, pad = (getattr(config, f"{name}_token_id", None) for name in ("bos", "pad"))
    repeat = sum(len(one.prompt) > 1 and one.tokens[: len(one.prompt)] == one.prompt for one in completions)
    padded = sum([pad, pad] in (one.prompt[:2], one.tokens[-2:]) for one in completions)
    begun, twice = (sum(one.prompt[:n] == [bos] * n for one in completions) for n in (1, 2))
    total, lengths = len(completions), [len(one.tokens) for one in completions]
    found = {
        f"the tokens of {repeat:,} of {total:,} sequences begin with their prompt; give the new tokens only":
            2 * repeat > total,
        f"{padded:,} of {total:,} sequences are padded with the token {pad}; leave padding out": 2 * padded > total,
        f"the target has longrope, with other factors beyond {limit} tokens: each sequence is compared with those of "
        "its whole length, and an engine may choose by another length": finding and limit != most,
        f"{begun:,} of {total:,} prompts begin with the model's begin-of-text token {bos}; did the model see one?":
            finding and bos is not None and 2 * begun < total,
        f"{twice:,} of {total:,} prompts begin with the begin-of-text token {bos} twice; did the model see both?":
            2 * twice > total,
        "later lines are longer, or shorter, as where lines are sorted by length or written as completions end; give "
        "them in the order of the requests":
            finding and total > 15 and min(lengths) < max(lengths)
            and abs(np.corrcoef(range(total), lengths)[0, 1]) > 0.5,
    }  # fmt: skip
    return [words for words, holds in found.items() if holds]


def endings_of(source: Source, completions: Sequence[Completion], auditor: Auditor) -> list[str]:
    """What is to be said of the ends of sequences where none were declared."""
    own = getattr(source.config, "eos_token_id", None) if isinstance(source, PreTrainedModel) else None
    ends, lengths = {own} if isinstance(own, int) else set(own or ()), [len(one.tokens) for one in completions]
    after = sum(any(token in ends for token in one.tokens[:-1]) for one in completions)
    found = {
        f"{after:,} of {len(completions):,} sequences continue after the end token {sorted(ends)}; give eos if it ends "
        "them": after > 0,
        f"completions have {min(lengths, default=0):,} to {max(lengths, default=0):,} tokens; what ended them? Give "
        "eos, or max_new_tokens, and the tokens of a stop string that was cut off":
            auditor.max_new_tokens is None and len(set(lengths)) > 1,
    }  # fmt: skip
    return [words for words, holds in found.items() if holds and not auditor.ends]


def audited(auditor: Auditor, completions: Sequence[Completion]) -> list[Completion]:
    """The `completions` as far as `auditor` has audited them: without those read ahead when it
    stopped, and without tokens after an end token."""
    sequence = np.concatenate([np.empty(0, np.int64), *(place[0] for place in auditor.places)])
    lengths = np.bincount(sequence, minlength=auditor.sequences).tolist()
    return [
        one._replace(tokens=one.tokens[:n], steps=None if one.steps is None else steps_between(one.steps, 0, n))
        for one, n in zip(completions, lengths, strict=False)
    ]


def dependent_sequences(report: Report, lengths: Sequence[int]) -> set[int] | None:
    """The sequences that share noise with an earlier one, by their own part of the evidence for it.

    `lengths` are the tokens of each sequence. None where the others still reject independence at
    `report.delta`: short sequences have too little evidence of their own.
    """
    ends = np.cumsum([0, *lengths])
    kinds = [report.running_by_alternative[name] for name in DEPENDENCE if name in report.running_by_alternative]
    gains = np.stack([np.diff(np.concatenate([[0.0], running])[ends]) for running in kinds])
    for least in DEPENDENT:
        shared = (gains > math.log10(least)).any(axis=0)
        if gains[:, ~shared].sum(axis=1).max() < -math.log10(report.delta):
            return set(np.flatnonzero(shared).tolist())
    return None


def repeated_noise(
    report: Report, models: Models, completions: Sequence[Completion], auditor: Auditor, fresh: Auditor
) -> tuple[str, list[str], Report | None]:
    """A cause and a check where sequences repeat each other's noise, if `auditor` has more evidence for
    that than for all deviations that are known beforehand; and the report of a `fresh` auditor on those
    that repeat none.

    What such noise has by chance all sequences have, so a bias of tokens or a temperature seems wrong.

    The report is None where each token repeats the noise of the one before: no sequence is without.
    """
    if report.violations or not report.rejected or report.verdict == "dependent":
        return "", [], None
    rows = teacher_forced_rows(models._replace(draft=None, suspected=None, faults=False), completions)
    within = sum((noise_within(row.p, torch.as_tensor(row.tokens, device=row.p.device)) for row in rows), np.zeros(2))
    lag, log10 = auditor.bets.distant_noise.lag(within)
    others = [value for name, value in report.by_alternative.items() if name not in (*NOISE, *LEARNED)]
    if log10 < max(-math.log10(report.delta), *others):
        return "", [], None
    where = f"{lag} lines apart" if lag else "each token that of the one before"
    made = f"sequences repeat each other's noise, {where}"
    check = (
        f"{made} (likelihood ratio 10^{log10:.1f}): what one has by chance, all have. Seed each one differently, make "
        "no generator anew within a sequence, and audit again"
    )
    _explain(models, completions[:lag], fresh)
    alone = fresh.report() if fresh.tokens else None
    return f"{made}, as a generator made anew with one seed for each call gives it", [check], alone


def rows_alone(report: Report, models: Models, completions: Sequence[Completion], auditor: Auditor) -> Report | None:
    """The report of a fresh `auditor`, which ignores dependence, on those sequences that share no
    noise with an earlier one; None without dependence, and where it cannot be said which they
    are.

    Bets on single rows are misled there: what one row does by chance is repeated by all that share
    its noise.
    """
    if report.violations or not report.rejected or not set(DEPENDENCE) & set(found_kinds(report)):
        return None
    shared = dependent_sequences(report, [len(one.tokens) for one in completions])
    if shared is None:
        return None
    kept = [completion for number, completion in enumerate(completions) if number not in shared]
    _explain(models, kept, auditor)
    return auditor.report() if auditor.tokens else None
