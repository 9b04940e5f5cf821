"""How many tokens to draft in the next step, chosen from what the steps so far showed:
`generate(gamma="auto")`.

For each row, the choice maximises expected tokens, by the acceptance in the row's past steps, over
costs that are known beforehand. Drafting nothing is one of the choices; what is forgotten returns
to the prior, so it is tried again.

The choice looks at past steps of the row alone and at nothing that is sampled in the step, so the
output distribution is the target's. It reads no clock, so equal seeds and costs give equal tokens,
in every batch and on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specnb.drafting.base import Drafter
from specnb.number_checks import require_number, shown

Ints = NDArray[np.int64]
SMALLEST_WEIGHT = 1e-6  # without a prior there would be no choice in the first step
LARGEST = 10  # the most draft tokens that are considered
CAPTURED = (0, 1, 2, 4, 8)  # of these where a step of each number is captured as a graph
FIXED = 4  # draft tokens of a step where they cannot be chosen; compiled, these or none are
COPIED = (0.05, 0.05)
"""Assumed cost of the first draft token of a step and of each further one, without drafting: its
part of the target's pass, sampling and the rule. Here of copies on a CPU."""
SAMPLED = (0.15, 0.01)
"""The same with a draft model, and on a CUDA device. With the trained pair on a CPU v is 1.26 with
four draft tokens (data/results/drafters.csv). On a device v(2) - 1 is 0.11 to 0.22 for two models
captured with 1 and 16 rows, and v(9) - v(2) at most 0.14 (data/results/gpu.csv)."""
MATCH = 6.0
"""m^2 / (m^2 + MATCH) is the prior probability that a token copied after m equal ones is accepted.
On the real model (`studies.real.workloads`), m = 1, 2, 3, 4, 8: 0.20, 0.51, 0.69, 0.77, 0.93 at
temperature 0; 0.12, 0.35, 0.53, 0.58, 0.82 at 1."""
MATCH_WEIGHT, MATCH_LONG = 3.0, 0.98  # of copies, what `weight` and `long` are of other tokens
MATCHES = 16  # longer ones count as this one
EXPONENT = 0.82  # of the ratio of parameters, which gives c; it fits published costs of drafts


@dataclass(frozen=True)
class Auto:
    """What `gamma="auto"` chooses by; give `gamma=Auto(...)` to change it.

    costs         time of a step with 0, 1, ... draft tokens, in any unit; the last is the most that
                  is drafted. By `Costs` as measured, [n * c + v for n, v in
                  enumerate(costs.verify_cost(range(1, 10)))]. None assumes costs from the sizes of
                  both models (`assumed_costs`)
    lately, long  factors per step by which evidence counts less, for single positions and for the
                  mean of a row
    accepted      prior probability that a draft token is accepted, with the weight of `weight`
                  draft tokens; copies have a prior by the length of their match (`MATCH`)

    Raises `TypeError` for costs that are no list, array or tensor, `ValueError` for costs that are
    not at least two positive numbers, a factor or probability outside [0, 1], and a weight below
    `SMALLEST_WEIGHT`.

    >>> Auto(costs=[1, 1.1, 1.2]).costs
    (1.0, 1.1, 1.2)
    """

    costs: Sequence[float] | None = None
    lately: float = 0.85
    long: float = 0.99
    accepted: float = 0.6
    weight: float = 4.0

    def __post_init__(self) -> None:
        require_number(most=1.0, lately=self.lately, long=self.long, accepted=self.accepted)
        require_number(SMALLEST_WEIGHT, weight=self.weight)
        if self.costs is not None:
            object.__setattr__(self, "costs", _times(self.costs))

    def costs_of(self, widths: Sequence[int], target: PreTrainedModel, drafter: Drafter) -> list[float]:
        """Time of a step with 0, 1, ... draft tokens up to the most of `widths`; infinite for other
        numbers."""
        costs = self.costs or assumed_costs(target, drafter)
        return [costs[n] if n in widths else np.inf for n in range(max(widths) + 1)]


def _times(costs: Any) -> tuple[float, ...]:
    values = costs.tolist() if hasattr(costs, "tolist") else costs
    message = f"costs is {shown(costs)}; it must be a list of times of steps with 0, 1, ... draft tokens"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(message)
    numbers: list[Any] = [value if isinstance(value, Real) else np.nan for value in values]
    if len(numbers) < 2 or not all(0 < number < np.inf for number in numbers):
        raise ValueError(f"{message}: at least two positive numbers")
    return tuple(map(float, numbers))


def assumed_costs(target: PreTrainedModel, drafter: Drafter) -> tuple[float, ...]:
    """Time of a step with 0, 1, ..., `LARGEST` draft tokens in plain steps, from the sizes of the
    models alone.

    >>> from specnb import load_pair
    >>> from specnb.drafting.model import ModelDrafter
    >>> pair = load_pair(packed=False)
    >>> [round(cost, 2) for cost in assumed_costs(pair.target, ModelDrafter(pair.draft))[:3]]
    [1.0, 1.3, 1.46]
    """
    model = drafter.draft_model
    cost_ratio = 0.0 if model is None else (model.num_parameters() / target.num_parameters()) ** EXPONENT
    first, further = COPIED if model is None and target.device.type == "cpu" else SAMPLED
    verified = [0.0, *(first + further * more for more in range(LARGEST))]
    return tuple(1 + cost_ratio * drafted + cost for drafted, cost in enumerate(verified))


