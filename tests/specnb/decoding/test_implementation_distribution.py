"""The implementation distribution: completions of the real loop have the target's joint distribution.

Sampling noise is all that is left between the counts and the enumerated distribution, so the tests say how
often they would be wrong (`FALSE_ALARMS` in all, by Bonferroni) and how small a deviation each of them
would find with power 0.99 (asserted below each distribution). Numerics are a verdict of their own: the cached
runs against runs without a cache.
"""

import numpy as np
import pytest
import torch
from implementation_distribution import (
    CASES,
    DEEP,
    GPU_CASES,
    LEVEL,
    PROMPTS,
    VOCAB,
    Case,
    made_drafter,
    measure,
    overlap_error,
)
from tiny import ARCHITECTURES, ROUNDING, next_distributions

from specnb.decoding.generate import generate
from specnb.distributions import total_variation
from specnb.models.cache import RaggedCache
from specnb.models.cached_model import CachedModel


@pytest.mark.parametrize("case", CASES, ids=str)
def test_completions_have_the_target_s_joint_distribution(case: Case) -> None:
    verdict = measure(case)
    assert verdict.probs.p_value > LEVEL, verdict
    assert verdict.acceptance > LEVEL, verdict
    assert verdict.detects(LEVEL) < (0.02 if case.rows == DEEP else 0.08)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_joint_distribution_on_the_gpu(case: Case) -> None:
    verdict = measure(case)
    assert verdict.probs.p_value > LEVEL, verdict
    assert verdict.acceptance > LEVEL, verdict


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tiny_distributions_depend_on_every_token_before(architecture: str) -> None:
    """Otherwise a broken cache would go unseen: the distribution changes much with any one of the last four tokens."""
    sequences = torch.cartesian_prod(*[torch.arange(VOCAB)] * 4)
    distributions = next_distributions(ARCHITECTURES[architecture](VOCAB), sequences.tolist()).reshape([VOCAB] * 5)
    for place in range(4):
        changed = distributions.movedim(place, 0)
        assert total_variation(changed[1:], changed[:-1]).mean() > 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_overlaps_are_those_of_uncached_models(architecture: str) -> None:
    worst, fully = overlap_error(architecture)
    assert worst < 1e-9
    assert fully > len(PROMPTS)  # so the caches have run behind bonus tokens, too


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_pass_over_n_tokens_n_passes_over_one_and_uncached_passes_agree(architecture: str, attention: str) -> None:
    """Numerics apart from sampling: in float64 the three ways to a logit differ by rounding only."""
    model = ARCHITECTURES[architecture](VOCAB, dtype=torch.float64)
    model.set_attn_implementation(attention)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (5, 12)))
    with torch.inference_mode():
        uncached = model(input_ids=tokens, use_cache=False).logits
        in_one = CachedModel(model, 12).run(tokens, torch.arange(12).expand(5, -1), keep=12)
        runner = CachedModel(model, 12)
        singly = [runner.run(tokens[:, [at]], torch.full((5, 1), at), keep=1) for at in range(12)]
        runner = CachedModel(model, 12)
        in_blocks = [
            runner.run(tokens[:, at : at + 4], torch.arange(at, at + 4).expand(5, -1), keep=4) for at in (0, 4, 8)
        ]
    assert isinstance(runner.cache, RaggedCache)
    for logits in (in_one, torch.cat(singly, dim=1), torch.cat(in_blocks, dim=1)):
        assert (logits - uncached).abs().max() < ROUNDING[attention]


def test_the_tested_completions_take_several_steps() -> None:
    """The joint distribution spans crops: most rows of a case need more than one step for their tokens."""
    case = Case("llama", "sharp", 3)
    target = ARCHITECTURES[case.architecture](VOCAB)
    made = generate(target, PROMPTS * 100, made_drafter(case), gamma=3, max_new_tokens=case.tokens, progress=False)
    assert (made.record.target_passes > 1).mean() > 0.5
