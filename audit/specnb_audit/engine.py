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

    Parameters
    ----------
    ignore : tuple of str
        Kinds that are left out.
    suspected : PreTrainedModel or callable, optional
        A model that may have been used instead of the target: adds the ratio against it.

    Examples
    --------
    >>> aim = Aim(ignore=("token-bias",))
    """

    ignore: tuple[str, ...] = ()
    suspected: Source | None = None


@dataclass(frozen=True)
class Engine:
    """What is known of the engine, whose rounding errors are no fault of its sampler.

    Parameters
    ----------
    dtype : torch.dtype, optional
        In which the engine computes. If unknown, tokens that bfloat16 would explain do not reject
        exactness: the outcome is `numerics`.
    logit_tolerance : float, optional
        How far below the tokens kept the logit of a token may be, in place of a measurement.
    control : sequence of Completion
        Sequences of the same engine and settings without speculation.
    draft_sampling : Sampling, optional
        How its draft model is sampled, if not as the target. Read by `audit`.
    positions : int
        Positions at which one forward pass is compared with passes over one token; 0: none.
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
        """What `Auditor` takes as `numerics` and `undeclared`."""
        if self.logit_tolerance is not None:
            return given_numerics(self.logit_tolerance, sampling), None
        if not isinstance(target, PreTrainedModel) or self.positions < 1 or not any(one.tokens for one in completions):
            return None, None

        def measured(dtype: torch.dtype | None) -> Numerics:
            return measure_numerics(target, completions, sampling, self.positions, dtype)

        unknown = self.dtype is None and target.dtype in (torch.float32, torch.float64)
        return measured(self.dtype), cache(lambda: measured(torch.bfloat16)) if unknown else None
