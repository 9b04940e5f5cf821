"""Draft models with more tokens than the target, and with fewer: exact all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from drafter_kinds import DEPTH_2, TWO_DRAFTS
from rule_checks import step_off
from tiny import gpt2, llama
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb.acceptance import measure_acceptance
from specnb.beam import beam_search
from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling, overlap, standardise
from specnb.drafters import Context, ModelDrafter, TreeDrafter
from specnb.rules import recursive_rejection
from specnb.sampler import generate
from specnb.trees import Scheme, distinct_children, independent_children, top_children
from studies.drafters.tables import MixtureDrafter

VOCAB, GAMMA = 4, 2
PREFIXES = ((0, 1, 0), (3, 1, 2, 3, 3))  # the second with tokens that some drafts do not have
SHARP = Sampling(0.7, top_k=3, top_p=0.9)


class Draft(NamedTuple):
    """A draft model, and the target's token of each of its tokens, -1 for none."""

    model: PreTrainedModel
    tokens: list[int]


DRAFTS = {
    "fewer": Draft(llama(3, dtype=torch.float64), [0, 1, 2]),
    "more": Draft(gpt2(6, dtype=torch.float64), [0, 1, 2, 3, -1, -1]),
}


def chain(draft: Draft, sampling: Sampling = Sampling()) -> ModelDrafter:
    return ModelDrafter(draft.model, sampling, vocab=VOCAB)


@torch.inference_mode()
def expected(draft: Draft, prefix: tuple[int, ...], sampling: Sampling) -> Tensor:
    """What the draft samples from after `prefix`: its distribution over the tokens that the target
    has."""
    own = [token if token in draft.tokens else 0 for token in prefix]
    logits = draft.model(input_ids=torch.tensor([own]), use_cache=False).logits[0, -1]
    kept = [token for token in draft.tokens if token >= 0]
    q = torch.zeros(VOCAB, dtype=torch.float64)
    q[kept] = standardise(logits[kept], sampling)
    return q


@pytest.mark.parametrize("sampling", [Sampling(), SHARP, Sampling(0)], ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_a_step_has_the_target_s_joint_distribution(name: str, sampling: Sampling) -> None:
    for prefix in PREFIXES:
        assert step_off(chain(DRAFTS[name], sampling), prefix) < 1e-12


@pytest.mark.parametrize("scheme", [independent_children, distinct_children, top_children])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_step_with_two_drafts_of_a_token_has_it_too(name: str, scheme: Scheme) -> None:
    draft = DRAFTS[name]
    drafter = TreeDrafter(draft.model, TWO_DRAFTS, scheme=scheme, vocab=VOCAB)
    assert step_off(drafter, PREFIXES[1], rule=recursive_rejection) < 1e-12


@pytest.mark.parametrize("name", DRAFTS)
def test_a_mixture_with_copies_has_it_too(name: str) -> None:
    drafter = MixtureDrafter(PromptLookupDrafter(VOCAB, shortest=1), chain(DRAFTS[name]), weight=0.4)
    for prefix in PREFIXES:
        assert step_off(drafter, prefix) < 1e-6  # copies are float32


@pytest.mark.parametrize("sampling", [Sampling(), SHARP], ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_q_is_the_draft_s_distribution_restricted_to_the_target_s_tokens(name: str, sampling: Sampling) -> None:
    draft = DRAFTS[name]
    drafter = chain(draft, sampling)
    uniforms = torch.rand(40, GAMMA, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for prefix in PREFIXES:
        context = Context(torch.tensor([[*prefix, *[0] * GAMMA]]).repeat(40, 1), torch.full((40,), len(prefix)))
        drafter.start(context)
        tokens, q = drafter.propose(context, uniforms)
        for row in range(40):
            for position in range(GAMMA):
                known = (*prefix, *tokens[row, :position].tolist())
                torch.testing.assert_close(q[row, position], expected(draft, known, sampling), atol=1e-10, rtol=0)


# In the loop.


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("own", [3, 6])
def test_at_temperature_0_the_tokens_are_those_without_a_draft(own: int, make: Callable[..., Any]) -> None:
    target, draft = llama(dtype=torch.float64), make(own, dtype=torch.float64)
    prompts = [[0], [3, 1], [3, 3, 2, 1]]
    asked: dict[str, Any] = {"max_new_tokens": 10, "sampling": Sampling(0)}
    plain = generate(target, prompts, None, **asked).tokens
    assert generate(target, prompts, draft, gamma=3, **asked).tokens == plain
    assert generate(target, prompts, draft, **asked).tokens == plain
    tree = TreeDrafter(draft, DEPTH_2, scheme=top_children, vocab=VOCAB)
    assert generate(target, prompts, tree, gamma=len(DEPTH_2), **asked).tokens == plain


# What measures such pairs.


@pytest.mark.parametrize("own", [3, 6])
def test_beam_search_finds_what_it_finds_without_the_draft(own: int) -> None:
    target, draft = llama(dtype=torch.float64), llama(own, dtype=torch.float64)
    alone = beam_search(target, [0, 3], width=2, max_new_tokens=5)
    made = beam_search(target, [0, 3], draft, width=2, draft_width=4, gamma=2, max_new_tokens=5)
    assert made.tokens == alone.tokens
    assert made.scores == pytest.approx(alone.scores, abs=1e-9)


@pytest.mark.parametrize("own", [3, 6])
def test_acceptance_is_the_overlap_with_the_restricted_distribution(own: int) -> None:
    target, draft = llama(dtype=torch.float64), llama(own, seed=5, dtype=torch.float64)
    plain = Draft(draft, [*range(VOCAB)][:own] + [-1] * (own - VOCAB))
    found = measure_acceptance(target, [[1], [3, 2]], draft, new_tokens=4)
    for row, sequence in enumerate(found.sequences):
        for at in range(4):
            known = tuple(sequence[: len(sequence) - 4 + at])
            own_q = expected(plain, known, Sampling())
            p = expected(Draft(target, [0, 1, 2, 3]), known, Sampling())
            assert found.beta["draft"][row, at] == pytest.approx(float(overlap(p, own_q)), abs=1e-9)


# What is refused.


def test_a_head_of_another_size_is_refused() -> None:
    trimmed = llama(VOCAB)
    trimmed.lm_head = nn.Linear(8, 2, bias=False)
    for make in (lambda: ModelDrafter(trimmed, vocab=VOCAB), lambda: generate(trimmed, [[0]], None)):
        with pytest.raises(ValueError, match="vocab"):
            make()
