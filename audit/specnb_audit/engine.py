"""What is known of the engine that generated the tokens, and which deviations are looked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from transformers import PreTrainedModel

from specnb.arguments import require_whole
from specnb.distributions import Sampling
from specnb_audit.numerics import Numerics, given_numerics, measure_numerics
from specnb_audit.teacher_forcing import Completion, Source


@dataclass(frozen=True)
class Aim:
    """Which deviations the audit looks for.

    ignore     kinds that are left out: names in `specnb_audit.alternatives.ALTERNATIVES`, and of
               violations
    suspected  a model, or a function as for the target, that may have been used instead: adds the
               ratio against it

    >>> aim = Aim(ignore=("temperature",))
    """

    ignore: tuple[str, ...] = ()
    suspected: Source | None = None


@dataclass(frozen=True)
class Engine:
    """What is known of the engine, and how its rounding errors are measured, which are no fault of
    a sampler.

    dtype            in which the engine computes; None: unknown. Then tokens that bfloat16 would
                     explain do not reject exactness, and the outcome is `numerics`
    logit_tolerance  how far below the tokens kept the logit of a token may be, in place of a
                     measurement
    control          sequences of the same engine, with the same settings, without speculation: what
                     they deviate in is the engine's own
    draft_sampling   how its draft model is sampled; None: as the target. Read by `audit`
    positions        number of positions at which a forward pass over a sequence is compared with
                     passes over one token, to measure rounding errors; 0: not measured

    Raises `ValueError` for a tolerance below 0 and for positions that are no whole number from 0,
    and `TypeError` for a dtype that is not one of floating point.
    """

    dtype: torch.dtype | None = None
    logit_tolerance: float | None = None
    control: Sequence[Completion] = ()
    draft_sampling: Sampling | None = None
    positions: int = 16

    def __post_init__(self) -> None:
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise TypeError(f"dtype is {self.dtype!r}; give a dtype of floating point, such as torch.bfloat16, or None")
        if self.logit_tolerance is not None and not 0 <= self.logit_tolerance <= torch.finfo(torch.float32).max:
            raise ValueError(f"logit_tolerance is {self.logit_tolerance}; it must be 0 or more, in units of logits")
        require_whole(positions=(self.positions, 0))

    def numerics(
        self, target: Source, completions: Sequence[Completion], sampling: Sampling
    ) -> tuple[Numerics | None, Callable[[], Numerics] | None]:
        """What `Auditor` takes as `numerics` and `undeclared`, measured at positions of
        `completions`."""
        if self.logit_tolerance is not None:
            return given_numerics(self.logit_tolerance, sampling), None
        if not isinstance(target, PreTrainedModel) or self.positions < 1 or not any(one.tokens for one in completions):
            return None, None

        def measured(dtype: torch.dtype | None) -> Numerics:
            return measure_numerics(target, completions, sampling, self.positions, dtype)

        unknown = self.dtype is None and target.dtype in (torch.float32, torch.float64)
        return measured(self.dtype), cache(lambda: measured(torch.bfloat16)) if unknown else None
