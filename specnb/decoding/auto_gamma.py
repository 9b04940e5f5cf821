"""How many tokens to draft in the next step, chosen from what the steps so far showed: `generate(gamma="auto")`.

Before each step the choice maximises expected tokens over expected time. Tokens: the acceptance of the draft token at
each position, estimated from past steps, with an estimate that forgets. Time: how long steps of each width took.
Drafting nothing is one of the choices, so speculation is switched off where it does not pay, and tried again from time
to time, because what is forgotten returns to the prior. The choice looks at past steps alone and at nothing that is
sampled in the step, so the output distribution is the target's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specnb.decoding.request import Request
from specnb.decoding.step import IDLE, Batch
from specnb.distributions import Uniforms
from specnb.drafting.base import Proposal, missing_members
from specnb.rules import Outcome

Floats = NDArray[np.float64]
LARGEST = 10  # the most draft tokens that are considered


@dataclass(frozen=True)
class Settings:
    """What the choice is made by.

    lately, long  factors per step by which evidence counts less: lately for single positions, because acceptance comes
                  in runs; long for the mean of a row, so that a text without acceptance is not tried too often
    accepted      prior probability that a draft token is accepted, with the weight of `weight` draft tokens
    recent        how many of the latest times of a width count; their median is its time
    """

    lately: float = 0.85
    long: float = 0.98
    accepted: float = 0.5
    weight: float = 1.5
    recent: int = 7


@dataclass
class Acceptance:
    """Estimates, for each row and position, how probably a draft token is accepted if the ones before it were.

    >>> estimate = Acceptance(rows=1, gamma=3)
    >>> estimate.learn(drafted=np.array([3]), accepted=np.array([1]))
    >>> estimate.tokens().round(1)[0]  # with 0, 1, 2 and 3 draft tokens
    array([1. , 1.7, 1.9, 2. ])
    """

    rows: int
    gamma: int
    settings: Settings = Settings()

    def __post_init__(self) -> None:
        self.tested, self.passed = np.zeros((2, self.rows, self.gamma))  # lately
        self.all_tested, self.all_passed = np.zeros((2, self.rows))  # at all positions, for long

    def learn(self, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Counts one step: how many tokens each row `(rows,)` drafted, and how many of these were accepted."""
        position = np.arange(self.gamma)
        reached = (position < drafted[:, None]) & (position <= accepted[:, None])
        passed = reached & (position < accepted[:, None])
        self.tested = self.settings.lately * self.tested + reached
        self.passed = self.settings.lately * self.passed + passed
        self.all_tested = self.settings.long * self.all_tested + reached.sum(axis=1)
        self.all_passed = self.settings.long * self.all_passed + passed.sum(axis=1)

    def forget(self, rows: list[int]) -> None:
        """Other sequences begin in `rows`."""
        for counts in (self.tested, self.passed, self.all_tested, self.all_passed):
            counts[rows] = 0

    def tokens(self) -> Floats:
        """Expected tokens of a step `(rows, gamma + 1)` with 0, 1, ..., gamma draft tokens, the final one included.

        A position leans on the row's other positions lately, these on the row's mean, and that on the prior.
        """
        weight = self.settings.weight
        mean = (self.all_passed + weight * self.settings.accepted) / (self.all_tested + weight)
        recent = (self.passed.sum(axis=1) + weight * mean) / (self.tested.sum(axis=1) + weight)
        each = (self.passed + weight * recent[:, None]) / (self.tested + weight)
        return np.concatenate([np.ones((self.rows, 1)), 1 + each.cumprod(axis=1).cumsum(axis=1)], axis=1)


