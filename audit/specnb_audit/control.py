"""Compares an audit of an engine with speculation with that of its control: the same engine without
speculation.

What both deviate in is the engine's own; what only the first deviates in is the speculation's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.stats import hypergeom

from specnb_audit.alternatives import DEPENDENCE
from specnb_audit.numerics import OTHER_KERNELS
from specnb_audit.report import SUSPICIOUS, ControlComparison, Report

Gaps = Sequence[tuple[float, float]]
ALIKE = 0.05
"""P-value from which on impossible tokens are called alike, if the largest gap is at most
`OTHER_KERNELS` times the control's. A test that does not reject at delta is no evidence that they
are."""


def compare_with_control(report: Report, control: Report, gaps: Gaps, control_gaps: Gaps) -> ControlComparison:
    """The comparison of two reports; `gaps` are those of all impossible tokens, by logit and top-p
    mass.

    Rows that share noise come from how the sequences were collected, so a control without it blames
    nothing; and where that is all that was found, what single rows show is not compared.
    """
    p_value = gap_p_value(gaps, report.tokens, control_gaps, control.tokens)
    alike = (
        p_value >= ALIKE
        and (not gaps or bool(control_gaps))
        and all(
            here <= OTHER_KERNELS * there for here, there in zip(_largest(gaps), _largest(control_gaps), strict=True)
        )
    )
    shared, only_here, undecided = list[str](), list[str](), list[str]()
    there = found_kinds(control)
    for kind in found_kinds(report):
        if report.verdict == "dependent" and kind not in DEPENDENCE:
            continue
        if kind in there or (kind == "impossible" and alike):
            shared.append(kind)
        elif kind in DEPENDENCE:
            undecided.append(kind)
        elif p_value < report.delta if kind == "impossible" else _is_absent(kind, report, control):
            only_here.append(kind)
        else:
            undecided.append(kind)
    return ControlComparison(control, shared, only_here, p_value, report.delta, alike, undecided)


def _is_absent(kind: str, report: Report, control: Report) -> bool:
    """Whether the `control` has as many tokens as it took to find `kind` here, and no sign of
    it."""
    if kind not in report.running_by_alternative:
        return control.tokens >= (report.found_after or 0)
    running = report.running_by_alternative[kind]
    seen = control.running_by_alternative.get(kind)
    if seen is None or len(seen) < int((running >= _bar(report)).argmax()) + 1:
        return False
    return float(seen.max()) < SUSPICIOUS


def _largest(gaps: Gaps) -> list[float]:
    """The largest gap of each column; infinite where one is not known, and 0 without any."""
    return [
        max((math.inf if math.isnan(gap[column]) else gap[column] for gap in gaps), default=0.0) for column in (0, 1)
    ]


def _bar(report: Report) -> float:
    """The decimal logarithm of an e-value that rejects exactness for one alternative among all, at
    `delta`."""
    return math.log10(max(len(report.running_by_alternative), 1) / report.delta)


def found_kinds(report: Report) -> list[str]:
    """Violations, and the alternatives whose e-value alone rejects exactness, all of them together
    at `delta`."""
    bar = _bar(report)
    peaks = {name: float(values.max(initial=-math.inf)) for name, values in report.running_by_alternative.items()}
    return [*report.violations, *sorted((name for name in peaks if peaks[name] >= bar), key=lambda name: -peaks[name])]


def gap_p_value(gaps: Gaps, n: int, control_gaps: Gaps, control_n: int) -> float:
    """The probability of at least so many impossible tokens among `n`, or so many beyond the
    control's largest.

    Under the hypothesis that every token is equally likely to be impossible, by equally large gaps,
    in both files. The three tests (number, logits, top-p mass) share the level by Bonferroni's
    inequality.
    """
    chances = [_excess(len(gaps), n, len(control_gaps), control_n)]
    for column in range(2):
        values = [max(0.0, gap[column]) if gap[column] == gap[column] else math.inf for gap in gaps]
        largest = max((gap[column] for gap in control_gaps if gap[column] == gap[column]), default=0.0)
        chances.append(_excess(sum(value > largest for value in values), n, 0, control_n))
    return min(1.0, len(chances) * min(chances))


def _excess(count: int, n: int, control_count: int, control_n: int) -> float:
    """The chance that `count` or more of the marked tokens are among the `n`, not among the
    control's."""
    return float(hypergeom.sf(count - 1, n + control_n, count + control_count, n)) if count else 1.0
