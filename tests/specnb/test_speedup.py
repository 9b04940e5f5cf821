"""A measured speed-up: whole calls in turn, by a clock that counts passes of the target; and the gamma
that measured costs recommend, 0 where none helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny import llama, near_copy, roomy_pair, without_tokenizer

from specnb import PromptLookupDrafter, Sampler, Sampling, generate, measure_speedup, speedup
from specnb.cost import Costs
from specnb.speedup import predicted_speedup, recommend_gamma
from specnb.statistics import Estimate
from specnb.theory import walltime_improvement

PROMPTS = [[1, 2], [3], [2, 2, 1], [0]]
TARGET = llama(5)
PAIR = without_tokenizer(TARGET, near_copy(TARGET, 0.3))
ASKED: dict[str, Any] = {"max_new_tokens": 8}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The calls of samplers: prompt's number and passes. A pass of the target takes a second, and
    drafting nothing."""
    calls: list[tuple[int, int]] = []

    class Counted(Sampler):
        def generate(self, prompts: Any, **more: Any) -> Any:
            made = super().generate(prompts, **more)
            calls.append((PROMPTS.index(list(prompts[0])), int(made.record.target_passes[0])))
            return made

    monkeypatch.setattr(speedup, "Sampler", Counted)
    monkeypatch.setattr(speedup, "now", lambda device: float(sum(number for _, number in calls)))
    costs = Costs(np.full(3, 0.5), np.ones((3, 12)) * [1, *[1.5] * 11], lengths=tuple(range(1, 13)))
    monkeypatch.setattr(speedup, "measure_costs", lambda pair, lengths, **_: costs)
    return calls


def test_it_is_the_time_per_token_of_plain_decoding_over_that_of_speculation(passes: list[tuple[int, int]]) -> None:
    asked: dict[str, Any] = ASKED | {"sampling": Sampling(0), "eos": 1, "seed": 3}
    found = measure_speedup(PAIR, PROMPTS, gamma=3, rounds=2, **asked)
    generations = [generate(TARGET, [prompt], PAIR.draft, gamma=3, **asked) for prompt in PROMPTS]
    made, n = [one.record for one in generations], np.array([len(one.tokens[0]) for one in generations])
    steps = np.array([record.target_passes[0] for record in made])
    assert (found.tokens == n[:, None]).all()
    assert (found.seconds == np.stack([n, steps], axis=1)).all()
    assert np.isclose(found.speedup.value, 1 / (steps / n).mean())
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    assert found.speedup.n == 4
    assert np.allclose(found.tokens_per_second, (1.0, n.sum() / steps.sum()))
    assert [sum(row == prompt for row, _ in passes) for prompt in range(4)] == [2 * 3] * 4
    accepted = np.concatenate([record.accepted[0] for record in made])
    assert np.isclose(found.tokens_per_step, accepted.mean() + 1)
    assert found.parts == {"drafting": 1.5, "verification": 1.5}
    assert found.predicted is not None
    assert np.isclose(found.predicted, n.sum() / steps.sum() / 3)
    assert "drafting 1.50, verification 1.50 plain passes" in str(found)


def test_each_prompt_has_random_numbers_of_its_own() -> None:
    asked: dict[str, Any] = ASKED | {"eos": 1, "seed": 3}
    found = measure_speedup(PAIR, PROMPTS[:1] * 8, gamma=3, rounds=1, compile=False, **asked)
    made = generate(TARGET, PROMPTS[:1] * 8, PAIR.draft, gamma=3, **asked)
    assert found.tokens[:, 1].tolist() == list(map(len, made.tokens))


def test_of_a_pair_auto_is_its_draft_model_and_of_a_model_copies(passes: list[tuple[int, int]]) -> None:
    common: dict[str, Any] = {"rounds": 1, **ASKED}
    of_model = measure_speedup(TARGET, PROMPTS, PAIR.draft, **common)
    assert measure_speedup(PAIR, PROMPTS, **common).tokens_per_step == of_model.tokens_per_step
    copies = measure_speedup(TARGET, PROMPTS, **common)
    drafter = PromptLookupDrafter(5)
    assert copies.tokens_per_step == measure_speedup(PAIR, PROMPTS, drafter, **common).tokens_per_step
    assert copies.parts["drafting"] == 0
    plain = measure_speedup(PAIR, PROMPTS, None, **common)
    assert (plain.speedup.value, plain.tokens_per_step, plain.predicted) == (1.0, 1.0, None)
    assert "predicted" not in str(plain)


