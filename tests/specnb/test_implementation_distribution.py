"""The implementation distribution: completions of the real loop have the target's joint
distribution.

Only sampling noise is left between the counts and the enumerated distribution, so the tests say how
often they would be wrong (`FALSE_ALARMS` in all, by Bonferroni) and how small a deviation each of
them would find with power 0.99 (asserted below each distribution). Numerics are checked apart from
it: recorded overlaps, hidden states and kept distributions against forward passes without a cache,
in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from drafter_kinds import DEEP, DEPTH_2, TREES, TableTreeDrafter, chain, gamma_of
from implementation_distribution import (
    CASES,
    LEVEL,
    MANY,
    PROMPTS,
    VOCAB,
    Case,
    completions_p_value,
    eager,
    made_drafter,
    measure,
    overlap_error,
    refilled,
)
from tiny import ARCHITECTURES, gemma2, llama, mistral, near_copy, next_distributions
from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import CachedModel
from specnb.distributions import total_variation
from specnb.drafters import Context, Drafter, Proposal, TreeDrafter
from specnb.sampler import Instruments, generate
from specnb.trees import TokenTree


@pytest.mark.parametrize("case", CASES, ids=str)
def test_completions_have_the_target_s_joint_distribution(case: Case) -> None:
    verdict = measure(case)
    assert verdict.probs.p_value > LEVEL, verdict
    assert verdict.acceptance > LEVEL, verdict
    assert verdict.detects(LEVEL) < (0.02 if case.rows == MANY else 0.08)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tiny_distributions_depend_on_every_token_before(architecture: str) -> None:
    """Otherwise a broken cache would go unseen: the distribution changes much with any one of the
    last four tokens."""
    sequences = torch.cartesian_prod(*[torch.arange(VOCAB)] * 4)
    distributions = next_distributions(ARCHITECTURES[architecture](VOCAB), sequences.tolist()).reshape([VOCAB] * 5)
    for place in range(4):
        changed = distributions.movedim(place, 0)
        assert total_variation(changed[1:], changed[:-1]).mean() > 0.1


def test_the_tested_completions_take_several_steps_and_accept_all_there_is() -> None:
    case = Case("llama", "sharp", 3)
    made = refilled(eager("llama"), made_drafter(case), 300, gamma=3)
    assert (made.record.target_passes > 1).mean() > 0.5
    for make in TREES.values():
        drafter = make()
        record = refilled(eager("llama"), drafter, 900, gamma=gamma_of(drafter)).record
        assert record.accepted.max() == TokenTree(drafter.parents or ()).depth


# Planted bugs of trees; those of chains and of the loop are in
# audit/tests/test_known_bugs_in_the_loop.py.


def test_a_path_that_is_not_moved_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedModel, "move", lambda *_: None)
    made = refilled(eager("llama"), TableTreeDrafter(DEPTH_2), 3_000, gamma=len(DEPTH_2), seed=6, check=False)
    assert completions_p_value(made, "llama") < LEVEL


def test_visible_siblings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = TokenTree.visible

    def all_before(tree: TokenTree, first: Tensor, capacity: int) -> Tensor:
        entry = torch.arange(capacity) - first[:, None]
        return visible(tree, first, capacity) | ((entry >= 0)[:, None] & (entry[:, None] <= tree.depths[:, None]))

    monkeypatch.setattr(TokenTree, "visible", all_before)
    with pytest.raises(TypeError, match=r"over a few tokens in the loop's cache"):
        refilled(eager("llama"), TableTreeDrafter(DEPTH_2), 9, gamma=len(DEPTH_2), seed=6)


# Numerics, apart from sampling.


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_overlaps_are_those_of_uncached_models(architecture: str) -> None:
    worst, fully = overlap_error(architecture)
    assert worst < 1e-9
    assert fully > len(PROMPTS)  # so the caches have run behind bonus tokens, too


class SeesStates(TreeDrafter):
    """Compares the target's hidden states with those of a forward pass without a cache."""

    hidden_layers = (-1, 0)
    target: PreTrainedModel
    checked = 0

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        for row, length in enumerate(context.lengths.tolist()):
            if length < 16:
                known = context.tokens[row, :length].tolist()
                states = self.target(torch.tensor([known]), output_hidden_states=True).hidden_states
                expected = torch.cat([states[layer] for layer in self.hidden_layers], dim=-1)[0, :-1]
                assert context.hidden_states is not None
                assert torch.allclose(context.hidden_states[row, : length - 1], expected, atol=1e-9)
                self.checked += 1
        return super().propose(context, uniforms)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_states_follow_the_accepted_path(architecture: str) -> None:
    """In refilled rows too."""
    target = ARCHITECTURES[architecture](dtype=torch.float64)
    drafter = SeesStates(near_copy(target, 0.1), DEEP)
    drafter.target = target
    made = generate(
        target, PROMPTS * 5, drafter, gamma=len(DEEP), max_new_tokens=9, eos=1, batch_size=2, progress=False
    )
    assert made.record.accepted.max() == 3
    assert drafter.checked > 10


def kept_error(target: PreTrainedModel, draft: Drafter | None, dtype: torch.dtype = torch.float64) -> float:
    """The largest difference of the distributions that a run keeps from those of passes over the
    whole sequence."""
    made = generate(
        target, PROMPTS * 2, draft, gamma=gamma_of(draft) if draft else 0, max_new_tokens=7, eos=1, batch_size=4,
        progress=False, instruments=Instruments(keep_probs=True),
    )  # fmt: skip
    assert made.probs is not None
    errors = []
    for prompt, tokens, probs in zip(PROMPTS * 2, made.tokens, made.probs, strict=True):
        assert probs.shape == (len(tokens), VOCAB)
        assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        exact = torch.cat([next_distributions(target, [[*prompt, *tokens[:n]]]) for n in range(len(tokens))])
        errors.append(float((probs - exact).abs().max()))
    return max(errors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [None, chain, *TREES.values()], ids=["nothing", "chain", *TREES])
def test_the_kept_distributions_are_the_target_s_own(make: Callable[[], Drafter] | None, dtype: torch.dtype) -> None:
    error = kept_error(llama(dtype=dtype), make() if make else None, dtype)
    assert error < {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]


@pytest.mark.parametrize("make", [None, chain, TREES["deep tree of a model"]], ids=["nothing", "chain", "tree"])
@pytest.mark.parametrize("model", [mistral, gemma2])
def test_layers_with_a_window_see_its_tokens(
    model: Callable[..., PreTrainedModel], make: Callable[[], Drafter] | None
) -> None:
    target = model(dtype=torch.float64)
    # Eager attention has a float32 softmax.
    assert kept_error(target, make() if make else None) < 1e-5
    with pytest.MonkeyPatch.context() as everything_visible:
        everything_visible.setattr("specnb.cache.sliding_window", lambda config: 99)
        with pytest.raises(TypeError, match=r"over a few tokens in the loop's cache"):
            kept_error(target, None)
