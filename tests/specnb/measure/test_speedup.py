"""A measured speed-up: whole calls in turn, by a clock that counts passes of the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from specnb.measure import speedup
from tiny import llama, near_copy, without_tokenizer

from specnb import PromptLookupDrafter, Sampling, generate, measure_speedup
from specnb.cost import Costs

PROMPTS = [[1, 2], [3], [2, 2, 1], [0]]
TARGET = llama(5)
PAIR = without_tokenizer(TARGET, near_copy(TARGET, 0.3))
ASKED: dict[str, Any] = {"max_new_tokens": 8, "progress": False}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The calls of `generate`: prompt's number and passes. A pass of the target takes a second, and
    drafting nothing."""
    calls: list[tuple[int, int]] = []

    def counted(target: Any, prompts: Any, *settings: Any, **more: Any) -> Any:
        made = generate(target, prompts, *settings, **more)
        calls.append((PROMPTS.index(list(prompts[0])), int(made.record.target_passes[0])))
        return made

    monkeypatch.setattr(speedup, "generate", counted)
    monkeypatch.setattr(speedup, "now", lambda device: float(sum(number for _, number in calls)))
    costs = Costs(np.full((3, 1), 0.5), np.ones((3, 12)) * [1, *[1.5] * 11], lengths=tuple(range(1, 13)))
    monkeypatch.setattr(speedup, "measure_costs", lambda pair, lengths, **_: costs)
    return calls


def test_it_is_the_time_per_token_of_plain_decoding_over_that_of_speculation(passes: list[tuple[int, int]]) -> None:
    found = measure_speedup(PAIR, PROMPTS, gamma=3, rounds=2, **ASKED)
    made = [generate(TARGET, [prompt], PAIR.draft, gamma=3, **ASKED).record for prompt in PROMPTS]
    steps = np.array([record.target_passes[0] for record in made])
    assert found.tokens.tolist() == [[8, 8]] * 4
    assert found.seconds.tolist() == [[8, n] for n in steps]
    assert np.isclose(found.speedup.value, 1 / (steps / 8).mean())
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    assert found.speedup.n == 4
    assert np.allclose(found.tokens_per_second, (1.0, 8 * 4 / steps.sum()))
    assert [sum(row == prompt for row, _ in passes) for prompt in range(4)] == [2 * 3] * 4
    accepted = np.concatenate([record.accepted[0] for record in made])
    assert np.isclose(found.tokens_per_step, accepted.mean() + 1)
    assert found.parts == {"drafting": 1.5, "verification": 1.5}
    assert found.predicted is not None
    assert np.isclose(found.predicted, found.tokens_per_step / 3)
    assert f"speculative  {found.tokens_per_second[1]:8.1f} tokens/s, {found.tokens_per_step:.2f} tokens" in str(found)
    assert "drafting 1.50, verification 1.50 plain passes" in str(found)


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


def test_the_end_of_a_sequence_and_the_sampling_are_those_of_generate(passes: list[tuple[int, int]]) -> None:
    found = measure_speedup(PAIR, PROMPTS, gamma=2, sampling=Sampling(0), eos=1, rounds=1, seed=3, **ASKED)
    made = generate(TARGET, PROMPTS, None, sampling=Sampling(0), eos=1, seed=3, **ASKED)
    assert found.tokens.T.tolist() == [list(map(len, made.tokens))] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"prompts": PROMPTS[:2]}, "there are 2 prompts"), ({"rounds": 0}, "rounds is 0"), ({"gamma": -1}, "gamma is -1")],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"target": PAIR, "prompts": PROMPTS} | ASKED | wrong
    with pytest.raises(ValueError, match=message):
        measure_speedup(**asked)


def test_a_head_has_no_prediction() -> None:
    """What it costs is in no pass of a model."""

    class OfStates(PromptLookupDrafter):
        hidden_layers = (-1,)

    found = measure_speedup(TARGET, PROMPTS, OfStates(5), gamma=2, rounds=1, **ASKED)
    assert found.predicted is None
    assert "tokens/s" in str(found)
