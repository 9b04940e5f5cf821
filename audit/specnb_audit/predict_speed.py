"""Predict the speed-up of an engine from what its log, a paper or an issue reports.

    speed-up = tokens per step / (drafting + verification + overhead)

All times are in plain steps, the time of a step of plain decoding of the same batch. What is not
given becomes a range, and a line in `missing`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any

from specnb.theory import expected_tokens, roofline
from specnb_audit.predict_devices import ridge_of
from specnb_audit.predict_numbers import Pair, Range, exactly, in_range, pair

# The ways to report acceptance, the most direct first.
ACCEPTANCE = ("tokens_per_step", "per_position", "acceptance_rate", "acceptance_rate_with_bonus", "alpha")
COSTS = ("cost_ratio", "params", "layers", "draft_passes", "verify_cost", "gpu", "verified", "overhead_ms")
# What is assumed where nothing is known.
DEPENDENCE = Range(1.0, 0.75, 1.1)  # accepted draft tokens over Equation 1's, for the alpha of a whole sequence
COST_RATIO = Range(0.05, 0.0, 0.2)
OVERHEAD_MS = Range(2.0, 0.0, 12.0)  # of a step
PLAIN = 50.0  # tokens per second
# Of the ratio of sizes in bytes, which gives c; 0.82 fits audit/data/reference/draft_costs.csv.
EXPONENTS = {"params": 0.82, "layers": 0.75}
LAUNCHES = 0.25  # plain steps by which passes over two tokens or more were slower than a roofline: data/results/gpu.csv
WIDE = 3.0  # a range that is so many times as high as low says little
AGREE = 0.03  # by what two reports of one acceptance may differ, both rounded


@dataclass(frozen=True)
class Prediction:
    """What `predict` returns; a range is what the missing inputs allow, not a confidence interval.

    Attributes
    ----------
    tokens : Range
        Tokens per step, the recovered or bonus token included.
    parts : dict of str to Range
        The time of a step by part, in plain steps.
    missing : tuple of str
        What was assumed in place of inputs that were not given.
    """

    tokens: Range
    parts: dict[str, Range]
    missing: tuple[str, ...]

    @property
    def speedup(self) -> Range:
        value, low, high = (sum(getattr(part, end) for part in self.parts.values()) for end in ("value", "low", "high"))
        return Range(self.tokens.value / value, self.tokens.low / high, self.tokens.high / low)

    @property
    def gains(self) -> dict[str, float]:
        """How many times as fast decoding would be if a part cost nothing, and a target forward
        pass no more than over one token."""
        cost = sum(part.value for part in self.parts.values())
        least = {"verification": 1.0, "fixed cost": 1.0}
        return {name: cost / (cost - part.value + least.get(name, 0.0)) for name, part in self.parts.items()}

    def __str__(self) -> str:
        slowest = max(self.gains, key=self.gains.__getitem__)
        lines = [f"{self.speedup} times plain decoding, with {self.tokens} tokens per step"]
        lines += [f"  {name}: {part} plain steps" for name, part in self.parts.items()]
        lines += [f"  {slowest} costs most: without it {self.gains[slowest]:.2f} times as fast"]
        width = self.speedup.high / self.speedup.low
        lines += [f"  a range of a factor of {width:.0f} says little: measure two lines (`fit_steps`)"] * (
            width >= WIDE
        )
        return "\n".join(lines + [f"  assumed: {line}" for line in self.missing])


def predict(
    *, gamma: float | None = None, tokens_per_step: float | None = None, per_position: Sequence[float] | None = None,
    conditional: bool | None = None, acceptance_rate: float | None = None,
    acceptance_rate_with_bonus: float | None = None, alpha: float | None = None, cost_ratio: float | None = None,
    params: Pair | None = None, layers: Pair | None = None, draft_passes: float | None = None,
    draft_bytes_per_param: float | None = None, verify_cost: float | Callable[[float], float] | None = None,
    gpu: str | Pair | None = None, verified: float | None = None, batch: float = 1, bytes_per_param: float = 2,
    active: float = 1, cache_ratio: float = 0, overhead_ms: float | None = None, plain: float | None = None,
    step_cost: tuple[float | Range, float | Range] | None = None,
) -> Prediction:  # fmt: skip
    """Predict tokens per step and the speed-up over plain decoding, for one setting.

    Parameters
    ----------
    gamma : float, optional
        Draft tokens in a row, of a tree its depth; the mean where it varies. `per_position` implies
        it, and so does `tokens_per_step` with an acceptance rate.
    tokens_per_step : float, optional
        Mean tokens per step, the bonus token included: "mean acceptance length", "accept length".
        One acceptance has to be given; several must agree.
    per_position : sequence of float, optional
        The fraction of steps in which draft token 1, 2, ... was accepted; or, with `conditional`, of
        those in which the tokens before it were.
    conditional : bool, optional
        Which of the two `per_position` are. Rates that rise can only be conditional; those that fall
        can be either, and are taken to be of all steps if nothing is said.
    acceptance_rate : float, optional
        Accepted over proposed draft tokens.
    acceptance_rate_with_bonus : float, optional
        (accepted + 1) / (proposed + 1): SGLang's "accept rate" before April 2026, and the "system
        efficiency" of vLLM V0.
    alpha : float, optional
        The mean acceptance probability along sequences, put into Equation 1.
    cost_ratio : float, optional
        c, a draft forward pass over a target forward pass, as measured; 0 for n-grams.
    params, layers : (float, float), optional
        Of target and draft, if c is not known: their ratio to the power 0.82 or 0.75. `params` of a
        mixture of experts are those that one token uses.
    draft_passes : float, optional
        Draft forward passes per step, if not `gamma`: 1 if one pass proposes all tokens.
    draft_bytes_per_param, bytes_per_param : float, optional
        2 for 16 bits, 1 for 8, about 0.6 for Q4_K_M; the draft's default to the target's.
    verify_cost : float or callable, optional
        v, a target forward pass over the n tokens of a row over one over a single token: a number,
        or a function of n.
    gpu : str or (float, float), optional
        If v is not known: a name, also as nvidia-smi prints it, or dense 16-bit teraflop/s and
        GB/s. v(n) is `specnb.theory.roofline`, between full overlap of reading and arithmetic and
        none.
    verified : float, optional
        Draft tokens in one verification, if not `gamma`: the nodes of a tree. (SGLang counts one
        more.)
    batch : float
        Rows that are decoded together.
    active : float
        The fraction of the target's parameters that one token uses: 0.1 for "30B-A3B".
    cache_ratio : float
        Bytes of one row's key-value cache over bytes of the target's weights.
    overhead_ms : float, optional
        Milliseconds of a step outside the forward passes: sampling, cache, scheduler. Needs
        `plain`.
    plain : float, optional
        Tokens per second of a row in plain decoding: the faster that is, the more an overhead
        costs.
    step_cost : (float or Range, float or Range), optional
        a and b of a step that takes a + b gamma plain steps, as `fit_steps` returns them, in place
        of everything about drafting, verification and overhead.

    Returns
    -------
    Prediction

    Raises
    ------
    ValueError
        If an input is missing or impossible, or two contradict each other.

    Notes
    -----
    Theorem 3.8 with a cost of verification and of overhead.

    Examples
    --------
    >>> print(predict(tokens_per_step=2.3, gamma=4, layers=(32, 1), gpu="NVIDIA H100 80GB HBM3", plain=150))
    1.43 [0.61, 2.04] times plain decoding, with 2.30 tokens per step
      drafting: 0.30 [0.12, 0.71] plain steps
      verification: 1.01 [1.00, 1.28] plain steps
      overhead: 0.30 [0.00, 1.80] plain steps
      overhead costs most: without it 1.23 times as fast
      a range of a factor of 3 says little: measure two lines (`fit_steps`)
      assumed: drafting from the ratio of layers
      assumed: verification from the roofline of H100
      assumed: overhead of 2 ms a step, from 0 to 12
    """
    given = locals()
    gamma, tokens, missing = emitted(given)
    if gamma is None:
        raise ValueError("gamma is missing; give it, or per_position, or an acceptance rate beside tokens_per_step")
    parts = dict[str, Range]()
    for name, (part, source) in (_assumed(gamma, given) | known_parts(gamma, given)).items():
        parts[name] = part
        missing += [source] * bool(source)
    return Prediction(tokens, parts, tuple(missing))


def emitted(given: Mapping[str, Any]) -> tuple[float | None, Range, list[str]]:
    """gamma, if the arguments of `predict` imply it, tokens per step, and what was assumed."""
    accepted = {name: given[name] for name in ACCEPTANCE if given.get(name) is not None}
    if not accepted:
        raise ValueError(
            f"an acceptance is missing; give one of {', '.join(name for name in ACCEPTANCE if name in given)}"
        )
    gamma = _implied_gamma(accepted) if given["gamma"] is None else given["gamma"]
    gamma, conditional = None if gamma is None else in_range("gamma", gamma, 1, 1e6), given.get("conditional")
    read = {name: _tokens(name, value, gamma, conditional) for name, value in accepted.items()}
    (name, tokens), *others = read.items()
    for other, same in others:
        if same.low > (1 + AGREE) * tokens.high or (1 + AGREE) * same.high < tokens.low:
            raise ValueError(
                f"{name} and {other} contradict each other: with gamma = {gamma:g} they mean {tokens} and {same} "
                "tokens per step; a rate that counts the bonus token is acceptance_rate_with_bonus"
            )
    assumed = ["0.75 to 1.1 of the accepted tokens that Equation 1 gives"] * (name == "alpha")
    rates = accepted.get("per_position")
    if rates is not None and conditional is None and len(rates) > 1:
        multiplied = 1 + math.fsum(accumulate(map(float, rates), operator.mul))
        assumed.append(
            "per_position as fractions of all steps; if of those that accepted the tokens before, give "
            f"conditional=True: {multiplied:.2f} tokens per step"
        )
    return gamma, tokens, assumed


def _implied_gamma(accepted: Mapping[str, Any]) -> float | None:
    if "per_position" in accepted:
        return len(accepted["per_position"])
    rates = [accepted.get(name) for name in ("acceptance_rate", "acceptance_rate_with_bonus")]
    if "tokens_per_step" not in accepted or rates == [None, None]:
        return None
    tokens = in_range("tokens_per_step without gamma", accepted["tokens_per_step"], 1.001, 1e6)
    rate, counted = (None if one is None else in_range("a rate without gamma", one, 1e-6, 1) for one in rates)
    if rate is None:
        return round(tokens / counted - 1, 9)  # type: ignore[operator]  # one of the two is given
    gamma, other = (tokens - 1) / rate, tokens / rate - 1
    if abs(gamma - round(gamma)) > 0.1 and abs(other - round(other)) < 0.05:
        raise ValueError(
            f"gamma would be {gamma:.2f}, or {other:.2f} if the rate counts the bonus token; give gamma, and a rate "
            "that counts it as acceptance_rate_with_bonus"
        )
    return round(gamma, 9)


def _tokens(name: str, value: Any, gamma: float | None, conditional: bool | None) -> Range:
    if name == "tokens_per_step":
        return exactly(in_range(name, value, 1, 1e6 if gamma is None else gamma + 1))
    if gamma is None:
        raise ValueError(f"gamma is missing; {name} gives the tokens of a step only with it")
    if name == "per_position":
        rates = [in_range(name, rate, 0, 1) for rate in value]
        if len(rates) != gamma:
            raise ValueError(f"per_position has {len(rates)} fractions; with gamma = {gamma:g} it needs as many")
        if conditional:
            rates = list(accumulate(rates, operator.mul))
        elif any(later > earlier for earlier, later in pairwise(rates)):
            raise ValueError(f"per_position rises in {rates}: rates given the tokens before need conditional=True")
        return exactly(1 + math.fsum(rates))
    if name == "acceptance_rate":
        return exactly(1 + gamma * in_range(name, value, 0, 1))
    if name == "acceptance_rate_with_bonus":
        return exactly((gamma + 1) * in_range(name, value, 1 / (gamma + 1), 1))
    if gamma != round(gamma):
        raise ValueError(f"gamma is {gamma}; with alpha it must be a whole number")
    more = float(expected_tokens(in_range(name, value, 0, 1), gamma)) - 1
    return Range(1 + more, 1 + DEPENDENCE.low * more, min(1 + DEPENDENCE.high * more, gamma + 1))


def known_parts(gamma: float | None, given: Mapping[str, Any]) -> dict[str, tuple[Range, str]]:
    """The time of a step by part, as far as the arguments of `predict` say, each with what it was
    taken from."""
    if given.get("step_cost") is not None:
        also = [name for name in COSTS if given[name] is not None]
        if also:
            raise ValueError(f"step_cost and {also[0]} contradict each other; step_cost is all that a step costs")
        fixed, each = (
            one if isinstance(one, Range) else exactly(in_range("step_cost", one, least, 1e6))
            for one, least in zip(given["step_cost"], (math.ulp(0.0), 0), strict=True)
        )
        return {"fixed cost": (fixed, ""), "draft tokens": (in_range("gamma", gamma, 1, 1e6) * each, "")}
    parts = dict[str, tuple[Range, str]]()
    passes, nodes = _counts(gamma, given)
    c = _cost_ratio(given)
    if c is not None and passes is not None:
        parts["drafting"] = passes * c[0], c[1]
    v = given["verify_cost"]
    if v is not None and (nodes is not None or not callable(v)):
        v = v(1 + (nodes or 0)) if callable(v) else v
        parts["verification"] = exactly(in_range("verify_cost", v, 0.01, 1e6)), ""
    elif given["gpu"] is not None and nodes is not None:
        parts["verification"] = verification(1 + nodes, given)
    if given["overhead_ms"] is not None:
        if given["plain"] is None:
            raise ValueError("overhead_ms needs plain, the tokens per second of plain decoding, to be compared with")
        parts["overhead"] = _steps(exactly(in_range("overhead_ms", given["overhead_ms"], 0, 1e6)), given), ""
    return parts


def _assumed(gamma: float, given: Mapping[str, Any]) -> dict[str, tuple[Range, str]]:
    """Every part of a step of which nothing is known; `known_parts` replaces the others."""
    if given["step_cost"] is not None:
        return {}
    passes, nodes = _counts(gamma, given)
    assert passes is not None
    assert nodes is not None
    unknown = "" if given["plain"] else f", with plain decoding at {PLAIN:g} tokens per second"
    return {
        "drafting": (passes * COST_RATIO, "cost_ratio from 0 to 0.2"),
        "verification": verification(1 + nodes, {**given, "gpu": None}),
        "overhead": (_steps(OVERHEAD_MS, given), f"overhead of 2 ms a step, from 0 to 12{unknown}"),
    }


def _counts(gamma: float | None, given: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Draft forward passes, and draft tokens in a verification."""
    passes, nodes = given["draft_passes"], given["verified"]
    passes = gamma if passes is None else in_range("draft_passes", passes, 0, 1e6)
    return passes, gamma if nodes is None else in_range("verified", nodes, gamma or 1, 1e6)


