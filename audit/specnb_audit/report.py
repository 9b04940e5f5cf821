"""The report of an audit: as an object, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specnb.statistics import Estimate
from specnb_audit.alternatives import ALTERNATIVES, GENERAL, LEARNED
from specnb_audit.numerics import SUSPICIOUS, Impossible, Numerics, Rate

Array = NDArray[np.float64]

FEW = 0.1
"""At temperature 0 an audit is too short where a larger share of other tokens than this might have
been missed."""
VIOLATIONS = {
    "impossible": "a token has probability zero under the settings claimed",
    "after-the-end": "tokens follow an end token",
    "wrong-length": "a sequence is longer than claimed, or shorter and without an end token",
}
"""What an exact sampler never does: one violation rejects exactness, without statistics."""
KINDS = VIOLATIONS | ALTERNATIVES
"""Every kind of deviation that a report can name, and what it means."""
WITHOUT_DRAFT = (
    "of an engine with a draft model give that, too (--draft): without it errors of acceptance and of the residual are "
    "hardly found, and one uniform for all tests of a step is not"
)
NOT_COVERED = f"deviations of another shape; kinds that are learnt from the sequences ({', '.join(LEARNED)})"
NOISE = (
    "noise without direction is hardly found (quantised weights, another dtype, stale weights): give the suspected "
    "model (--alternative)"
)


@dataclass(frozen=True)
class Report:
    """The outcome of an audit at the false-alarm rate `delta`; `str` says it in words.

    Attributes
    ----------
    found_after : int or None
        Number of tokens after which exactness was rejected.
    numerics_only : bool
        Whether tokens deviate, but by no more than rounding explains.
    running, running_by_alternative
        Decimal logarithm of the e-value after each token, and of that of each alternative.
    tv : Estimate
        A lower bound on the total variation per token, estimated (`specnb_audit.evidence`).
    violations : dict
        Number of violations by name, as in `VIOLATIONS`.
    impossible, borderline, undeclared : list
        The first tokens of probability zero, by what explains them (`numerics.ImpossibleTokens`),
        with `impossible_summary` of all; `rate` is the bet on their number.
    certain : bool
        Whether every token had probability 1, as at temperature 0.
    breakdown : dict
        Evidence of the leading alternative by position, token, ...: (group, tokens, decimal log
        e-value).
    detectable : dict
        The total variation per token from which on a deviation of each kind would have been found
        with power 0.9, had it been mixed into every token alike; NaN: none would.
    control, rows_alone
        The comparison with the engine without speculation; where rows share noise, the report on
        those that share none with an earlier one.
    cause : str
        What explains the rejection, where that is known better than by the kind of deviation.
    checks, notes : list of str
        What is wrong with the sequences themselves, and what else is to be said.
    left_out : int
        Number of sequences that were left out.
    required : dict
        The total variation per token from which on a kind had to be found.
    """

    delta: float
    tokens: int
    sequences: int
    found_after: int | None
    numerics_only: bool
    running: Array
    running_by_alternative: dict[str, Array]
    tv: Estimate
    violations: dict[str, int] = field(default_factory=dict)
    impossible: list[Impossible] = field(default_factory=list)
    borderline: list[Impossible] = field(default_factory=list)
    undeclared: list[Impossible] = field(default_factory=list)
    impossible_summary: str = ""
    breakdown: dict[str, list[tuple[str, int, float]]] = field(default_factory=dict)
    detectable: dict[str, float] = field(default_factory=dict)
    numerics: Numerics | None = None
    notes: list[str] = field(default_factory=list)
    control: ControlComparison | None = None
    rows_alone: Report | None = None
    interrupted: bool = False
    rate: Rate | None = None
    certain: bool = False
    cause: str = ""
    checks: list[str] = field(default_factory=list)
    left_out: int = 0
    required: Mapping[str, float] = field(default_factory=dict)

    @property
    def rejected(self) -> bool:
        return self.found_after is not None

    @property
    def verdict(self) -> str:
        """`rejected`, `dependent`, `numerics` or `not rejected`.

        `dependent` is a rejection, too: rows share noise, and those that share none do not deviate.
        """
        if self.rejected and self.rows_alone is not None and not self.rows_alone.rejected:
            return "dependent"
        return "rejected" if self.rejected else "numerics" if self.numerics_only else "not rejected"

    @property
    def undecided(self) -> str:
        """Why the outcome is neither a rejection nor a pass; empty if it is one of them."""
        if self.rejected:
            return ""
        if self.rate and self.rate.drafted_p < 10**-SUSPICIOUS and not self._like_control:
            return (
                "of the impossible tokens more are the draft's most probable token than noise makes, as a rule that "
                "accepts too much gives it; audit more tokens, beside a control (--control)"
            )
        if self.rate and self.rate.log10_e >= SUSPICIOUS:
            return "more tokens are impossible than numerics explain, with little evidence as yet; audit more tokens"
        if self.numerics_only:
            return "the tokens deviate from the target, by no more than numerics explain"
        if self.log10_e_peak >= SUSPICIOUS:
            return (
                f"not rejected, and suspicious: an exact sampler reaches an e-value of {_power(self.log10_e_peak)} "
                f"with probability at most {10**-self.log10_e_peak:.1g}; audit more tokens"
            )
        missed = {kind: tv for kind, tv in self.required.items() if not self.detectable.get(kind, math.inf) <= tv}
        if missed:
            kind, tv = next(iter(missed.items()))
            if kind not in self.detectable:
                return f"no deviation was found, and {kind} was not looked for; see --draft, --alternative and --ignore"
            return f"no deviation was found, and {kind} of a total variation of {tv:g} might have been missed"
        if self.left_out > self.sequences:
            return f"no deviation was found, and most sequences ({self.left_out:,}) were left out"
        most = FEW if self.certain else math.inf
        found = [value for value in self._kinds.values() if value <= most]
        if len(found) < len(self._kinds) / 2 and not self.required:
            return "no deviation was found, in too few tokens to find most kinds"
        return ""

    @property
    def log10_e(self) -> float:
        """Decimal logarithm of the e-value at the end; infinite after a violation."""
        return math.inf if any(self.violations.values()) else float(self.running[-1])

    @property
    def log10_e_peak(self) -> float:
        """The largest `log10_e` after any token; 10 to the power of minus this is a p-value."""
        return math.inf if any(self.violations.values()) else float(self.running.max())

    @property
    def by_alternative(self) -> dict[str, float]:
        """Decimal logarithm of each alternative's e-value, the largest first (but see `GENERAL`)."""
        last = {name: float(values[-1]) for name, values in self.running_by_alternative.items()}
        return dict(sorted(last.items(), key=lambda item: -item[1] / GENERAL.get(item[0], 1.0)))

    @property
    def diagnosis(self) -> str | None:
        """A violation, or the alternative with the largest e-value; None without a deviation."""
        if not self.rejected and not self.numerics_only:
            return None
        return next(iter(self.violations)) if self.violations else next(iter(self.by_alternative))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The report in words, the cause first; sequences and positions are counted from 0."""
        checks = [f"check: {check}" for check in self.checks]
        notes = [f"note: {note}" for note in self.notes]
        noise = [] if self.rejected or self.certain else [f"  {NOISE}"]
        without = (
            [] if self.certain or not self.detectable or "draft-leak" in self.detectable else [f"  {WITHOUT_DRAFT}"]
        )
        return [self.headline, *without, *noise, *checks, *self._outcome_lines(), *self._detectable_lines(), *notes]

    @property
    def headline(self) -> str:
        if self.verdict == "dependent":
            return (
                f"DEPENDENT after {self._found_after}: rows share noise, as equal seeds give it; those that share none "
                "do not deviate"
            )
        if self.rejected:
            own = ""
            if self.control is not None and self.control.source == "engine" and self.diagnosis in self.control.shared:
                own = "; the control deviates alike"
                own += ": the engine's own, not the speculation's" * (not self.control.undecided)
            return f"REJECTED after {self._found_after}: {self.cause or KINDS[self.diagnosis or 'impossible']}{own}"
        if self.undecided:
            return f"UNDECIDED: {self.undecided}"
        listed = "; the deviations that would have been detected are listed below"
        return "no deviation was found" + listed * bool(self.detectable)

    def _outcome_lines(self) -> list[str]:
        impossible = f"; {self.impossible_summary}" if self.impossible_summary else ""
        tokens, sequences = counted(self.tokens, "token"), counted(self.sequences, "sequence")
        lines = [f"audit of {tokens} in {sequences}, false-alarm rate at most {self.delta:g}{impossible}"]
        if self.verdict == "dependent":
            lines += self._dependence_lines()
        elif self.rejected:
            lines += self._diagnosis_lines()
        elif self.numerics_only:
            lines += self._numerics_lines()
        elif self.log10_e_peak >= SUSPICIOUS:
            lines += self._most_evidence_lines()
        if self.rate is not None:
            lines += [f"  {self.rate}"]
        largest = "" if any(self.violations.values()) else f", largest {_power(self.log10_e_peak)}"
        lines += [f"e-value: {_power(self.log10_e)}{largest}"]
        lines += [f"impossible: {one}" for one in self.impossible[:5]]
        lines += [f"impossible by no more than the numerics explain: {one}" for one in self.borderline[:5]]
        by = "numerics as in the control" if self._like_control else "those of bfloat16"
        lines += [f"impossible by no more than {by} would explain: {one}" for one in self.undeclared[:5]]
        lines += [
            f"total variation per token: at least {self.tv.low:.4f}, from a deviation of {self.tv.value:.4f} "
            f"[{self.tv.low:.4f}, {self.tv.high:.4f}] along the best function tried; there is no bound from above"
        ]
        if self.control is not None:
            lines += self.control.lines()
        return lines if self.numerics is None else [*lines, f"numerics: {self.numerics}"]

    def _detectable_lines(self) -> list[str]:
        if not self.detectable:
            return []
        if self.certain:
            share = f", of which a share of {self.detectable['impossible']:.4f} would have been found with probability "
            share = share + "0.9" if "impossible" in self.detectable else ""
            return [f"every token was certain under the settings claimed: what can be wrong is another token{share}"]
        lines = ["would have been found with probability 0.9 from this total variation per token on, each kind alone:"]
        figures = sorted((value, name) for name, value in self.detectable.items() if not math.isnan(value))
        lines += [f"  {value:.4f}  {name}: {KINDS[name]}" for value, name in figures]
        if self._found:
            lines += [f"  {max(self._found):.4f}  any one of the kinds with a figure"]
        none = [name for name, value in self.detectable.items() if math.isnan(value)]
        lines += [f"  none at this length, however large: {', '.join(none)}"] * bool(none)
        lines += [f"  (mixed into every token alike) not covered: {NOT_COVERED}"]
        return lines

    @property
    def _kinds(self) -> dict[str, float]:
        """The figures of `detectable` that say whether there were enough tokens."""
        return {name: value for name, value in self.detectable.items() if name == "impossible" or not self.certain}

    @property
    def _found(self) -> list[float]:
        return [value for value in self.detectable.values() if not math.isnan(value)]

    @property
    def _explained(self) -> list[str]:
        threshold = -math.log10(self.delta) / 2
        return [*self.violations, *[name for name, value in self.by_alternative.items() if value > threshold][:3]]

    def _dependence_lines(self) -> list[str]:
        assert self.rows_alone is not None
        alone = self.rows_alone
        return [
            *self._diagnosis_lines(),
            f"  {counted(alone.sequences, 'row')} without noise of an earlier one, {counted(alone.tokens, 'token')}: "
            f"{alone.undecided or 'no deviation was found'} (largest e-value {_power(alone.log10_e_peak)})",
        ]

    @property
    def _found_after(self) -> str:
        return counted(self.found_after or 0, "token")

    def _most_evidence_lines(self) -> list[str]:
        name, value = next(iter(self.by_alternative.items()))
        return [f"  most evidence is for {name} (e-value {_power(value)}): {ALTERNATIVES[name]}"]

    @property
    def _like_control(self) -> bool:
        return self.control is not None and self.control.alike and bool(self.control.control.impossible_summary)

    def _numerics_lines(self) -> list[str]:
        if not self.undeclared:
            return [
                f"  an engine whose numerics are of the measured size is called rejected with probability at most "
                f"{self.delta:g}"
            ]
        if self._like_control:
            return ["  the same engine without speculation has as many impossible tokens, and as large ones"]
        # Noise has no direction, and gives no evidence where tokens are possible.
        if self.log10_e_peak >= SUSPICIOUS:
            return [
                "  all impossible tokens lie within the noise of bfloat16; the possible ones deviate too, which that",
                "  noise does not explain: compare the settings claimed with those of the engine",
                *self._most_evidence_lines(),
            ]
        return [
            "  all impossible tokens lie within the noise of bfloat16: if the engine computes in bfloat16, give its",
            "  dtype (--engine-dtype bfloat16, or --dtype bfloat16 for the target too);",
            "  if it computes in float32, say so (--engine-dtype float32), and they reject exactness",
        ]

    def _diagnosis_lines(self) -> list[str]:
        told = None if self.cause else self.diagnosis  # in the headline
        lines = [
            f"  {name} ({count:,})" + f": {VIOLATIONS[name]}" * (name != told)
            for name, count in self.violations.items()
        ]
        leading = [(name, self.by_alternative[name]) for name in self._explained if name not in self.violations]
        lines += [
            f"  looks like {name} (e-value {_power(value)})" + f": {ALTERNATIVES[name]}" * (name != told)
            for name, value in leading
        ]
        for grouping, groups in self.breakdown.items() if leading else ():
            best = sorted(groups, key=lambda group: -group[2])[:3]
            gains = ", ".join(f"{group} ({_power(gain)})" for group, _, gain in best)
            lines += [f"  most evidence by {grouping}: {gains}"]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON types, without the arrays per token; infinities and NaN are strings."""
        names = (
            "headline", "checks", "verdict", "rejected", "undecided", "diagnosis", "delta", "tokens", "sequences",
            "left_out", "found_after", "interrupted", "log10_e", "log10_e_peak",
        )  # fmt: skip
        plain = {name: getattr(self, name) for name in names}
        plain |= {"log10_e_by_alternative": self.by_alternative, "violations": self.violations}
        for name in ("impossible", "borderline", "undeclared"):
            plain[name] = [one._asdict() for one in getattr(self, name)]
        plain |= {
            "impossible_summary": self.impossible_summary,
            "rate": None if self.rate is None else self.rate._asdict(),
            "breakdown": {
                grouping: [{"group": name, "tokens": tokens, "log10_e": gain} for name, tokens, gain in groups]
                for grouping, groups in self.breakdown.items()
            },
            "tv_lower_bound": self.tv._asdict(),
            "detectable": self.detectable,
            "numerics": None if self.numerics is None else self.numerics._asdict(),
            "control": None if self.control is None else self.control.to_dict(),
            "rows_alone": None if self.rows_alone is None else self.rows_alone.to_dict(),
            "notes": self.notes,
        }
        return {key: _json(value) for key, value in plain.items()}