@dataclass
class StepTimes:
    """The time of a step by the number of tokens drafted, from the latest steps of each width.

    Others lie on the line between their neighbours; beyond the widest, on that through the narrowest and the widest.

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
    >>> auto.choose(np.array([True]))
    4
    """

    def __init__(self, rows: int, gamma: int, settings: Settings = Settings()) -> None:
        self.gamma = gamma
        self.acceptance = Acceptance(rows, gamma, settings)
        self.times = StepTimes(gamma, settings)

    def choose(self, going: NDArray[np.bool_]) -> int:
        """The number of draft tokens, 0 to gamma, for the rows that are `going` `(rows,)`."""
        known = self.times.latest
        if not any(known):  # none, or plain steps only: as many as possible, of which a drafter may propose fewer
            return self.gamma
        if 0 not in known:
            return 0
        tokens = self.acceptance.tokens()[going].sum(axis=0)
        return int(np.argmax(tokens / self.times.expected()))

    def learn(self, width: int, seconds: float, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Counts a step that took `seconds` with `width` positions for draft tokens; see `Acceptance.learn`."""
        self.times.learn(width, seconds)
        self.acceptance.learn(drafted, accepted)


class AutoBatch(Batch):
    """A batch whose steps have as many draft tokens as pays, at most the request's gamma.

    All rows of a step have the same width. A step in which no row has a draft token is a plain one, also where that is
    known only after drafting. `fixed_width` says for which requests not.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.auto = AutoGamma(request.rows, request.gamma)
        self.readers = [(part, part.unseen) for part in _parts(request.drafter) if hasattr(part, "unseen")]
        self.skipped = 0  # tokens of each row since the drafter has drafted

    def enter(self, rows: list[int], prompts: Sequence[Sequence[int]], uniforms: Uniforms, max_new_tokens: int) -> None:
        super().enter(rows, prompts, uniforms, max_new_tokens)
        self.auto.acceptance.forget(rows)

    def step_in_parts(self, mark: Callable[[str], None] = lambda part: None) -> None:
        going = (self.state.remaining > IDLE).numpy()
        self.asked = self.width = self.auto.choose(going)
        start = time.perf_counter()
        super().step_in_parts(mark)
        drafted, accepted = self.fate
        self.auto.learn(self.width, time.perf_counter() - start, drafted * going, accepted)

    def propose(self, uniforms: Tensor) -> Proposal:
        if self.asked == 0:
            self.skipped += 1
            return Proposal(uniforms[:, :0].long(), uniforms.new_zeros(len(uniforms), 0, self.vocab))
        for part, least in self.readers:  # models in the drafter have not seen the tokens of plain steps
            part.unseen = least + min(self.skipped, int(self.state.lengths.max()) - least)
        proposal = super().propose(uniforms)
        for part, least in self.readers:  # the drafter may serve other batches
            part.unseen = least
        self.skipped = 0
        return proposal

    def verify_and_emit(self, logits: Tensor, draft_tokens: Tensor, q: Tensor) -> Outcome:
        outcome = super().verify_and_emit(logits, draft_tokens, q)
        self.fate = (draft_tokens >= 0).sum(dim=1).numpy(), outcome.accepted.numpy()
        return outcome


def fixed_width(target: Any, drafter: Any, compile: bool | str, batch_class: type[Batch] | None) -> str:
    """Why the steps of `generate` cannot differ in width; nothing if they can."""
    name = type(drafter).__name__
    if getattr(drafter, "parents", None) is not None:
        return f"{name} proposes a tree of a fixed shape"
    if getattr(drafter, "hidden_layers", ()):
        return f"{name} reads hidden states, so it must draft in every step"
    if batch_class is not None:
        return f"the study makes its own steps ({batch_class.__name__})"
    device = getattr(target, "device", None)
    if compile or device is None or device.type != "cpu":
        how = f"compile={compile!r} on {device}"
        return f"steps of different widths are made on the CPU without compilation only, not with {how}"
    return ""


def _parts(drafter: Any) -> list[Any]:
    inner = [part for part in vars(drafter).values() if not isinstance(part, type) and not missing_members(part)]
    return [drafter, *(each for part in inner for each in _parts(part))]