def _steps(milliseconds: Range, given: Mapping[str, Any]) -> Range:
    plain = PLAIN if given["plain"] is None else in_range("plain", given["plain"], 1e-6, 1e6)
    return plain / 1000 * milliseconds


def _cost_ratio(given: Mapping[str, Any]) -> tuple[Range, str] | None:
    if given["cost_ratio"] is not None:
        return exactly(in_range("cost_ratio", given["cost_ratio"], 0, 1e6)), ""
    for name, exponent in EXPONENTS.items():
        if given[name] is not None:
            target, draft = pair(name, given[name])
            width = in_range("bytes_per_param", given["bytes_per_param"], 0.1, 16)
            own = given["draft_bytes_per_param"]
            ratio = draft / target * (1 if own is None else in_range("draft_bytes_per_param", own, 0.1, 16) / width)
            low, high = sorted([ratio, math.sqrt(ratio)])
            if own is not None and own < 1 < given["batch"]:  # unpacked for many rows: as costly as without
                high = max(high, draft / target)
            return Range(ratio**exponent, low, high), f"drafting from the ratio of {name}"
    return None


def verification(n: float, given: Mapping[str, Any]) -> tuple[Range, str]:
    """v(n) from a roofline, and its source.

    The low end is 1, as of passes that wait for launches. The high end is without overlap, at the
    ridges of the data sheet and of the slowest published speed, with `LAUNCHES`. Experts that tokens
    choose independently are more weights to read than for one token, unless the batch reads all;
    those of one row may choose alike. The value is the geometric mean of both, at half of the overlap.
    """
    limits = {"bytes_per_param": (0.1, 16), "active": (1e-4, 1), "batch": (1, 1e9), "cache_ratio": (0, 1e9)}
    width, active, batch, cache = (in_range(name, given[name], *ends) for name, ends in limits.items())
    ridge, source = ridge_of(given["gpu"], width, active)

    def reading(tokens: float) -> float:
        """Of all weights, with the caches."""
        return 1.0 - math.pow(1 - active, tokens) + batch * cache

    plain = reading(batch)

    def v(ridge: float, overlap: float, more: float) -> float:
        return float(roofline(n, ridge * plain / active, batch, overlap, more))

    alike, independent = 1.0, reading(n * batch) / plain
    value = math.sqrt(v(ridge.value, 0.5, alike) * v(ridge.value, 0.5, independent))
    ends = [v(*one) for one in product((ridge.value, ridge.low, ridge.high), (0, 1), (alike, independent))]
    return Range(value, min(1.0, *ends), max(ends) + LAUNCHES * (n > 1)), f"verification from the {source}"