class ControlComparison(NamedTuple):
    """What an audit and its control have in common.

    shared       kinds of deviation found in both: the engine's own
    only_here    kinds found with speculation only, where the control is long enough
    undecided    kinds found with speculation only that the control cannot attribute
    p_value      how likely so many more, or larger, impossible tokens would be if both were alike
    delta        level at which they are said to differ
    alike        whether the impossible tokens are about as many and as large as the control's
    """

    control: Report
    shared: list[str]
    only_here: list[str]
    p_value: float
    delta: float
    alike: bool = True
    undecided: Sequence[str] = ()

    @property
    def source(self) -> str | None:
        """Whose the deviations are: `engine`, `speculation`, `both`, or None."""
        return {(True, True): "both", (True, False): "engine", (False, True): "speculation"}.get(
            (bool(self.shared), bool(self.only_here))
        )

    def lines(self) -> list[str]:
        control = self.control
        seen = f"; {control.impossible_summary}" if control.impossible_summary else ""
        tokens = counted(control.tokens, "token")
        lines = [f"control ({tokens} without speculation): {control.verdict}{seen}"]
        if self.shared:
            lines += [f"  the engine's own, in the control too: {', '.join(self.shared)}"]
        if self.only_here:
            lines += [f"  the speculation's, not in the control: {', '.join(self.only_here)}"]
        if self.undecided:
            lines += [
                f"  the engine's or the speculation's, which the control does not decide: {', '.join(self.undecided)}"
            ]
        if self.p_value < 1 or not self.alike:
            lines += [f"  {self._sizes()} (p = {self.p_value:.2g})"]
        return lines

    def to_dict(self) -> dict[str, Any]:
        names = ("source", "shared", "only_here", "undecided", "p_value")
        return {name: getattr(self, name) for name in names} | {"report": self.control.to_dict()}

    def _sizes(self) -> str:
        if self.p_value < self.delta:
            return (
                "impossible tokens are more or larger than the control's: where they are alike, that is said with "
                f"probability at most {self.delta:g}"
            )
        if self.alike:
            return "impossible tokens are about as many and as large as the control's"
        return "it is not decided whether impossible tokens are more or larger than the control's"


def counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def _power(log10: float) -> str:
    if math.isinf(log10):
        return "infinite" if log10 > 0 else "0"
    return f"10^{round(log10, 1) + 0.0:.1f}"  # -0.04 is 0.0, not -0.0


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_json(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
