"""What an audit found, as an object, in words, as JSON and as a page."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specnb.audit.alternatives import ALTERNATIVES
from specnb.audit.numerics import Numerics
from specnb.measure.statistics import Estimate

Array = NDArray[np.float64]

CERTAIN = {
    "impossible": "a token has probability zero under the settings claimed",
    "after-the-end": "tokens follow an end-of-text",
    "wrong-length": "a text is longer than asked, or ends early without an end-of-text",
}
"""Findings that need no statistics: one of them is enough."""


class Impossible(NamedTuple):
    """A token of probability zero: the text, its place there, the token, and how far outside it is:
    `logit` below what argmax or top-k keeps, and `mass` beyond top-p (NaN where no logits were given)."""

    row: int
    offset: int
    token: int
    logit: float
    mass: float

    def __str__(self) -> str:
        far = [] if not self.logit > 0 else [f"its logit is {self.logit:.3g} below the least one kept"]
        far += [] if not self.mass > 0 else [f"{self.mass:.3g} of mass beyond top-p lies before it"]
        return f"text {self.row}, place {self.offset}: token {self.token}" + (f" ({' and '.join(far)})" if far else "")


@dataclass(frozen=True)
class Report:
    """The outcome of an audit of `tokens` tokens in `rows` texts at the false-alarm rate `delta`.

    found_after    number of tokens after which the evidence passed 1/delta, None if it did not
    numerics_only  whether it passed 1/delta, but by no more than the target's own numerics account for
    running        (tokens,) decimal logarithm of the e-value after each token
    running_kinds  the same of each kind of alternative, of `specnb.audit.alternatives.ALTERNATIVES`
    certain        kind -> how many findings that need no statistics, of `CERTAIN`
    impossible     the tokens of probability zero (the first 100)
    border         those that numerics may have put there: no farther outside than the target from itself
    where          of the leading kind, where its evidence comes from: lists of (what, tokens, decimal log evidence)
    tv             what the best witness sees of the total variation per token; see `specnb.audit.distance`
    detectable     kind -> the total variation per token that would have been found with power 0.9
    interrupted    whether the keyboard stopped it before the last token
    """

    delta: float
    tokens: int
    rows: int
    found_after: int | None
    numerics_only: bool
    running: Array
    running_kinds: dict[str, Array]
    tv: Estimate
    certain: dict[str, int] = field(default_factory=dict)
    impossible: list[Impossible] = field(default_factory=list)
    border: list[Impossible] = field(default_factory=list)
    where: dict[str, list[tuple[str, int, float]]] = field(default_factory=dict)
    detectable: dict[str, float] = field(default_factory=dict)
    numerics: Numerics | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def rejected(self) -> bool:
        """Whether exactness is rejected at the false-alarm rate `delta`."""
        return self.found_after is not None

    @property
    def verdict(self) -> str:
        """`rejected`, `numerics` or `not rejected`."""
        return "rejected" if self.rejected else "numerics" if self.numerics_only else "not rejected"

    @property
    def log10_e(self) -> float:
        """Decimal logarithm of the e-value at the end; infinite after a finding that needs no statistics."""
        return math.inf if any(self.certain.values()) else float(self.running[-1])

    @property
    def log10_e_peak(self) -> float:
        """The largest it ever was; 10 to minus this is a p-value, whenever one stops."""
        return math.inf if any(self.certain.values()) else float(self.running.max())

    @property
    def kinds(self) -> dict[str, float]:
        """Decimal log e-value of each kind of alternative at the end, the largest first."""
        last = {kind: float(values[-1]) for kind, values in self.running_kinds.items()}
        return dict(sorted(last.items(), key=lambda item: -item[1]))

    @property
    def kind(self) -> str | None:
        """What the deviation looks like: a certain finding, or the alternative with most evidence; None without one."""
        if not self.rejected and not self.numerics_only:
            return None
        return next(iter(self.certain)) if self.certain else next(iter(self.kinds))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The report in plain words."""
        rate = f"{self.delta:g}"
        lines = [f"audit of {self.tokens:,} tokens in {self.rows:,} texts, false alarms at most {rate}"]
        if self.rejected:
            lines += [
                f"REJECTED after {self.found_after:,} tokens: the sampler does not have the target's distribution"
            ]
            lines += self._likeness()
        elif self.numerics_only:
            lines += ["NUMERICS: the text deviates from the run over whole texts, by no more than the target does"]
        else:
            lines += [
                "no deviation was found" + ("; what would have been found is listed below" * bool(self.detectable))
            ]
        certain = any(self.certain.values())
        lines += [
            f"evidence: e = {_power(self.log10_e)}" + ("" if certain else f", at most {_power(self.log10_e_peak)}")
        ]
        lines += [f"impossible: {one}" for one in self.impossible[:5]]
        lines += [f"at the border, where numerics decide: {one}" for one in self.border[:5]]
        lines += [
            f"total variation per token seen by the best witness: {self.tv.value:.4f} "
            f"[{self.tv.low:.4f}, {self.tv.high:.4f}]; all of it may be more"
        ]
        if self.numerics is not None:
            lines += [f"numerics: {self.numerics}"]
        if self.detectable:
            lines += ["total variation per token that would have been found with power 0.9:"]
            lines += [f"  {kind:<17}{_distance(value)}" for kind, value in self.detectable.items()]
        return lines + [f"note: {note}" for note in self.notes]

    def _likeness(self) -> list[str]:
        lines = [f"  {kind}: {CERTAIN[kind]} ({count:,})" for kind, count in self.certain.items()]
        leading = [(kind, value) for kind, value in self.kinds.items() if value > -math.log10(self.delta) / 2][:3]
        lines += [f"  looks like {kind} (e = {_power(value)}): {ALTERNATIVES[kind]}" for kind, value in leading]
        for what, entries in self.where.items() if leading else ():
            best = sorted(entries, key=lambda entry: -entry[2])[:3]
            lines += [f"  most evidence {what}: " + ", ".join(f"{name} ({_power(gain)})" for name, _, gain in best)]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The report without its running evidence, of types that JSON has; infinities and NaN are strings."""
        plain = {
            "verdict": self.verdict,
            "rejected": self.rejected,
            "kind": self.kind,
            "delta": self.delta,
            "tokens": self.tokens,
            "rows": self.rows,
            "found_after": self.found_after,
            "log10_e": self.log10_e,
            "log10_e_peak": self.log10_e_peak,
            "kinds": self.kinds,
            "certain": self.certain,
            "impossible": [one._asdict() for one in self.impossible],
            "border": [one._asdict() for one in self.border],
            "where": {
                what: [{"what": name, "tokens": tokens, "log10_e": gain} for name, tokens, gain in entries]
                for what, entries in self.where.items()
            },
            "tv_witnessed": self.tv._asdict(),
            "detectable": self.detectable,
            "numerics": None if self.numerics is None else self.numerics._asdict(),
            "notes": self.notes,
        }
        return {key: _json(value) for key, value in plain.items()}

    def to_html(self) -> str:
        """A page of its own: verdict, the running evidence, and tables."""
        body = self._repr_html_()
        return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>audit</title><body>{body}</body></html>\n'

    def _repr_html_(self) -> str:
        colour = {"rejected": "#b2182b", "numerics": "#b07c00", "not rejected": "#2166ac"}[self.verdict]
        words = html.escape("\n".join(line for line in self.lines() if not line.startswith("  ") or self.rejected))
        table = self.detectable or {}
        rows = "".join(f"<tr><td>{kind}</td><td>{_distance(value)}</td></tr>" for kind, value in table.items())
        found = (
            f"<table><tr><th>kind</th><th>total variation found with power 0.9</th></tr>{rows}</table>" if rows else ""
        )
        return (
            f'<div style="font-family:sans-serif;max-width:60em"><h2 style="color:{colour}">{self.verdict}</h2>'
            f'{self._chart()}<pre style="white-space:pre-wrap">{words}</pre>{found}</div>'
        )

    def _chart(self) -> str:
        """Decimal log evidence against tokens, with the line at 1/delta; nothing where there are no tokens."""
        if self.tokens == 0:
            return ""
        wide, high, bar = 640, 180, -math.log10(self.delta)
        kept = np.unique(np.linspace(0, self.tokens - 1, 600).astype(int))
        top = max(1.3 * bar, min(self.log10_e_peak, 3 * bar))
        values = np.clip(self.running[kept], -3, top)
        cut = f", drawn up to 10^{top:.3g}" if self.log10_e_peak > top else ""

        def y(value: Any) -> Any:
            return high - 20 - (value + 3) / (top + 3) * (high - 30)

        points = " ".join(
            f"{40 + x:.1f},{h:.1f}" for x, h in zip(kept / self.tokens * (wide - 50), y(values), strict=True)
        )
        lines = "".join(
            f'<line x1="40" x2="{wide - 10}" y1="{y(at):.1f}" y2="{y(at):.1f}" stroke="{ink}"/>'
            f'<text x="2" y="{y(at) + 4:.1f}" font-size="11">10^{at:.3g}</text>'
            for at, ink in ((0.0, "#bbb"), (bar, "#b2182b"))
        )
        return (
            f'<svg viewBox="0 0 {wide} {high}" width="{wide}" role="img" aria-label="evidence against tokens">{lines}'
            f'<polyline fill="none" stroke="#2166ac" stroke-width="1.5" points="{points}"/>'
            f'<text x="40" y="{high - 4}" font-size="11">evidence after 1 to {self.tokens:,} tokens{cut}</text></svg>'
        )


def _power(log10: float) -> str:
    if math.isinf(log10):
        return "infinite" if log10 > 0 else "0"
    return f"10^{round(log10, 1) + 0.0:.1f}"  # -0.04 is 0.0, not -0.0


def _distance(value: float) -> str:
    return "none at this length" if math.isnan(value) else f"{value:.4f}"


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_json(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
