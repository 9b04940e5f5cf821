"""How many tokens to draft in the next step, chosen from what the steps so far showed: `generate(gamma="auto")`.

Before each step the choice maximises expected tokens over expected time. Tokens: the acceptance of the draft token at
each position, estimated from past steps, with an estimate that forgets. Time: how long steps of each width took. Drafting
nothing is one of the choices, so speculation is switched off where it does not pay, and tried again from time to time,
because what is forgotten returns to the prior. The choice looks at past steps alone and at nothing that is sampled in the
step, so the output distribution is the target's (contract 10 of the design).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """What the choice is made by.

    forget    factor per step by which earlier evidence counts less
    accepted  prior probability that a draft token is accepted
    weight    how many draft tokens the prior counts for
    recent    how many of the latest times of a width count; their median is its time
    """

    forget: float = 0.96
    accepted: float = 0.7
    weight: float = 1.5
    recent: int = 7


@dataclass
class Acceptance:
    """Estimates, for each row and position, how probably a draft token is accepted if the ones before it were.

    >>> estimate = Acceptance(rows=1, gamma=3)
    >>> for _ in range(40):
    ...     estimate.learn(drafted=np.array([3]), accepted=np.array([1]))
    >>> estimate.tokens().round(1)[0]
    array([1. , 1.9, 2. , 2. ])
    """

    rows: int
    gamma: int
    settings: Settings = Settings()
    tested: Floats = field(init=False)
    passed: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.tested, self.passed = np.zeros((2, self.rows, self.gamma))

    def learn(self, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Counts one step: how many tokens each row `(rows,)` drafted, and how many of these were accepted."""
        position = np.arange(self.gamma)
        reached = (position < drafted[:, None]) & (position <= accepted[:, None])
        self.tested = self.settings.forget * self.tested + reached
        self.passed = self.settings.forget * self.passed + (reached & (position < accepted[:, None]))

    def forget(self, rows: list[int]) -> None:
        """Other sequences begin in `rows`."""
        self.tested[rows] = self.passed[rows] = 0

    def tokens(self) -> Floats:
        """Expected tokens of a step `(rows, gamma + 1)` with 0, 1, ..., gamma draft tokens, the final one included.

        A position leans on the row's mean over positions as far as it was not tested itself, and that on the prior.
        """
        prior, weight = self.settings.accepted, self.settings.weight
        mean = (self.passed.sum(1) + weight * prior) / (self.tested.sum(1) + weight)
        each = (self.passed + weight * mean[:, None]) / (self.tested + weight)
        return np.concatenate([np.ones((self.rows, 1)), 1 + each.cumprod(axis=1).cumsum(axis=1)], axis=1)


@dataclass
class StepTimes:
    """The time of a step by the number of tokens drafted, from the latest steps of each width.

    Widths that were not tried lie on the line between their neighbours; beyond the widest, on that through the narrowest
    and the widest. The first steps of a generation are the widest and the narrowest, so both are known at once.

    >>> times = StepTimes(gamma=4)
    >>> times.learn(0, 1.0); times.learn(4, 1.4)
    >>> times.expected().round(2)
    array([1. , 1.1, 1.2, 1.3, 1.4])
    """

    gamma: int
    settings: Settings = Settings()
    latest: dict[int, deque[float]] = field(default_factory=dict)

    def learn(self, width: int, seconds: float) -> None:
        """Counts a step in which `width` tokens were drafted."""
        self.latest.setdefault(width, deque(maxlen=self.settings.recent)).append(seconds)

    def expected(self) -> Floats:
        """`(gamma + 1,)`; all the same as long as fewer than two widths are known."""
        known = sorted(self.latest)
        if len(known) < 2:
            return np.ones(self.gamma + 1)
        medians = [float(np.median(self.latest[width])) for width in known]
        slope = (medians[-1] - medians[0]) / (known[-1] - known[0])
        widths = np.arange(self.gamma + 1)
        beyond = medians[-1] + slope * (widths - known[-1])
        # A step over more tokens is not faster: a median that says so is noise.
        times = np.where(widths > known[-1], beyond, np.interp(widths, known, medians))
        return np.maximum.accumulate(times)


class AutoGamma:
    """Chooses the number of draft tokens of each step of a batch.

    >>> auto = AutoGamma(rows=1, gamma=4)
    >>> for _ in range(60):
    ...     width = auto.choose(np.array([True]))
    ...     auto.learn(width, 1 + 0.1 * width, drafted=np.array([width]), accepted=np.array([0]))
    >>> auto.choose(np.array([True]))  # nothing was ever accepted
    0
    """

    def __init__(self, rows: int, gamma: int, settings: Settings = Settings()) -> None:
        self.gamma = gamma
        self.acceptance = Acceptance(rows, gamma, settings)
        self.times = StepTimes(gamma, settings)

    def choose(self, going: NDArray[np.bool_]) -> int:
        """The number of draft tokens, 0 to gamma, for the rows that are `going` `(rows,)`."""
        for width in (self.gamma, 0):
            if width not in self.times.latest:
                return width
        tokens = self.acceptance.tokens()[going].sum(axis=0)
        return int(np.argmax(tokens / self.times.expected()))

    def learn(self, width: int, seconds: float, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Counts a step that took `seconds` with `width` positions for draft tokens; see `Acceptance.learn`."""
        self.times.learn(width, seconds)
        self.acceptance.learn(drafted, accepted)
