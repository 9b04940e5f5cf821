"""Runs an audit over sequences as they arrive, and asks afterwards what may explain a finding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb_audit.alternatives import DEPENDENCE
from specnb_audit.auditor import SHARE, Auditor, Ends, end_tokens
from specnb_audit.bets import Row
from specnb_audit.claimed import penalties_of
from specnb_audit.control import compare_with_control, side_of
from specnb_audit.engine import Engine
from specnb_audit.explanations import (
    audited,
    bonus_of_draft,
    checks_of,
    endings_of,
    first_of_steps,
    forced_places,
    likelier_settings,
    only_after_rejections,
    other_rotary_factors,
    other_settings_or_prompts,
    remembering,
    repeated_noise,
    rows_alone,
    suspected_explains,
    unapplied_constraint,
)
from specnb_audit.logprobs import logprob_findings
from specnb_audit.numerics import OTHER_KERNELS, SUSPICIOUS, Numerics, impossible_rate
from specnb_audit.penalties import require_penalties
from specnb_audit.report import KINDS, Report, counted
from specnb_audit.step_sizes import step_findings
from specnb_audit.teacher_forcing import Completion, Models, require_completions, teacher_forced_rows, vocabulary

MEASURED = 4  # sequences that the numerics are measured on
SOON, EVERY = 0.5, 10.0  # seconds until progress is shown first, and between lines

Progress = bool | Callable[[str], None]
"""True: a bar on stderr. False: nothing. A function: gets a line now and then, and one at a
rejection."""
EngineNumerics = tuple[Numerics | None, Callable[[], Numerics] | None]
Show = Callable[[int, float, int | None], None]
"""Called after each row with: tokens in all, decimal logarithm of the e-value, tokens at the
rejection or None."""


@dataclass(frozen=True)
class Settings:
    """The settings of an audit, as those of `specnb_audit.audit`."""

    delta: float = 1e-6
    seed: int = 0
    eos: Ends = None
    max_new_tokens: int | None = None
    ignore: tuple[str, ...] = ()
    stop: bool = False
    progress: Progress = True

    def __post_init__(self) -> None:
        if not isinstance(self.stop, bool):
            raise TypeError(f"stop is {self.stop!r}; it must be True or False")

    def auditor(
        self,
        numerics: Numerics | None = None,
        undeclared: Callable[[], Numerics] | None = None,
        more: Sequence[str] = (),
    ) -> Auditor:
        ignored = (*self.ignore, *more)
        return Auditor(self.delta, self.seed, self.eos, self.max_new_tokens, numerics, undeclared, ignored)


def audit_distributions(
    rows: Iterable[Row],
    auditor: Auditor | None = None,
    *,
    stop: bool = False,
    progress: Progress = True,
    expected: int | None = None,
) -> Report:
    """The report on `rows`, whose distributions exist already.

    Ctrl-C stops it with the report on the tokens so far.

    Parameters
    ----------
    rows : iterable of Row
        May come one at a time.
    auditor : Auditor, optional
        Holds the settings of the test.
    stop : bool
        Whether to stop as soon as exactness is rejected.
    expected : int, optional
        Number of tokens, for the progress bar.

    Examples
    --------
    >>> import torch
    >>> print(audit_distributions([Row([1] * 40, torch.full((40, 2), 0.5))], progress=False).verdict)
    rejected
    """
    auditor = Auditor() if auditor is None else auditor
    sequences = auditor.sequences
    with shown(progress, expected) as show:
        try:
            for row in rows:
                auditor.add(row)
                sequences = auditor.sequences
                show(auditor.tokens, auditor.log10_e, auditor.found_after)
                if stop and auditor.found_after is not None:
                    break
            return auditor.report()
        except KeyboardInterrupt:
            if auditor.tokens == 0 and not auditor.violations:
                raise
            note = f"interrupted after {counted(auditor.tokens, 'token')}"
            # The auditor may have begun another sequence, none of whose tokens count.
            return replace(auditor.report(), sequences=sequences, interrupted=True, notes=[note])


@contextmanager
def shown(progress: Progress, expected: int | None) -> Iterator[Show]:
    """What to call after each row: moves a bar, or passes lines on."""
    next_at, announced = time.monotonic() + SOON, False
    total, off = "" if expected is None else f" of {expected:,}", progress is not True
    with tqdm(total=expected, desc="audit", unit="token", delay=SOON, leave=False, disable=off) as bar:

        def show(tokens: int, log10_e: float, found_after: int | None) -> None:
            nonlocal next_at, announced
            e_value = f"10^{log10_e:.1f}" if math.isfinite(log10_e) else "infinite"
            bar.update(tokens - bar.n)
            bar.set_postfix_str(f"e = {e_value}", refresh=False)
            if callable(progress) and (time.monotonic() >= next_at or (found_after is not None and not announced)):
                verdict = "" if found_after is None else f"; rejected after {found_after:,}"
                progress(f"audited {tokens:,}{total} tokens, e = {e_value}{verdict}")
                next_at, announced = time.monotonic() + EVERY, found_after is not None

        yield show


def require_models(models: Models, completions: Sequence[Completion], names: Sequence[str] | None = None) -> None:
    """Raises `ValueError` for a completion that a model gives no distributions for, and for
    penalties that they cannot be given."""
    vocab, penalised = vocabulary(models.target, completions[0].prompt), (models.target, models.suspected)
    end_tokens(models.ends, vocab)
    has_logits = all(source is None or isinstance(source, PreTrainedModel) for source in penalised)
    require_penalties(penalties_of(models.sampling), vocab, has_logits)
    for source in models.all():
        require_completions(source, completions, names, vocab)
    for number, one in enumerate(completions):
        name, steps, logprobs = f"sequence {number}" if names is None else names[number], one.steps, one.logprobs
        if steps is not None and sum(steps) != len(one.tokens):
            raise ValueError(f"{name} has {len(one.tokens)} tokens, and its steps add up to {sum(steps)}")
        if logprobs is not None and len(logprobs) != len(one.tokens):
            raise ValueError(f"{name} has {len(one.tokens)} tokens, and {len(logprobs)} logprobs")
        one.constraints.require_possible(one.tokens, vocab, name)
    if not models.ends and any(one.constraints.min_tokens for one in completions):
        raise ValueError("min_tokens is given and no end token; give those that it suppresses (--eos, eos)")


@torch.inference_mode()
def audit_completions(
    models: Models,
    completions: Iterable[Completion | None],
    settings: Settings = Settings(),
    engine: Engine = Engine(),
    expected: int | None = None,
) -> Report:
    """The report on `completions`, checked by `require_models`, which may arrive one at a time;
    None among them means that no more are ready. Ctrl-C stops it with the report so far."""
    if engine.control and not any(one.tokens for one in engine.control):
        raise ValueError("the control has no tokens; give at least one sequence with a token in it, or no control")
    first, rest = _first(completions)
    ready = [one for one in first if one is not None]
    numerics = engine.numerics(models.target, ready, models.sampling)
    auditor = settings.auditor(*numerics)
    kept = list[Completion]()
    rows = teacher_forced_rows(models, remembering(chain(first, rest), kept))
    report = audit_distributions(rows, auditor, stop=settings.stop, progress=settings.progress, expected=expected)
    if report.interrupted:
        return report
    try:
        with searching(settings.progress, report):
            report = _explained_report(report, models, auditor, audited(auditor, kept), settings, engine, numerics)
    except KeyboardInterrupt:
        note = "interrupted after the last token: there is no comparison with a control, and nothing more is explained"
        return replace(report, interrupted=True, notes=[note])
    if report.rows_alone is not None and len(kept) < report.sequences:
        note = f"shared noise was looked for in the first {len(kept):,} sequences"
        report = replace(report, notes=[*report.notes, note])
    return report


@contextmanager
def searching(progress: Progress, report: Report) -> Iterator[None]:
    """Says the verdict on a rejected audit before its cause is known, and that the cause is looked for."""
    if not report.rejected:
        yield
        return
    verdict = f"rejected after {counted(report.found_after or 0, 'token')}"
    if callable(progress):
        progress(f"audited {report.tokens:,} tokens: {verdict}; looking for the cause")
    with tqdm(desc=f"{verdict}; looking for the cause", bar_format="{desc}", leave=False, disable=progress is not True):
        yield


def _explained_report(
    report: Report,
    models: Models,
    auditor: Auditor,
    known: Sequence[Completion],
    settings: Settings,
    engine: Engine,
    numerics: EngineNumerics,
) -> Report:
    """The report with all that is asked after the last token."""
    report = _with_rate(report, auditor, models, known, settings)

    def fresh_auditor(*more: str) -> Auditor:
        return settings.auditor(*numerics, more=("wrong-length", *more))

    place, place_notes = "", list[str]()
    if report.rejected and not report.violations:  # asked first of all explanations
        place, place_notes = forced_places(models, known, fresh_auditor())
    alone = None if place else rows_alone(report, models, known, fresh_auditor(*DEPENDENCE))
    report = replace(report, rows_alone=alone, cause=place)
    if engine.control:
        report = _with_control(report, auditor, models, known, engine.control, settings, numerics)
    report = _explained(report, auditor, models, known, fresh_auditor)
    wrong, right = logprob_findings(models, known, numerics[0])
    slow, lengths = step_findings(models, known)
    checks, notes = [*wrong, *report.checks, *slow], [*report.notes, *place_notes, *right, *lengths]
    notes += endings_of(models.target, known, auditor)
    return replace(report, checks=checks, notes=notes)


def _with_rate(
    report: Report, auditor: Auditor, models: Models, completions: Sequence[Completion], settings: Settings
) -> Report:
    """The report where impossible tokens that numerics explain one by one have been counted."""
    noise = auditor.impossible.noise
    if noise == 0 or "impossible" in auditor.ignored:
        return report
    delta = settings.delta * SHARE / 2
    rate = impossible_rate(models, completions, noise, delta, settings.seed)
    auditor.convict_impossible(rate, rate.found_after)
    return replace(auditor.report(), interrupted=report.interrupted)


def _first(completions: Iterable[Completion | None]) -> tuple[list[Completion | None], Iterator[Completion | None]]:
    """The first completions, up to one with tokens, and as many more with tokens as are ready, up to `MEASURED`;
    and the iterator over the rest."""
    rest = iter(completions)
    first: list[Completion | None] = []
    for completion in rest:
        first.append(completion)
        ready = [one for one in first if one is not None and one.tokens]
        if len(ready) >= MEASURED or (completion is None and ready):
            break
    return first, rest


def _with_control(
    report: Report,
    auditor: Auditor,
    models: Models,
    known: Sequence[Completion],
    completions: Sequence[Completion],
    settings: Settings,
    numerics: EngineNumerics,
) -> Report:
    """The report with the comparison of the `known` completions with those of the control.

    The same bets are made on the control, so that no kind is missing there for want of a test.
    Where noise explains the impossible tokens, the control decides: they are the speculation's if
    they are more, or larger, than other kernels make of the control's.
    """
    control = settings.auditor(*numerics)
    plain = teacher_forced_rows(models, completions)
    if audit_distributions(plain, control, progress=settings.progress).interrupted:
        raise KeyboardInterrupt
    plain_known = audited(control, completions)
    there = _with_rate(control.report(detect=False), control, models, plain_known, settings)
    sides = side_of(auditor, known), side_of(control, plain_known)
    before, rate = report, auditor.rate
    # What noise of twice the size hardly explains need not be explained by worse kernels again. Each
    # factor has its own part of delta.
    factor = 1 if rate and rate.log10_e >= SUSPICIOUS else OTHER_KERNELS
    comparison = compare_with_control(report, there, *sides, factor)
    if report.violations.get("impossible") and comparison.alike and not control.violations.get("impossible"):
        auditor.excuse_impossible()
        report = auditor.report()
    elif (
        not report.violations.get("impossible") and comparison.p_value < settings.delta * SHARE / 4
    ):  # either factor has as much
        auditor.convict_impossible(rate, auditor.tokens)
        report = auditor.report()
    if report is not before:
        report = replace(report, rows_alone=before.rows_alone, cause=before.cause)
        comparison = compare_with_control(report, there, *sides, factor)
    return replace(report, control=comparison)


def _explained(
    report: Report, auditor: Auditor, models: Models, completions: Sequence[Completion], fresh: Callable[[], Auditor]
) -> Report:
    checks = checks_of(models.target, completions, report.rejected or bool(report.undecided))
    if report.verdict in ("not rejected", "dependent") or report.cause:
        return replace(report, checks=checks)
    suspicious = {one.sequence for one in (*report.impossible, *report.borderline, *report.undeclared)}
    cause, notes = likelier_settings(models, completions, suspicious, fresh())
    if suspicious and not cause and suspected_explains(models, completions, len(auditor.impossible.gaps), fresh()):
        cause = KINDS["suspected-model"]
    if report.rejected and not cause:
        cause = unapplied_constraint(models, completions, suspicious, fresh)
        cause = cause or other_rotary_factors(models, completions, fresh)
    if report.rejected and not cause:
        cause, notes = other_settings_or_prompts(models, completions, fresh)
    if report.rejected and not cause and not report.violations:
        cause = bonus_of_draft(report) or only_after_rejections(report, models, completions, fresh)
        cause = cause or first_of_steps(report)
    if report.rejected and not cause:
        cause, more, alone = repeated_noise(report, models, completions, auditor, fresh())
        report, checks = replace(report, rows_alone=report.rows_alone or alone), [*more, *checks]
        if report.diagnosis == "never-occurs" and not cause:
            cause = auditor.bets.absences.words()
            ended = not auditor.ends and len({len(one.tokens) for one in completions}) > 1
            cause += ", or as if a stop string were cut off" * ended
    return replace(report, checks=checks, cause=cause if report.rejected else "", notes=notes)
