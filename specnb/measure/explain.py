"""Why is a speed-up as it is: what a step costs, what of that is known, and what nothing explains.

The inverse of `specnb.predict`: from a measured speed-up S and E tokens per step a step costs E / S
plain steps, and Theorem 3.8 says what it consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specnb.measure.predict import Pair, Range, cost_ratio_of, exactly, in_range, roofline, tokens_of

ADVICE = {
    "drafting": "a cheaper drafter, fewer draft tokens a step, or all of them in one pass",
    "verification": "fewer draft tokens a step (or a smaller tree), fewer rows, packed or compiled weights",
    "overhead": "sampling without sorting the vocabulary, no waiting between passes, captured or compiled steps",
    "the rest": "its parts, measured one by one: `measure_speedup`, and `generate` with `Hooks(timed=True)`",
}
NEGLIGIBLE = 0.05  # of a step
PARTS = ("drafting", "verification", "overhead", "the prompt")  # what a step costs


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns; `str` says it in words.

    cost   of a step, in plain steps
    parts  of that cost, by name; ranges where what was given allows several values
    rest   what the parts leave, under the name of what was not given
    """

    speedup: float
    tokens: float
    cost: float
    parts: dict[str, Range]
    rest: Range
    rest_is: str

    def __str__(self) -> str:
        lines = [f"{self.tokens:.2f} tokens per step at {self.speedup:.2f}: a step costs {self.cost:.2f} plain steps"]
        lines += [self._line(name, part) for name, part in self.parts.items()]
        lines.append(self._line(self.rest_is, self.rest))
        if self.rest.high < -NEGLIGIBLE * self.cost:
            lines.append("the parts cost more than the whole step: one of the numbers is of another measurement")
        else:
            largest = max({**self.parts, "the rest": self.rest}.items(), key=lambda part: part[1].value)[0]
            lines.append(f"try first: {ADVICE[largest]}")
        if self.cost >= self.tokens:
            lines.append(f"plain decoding is faster, until a step gives more than {self.cost:.2f} tokens")
        return "\n".join(lines)

    def _line(self, name: str, part: Range) -> str:
        left = self.cost - part.value
        gain = f"; without it {self.tokens / left:.2f} times plain decoding" if 0 < left < self.cost else ""
        return f"  {name}: {part}{gain}"


def explain(
    *, speedup: float, gamma: float | None = None, tokens_per_step: float | None = None,
    acceptance_rate: float | None = None, per_position: Sequence[float] | None = None,
    cost_ratio: float | None = None, params: Pair | None = None, layers: Pair | None = None,
    draft_passes: float | None = None, verify_cost: float | Callable[[float], float] | None = None,
    gpu: str | Pair | None = None, verified: float | None = None, batch: float = 1, bytes_per_param: float = 2,
    active: float = 1, cache_ratio: float = 0, overhead: float | None = None,
) -> Explanation:  # fmt: skip
    """What a step cost that gave `speedup`, by part, as far as the numbers say.

    The arguments are those of `specnb.predict`, all measured in one run. Nothing is assumed in
    place of what is not given: it stays in the rest. Drafting needs `gamma` or `draft_passes`, and
    one of `cost_ratio`, `params` and `layers`; verification needs `gamma` or `verified`, and
    `verify_cost` or `gpu`.

    Raises `ValueError` for a speed-up that is no positive number, an acceptance that is missing or
    given twice, and numbers out of their range.

    >>> print(explain(speedup=1.3, tokens_per_step=3.87, gamma=7, cost_ratio=0.06))
    3.87 tokens per step at 1.30: a step costs 2.98 plain steps
      drafting: 0.42; without it 1.51 times plain decoding
      verification, overhead and the prompt: 2.56; without it 9.21 times plain decoding
    try first: its parts, measured one by one: `measure_speedup`, and `generate` with `Hooks(timed=True)`
    """
    accepted = {"tokens_per_step": tokens_per_step, "acceptance_rate": acceptance_rate, "per_position": per_position}
    most = gamma if gamma is not None else len(per_position) if per_position is not None else None
    if most is None and acceptance_rate is not None:
        raise ValueError("gamma is missing; an acceptance rate gives the tokens of a step only with it")
    tokens = tokens_of(1e6 if most is None else in_range("gamma", most, 1, 1e6), accepted, []).value
    speedup = in_range("speedup", speedup, 0.01, 1000)
    parts = dict[str, Range]()
    passes = most if draft_passes is None else in_range("draft_passes", draft_passes, 0, 1e6)
    sizes = {"params": params, "layers": layers}
    if passes is not None and any(one is not None for one in (cost_ratio, params, layers)):
        c = cost_ratio_of(cost_ratio, sizes, [])
        parts["drafting"] = Range(passes * c.value, passes * c.low, passes * c.high)
    checked = most if verified is None else in_range("verified", verified, 1, 1e6)
    if checked is not None and verify_cost is not None:
        v = verify_cost(1 + checked) if callable(verify_cost) else verify_cost
        parts["verification"] = exactly(in_range("verify_cost", v, 0.01, 1e6))
    elif checked is not None and gpu is not None:
        parts["verification"] = Range(*roofline(1 + checked, gpu, bytes_per_param, active, batch, cache_ratio)[0])
    if overhead is not None:
        parts["overhead"] = exactly(in_range("overhead", overhead, 0, 1e6))
    return explained(speedup, tokens, parts)


def explained(speedup: float, tokens: float, parts: dict[str, Range]) -> Explanation:
    """The explanation of a step with these `parts`; the others of `PARTS` are the rest."""
    cost, unknown = tokens / speedup, [name for name in PARTS if name not in parts]
    ends = [cost - sum(getattr(part, end) for part in parts.values()) for end in ("value", "high", "low")]
    named = " and ".join(filter(None, [", ".join(unknown[:-1]), unknown[-1]]))
    return Explanation(speedup, tokens, cost, parts, Range(*ends), named)
