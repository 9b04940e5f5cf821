"""The hint at bfloat16: given where the tokens come from the target in bfloat16, and not for a wrong temperature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reports import report
from tiny import llama
from transformers import PreTrainedModel

from specnb.audit import explanations
from specnb.audit.explanations import bfloat16_note
from specnb.audit.impossible import Impossible
from specnb.audit.numerics import Numerics, in_dtype
from specnb.audit.teacher_forcing import Completion
from specnb.decoding.loop import generate
from specnb.sampling.distributions import Sampling

PROMPTS = [[1], [2, 3], [0, 1, 2], [3]] * 30
LARGE = Numerics(16, logit=0.5, tv=0.1, tv_mean=0.05, nats=0.05)
CROSSED = np.array([1.0, 5.0, 6.2, 6.1])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Its logits are large, and so are their errors in bfloat16."""
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    return model


def completions(model: PreTrainedModel, sampling: Sampling = Sampling()) -> list[Completion]:
    made = generate(model, PROMPTS, model, gamma=2, max_new_tokens=12, sampling=sampling, progress=False)
    return [Completion(prompt, tokens) for prompt, tokens in zip(PROMPTS, made.tokens, strict=True)]


def note(target: PreTrainedModel, given: list[Completion], measured: Numerics | None = LARGE) -> list[str]:
    found = report(found_after=3, running=CROSSED, detectable={})
    return bfloat16_note(found, measured, target, Sampling(), given)


def test_tokens_of_the_target_in_bfloat16_get_the_hint(target: PreTrainedModel) -> None:
    given = completions(in_dtype(target, torch.bfloat16))
    assert "--engine-dtype bfloat16" in "".join(note(target, given))
    assert note(target, given, measured=None) == []
    assert note(target, given, measured=LARGE._replace(nats=0.0)) == []


@pytest.mark.parametrize("temperature", [1.0, 0.9, 1.1])
def test_other_tokens_do_not_get_it(target: PreTrainedModel, temperature: float) -> None:
    assert note(target, completions(target, Sampling(temperature))) == []


@torch.inference_mode()
def test_only_the_first_tokens_are_tried(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences up to the one with the last of them, which bounds the time that a hint takes."""
    given = completions(target)[:4]
    first = explanations._bfloat16_gain(target, Sampling(), given[:2])
    assert first != pytest.approx(explanations._bfloat16_gain(target, Sampling(), given))
    monkeypatch.setattr(explanations, "TRIED", len(given[0].tokens) + 1)
    assert explanations._bfloat16_gain(target, Sampling(), given) == pytest.approx(first)


@pytest.mark.parametrize("peak", [1.0, 4.0])
def test_near_ties_with_evidence_beside_them_are_not_put_down_to_bfloat16(peak: float) -> None:
    one = Impossible(0, 1, 5, 0.01, 0.0)
    words = str(report(numerics_only=True, undeclared=[one], running=np.array([0.0, peak, 0.5, 0.5]), detectable={}))
    assert ("--engine-dtype bfloat16" in words) == (peak < 2)
    assert ("compare the settings claimed" in words) == (peak >= 2)
