"""Compares an audit of an engine with speculation with that of its control: the same engine without speculation.

What both deviate in is the engine's own; what only the first deviates in is the speculation's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import hypergeom

from specnb.audit.report import Report

Gaps = Sequence[tuple[float, float]]


class ControlComparison(NamedTuple):
    """What an audit and its control have in common.

    control      the report on the control
    shared       kinds of deviation found in both: the engine's own
    only_here    kinds found only with speculation
    p_value      of the impossible tokens, if those with and without speculation are alike: how likely at least so many
                 more of them, or so many larger ones, would be
    delta        error rate at which they are said to differ
    """

    control: Report
    shared: list[str]
    only_here: list[str]
    p_value: float
    delta: float

    @property
    def alike(self) -> bool:
        """Whether the impossible tokens are no more and no larger than the control's."""
        return self.p_value >= self.delta

    @property
    def source(self) -> str | None:
        """Whose the deviations are: `engine`, `speculation`, `both`, or None without any."""
        return {(True, True): "both", (True, False): "engine", (False, True): "speculation"}.get(
            (bool(self.shared), bool(self.only_here))
        )

    def lines(self) -> list[str]:
        """The comparison in words."""
        control = self.control
        seen = f"; {control.impossible_summary}" if control.impossible_summary else ""
        lines = [f"control ({control.tokens:,} tokens without speculation): {control.verdict}{seen}"]
        if self.shared:
            lines += [f"  the engine's own, in the control too: {', '.join(self.shared)}"]
        if self.only_here:
            lines += [f"  the speculation's, not in the control: {', '.join(self.only_here)}"]
        if control.impossible_summary and self.p_value < 1:
            differ = "no more and no larger" if self.alike else "more or larger"
            lines += [
                f"  impossible tokens are {differ} than the control's (p = {self.p_value:.2g}; they would be called "
                f"different by chance with probability {self.delta:g})"
            ]
        return lines


def compare_with_control(report: Report, control: Report, gaps: Gaps, control_gaps: Gaps) -> ControlComparison:
    """The comparison of two reports; `gaps` are those of all impossible tokens, by logit and top-p mass."""
    p_value = gap_p_value(gaps, report.tokens, control_gaps, control.tokens)
    here, there = found_kinds(report), found_kinds(control)
    if "impossible" in here and p_value >= report.delta:
        there.append("impossible")
    shared = [kind for kind in here if kind in there]
    return ControlComparison(control, shared, [kind for kind in here if kind not in there], p_value, report.delta)


def found_kinds(report: Report) -> list[str]:
    """Violations, and the alternatives whose e-value alone rejects exactness, all of them together at `delta`.

    >>> from specnb.audit import audit
    >>> found_kinds(audit(lambda prefix: [1.0, 0.0], [[1]], prompts=[[]], progress=False))
    ['impossible']
    """
    bar = math.log10(max(len(report.running_by_alternative), 1) / report.delta)
    peaks = {name: float(values.max(initial=-math.inf)) for name, values in report.running_by_alternative.items()}
    return [*report.violations, *sorted((name for name in peaks if peaks[name] >= bar), key=lambda name: -peaks[name])]


def gap_p_value(gaps: Gaps, n: int, control_gaps: Gaps, control_n: int) -> float:
    """The probability of at least so many impossible tokens among `n`, or so many beyond the control's largest.

    Under the hypothesis that every token is equally likely to be impossible, by equally large gaps, in both files. The
    three tests (number, logits, top-p mass) share the level by Bonferroni's inequality.

    >>> gap_p_value([(0.1, 0.0)], 1000, [(0.2, 0.0)], 1000)
    1.0
    """
    chances = [_excess(len(gaps), n, len(control_gaps), control_n)]
    for column in range(2):
        values = [max(0.0, gap[column]) if gap[column] == gap[column] else math.inf for gap in gaps]
        largest = max((gap[column] for gap in control_gaps if gap[column] == gap[column]), default=0.0)
        chances.append(_excess(sum(value > largest for value in values), n, 0, control_n))
    return min(1.0, len(chances) * min(chances))


def _excess(count: int, n: int, control_count: int, control_n: int) -> float:
    """The chance that `count` or more of the marked tokens are among the `n`, not among the control's."""
    return float(hypergeom.sf(count - 1, n + control_n, count + control_count, n)) if count else 1.0
