"""Why is a speed-up as it is? What a step cost, by part; and from lines at several gammas a cost a
+ b gamma, the best gamma, and when speculation should be off.

A step with a speed-up S and E tokens took E / S plain steps. Theorem 3.8 says what that consists
of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specnb.theory import expected_tokens, solve_alpha
from specnb_audit.predict_numbers import Pair, Range, in_range
from specnb_audit.predict_speed import AGREE, emitted, known_parts

PARTS = ("drafting", "verification", "overhead", "the prompt")  # what a step costs
ADVICE = {
    "drafting": "a cheaper drafter, fewer draft tokens a step, or all of them in one pass",
    "verification": "fewer draft tokens a step (or a smaller tree), fewer rows, packed or compiled weights",
    "overhead": "sampling without sorting the vocabulary, no waiting between passes, captured or compiled steps",
    "the rest": "to measure its parts one by one, or `fit_steps` from lines at two gammas",
}
NEGLIGIBLE = 0.05  # of a step
NOISE = 0.05  # relative standard deviation of a measured speed; two of one set-up may differ by a tenth
DRAWS = 2000

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns; `str` says it in words.

    Attributes
    ----------
    speedup, tokens : float
        Over plain decoding, and per step.
    parts : dict of str to Range
        The time of a step by part, in plain steps, as far as it was given.
    rest_is : str
        The parts that were not given.
    assumed : tuple of str
        What can be read in another way.
    """

    speedup: float
    tokens: float
    parts: dict[str, Range]
    rest_is: str
    assumed: tuple[str, ...] = ()

    @property
    def cost(self) -> float:
        return self.tokens / self.speedup

    @property
    def rest(self) -> Range:
        value, high, low = (
            self.cost - sum(getattr(part, end) for part in self.parts.values()) for end in ("value", "low", "high")
        )
        return Range(value, low, high)

    def __str__(self) -> str:
        lines = [f"{self.tokens:.2f} tokens per step at {self.speedup:.2f}: a step costs {self.cost:.2f} plain steps"]
        parts = {**self.parts, self.rest_is: self.rest}
        # Without a part; of verification a forward pass over one token remains.
        left = {name: self.cost - part.value + ("verification" in name) for name, part in parts.items()}
        for name, part in parts.items():
            saves = 0 < left[name] < self.cost
            gain = f"; without it {self.tokens / left[name]:.2f} times plain decoding" if saves else ""
            lines.append(f"  {name}: {part}{gain}")
        # What was not given has a forward pass of the target in it, unless that was given.
        least = -NEGLIGIBLE * self.cost if "verification" in self.parts else 1 - 2 * NOISE
        if self.rest.high < least:
            lines.append(
                "the parts, a forward pass of the target among them, cost more than the whole step: the numbers "
                "contradict each other"
            )
        else:
            lines.append(f"try first: {ADVICE.get(min(left, key=left.__getitem__), ADVICE['the rest'])}")
        if self.cost >= self.tokens:
            lines.append(f"plain decoding is faster, until a step gives more than {self.cost:.2f} tokens")
        return "\n".join(lines + [f"assumed: {line}" for line in self.assumed])


def explain(
    *, speedup: float | None = None, speed: float | None = None, plain: float | None = None,
    gamma: float | None = None, tokens_per_step: float | None = None, per_position: Sequence[float] | None = None,
    conditional: bool | None = None, acceptance_rate: float | None = None,
    acceptance_rate_with_bonus: float | None = None, cost_ratio: float | None = None, params: Pair | None = None,
    layers: Pair | None = None, draft_passes: float | None = None, draft_bytes_per_param: float | None = None,
    verify_cost: float | Callable[[float], float] | None = None, gpu: str | Pair | None = None,
    verified: float | None = None, batch: float = 1, bytes_per_param: float = 2, active: float = 1,
    cache_ratio: float = 0, overhead_ms: float | None = None,
) -> Explanation:  # fmt: skip
    """What a step cost that gave a measured speed-up, by part; nothing is assumed.

    Parameters
    ----------
    speedup : float, optional
        Over plain decoding of the same batch.
    speed, plain : float, optional
        Tokens per second of a row with and without speculation, in place of `speedup`.
    gamma, tokens_per_step, ..., overhead_ms
        As in `predict`, all of one measurement. Drafting needs `gamma` or `draft_passes`, and one
        of `cost_ratio`, `params` and `layers`; verification needs `verify_cost`, or `gpu` with
        `gamma` or `verified`.

    Returns
    -------
    Explanation

    Raises
    ------
    ValueError
        If a number is missing or impossible, or two contradict each other.

    Examples
    --------
    >>> print(explain(speedup=1.3, tokens_per_step=3.87, gamma=7, cost_ratio=0.06))
    3.87 tokens per step at 1.30: a step costs 2.98 plain steps
      drafting: 0.42; without it 1.51 times plain decoding
      verification, overhead and the prompt: 2.56; without it 2.73 times plain decoding
    try first: to measure its parts one by one, or `fit_steps` from lines at two gammas
    """
    given = locals()
    if speed is not None and plain is not None:
        ratio = in_range("speed", speed, 1e-6, 1e9) / in_range("plain", plain, 1e-6, 1e9)
        if speedup is not None and not 1 / (1 + AGREE) < speedup / ratio < 1 + AGREE:
            raise ValueError(f"speedup is {speedup}, and speed / plain is {ratio:.3g}: they contradict each other")
        speedup = ratio
    gamma, tokens, assumed = emitted(given)
    if speedup is None:
        each = "" if speed is None else f"; a step took {1000 * tokens.value / speed:.2f} ms"
        raise ValueError(f"the speed-up is missing; give speedup, or speed and plain in tokens per second{each}")
    speedup = in_range("speedup", speedup, 0.01, 1000)
    parts = {name: part for name, (part, _) in known_parts(gamma, given | {"step_cost": None}).items()}
    unknown = [name for name in PARTS if name not in parts]
    named = " and ".join(filter(None, [", ".join(unknown[:-1]), unknown[-1]]))
    return Explanation(speedup, tokens.value, parts, named, tuple(assumed))


