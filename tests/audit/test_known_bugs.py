"""Bugs run in the real loop, change one thing, and leave nothing behind."""

import pytest
from tiny import gpt2, llama, near_copy

from specnb.audit.known_bugs import EXACT, KNOWN_BUGS, LOOP, generate, known_bugs, planted
from specnb.decoding import loop
from specnb.drafting.model import ModelDrafter
from specnb.sampling.distributions import Sampling

TARGET = llama()
DRAFT = near_copy(TARGET, noise=0.3)
PROMPTS = [[0], [1, 2, 3]]
SETTINGS = {"gamma": 3, "max_new_tokens": 8, "seed": 5, "progress": False}


def test_without_a_bug_it_is_the_loop_itself():
    assert generate(EXACT, TARGET, PROMPTS, DRAFT, **SETTINGS).tokens == (
        loop.generate(TARGET, PROMPTS, DRAFT, **SETTINGS).tokens
    )


def test_a_bug_is_asked_for_what_it_needs():
    filters = Sampling(top_k=2)
    assert known_bugs(filters)["raw-q"].asked == filters
    assert known_bugs(filters)["no-residual"].asked == Sampling()


@pytest.mark.parametrize("name", KNOWN_BUGS)
def test_every_bug_writes_text_and_leaves_nothing_behind(name):
    before = loop.generate(TARGET, PROMPTS, DRAFT, **SETTINGS).tokens
    made = generate(known_bugs(Sampling(top_k=2))[name], TARGET, PROMPTS, DRAFT, eos=3, **SETTINGS)
    assert all(made.tokens)
    assert loop.generate(TARGET, PROMPTS, DRAFT, **SETTINGS).tokens == before


def test_a_bug_is_taken_out_when_the_loop_fails():
    before = loop.generate(TARGET, PROMPTS, DRAFT, **SETTINGS).tokens
    with pytest.raises(ZeroDivisionError), planted(KNOWN_BUGS["rows-share-noise"]):
        raise ZeroDivisionError
    assert loop.generate(TARGET, PROMPTS, DRAFT, **SETTINGS).tokens == before


def test_a_bug_of_drafting_needs_the_model_itself():
    with pytest.raises(TypeError, match="greedy-draft-soft-q changes how a draft model is sampled"):
        generate(KNOWN_BUGS["greedy-draft-soft-q"], TARGET, PROMPTS, ModelDrafter(DRAFT), **SETTINGS)


def test_every_bug_of_the_loop_says_what_it_plants_and_where_it_was_seen():
    assert all(bug.plant and bug.wrong and bug.seen for bug in LOOP)
    assert len(KNOWN_BUGS) == len({bug.wrong for bug in KNOWN_BUGS.values()})


def test_other_models_have_the_bugs_too():
    target = gpt2()
    made = generate(KNOWN_BUGS["rejected-stays"], target, PROMPTS, near_copy(target, noise=0.3), **SETTINGS)
    assert [len(text) for text in made.tokens] == [8, 8]
