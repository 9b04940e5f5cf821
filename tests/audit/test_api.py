"""`audit` on models and functions: input, findings and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny import llama
from torch import Tensor
from transformers import PreTrainedModel

from specnb.audit import Engine, assert_exact, audit, audit_distributions
from specnb.decoding.loop import generate
from specnb.sampling.distributions import Sampling, sample
from specnb.sampling.verification import Outcome, token_verification

PROMPTS = [[1], [2, 3], [0, 1, 2]] * 40


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return llama(seed=9, layers=1)


def no_residual(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    return Outcome(accepted, sample(p.take_along_dim(accepted[..., None, None], dim=-2).squeeze(-2), final))


def test_exact_completions_of_a_model_pass(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    made = generate(target, PROMPTS, draft, gamma=2, max_new_tokens=12, progress=False)
    steps = [[size for size in row if size] for row in made.record.emitted.tolist()]
    for aim in ({}, {"draft": draft}, {"draft": draft, "steps": steps}):
        report = assert_exact(target, made.tokens, prompts=PROMPTS, **aim)
        assert report.tokens == sum(map(len, made.tokens))
        assert report.sequences == len(PROMPTS)
        assert len(report.running) == report.tokens
        assert report.numerics is not None
        assert report.numerics.logit < 1e-4
        assert report.detectable["argmax"] > 0
        assert "no deviation was found" in str(report)


def test_a_broken_sampler_is_found(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    prompts = PROMPTS * 3
    made = generate(target, prompts, draft, gamma=2, max_new_tokens=12, rule=no_residual, progress=False)
    report = audit(target, made.tokens, prompts=prompts, draft=draft, progress=False)
    assert report.rejected
    assert report.diagnosis == "no-residual"
    with pytest.raises(AssertionError, match="REJECTED"):
        assert_exact(target, made.tokens, prompts=prompts, draft=draft)
    stopped = audit(target, made.tokens, prompts=prompts, draft=draft, stop=True, progress=False)
    assert report.found_after is not None
    assert stopped.found_after == report.found_after <= stopped.tokens < report.tokens


def test_wrong_settings_are_found(target: PreTrainedModel) -> None:
    """Sampled at one temperature, claimed at another; drawn without top-k, claimed with it."""
    made = generate(target, PROMPTS, max_new_tokens=12, sampling=Sampling(0.5), progress=False)
    report = audit(target, made.tokens, prompts=PROMPTS, progress=False)
    assert report.diagnosis in {"sharper", "argmax", "tail-cut"}
    assert not audit(target, made.tokens, prompts=PROMPTS, sampling=Sampling(0.5), progress=False).rejected
    single = Engine(torch.float32)
    report = audit(target, made.tokens, prompts=PROMPTS, sampling=Sampling(0.5, top_k=2), engine=single, progress=False)
    assert report.diagnosis == "impossible"
    assert report.impossible[0].logit > 0


def test_greedy_sequences_show_the_first_difference_and_its_logit_gap(target: PreTrainedModel) -> None:
    made = generate(target, PROMPTS[:3], max_new_tokens=6, sampling=Sampling(0), progress=False)
    greedy: dict[str, Any] = {
        "prompts": PROMPTS[:3],
        "sampling": Sampling(0),
        "engine": Engine(torch.float32),
        "progress": False,
    }
    assert not audit(target, made.tokens, **greedy).rejected
    completions = [list(text) for text in made.tokens]
    with torch.inference_mode():
        logits = target(input_ids=torch.tensor([[*PROMPTS[1], *completions[1][:2]]])).logits[0, -1]
    completions[1][2] = int(logits.topk(2).indices[1])
    report = audit(target, completions, **greedy)
    first = report.impossible[0]
    assert (first.sequence, first.position, first.token) == (1, 2, completions[1][2])
    top = logits.topk(2).values
    assert first.logit == pytest.approx(float(top[0] - top[1]), abs=1e-4)


def test_functions_are_targets_too() -> None:
    generator = np.random.default_rng(3)
    table = generator.dirichlet(np.ones(5), size=6)

    def probs(prefix: tuple[int, ...]) -> np.ndarray:
        return np.asarray(table[prefix[-1] if prefix else 5])

    completions = []
    for _ in range(30):
        text: list[int] = []
        for _ in range(20):
            text.append(int(generator.choice(5, p=probs(tuple(text)))))
        completions.append(text)
    assert_exact(probs, completions, prompts=[[]] * 30)
    assert_exact(probs, completions, prompts=[[]] * 30, draft=lambda prefix: np.full(5, 0.2))
    turned = [[(token + 1) % 5 for token in text] for text in completions]
    assert audit(probs, turned, prompts=[[]] * 30, progress=False).rejected


def test_sequences_that_continue_after_eos_are_mentioned(target: PreTrainedModel) -> None:
    target.config.eos_token_id = 2
    try:
        noted = audit(target, [[0, 2, 1], [1, 2]], prompts=[[1], [1]], progress=False)
        ended = audit(target, [[0, 2, 1], [1, 2]], prompts=[[1], [1]], eos=2, progress=False)
    finally:
        target.config.eos_token_id = None
    assert noted.notes == ["1 sequence continues after the end token [2]; give eos if it ends them"]
    assert ended.diagnosis == "after-the-end"


def test_an_interrupt_still_gives_a_report(target: PreTrainedModel) -> None:
    from specnb.audit.bets import Row

    def rows() -> Iterator[Row]:
        yield Row([0, 1], torch.full((2, 4), 0.25))
        raise KeyboardInterrupt

    report = audit_distributions(rows(), progress=False)
    assert report.tokens == 2
    assert "interrupted after 2 tokens" in str(report)


def test_the_report_is_json(target: PreTrainedModel) -> None:
    report = audit(target, [[0, 1, 2]], prompts=[[1]], sampling=Sampling(top_k=1), progress=False)
    read = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert read["verdict"] == "rejected"
    assert read["log10_e"] == "inf"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"completions": []}, "no tokens"),
        ({"completions": [[]], "prompts": [[1]]}, "no tokens"),
        ({"completions": [[1]], "prompts": [[1], [2]]}, "1 completions and 2 prompts"),
        ({"completions": [[1, 9]], "prompts": [[1]]}, "has the token 9"),
        ({"completions": [[1]], "prompts": [[]]}, "no prompt"),
        ({"completions": [[1]], "prompts": [[1]], "steps": [[2]]}, "steps add up to 2"),
        ({"completions": [[1] * 40], "prompts": [[1]]}, "16 positions"),
        ({"completions": [[1]], "prompts": [[1]], "draft": llama(vocab=5)}, "same vocabulary"),
        ({"completions": [[1]], "prompts": [[1]], "delta": 0.0}, "delta is 0"),
    ],
)
def test_bad_input_is_refused(target: PreTrainedModel, given: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"prompts": []} | given if not given["completions"] else given
    with pytest.raises(ValueError, match=words):
        audit(target, settings.pop("completions"), progress=False, **settings)


def test_a_certain_distribution_may_be_given_in_whole_numbers() -> None:
    draft = np.array([0.5, 0.5])
    report = audit(lambda prefix: [1, 0], [[0] * 5], prompts=[[]], draft=lambda prefix: draft, progress=False)
    assert not report.rejected