@dataclass(frozen=True)
class StepFit:
    """What `fit_steps` returns; `str` says it in words. Every range is a 95% interval.

    Attributes
    ----------
    fixed, per_token : Range
        a and b of a step that costs a + b gamma, in plain steps; in milliseconds without `plain`.
    best_gamma, tokens
        The fastest gamma of those tried, and tokens per step there.
    speedup : Range or None
        There, over plain decoding; None without `plain`.
    break_even : Range or None
        The alpha below which no gamma is faster than plain decoding; inf if none is at alpha = 1.
    measured : tuple of float
        The gammas of the lines.
    """

    fixed: Range
    per_token: Range
    best_gamma: Range
    speedup: Range | None
    break_even: Range | None
    tokens: float
    measured: tuple[float, ...]

    def __str__(self) -> str:
        best, last = self.best_gamma, max(self.measured)
        between = f" [{best.low:g}, {best.high:g}]" if best.low < best.high else ""
        lines = [f"a step costs {self.fixed} + {self.per_token} gamma "]
        lines[0] += "milliseconds" if self.speedup is None else "plain steps"
        lines.append(f"best gamma: {best.value:g}{between}, with {self.tokens:.2f} tokens per step")
        if best.high > last:
            lines.append(f"  above {last:g}, the largest measured, the acceptance is taken to stay")
        if self.speedup is None or self.break_even is None:
            return "\n".join([*lines, "whether it is faster than plain decoding needs plain, its tokens per second"])
        lines.append(f"speed-up there: {self.speedup} times plain decoding")
        if self.break_even.value > 1:
            return "\n".join([*lines, "off: at no acceptance does a gamma pay"])
        need = self.fixed.value + self.per_token.value * best.value
        lines.append(
            f"off below an alpha of {self.break_even}; at gamma = {best.value:g} below {need:.2f} tokens per step"
        )
        verdict = (
            "on" if self.speedup.low > 1 else "off" if self.speedup.high < 1 else "too close to tell: measure more"
        )
        return "\n".join([*lines, f"at this acceptance: {verdict}"])


