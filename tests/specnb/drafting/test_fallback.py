"""A drafter of two parts: each is told of every sequence and of every step, with what the loop
said."""

from __future__ import annotations

from typing import Any

import torch
from drafter_kinds import attending_some, near_model
from torch import Tensor

from specnb.drafters import Context, Proposal
from specnb.heads import FallbackDrafter
from specnb.ngram import PromptLookupDrafter
from specnb.rules import Outcome
from specnb.sampler import generate


class Heard(PromptLookupDrafter):
    """A copy of the text that writes down what it is told."""

    def __init__(self) -> None:
        super().__init__(4, shortest=1)
        self.heard: list[tuple[Any, ...]] = []

    def start(self, *given: Any) -> None:
        self.heard.append(given)

    def update(self, *given: Any) -> None:
        self.heard.append(given)


class Sampled(Heard):
    """Proposes token 3 everywhere, with a q in float64."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        self.heard.append((context, uniforms))
        tokens = torch.full(uniforms.shape, 3)
        return Proposal(tokens, torch.nn.functional.one_hot(tokens, 4).double())


def test_both_parts_are_told_what_the_loop_says() -> None:
    copied, model = Heard(), Sampled()
    drafter = FallbackDrafter(copied, model)  # type: ignore[arg-type]  # what a model is asked for is in `Sampled`
    context, rows = Context(torch.tensor([[1, 2, 1], [0, 1, 2]]), torch.tensor([3, 3])), torch.tensor([1])
    outcome = Outcome(torch.tensor([1, 0]), torch.tensor([0, 1]))
    drafter.start(context, rows)
    drafter.update(context, outcome)
    assert copied.heard == model.heard == [(context, rows), (context, outcome)]
    proposal = drafter.propose(context, uniforms := torch.rand(2, 2))
    assert proposal.draft_tokens.tolist() == [[2, 1], [3, 3]]
    assert proposal.q.dtype == torch.float64
    # The host has read whether all rows copy, so the model need not spare it the wait.
    assert model.heard[-1] == (context._replace(waits=True), uniforms)


def test_gamma_auto_is_the_number_of_tokens_that_are_copied() -> None:
    drafter = FallbackDrafter(PromptLookupDrafter(4, shortest=2), attending_some(), 5)
    made = generate(near_model("llama"), [[0, 1, 0, 1], [2, 3]], drafter, max_new_tokens=12, progress=False)
    assert made.record.gamma == 5
