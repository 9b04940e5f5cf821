"""Drafters of studies: bad arguments are errors that name what was given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from drafter_kinds import HALVES, VOCAB, TableDrafter, attending, counted, table
from tiny import llama

from specnb.distributions import Sampling
from specnb.drafters import Context, Drafter
from specnb.heads import FallbackDrafter
from specnb.ngram import NgramDrafter, UniformDrafter
from specnb.rules import Outcome
from specnb.sampler import generate
from studies.drafters.egag import EntropyGuidedDrafter
from studies.drafters.length import StopDrafter

FOUR = UniformDrafter(VOCAB)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (StopDrafter, (UniformDrafter, HALVES, 0.1), "drafter is <class .*UniformDrafter"),
        (StopDrafter, (NgramDrafter(counted().model, Sampling(0)), HALVES, 0.1), "drafter samples otherwise than from"),
        (partial(EntropyGuidedDrafter, FOUR, gamma_min=0), (), "gamma_min is 0"),
        (partial(EntropyGuidedDrafter, FOUR, gamma_min=3, gamma_max=2), (), "gamma_max is 2; .* from 3"),
        (partial(EntropyGuidedDrafter, FOUR, egag_ema_beta=1.0), (), "egag_ema_beta is 1.0"),
        (partial(EntropyGuidedDrafter, FOUR, egag_ema_beta=-0.1), (), "egag_ema_beta is -0.1"),
        (partial(EntropyGuidedDrafter, FOUR, max_new_tokens=0), (), "max_new_tokens is 0"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[..., Any], arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(*arguments)


class Told(TableDrafter):
    """Counts the steps that it is told of."""

    steps = 0

    def update(self, context: Context, outcome: Outcome) -> None:
        self.steps += 1


@pytest.mark.parametrize(
    "around",
    [
        lambda told: FallbackDrafter(told, attending()),
        lambda told: StopDrafter(told, HALVES, 0.3),
        EntropyGuidedDrafter,
    ],
)
def test_the_parts_of_a_drafter_are_told_what_became_of_its_tokens(around: Callable[[Drafter], Drafter]) -> None:
    told = Told(table())
    made = generate(llama(), [[1]], around(told), gamma=2, max_new_tokens=6, progress=False)
    assert told.steps == made.record.target_passes[0]
