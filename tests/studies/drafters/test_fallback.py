"""Copying and a model in turn: the model evaluates what was copied beside it."""

import torch
from drafter_kinds import VOCAB, near
from torch import Tensor

from specnb.drafting.base import Context
from studies.drafters.fallback import FallbackDrafter
from studies.drafters.suffix import SuffixDrafter

UNIFORMS = torch.full((2, 3), 0.4, dtype=torch.float64)


def context(*rows: list[int]) -> Context:
    tokens = torch.zeros(len(rows), 12, dtype=torch.int64)
    for row, known in enumerate(rows):
        tokens[row, : len(known)] = torch.tensor(known)
    return Context(tokens, torch.tensor([len(known) for known in rows]))


@torch.inference_mode()
def q_after(*steps: Context) -> Tensor:
    """q of the last of `steps`, in which neither row copies; a row copies after two tokens 1."""
    drafter = FallbackDrafter(SuffixDrafter([[1] * 8], VOCAB, longest=2), near("llama"))
    drafter.start(steps[0])
    for step in steps[:-1]:
        drafter.propose(step, UNIFORMS)
    return drafter.propose(steps[-1], UNIFORMS).q


def test_a_row_that_copied_is_sampled_as_if_the_model_had_seen_it_from_the_start() -> None:
    """In the first step both rows copy, or one of them beside a row of the model; then three tokens are accepted."""
    last = context([2, 1, 1, 1, 1, 1, 0], [0, 2, 3, 2])
    for first in (context([2, 1, 1], [0, 2, 3]), context([2, 1, 1], [0, 1, 1])):
        after = last if first.tokens[1, 1] == 2 else context([2, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 2])
        assert torch.allclose(q_after(first, after), q_after(after), atol=1e-6)


def test_a_model_that_has_not_been_evaluated_yet_can_be_refilled() -> None:
    """All rows copy until the second prompt takes a row."""
    drafter = FallbackDrafter(SuffixDrafter([[1] * 8], VOCAB), near("llama"))
    drafter.start(context([1], [1]))
    refilled = context([0, 2, 3], [1])
    drafter.start(refilled, torch.tensor([0]))
    with torch.inference_mode():
        q = drafter.propose(refilled, UNIFORMS).q
    assert torch.allclose(q, q_after(refilled), atol=1e-6)
