"""The registry of known bugs, and `generate` with each of them."""

from typing import Any, get_args

import pytest
from all_known_bugs import ALL_KNOWN_BUGS
from tiny import gpt2, llama, near_copy

from specnb.audit.bugs.bug import Kind
from specnb.audit.bugs.loop import LOOP_BUGS
from specnb.audit.known_bugs import EXACT, KNOWN_BUGS, generate, known_bugs
from specnb.decoding import loop
from specnb.drafting.model import ModelDrafter
from specnb.sampling.distributions import Sampling
from specnb.sampling.verification import token_verification

TARGET = llama()
DRAFT = near_copy(TARGET, noise=0.3)
PROMPTS = [[0], [1, 2, 3]]
SETTINGS: dict[str, Any] = {"gamma": 3, "max_new_tokens": 8, "seed": 5, "progress": False}


def test_without_a_bug_it_is_the_loop_itself() -> None:
    assert generate(EXACT, TARGET, PROMPTS, DRAFT, **SETTINGS).tokens == (
        loop.generate(TARGET, PROMPTS, DRAFT, **SETTINGS).tokens
    )


def test_bugs_that_need_filters_claim_them() -> None:
    filters = Sampling(top_k=2)
    assert known_bugs(filters)["raw-q"].claimed == filters
    assert known_bugs(filters)["no-residual"].claimed == Sampling()


@pytest.mark.parametrize("name", KNOWN_BUGS)
def test_every_bug_generates_and_leaves_the_loop_as_it_is(name: str) -> None:
    before = loop.generate(TARGET, PROMPTS, DRAFT, **SETTINGS).tokens
    made = generate(known_bugs(Sampling(top_k=2))[name], TARGET, PROMPTS, DRAFT, eos=3, **SETTINGS)
    assert all(made.tokens)
    assert loop.generate(TARGET, PROMPTS, DRAFT, **SETTINGS).tokens == before


def test_a_bug_of_drafting_needs_the_model_itself() -> None:
    with pytest.raises(TypeError, match="greedy-draft-soft-q changes how a draft model is sampled"):
        generate(KNOWN_BUGS["greedy-draft-soft-q"], TARGET, PROMPTS, ModelDrafter(DRAFT), **SETTINGS)


def test_every_bug_is_described_once() -> None:
    assert all(bug.name and bug.description and bug.reported_in for bug in ALL_KNOWN_BUGS)
    assert len({(bug.kind, bug.name) for bug in ALL_KNOWN_BUGS}) == len(ALL_KNOWN_BUGS)
    assert {bug.kind for bug in ALL_KNOWN_BUGS} == set(get_args(Kind))
    assert len({bug.description for bug in KNOWN_BUGS.values()}) == len(KNOWN_BUGS)


def test_every_bug_of_the_loop_changes_a_part_of_it() -> None:
    assert all(bug.batch or bug.draft_class or bug.rule is not token_verification for bug in LOOP_BUGS.values())


def test_other_models_have_the_bugs_too() -> None:
    target = gpt2()
    made = generate(KNOWN_BUGS["rejected-stays"], target, PROMPTS, near_copy(target, noise=0.3), **SETTINGS)
    assert [len(text) for text in made.tokens] == [8, 8]
