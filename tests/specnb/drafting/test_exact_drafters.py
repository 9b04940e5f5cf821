"""Every drafter leaves the target's distribution as it is: enumerated, and in the real loop with refilled rows.

Each planted bug of a drafter is found by the same two checks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import distribution_pair
from drafter_kinds import BUGS, COMBINED, WITH_MODEL, WITHOUT_MODEL, chain
from implementation_distribution import (
    FALSE_ALARMS,
    PROMPTS,
    VOCAB,
    acceptance_p_value,
    assert_rows_do_not_interact,
    completions_p_value,
    eager,
    refilled,
)
from tiny import llama

from specnb.decoding.generate import generate
from specnb.drafting.base import Context, Drafter, missing_members
from specnb.drafting.model import MixtureDrafter, ModelDrafter
from specnb.drafting.ngram import SuffixDrafter, UniformDrafter
from specnb.enumeration import completed, drafter_step_distribution, drafts_of, joint_distribution
from studies.drafters.fallback import FallbackDrafter

ALL = WITHOUT_MODEL | WITH_MODEL | COMBINED
PREFIXES = ((0, 1, 0), (3, 1, 2, 3, 1))
GAMMA = 2
ROWS = 1_500
LEVEL = FALSE_ALARMS / (2 * len(ALL) + len(BUGS))


def deviation(drafter: Drafter, prefix: tuple[int, ...], seed: int = 0) -> float:
    """Total variation between what a step with `drafter` leads to and the target's distribution."""
    p, _ = distribution_pair("dense", VOCAB, seed)
    emitted = drafter_step_distribution(drafter, p, prefix, GAMMA)
    return float((completed(emitted, p, GAMMA + 1) - joint_distribution(p, GAMMA + 1)).abs().sum()) / 2


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_a_step_with_the_drafter_has_the_target_s_joint_distribution(name: str) -> None:
    for seed, prefix in enumerate(PREFIXES):
        assert deviation(WITHOUT_MODEL[name](), prefix, seed) < 1e-6  # tables are float32


@pytest.mark.parametrize("name", BUGS)
def test_the_enumeration_finds_the_bug(name: str) -> None:
    assert max(deviation(BUGS[name](), prefix, seed) for seed, prefix in enumerate(PREFIXES)) > 0.005


def test_probabilities_of_the_proposals_sum_to_one() -> None:
    drafts = drafts_of(WITHOUT_MODEL["mixture"](), (3, 1, 2, 3, 1), GAMMA)
    assert sum(draft.probability for draft in drafts) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_the_real_loop_has_the_target_s_distribution(name: str) -> None:
    architecture, eos = [("llama", None), ("gpt2", 1)][list(ALL).index(name) % 2]
    made = refilled(eager(architecture), ALL[name](), ROWS, gamma=3, eos=eos, seed=8)
    assert completions_p_value(made, architecture, eos) > LEVEL
    assert acceptance_p_value(made.record) > LEVEL
    assert made.record.accepted.any()


@pytest.mark.parametrize("name", BUGS)
def test_the_real_loop_finds_the_bug(name: str) -> None:
    made = refilled(eager("llama"), BUGS[name](), 9_000, gamma=3, seed=8)
    assert min(completions_p_value(made, "llama"), acceptance_p_value(made.record)) < LEVEL


@pytest.mark.parametrize("name", ALL)
def test_refilled_rows_get_the_tokens_they_would_get_together(name: str) -> None:
    assert_rows_do_not_interact(llama(dtype=torch.float64), ALL[name], gamma=3)


@pytest.mark.parametrize("name", COMBINED)
def test_one_prompt_at_a_time_gets_the_same_draft_tokens(name: str) -> None:
    """Drafters within others see all tokens of a row, also those proposed or added without them."""
    target = llama(dtype=torch.float64)
    asked: dict[str, Any] = {"gamma": 3, "max_new_tokens": 12, "seed": 0, "progress": False}
    together = generate(target, PROMPTS * 4, COMBINED[name](), **asked).record
    alone = generate(target, PROMPTS * 4, COMBINED[name](), batch_size=1, **asked).record
    assert np.array_equal(alone.draft_tokens, together.draft_tokens)
    assert np.allclose(alone.beta, together.beta, atol=1e-5)  # the draft models are float32


def test_a_model_that_has_not_been_evaluated_yet_can_be_refilled() -> None:
    """Prompts of one token need no forward pass, and all rows copy until the second prompt takes a row."""
    drafter = FallbackDrafter(SuffixDrafter([[0, 1, 2, 3] * 2], VOCAB, shortest=1), ModelDrafter(llama()))
    prompts = [[0], [0], [0, 1, 2], [2, 0]]
    made = generate(llama(), prompts, drafter, gamma=2, max_new_tokens=4, batch_size=2, progress=False)
    assert all(len(tokens) == 4 for tokens in made.tokens)


@pytest.mark.parametrize("name", ALL)
def test_drafters_have_all_members(name: str) -> None:
    assert missing_members(ALL[name]()) == []


def test_the_weight_of_a_mixture_is_its_share() -> None:
    context = Context(torch.tensor([[0, 1, 0]]), torch.tensor([3]))
    q = MixtureDrafter(UniformDrafter(VOCAB), chain(), weight=0.25).distribution(context, 0)
    assert torch.allclose(q, 0.25 * torch.full((1, VOCAB), 1 / VOCAB) + 0.75 * chain().table[[0]])
