"""Compares an audit with that of its control, the same engine without speculation: what both
deviate in is the engine's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scipy.stats import binom

from specnb_audit.alternatives import DEPENDENCE
from specnb_audit.auditor import Auditor
from specnb_audit.numerics import OTHER_KERNELS, SUSPICIOUS
from specnb_audit.report import ControlComparison, Report
from specnb_audit.teacher_forcing import Completion

Gaps = Sequence[tuple[float, float]]
ALIKE = 0.05
"""P-value from which on impossible tokens are called alike, if the largest gap is at most
`OTHER_KERNELS` times the control's. A test that does not reject at delta is no evidence that they
are."""


class Side(NamedTuple):
    """The impossible tokens among `n`: their gaps, and how many are the draft's most probable
    token."""

    n: int
    gaps: Gaps
    drafted: int = 0


def side_of(auditor: Auditor, completions: Sequence[Completion]) -> Side:
    """What `auditor` found in the `completions`, each prefix counted once: an engine errs alike
    again."""
    found = auditor.impossible
    drafted = [*found.are_drafted, *[False] * (len(found.gaps) - len(found.are_drafted))]
    kept = dict(zip(found.places, zip(found.gaps, drafted, strict=True), strict=True))
    new = [kept.get(place) for place in _first_places(completions)]
    impossible = [one for one in new if one is not None]
    return Side(len(new), [gap for gap, _ in impossible], sum(drafted for _, drafted in impossible))


def _first_places(completions: Sequence[Completion]) -> Iterator[tuple[int, int]]:
    """Sequence and position of each token whose prefix no token before it had."""
    seen = set[int]()
    for sequence, one in enumerate(completions):
        prefix = hash(tuple(one.prompt))
        for position, token in enumerate(one.tokens):
            if prefix not in seen:
                yield sequence, position
            seen.add(prefix)
            prefix = hash((prefix, token))


def compare_with_control(
    report: Report, control: Report, here: Side, there: Side, factor: float = OTHER_KERNELS
) -> ControlComparison:
    """The comparison of two reports, and of the impossible tokens of both (`more_p_value`).

    Rows that share noise come from how the sequences were collected, so a control without it blames
    nothing; and where that is all that was found, what single rows show is not compared.
    """
    p_value, equal = more_p_value(here, there, factor), more_p_value(here, there, factor=1)
    largest = zip(_largest(here.gaps), _largest(there.gaps), strict=True)
    alike = (
        equal >= ALIKE
        and (not here.gaps or bool(there.gaps))
        and all(own <= OTHER_KERNELS * other for own, other in largest)
    )
    shared, only_here, undecided = list[str](), list[str](), list[str]()
    found = found_kinds(control)
    for kind in found_kinds(report):
        if report.verdict == "dependent" and kind not in DEPENDENCE:
            continue
        if kind == "impossible":
            same = alike or (kind in found and p_value >= ALIKE)
            (shared if same else only_here if p_value < report.delta else undecided).append(kind)
        elif kind in found:
            shared.append(kind)
        elif kind in DEPENDENCE:
            undecided.append(kind)
        elif _is_absent(kind, report, control):
            only_here.append(kind)
        else:
            undecided.append(kind)
    return ControlComparison(control, shared, only_here, p_value, report.delta, alike, undecided)


def _is_absent(kind: str, report: Report, control: Report) -> bool:
    """Whether the `control` is as long as it took to find `kind` here, and shows no sign of it."""
    if kind not in report.running_by_alternative:
        return control.tokens >= (report.found_after or 0)
    running = report.running_by_alternative[kind]
    seen = control.running_by_alternative.get(kind)
    if seen is None or len(seen) < int((running >= _bar(report)).argmax()) + 1:
        return False
    return float(seen.max()) < SUSPICIOUS


def _largest(gaps: Gaps) -> list[float]:
    """The largest gap of each column; infinite where one is unknown, 0 without any."""
    return [
        max((math.inf if math.isnan(gap[column]) else gap[column] for gap in gaps), default=0.0) for column in (0, 1)
    ]


def _bar(report: Report) -> float:
    return math.log10(max(len(report.running_by_alternative), 1) / report.delta)


def found_kinds(report: Report) -> list[str]:
    """Violations, and the alternatives whose e-value alone rejects exactness."""
    bar = _bar(report)
    peaks = {name: float(values.max(initial=-math.inf)) for name, values in report.running_by_alternative.items()}
    return [*report.violations, *sorted((name for name in peaks if peaks[name] >= bar), key=lambda name: -peaks[name])]


def more_p_value(here: Side, there: Side, factor: float = OTHER_KERNELS) -> float:
    """The probability of so many impossible tokens, or so many that are the draft's, or so many
    beyond `factor` times the control's largest.

    Under the hypothesis that a token is at most `factor` times as likely to be impossible as in the
    control, by gaps at most so many times as large (kernels that verify drafts may round worse),
    those here are, given the total, at most binomial. The four tests share the level.
    """
    share = factor * here.n / max(factor * here.n + there.n, 1)
    counts = [(len(here.gaps), len(there.gaps)), (here.drafted, there.drafted)]
    for column in range(2):
        values = [max(0.0, gap[column]) if gap[column] == gap[column] else math.inf for gap in here.gaps]
        largest = max((gap[column] for gap in there.gaps if gap[column] == gap[column]), default=0.0)
        counts.append((sum(value > factor * largest for value in values), 0))
    chances = [float(binom.sf(own - 1, own + other, share)) if own else 1.0 for own, other in counts]
    return min(1.0, len(chances) * min(chances))
