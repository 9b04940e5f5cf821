"""The registry of known bugs, and `generate` with each of them."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from all_known_bugs import ALL_KNOWN_BUGS
from tiny import gpt2, llama, near_copy

from specnb.decoding import generate as loop
from specnb.decoding.generate import Study
from specnb.distributions import Sampling
from specnb.drafting.base import Context
from specnb.drafting.model import ModelDrafter
from specnb.models.cached_model import CachedModel
from specnb.rules import token_verification
from specnb_audit.bugs.bug import Bug, Kind
from specnb_audit.bugs.loop import LOOP_BUGS, Reseeded, WithoutLastToken
from specnb_audit.bugs.step import FILTERS, step_bugs
from specnb_audit.known_bugs import (
    EXACT,
    HELD_OUT_BUGS,
    KNOWN_BUGS,
    MORE_BUGS,
    BuggyDrafter,
    generate,
    known_bugs,
)

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


@pytest.mark.parametrize("name", MORE_BUGS)
def test_every_further_bug_generates(name: str) -> None:
    made = generate(MORE_BUGS[name], TARGET, PROMPTS, DRAFT, **SETTINGS)
    assert [len(tokens) for tokens in made.tokens] == [8, 8]


def test_a_bug_of_drafting_needs_the_model_itself() -> None:
    with pytest.raises(TypeError, match="greedy-draft-soft-q changes how a draft model is sampled"):
        generate(KNOWN_BUGS["greedy-draft-soft-q"], TARGET, PROMPTS, ModelDrafter(DRAFT), **SETTINGS)


def test_every_bug_is_described_once() -> None:
    assert all(bug.name and bug.description and bug.reported_in for bug in ALL_KNOWN_BUGS)
    assert len({(bug.kind, bug.name) for bug in ALL_KNOWN_BUGS}) == len(ALL_KNOWN_BUGS)
    assert {bug.kind for bug in ALL_KNOWN_BUGS} == set(get_args(Kind))
    assert len({bug.description for bug in KNOWN_BUGS.values()}) == len(KNOWN_BUGS)


def test_half_of_the_bugs_are_held_out() -> None:
    assert set(HELD_OUT_BUGS) <= set(MORE_BUGS)
    assert not any(bug.held_out for bug in KNOWN_BUGS.values())
    assert len(HELD_OUT_BUGS) >= len(KNOWN_BUGS | MORE_BUGS) / 2


def test_every_bug_of_the_loop_changes_a_part_of_it() -> None:
    assert all(bug.batch or bug.draft_class or bug.rule is not token_verification for bug in LOOP_BUGS.values())


def test_other_models_have_the_bugs_too() -> None:
    target = gpt2()
    made = generate(KNOWN_BUGS["rejected-stays"], target, PROMPTS, near_copy(target, noise=0.3), **SETTINGS)
    assert [len(text) for text in made.tokens] == [8, 8]


def same(draft_model: Any) -> Any:
    return draft_model


BUG = Bug("one", "a bug", "-", "step")
COLD = Sampling(0.5)


@pytest.mark.parametrize(
    ("bug", "sampling", "runner"),
    [
        (replace(BUG, claimed=COLD), COLD, CachedModel),
        (replace(BUG, claimed=COLD, p=same), COLD, CachedModel),
        (replace(BUG, claimed=COLD, q=same), Sampling(), CachedModel),  # what makes q starts from the raw distribution
        (replace(BUG, claimed=COLD, sampled=same), Sampling(), CachedModel),
        (replace(BUG, claimed=COLD, sampled=same, q=same), Sampling(), CachedModel),
        (replace(BUG, draft_class=WithoutLastToken), Sampling(), WithoutLastToken),
    ],
)
def test_a_draft_with_a_bug(bug: Bug, sampling: Sampling, runner: type[CachedModel]) -> None:
    drafter = BuggyDrafter(DRAFT, bug)
    assert (drafter.model, drafter.bug, drafter.sampling, drafter.runner_class) == (DRAFT, bug, sampling, runner)


def test_draft_tokens_are_sampled_from_one_distribution_and_another_is_reported() -> None:
    """The last token is always sampled, whatever u is, and the first is reported."""
    last, first = (torch.eye(4)[[token]].expand(1, 4) for token in (3, 0))
    bug = replace(BUG, sampled=lambda probs: last.to(probs.dtype), q=lambda q: first.expand_as(q))
    context = Context(tokens=torch.tensor([[1, 2, 0, 0, 0, 0]]), lengths=torch.tensor([2]))
    uniforms = torch.tensor([[0.1, 0.6]], dtype=torch.float64)
    found = {}
    for name, one in {
        "plain": BUG,
        "both": bug,
        "sampled": replace(bug, q=None),
        "q": replace(bug, sampled=None),
    }.items():
        drafter = BuggyDrafter(DRAFT, one)
        with torch.inference_mode():
            drafter.start(context)
            found[name] = drafter.propose(context, uniforms)
    plain = ModelDrafter(DRAFT)
    with torch.inference_mode():
        plain.start(context)
        wanted = plain.propose(context, uniforms)
    assert torch.equal(found["plain"].draft_tokens, wanted.draft_tokens)
    assert torch.equal(found["plain"].q, wanted.q)
    assert found["both"].draft_tokens.tolist() == found["sampled"].draft_tokens.tolist() == [[3, 3]]
    assert torch.equal(found["q"].draft_tokens, wanted.draft_tokens)
    assert torch.equal(found["q"].q, first.expand(1, 2, 4))
    assert torch.equal(found["both"].q, first.expand(1, 2, 4))
    assert not torch.equal(found["sampled"].q, found["both"].q)


def test_the_loop_gets_what_the_bug_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule, on p as it makes it; the settings claimed, or none where it makes p from the raw distribution."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(loop, "generate", lambda *given, **more: seen.append((given, more)) or "made")
    rule: Any = lambda p, *given: (p, *given)  # noqa: E731
    for bug in (
        replace(BUG, rule=rule, claimed=COLD),
        replace(BUG, rule=rule, claimed=COLD, p=lambda p: 2 * p, batch=Reseeded),
    ):
        assert generate(bug, TARGET, PROMPTS, DRAFT, gamma=3, seed=5) == "made"  # type: ignore[comparison-overlap]
        (target, prompts, drafter), more = seen.pop()
        assert (target, prompts) == (TARGET, PROMPTS)
        assert isinstance(drafter, BuggyDrafter)
        assert (drafter.bug, drafter.model) == (bug, DRAFT)
        found = more.pop("rule")
        tensors = [torch.full((1,), float(number)) for number in range(1, 6)]
        assert found(*tensors) == (2 * tensors[0] if bug.p else tensors[0], *tensors[1:])
        sampling = Sampling() if bug.p else COLD
        assert more == {"sampling": sampling, "study": Study(batch_class=bug.batch), "gamma": 3, "seed": 5}


def test_which_bugs_need_the_draft_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of how draft tokens are sampled and reported, and of the draft's cache unless the batch has them too."""
    monkeypatch.setattr(loop, "generate", lambda target, prompts, drafter, **more: drafter)
    drafter = ModelDrafter(DRAFT)
    for changes, needs in (
        ({}, False),
        ({"p": same}, False),
        ({"batch": Reseeded}, False),
        ({"q": same}, True),
        ({"sampled": same}, True),
        ({"draft_class": WithoutLastToken}, True),
        ({"draft_class": WithoutLastToken, "batch": Reseeded}, False),
        ({"q": same, "batch": Reseeded}, True),
    ):
        bug = replace(BUG, **changes)
        words = r"^one changes how a draft model is sampled; give the model, not a drafter$"
        if needs:
            with pytest.raises(TypeError, match=words):
                generate(bug, TARGET, PROMPTS, drafter)
        else:
            assert generate(bug, TARGET, PROMPTS, drafter) is drafter  # type: ignore[comparison-overlap]


def test_the_suite_has_every_bug() -> None:
    suite = known_bugs()
    assert list(suite) == list(KNOWN_BUGS) == list(step_bugs(FILTERS) | LOOP_BUGS)
    assert suite["reseeded"].batch is Reseeded
    assert suite["no-residual"].batch is None
    assert Bug("exact", "nothing", "-", "step", lossless=True) == EXACT
    assert EXACT.lossless
