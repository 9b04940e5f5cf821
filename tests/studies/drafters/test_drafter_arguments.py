"""Drafters of studies: bad arguments are errors that name what was given; the suffix automaton
counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drafter_kinds import VOCAB, WIDTH, TableDrafter, attending, near, near_model, recurrent, table
from tiny import llama

from specnb.drafters import Context, Drafter, MixtureDrafter
from specnb.heads import FallbackDrafter
from specnb.ngram import UniformDrafter
from specnb.rules import Outcome
from specnb.sampler import generate
from studies.drafters.bandit import BanditDrafter
from studies.drafters.heads import FeatureDrafter, ParallelHeads, RecurrentHead
from studies.drafters.length import LowConfidence, StoppingDrafter
from studies.drafters.skip_gram import SkipGramDrafter
from studies.drafters.suffix import SuffixAutomaton, SuffixDrafter


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (SuffixDrafter, ([[]], 4), "no tokens"),
        (SuffixDrafter, ([[1, 7]], 4), "token 7; the vocabulary has the tokens 0 to 3"),
        (SuffixDrafter, ("12", 4), "document 0 is '1'"),
        (FeatureDrafter, (near_model("llama"), ParallelHeads(WIDTH, 16, 2)), "give one of the class RecurrentHead"),
        (type(attending()), (near_model("llama"), RecurrentHead(WIDTH, 16)), "give one of the class AttentionHead"),
        (FeatureDrafter, (near_model("llama"), RecurrentHead(4, 16)), "width 4, and LlamaForCausalLM has 8; give the"),
        (FeatureDrafter, (near_model("llama"), RecurrentHead(WIDTH, 16).double()), "torch.float64 on cpu, and the"),
        (StoppingDrafter, (UniformDrafter(VOCAB), LowConfidence(0.1), -1), "at_least is -1"),
        (StoppingDrafter, (UniformDrafter, LowConfidence(0.1)), "drafter is the class UniformDrafter"),
        (StoppingDrafter, (UniformDrafter(VOCAB), 0.1), "stop is 0.1; it must be a stopping rule, such as"),
        (MixtureDrafter, (UniformDrafter(VOCAB), SkipGramDrafter([0, 1, 2], 1, 4)), "second is a SkipGramDrafter"),
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


def test_the_automaton_counts_as_a_search_does() -> None:
    documents = [np.random.default_rng(seed).integers(0, 3, 30).tolist() for seed in range(3)]
    automaton = SuffixAutomaton(documents)
    for seed in range(20):
        recent = np.random.default_rng([seed, 1]).integers(0, 3, 6).tolist()
        for length in range(6, -1, -1):
            suffix = recent[6 - length :]
            after = [
                document[at + length]
                for document in documents
                for at in range(len(document) - length)
                if document[at : at + length] == suffix
            ]
            if after:
                break
        assert automaton.continuations(recent) == (length, {token: after.count(token) for token in set(after)})


class Told(TableDrafter):
    """Counts the steps that it is told of."""

    steps = 0

    def update(self, context: Context, outcome: Outcome) -> None:
        self.steps += 1


@pytest.mark.parametrize(
    "around",
    [
        lambda told: BanditDrafter(told, (1, 2), 0.1),
        lambda told: FallbackDrafter(told, near("llama")),
        lambda told: StoppingDrafter(told, LowConfidence(0.4)),
    ],
)
def test_the_parts_of_a_drafter_are_told_what_became_of_its_tokens(around: Callable[[Drafter], Drafter]) -> None:
    told = Told(table())
    made = generate(llama(), [[1]], around(told), gamma=2, max_new_tokens=6, progress=False)
    assert told.steps == made.record.target_passes[0]
