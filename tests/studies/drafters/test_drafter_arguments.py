"""Drafters of studies: bad arguments are errors that name what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafter_kinds import VOCAB, TableDrafter, attending, recurrent, table
from tiny import llama

from specnb.drafters import Context, Drafter, MixtureDrafter
from specnb.heads import FallbackDrafter
from specnb.ngram import UniformDrafter
from specnb.rules import Outcome
from specnb.sampler import generate
from studies.drafters.length import LowConfidence, StoppingDrafter
from studies.drafters.skip_gram import SkipGramDrafter


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (StoppingDrafter, (UniformDrafter(VOCAB), LowConfidence(0.1), -1), "at_least is -1"),
        (StoppingDrafter, (UniformDrafter, LowConfidence(0.1)), "drafter is <class .*UniformDrafter"),
        (StoppingDrafter, (UniformDrafter(VOCAB), 0.1), "stop is 0.1; it must be a stopping rule, such as"),
        (MixtureDrafter, (UniformDrafter(VOCAB), SkipGramDrafter([0, 1, 2], 1, 4)), "second is <.*SkipGramDrafter"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[..., Any], arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(*arguments)


def test_heads_need_the_target_s_hidden_states() -> None:
    context = Context(torch.tensor([[1, 2]]), torch.tensor([2]))
    for call in (lambda: attending().start(context), lambda: recurrent().propose(context, torch.rand(1, 1))):
        with pytest.raises(ValueError, match="there are no hidden states; give this drafter to generate"):
            call()


class Told(TableDrafter):
    """Counts the steps that it is told of."""

    steps = 0

    def update(self, context: Context, outcome: Outcome) -> None:
        self.steps += 1


@pytest.mark.parametrize(
    "around",
    [
        lambda told: FallbackDrafter(told, attending()),
        lambda told: StoppingDrafter(told, LowConfidence(0.4)),
    ],
)
def test_the_parts_of_a_drafter_are_told_what_became_of_its_tokens(around: Callable[[Drafter], Drafter]) -> None:
    told = Told(table())
    made = generate(llama(), [[1]], around(told), gamma=2, max_new_tokens=6, progress=False)
    assert told.steps == made.record.target_passes[0]
