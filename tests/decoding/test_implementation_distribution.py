"""The engine law: what the real loop emits, with cache, batch and several steps, has the target's joint law.

Sampling noise is all that is left between the counts and the enumerated law, so the tests say how
often they would be wrong (`FALSE_ALARMS` in all, by Bonferroni) and how small a deviation each of them
would find with power 0.99 (asserted below each law). Numerics are a verdict of their own: the cached
runs against runs without a cache.
"""

import numpy as np
import pytest
import torch
from engine_law import PROMPTS, VOCAB, Case, made_drafter, measure
from tiny import ARCHITECTURES, ROUNDING, near_copy, next_laws

from specnb.cache import RaggedCache
from specnb.decode import generate
from specnb.draft import ModelDraft
from specnb.law import Sampling, overlap, total_variation
from specnb.models import Runner

FALSE_ALARMS = 1e-6
TOP_K = Sampling(temperature=1.0, top_k=3)
TOP_P = Sampling(temperature=0.8, top_p=0.9)
DEEP = 112_500

CASES = [
    # Many rows, to find small deviations.
    Case("gpt2", "sharp", 3, tokens=3, rows=DEEP),
    Case("llama", "near", 1, tokens=3, eos=1, rows=DEEP),
    # Fewer rows, more tokens and settings.
    Case("llama", "near", 3),
    Case("gpt2", "near", 3, eos=1),
    Case("llama", "model", 1),
    Case("gpt2", "model", 1, eos=2),
    Case("gpt2", "sharp", 3, sampling=TOP_K),
    Case("llama", "sharp", 3, eos=2, sampling=TOP_P),
    Case("llama", "patchy", 3),
    Case("gpt2", "patchy", 1, eos=1),
    Case("llama", "ngram", 3, eos=1),
    Case("gpt2", "ngram", 1, sampling=TOP_P),
    Case("gpt2", "argmax", 3),
    Case("llama", "argmax", 1, eos=1),
    Case("llama", "alone", 0),
    Case("gpt2", "alone", 0, eos=1),
    Case("llama", "model", 3, attention="sdpa"),
]
GPU_CASES = [Case(name, "sharp", 3, eos=1, attention="sdpa", device="cuda") for name in ARCHITECTURES]
TESTS = 60
"""At least as many as there are: two for each case, here, on the GPU and in `test_engine_mutants`."""
LEVEL = FALSE_ALARMS / TESTS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emitted_texts_have_the_target_s_joint_law(case):
    verdict = measure(case)
    assert verdict.law.p_value > LEVEL, verdict
    assert verdict.acceptance > LEVEL, verdict
    assert verdict.detects(LEVEL) < (0.02 if case.rows == DEEP else 0.08)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_joint_law_on_the_gpu(case):
    verdict = measure(case)
    assert verdict.law.p_value > LEVEL, verdict
    assert verdict.acceptance > LEVEL, verdict


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tiny_laws_depend_on_every_token_before(architecture):
    """Otherwise a broken cache would go unseen: the law changes much with any one of the last four tokens."""
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * 4)
    laws = next_laws(ARCHITECTURES[architecture](VOCAB), texts.tolist()).reshape([VOCAB] * 5)
    for place in range(4):
        changed = laws.movedim(place, 0)
        assert total_variation(changed[1:], changed[:-1]).mean() > 0.1


def overlap_error(architecture):
    """The largest difference between a recorded overlap and that of both models run without a cache,
    and how often all drafts of a step were accepted."""
    target = ARCHITECTURES[architecture](VOCAB, dtype=torch.float64)
    draft = near_copy(target, noise=0.05)
    prompts = PROMPTS * 4
    made = generate(target, prompts, ModelDraft(draft), gamma=3, max_new_tokens=9, seed=3, progress=False)
    record, worst, fully = made.record, 0.0, 0
    for row, prompt in enumerate(prompts):
        text = [*prompt]
        for step in range(record.target_runs[row]):
            for at in range(record.tested[row, step].sum()):
                known = [text + record.drafts[row, step, :at].tolist()]
                exact = overlap(next_laws(target, known), next_laws(draft, known))
                worst = max(worst, abs(float(exact) - record.beta[row, step, at]))
            fully += record.emitted[row, step] == record.gamma + 1
            emitted = record.emitted[row, step]
            text += made.tokens[row][len(text) - len(prompt) :][:emitted]
    return worst, fully


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_overlaps_are_those_of_uncached_models(architecture):
    worst, fully = overlap_error(architecture)
    assert worst < 1e-9
    assert fully > len(PROMPTS)  # so the caches have run behind bonus tokens, too


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_runs_over_n_tokens_n_runs_over_one_and_uncached_runs_agree(architecture, attention):
    """Numerics apart from sampling: in float64 the three ways to a logit differ by rounding only."""
    model = ARCHITECTURES[architecture](VOCAB, dtype=torch.float64)
    model.set_attn_implementation(attention)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (5, 12)))
    with torch.inference_mode():
        uncached = model(input_ids=tokens, use_cache=False).logits
        in_one = Runner(model, 12).run(tokens, torch.arange(12).expand(5, -1), keep=12)
        runner = Runner(model, 12)
        singly = [runner.run(tokens[:, [at]], torch.full((5, 1), at), keep=1) for at in range(12)]
        runner = Runner(model, 12)
        in_blocks = [
            runner.run(tokens[:, at : at + 4], torch.arange(at, at + 4).expand(5, -1), keep=4) for at in (0, 4, 8)
        ]
    assert isinstance(runner.cache, RaggedCache)
    for logits in (in_one, torch.cat(singly, dim=1), torch.cat(in_blocks, dim=1)):
        assert (logits - uncached).abs().max() < ROUNDING[attention]


def test_the_tested_texts_take_several_steps():
    """The joint law spans crops: most rows of a case need more than one step for their tokens."""
    case = Case("llama", "sharp", 3)
    target = ARCHITECTURES[case.architecture](VOCAB)
    made = generate(target, PROMPTS * 100, made_drafter(case), gamma=3, max_new_tokens=case.tokens, progress=False)
    assert (made.record.target_runs > 1).mean() > 0.5