class AutoGamma:
    """Chooses the number of draft tokens of each row.

    It estimates how probably the draft token at each position is accepted if those before it were,
    apart for steps after an entirely accepted draft. A position leans on the others, these on the
    row's mean, that on the prior.

    Where the drafter says how many tokens agree before the place that it copies from
    (`Drafter.matched`), acceptance is estimated for each such number in place of the position; with
    each draft token there is one more.

    >>> choice = AutoGamma(rows=2, costs=(1.0, 1.1, 1.2, 1.3))
    >>> for _ in range(8):
    ...     choice.learn(drafted=np.array([3, 3]), accepted=np.array([3, 0]))
    >>> choice.choose()
    array([3, 0])
    """

    def __init__(self, rows: int, costs: Sequence[float], auto: Auto = Auto()) -> None:
        self.costs, self.auto, self.rows = np.asarray(costs, dtype=np.float64), auto, np.arange(rows)
        # How many draft tokens were tested, and how many passed: at each position lately, and at
        # all for long.
        self.known, self.all_known = np.zeros((2, rows, 2, len(costs) - 1)), np.zeros((2, rows))
        self.in_run = np.zeros(rows, dtype=np.int64)  # 1 after a draft that was accepted entirely
        # Tested and passed, by the number of tokens that agree.
        self.after_match = np.zeros((2, rows, MATCHES + 1))
        self.agreeing: Ints | None = None  # that number at each position, `(rows, positions)`

    def forget(self, rows: list[int]) -> None:
        """Other sequences begin in `rows`."""
        self.known[:, rows], self.all_known[:, rows], self.in_run[rows] = 0, 0, 0
        self.after_match[:, rows] = 0

    def learn(self, drafted: Ints, accepted: Ints) -> None:
        """Counts one step: how many tokens each row `(rows,)` drafted, and how many of these were
        accepted."""
        self.known *= self.auto.lately
        self.all_known *= self.auto.long
        self.after_match *= MATCH_LONG
        if drafted.any():
            position = np.arange(len(self.costs) - 1)
            reached = (position < drafted[:, None]) & (position <= accepted[:, None])
            new = np.stack([reached, reached & (position < accepted[:, None])])
            self.known[:, self.rows, self.in_run] += new
            self.all_known += new.sum(axis=-1)
            if self.agreeing is not None:
                for known, found in zip(self.after_match, new, strict=True):
                    np.add.at(known, (self.rows[:, None], self.agreeing), found)
        self.in_run = ((drafted > 0) & (accepted == drafted)).astype(np.int64)

    def choose(self, matched: Ints | None = None) -> Ints:
        """The number of draft tokens `(rows,)`, 0 to `len(costs) - 1`; `matched` `(rows,)` is of
        `Drafter.matched`."""
        self.agreeing = None
        if matched is not None and not matched.any():
            return np.zeros_like(matched)
        each = self._by_position() if matched is None else self._by_match(matched)
        tokens = np.concatenate([np.ones((len(each), 1)), 1 + each.cumprod(axis=1).cumsum(axis=1)], axis=1)
        # Rounded, so that the last bits of a sum do not decide between equals.
        best: Ints = (tokens / self.costs).round(9).argmax(axis=1)
        return best

    def _by_match(self, matched: Ints) -> NDArray[np.float64]:
        self.agreeing = agreeing = np.minimum(matched[:, None] + np.arange(len(self.costs) - 1), MATCHES)
        square = np.square(agreeing, dtype=np.float64)
        tested, passed = self.after_match[:, self.rows[:, None], agreeing]
        prior = MATCH_WEIGHT * square / (square + MATCH)
        each: NDArray[np.float64] = (passed + prior) / (tested + MATCH_WEIGHT)
        return each * (matched > 0)[:, None]

    def _by_position(self) -> NDArray[np.float64]:
        weight = self.auto.weight
        tested, passed = self.known[:, self.rows, self.in_run]
        all_tested, all_passed = self.all_known
        mean = (all_passed + weight * self.auto.accepted) / (all_tested + weight)
        recent = (passed.sum(axis=1) + weight * mean) / (tested.sum(axis=1) + weight)
        each: NDArray[np.float64] = (passed + weight * recent[:, None]) / (tested + weight)
        return each


def varies(target: PreTrainedModel, drafter: Drafter, compile: bool | str) -> bool:
    """Whether steps of `generate` can differ in width: chains, in the loop's own steps.

    A drafter that reads hidden states must draft in every step; so must a compiled model, whose
    passes have one length.
    """
    fixed = drafter.parents is not None or drafter.hidden_layers or drafter.every_step
    return not fixed and not (compile is True and drafter.draft_model is not None)


def widths(gamma: int, target: PreTrainedModel, drafter: Drafter, compile: bool | str) -> tuple[int, ...]:
    """The numbers of draft tokens that a step can ask for, up to `gamma`, ascending.

    On a device other than the CPU a draft model drafts in every step: the host does not know how
    far it has read. Each number is compiled or captured by itself, so there are few of them then.
    """
    every = range(gamma + 1) if not compile else (0, gamma) if compile is True else (*CAPTURED, gamma)
    least = int(target.device.type != "cpu" and drafter.draft_model is not None)
    return tuple(sorted({n for n in every if least <= n <= gamma}))
