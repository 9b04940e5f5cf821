"""The engines' checks, built again: an exact sampler passes them, gross bugs do not, and what they let through."""

import numpy as np
import pytest
import torch
from tiny import llama, near_copy, without_tokenizer

from specnb.measure.statistics import goodness_of_fit
from specnb_audit.known_bugs import EXACT, KNOWN_BUGS
from studies.audit_power.engine_checks import (
    CHECKS,
    at_temperature_0,
    emitted,
    exercised,
    greedy_passes,
    score_passes,
    tensorrt_llm,
    vllm_v1,
)

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_steps_of_an_exact_sampler_have_the_target_s_distribution_at_every_position() -> None:
    blocks = emitted(EXACT, P, Q, 2, 60_000, rng())
    assert blocks.shape == (60_000, 3)
    for column in blocks.T:
        counts = torch.bincount(column[column >= 0], minlength=3)
        assert goodness_of_fit(counts.numpy(), P.numpy()).p_value > 1e-6
    assert ((blocks[:, 1:] >= 0) <= (blocks[:, :-1] >= 0)).all()  # nothing stands behind the last token


def test_bugs_of_drafts_and_distributions_are_in_the_steps() -> None:
    greedy = emitted(KNOWN_BUGS["greedy-draft-soft-q"], P, Q, 1, 5_000, rng())[:, 0]
    assert torch.bincount(greedy, minlength=3)[2] / 5_000 == pytest.approx(1 / 3, abs=0.03)  # p/q at q's argmax
    argmax = emitted(KNOWN_BUGS["always-argmax"], P, Q, 1, 100, rng())[:, 0]
    assert argmax.unique().tolist() == [0]


@pytest.mark.parametrize("name", ["vLLM V1", "TensorRT-LLM"])
def test_an_exact_sampler_passes_and_an_inverted_residual_does_not(name: str) -> None:
    check, _ = CHECKS[name]
    assert check(EXACT, rng(1))
    assert not check(KNOWN_BUGS["inverted-residual"], rng(1))


def test_what_lives_in_the_context_passes() -> None:
    assert vllm_v1(KNOWN_BUGS["wrong-slice"], rng(2))
    assert tensorrt_llm(KNOWN_BUGS["wrong-slice"], rng(2))


def test_which_bugs_a_check_of_one_rule_comes_past() -> None:
    passed_by = {name for name, bug in KNOWN_BUGS.items() if not exercised(bug)}
    assert {"raw-q", "filter-order", "soft-greedy", "bonus-cache", "eos-inside"} <= passed_by
    assert not {"no-residual", "reseeded", "greedy-draft-soft-q", "always-accepting"} & passed_by


def test_a_planted_bug_of_the_rule_is_rejected() -> None:
    bug = KNOWN_BUGS["always-accepting"]
    assert not vllm_v1(bug, rng(1))
    assert not tensorrt_llm(bug, rng(1))


def test_greedy_equality_sees_caches_and_no_sampling_bug() -> None:
    target = llama()
    pair = without_tokenizer(target, near_copy(target, noise=0.5))
    prompts = [[0], [1, 2], [3, 3, 1], [2]]
    passes = {name: greedy_passes(KNOWN_BUGS[name], pair, prompts, 12) for name in ("no-residual", "rejected-stays")}
    assert passes == {"no-residual": True, "rejected-stays": False}
    assert greedy_passes(EXACT, pair, prompts, 12)
    assert at_temperature_0(KNOWN_BUGS["soft-greedy"]) is KNOWN_BUGS["soft-greedy"]


def test_a_score_lets_half_of_a_large_loss_through() -> None:
    assert score_passes(0.905) > 0.999
    assert 0.4 < score_passes(0.80) < 0.6