@pytest.mark.parametrize("wrong", [{"prompts": PROMPTS[:2]}, {"rounds": 0}])
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"target": PAIR, "prompts": PROMPTS} | ASKED | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        measure_speedup(**asked)


def test_a_head_has_no_prediction() -> None:
    """What it costs is in no pass of a model."""

    class OfStates(PromptLookupDrafter):
        hidden_layers = (-1,)

    found = measure_speedup(TARGET, PROMPTS, OfStates(5), gamma=2, rounds=1, **ASKED)
    assert found.predicted is None


# A recommended gamma.


def costs(c: float, verify: Callable[[int], float]) -> Costs:
    """Times without noise; a target forward pass over n tokens takes verify(n)."""
    lengths = tuple(range(1, 10))
    return Costs(np.full(5, c), np.tile([float(verify(n)) for n in lengths], (5, 1)), lengths)


@pytest.mark.parametrize("alpha", [0.7, 1.0])
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_without_noise_the_prediction_is_the_theorem(alpha: float, slope: float) -> None:
    beta = np.full((8, 10), alpha)

    def verify(n: Any) -> Any:
        return 1 + slope * (n - 1)

    for gamma in (1, 4, 8):
        made = predicted_speedup(beta, costs(0.1, verify), gamma)
        assert made[:3] == pytest.approx([float(walltime_improvement(alpha, gamma, 0.1, verify))] * 3)
        assert made.n == 80


@pytest.mark.parametrize("c", [0.05, 5.0])
def test_a_draft_that_costs_more_than_its_target_is_not_recommended(c: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = roomy_pair()
    monkeypatch.setattr(speedup, "measure_costs", lambda *_, **__: costs(c, lambda n: 1))
    made = recommend_gamma(pair, [[token] for token in range(8)], new_tokens=16)
    assert (made.gamma == 0) == (c > 1)
    assert set(made.predicted) == set(range(1, 9))
    assert str(made).startswith("do not speculate: the best, gamma = " if c > 1 else f"gamma = {made.gamma}: ")
    assert 0 < made.alpha.low <= made.alpha.value <= made.alpha.high < 1


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"draft": PromptLookupDrafter(5)}, "draft is .* must be a model"),
        ({"draft": "auto"}, "draft is 'auto'"),
        ({"target": PAIR, "draft": "gpt2"}, "draft is 'gpt2'"),
        ({"compile": "Auto"}, "compile is 'Auto'"),
        ({"repetitions": 2}, "repetitions"),
        ({"largest": 0}, "largest"),
    ],
)
def test_what_has_no_recommendation_is_refused(wrong: dict[str, Any], word: str) -> None:
    asked: dict[str, Any] = {"target": TARGET, "prompts": PROMPTS * 2, "draft": PAIR.draft, "new_tokens": 4} | wrong
    with pytest.raises((TypeError, ValueError), match=word):
        recommend_gamma(**asked)


@pytest.mark.parametrize(("low", "gamma"), [(0.9, 0), (1.0, 0), (1.1, 3)])
def test_a_gamma_is_recommended_only_if_its_whole_interval_is_above_1(
    low: float, gamma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three gammas the last is predicted to be the fastest, 1.2 times plain decoding."""
    monkeypatch.setattr(speedup, "measure_costs", lambda *_, **__: None)
    monkeypatch.setattr(
        speedup, "predicted_speedup", lambda beta, costs, gamma, seed: Estimate(0.9 + gamma / 10, low, 1.5, beta.size)
    )
    assert recommend_gamma(TARGET, PROMPTS * 2, PAIR.draft, largest=3, new_tokens=4).gamma == gamma