def fit_steps(
    lines: Sequence[Sequence[float]], *, plain: float | None = None, noise: float = NOISE, largest: int | None = None,
    seed: int = 0,
) -> StepFit:  # fmt: skip
    """The cost a + b gamma of a step, the best gamma, and the acceptance below which speculation
    should be off, from a log at two or more gammas.

    Parameters
    ----------
    lines : sequence of (gamma, tokens per step, tokens per second)
        Measured with the same prompts and batch.
    plain : float, optional
        The speed of plain decoding, in the same unit. A line with gamma 0 says the same.
    noise : float
        Relative standard deviation of a measured speed; more if the lines lie further from a + b
        gamma.
    largest : int, optional
        The largest gamma that is tried. Default: twice the largest of the lines.
    seed : int
        Of the errors that are drawn for the intervals.

    Returns
    -------
    StepFit

    Raises
    ------
    ValueError
        If there are fewer than two gammas, a number is impossible, or the lines contradict each
        other.

    Notes
    -----
    Least squares of relative errors. Alpha is interpolated between the lines, so that Equation 1
    gives the measured tokens. The intervals are of speeds that are off by `noise`, not of other
    prompts.

    Examples
    --------
    >>> print(fit_steps([(1, 1.8, 140.0), (4, 2.9, 150.0)], plain=100.0))
    a step costs 1.07 [0.88, 1.29] + 0.22 [0.14, 0.30] gamma plain steps
    best gamma: 3 [2, 3], with 2.73 tokens per step
    speed-up there: 1.59 [1.40, 1.81] times plain decoding
    off below an alpha of 0.29 [0.12, 0.45]; at gamma = 3 below 1.72 tokens per step
    at this acceptance: on
    """
    rows = sorted(tuple(line) for line in lines)
    if rows and rows[0][0] == 0:
        own = in_range("the speed of a line", rows.pop(0)[2], 1e-6, 1e9)
        if plain is not None and abs(in_range("plain", plain, 1e-6, 1e9) / own - 1) > 2 * max(noise, NOISE):
            raise ValueError(f"plain is {plain}, and the line at gamma = 0 has {own}: they contradict each other")
        plain = own
    whole = [gamma for gamma, *_ in rows if gamma != round(gamma)]
    if not rows or whole:
        raise ValueError(f"lines are {lines}; need whole gammas, two different ones above 0 at least")
    unit, name = (1000.0, "milliseconds") if plain is None else (in_range("plain", plain, 1e-6, 1e9), "plain steps")
    times = np.array([unit * mean / in_range("the speed of a line", speed, 1e-6, 1e9) for _, mean, speed in rows])
    if len({gamma for gamma, *_ in rows}) < 2:
        each = ", ".join(f"{time:.2f}" for time in times)
        raise ValueError(
            f"all lines are at gamma = {rows[0][0]:g}, where a step took {each} {name}; a + b gamma needs a line at "
            "another gamma, and `explain` takes one line apart"
        )
    alphas = [solve_alpha(tokens, int(gamma)) for gamma, tokens, _ in rows]
    gammas, emitted_tokens, _ = np.array(rows, dtype=np.float64).T
    if (emitted_tokens * (1 + NOISE) < np.maximum.accumulate(emitted_tokens)).any():
        raise ValueError("the lines contradict each other: more draft tokens gave fewer tokens per step")

    design = np.stack([np.ones_like(times), gammas], axis=1) / times[:, None]
    solved = np.linalg.pinv(design)
    left = 1 - design @ solved @ np.ones_like(times)
    if len(rows) > 2:
        noise = max(noise, float(np.sqrt((left**2).sum() / (len(rows) - 2))))
    errors = noise * np.random.default_rng(seed).standard_normal((DRAWS, 1 + len(rows)))
    errors[0] = 0  # the fit itself
    off = np.exp(errors[:, 1:])
    costs = off @ solved.T
    if (np.quantile(costs, 0.975, axis=0) <= 0).any():
        raise ValueError(
            "the lines contradict each other: more draft tokens took less time, or no time is left for a step"
        )
    level = off @ (1 / times) / (1 / times**2).sum()  # the cost of a step if it is the same at every gamma
    slope = off @ (gammas / times) / (gammas**2 / times**2).sum()  # and if nothing is fixed
    costs = np.where(costs[:, :1] < 0, np.stack([0 * slope, slope], axis=1), costs)
    costs = np.where(costs[:, 1:] < 0, np.stack([level, 0 * level], axis=1), costs)
    if plain is not None:
        costs *= np.exp(errors[:, :1])

    tried = np.arange(1, 1 + (2 * int(gammas[-1]) if largest is None else largest))
    of_gamma = {
        gamma: np.mean([alpha for at, alpha in zip(gammas, alphas, strict=True) if at == gamma]) for gamma in gammas
    }
    tokens = expected_tokens(np.interp(tried, list(of_gamma), list(of_gamma.values())), tried)
    steps: Array = np.asarray(costs[:, :1] + costs[:, 1:] * tried, dtype=np.float64)
    fastest = (tokens / steps).argmax(axis=1)
    best = int(fastest[0])
    speedup, break_even = None, None
    if plain is not None:
        speedup, break_even = _interval(tokens[best] / steps[:, best]), _interval(_even(steps, tried))
    return StepFit(
        fixed=_interval(costs[:, 0]), per_token=_interval(costs[:, 1]),
        best_gamma=_interval(tried[fastest].astype(np.float64)), speedup=speedup, break_even=break_even,
        tokens=float(tokens[best]), measured=tuple(gammas.tolist()),
    )  # fmt: skip


def _even(steps: Array, gammas: NDArray[np.int64]) -> Array:
    """The least alpha with which a step of some gamma gives more tokens than it costs; inf if none
    does."""
    alphas = np.linspace(0, 1, 1001)
    needed = [
        np.interp(steps[:, at], expected_tokens(alphas, gamma), alphas, right=np.inf) for at, gamma in enumerate(gammas)
    ]
    return np.asarray(np.min(needed, axis=0))


def _interval(draws: Array) -> Range:
    """The first of the draws, the fit itself, with the central 95% of all."""
    low, high = np.quantile(draws, [0.025, 0.975], method="nearest")
    return Range(float(draws[0]), float(min(low, draws[0])), float(max(high, draws[0])))
