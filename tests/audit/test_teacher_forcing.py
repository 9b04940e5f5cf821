"""Distributions along existing texts are those of full runs, whether texts run together, alone or in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ARCHITECTURES, llama, next_distributions

from specnb.audit import audit, teacher_forcing
from specnb.audit.bets import CutoffGap
from specnb.audit.teacher_forcing import Completion, Models, cutoff_gap, require_completions, teacher_forced_rows
from specnb.sampling.distributions import Sampling

TEXTS = [Completion([1], [0, 2, 3, 1]), Completion([2, 3, 0], [1]), Completion([0, 0], [3, 2, 1, 0, 2])]
SHARP = Sampling(0.7, top_k=3, top_p=0.9)


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Two texts at most run together, and longer ones in pieces of `size` tokens."""
    return lambda size: monkeypatch.setattr(teacher_forcing, "LOGITS", 4 * size)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("size", [1, 2, 5, 14, 10**6])
def test_rows_have_the_distributions_of_full_runs(
    architecture: str, size: int, small_runs: Callable[[int], None]
) -> None:
    small_runs(size)
    target = ARCHITECTURES[architecture](dtype=torch.float64)
    draft = ARCHITECTURES[architecture](seed=9, layers=1, dtype=torch.float64)
    with torch.inference_mode():
        rows = list(teacher_forced_rows(Models(target, SHARP, draft, Sampling(0.7)), TEXTS))
    completions = [row for row in rows if not row.continues]
    assert [list(row.prompt) for row in completions] == [text.prompt for text in TEXTS]
    assert [token for row in rows for token in row.tokens] == [token for text in TEXTS for token in text.tokens]
    for model, sampling, name in ((target, SHARP, "p"), (draft, Sampling(0.7), "q"), (draft, Sampling(), "raw")):
        found = torch.cat([getattr(row, name) for row in rows])
        prefixes = [[*text.prompt, *text.tokens[:at]] for text in TEXTS for at in range(len(text.tokens))]
        wanted = torch.cat([next_distributions(model, [prefix], sampling) for prefix in prefixes])
        assert torch.allclose(found, wanted, atol=1e-10)


def test_functions_are_asked_for_every_prefix() -> None:
    asked = []

    def probs(prefix: tuple[int, ...]) -> list[float]:
        asked.append(prefix)
        return [0.7, 0.2, 0.1]

    (row,) = teacher_forced_rows(Models(probs, Sampling(top_k=2)), [Completion([1], [0, 2])])
    assert asked[-2:] == [(1,), (1, 0)]
    assert row.p[0].tolist() == pytest.approx([7 / 9, 2 / 9, 0])
    assert row.q is None
    assert row.raw is None
    assert list(row.cutoff_gaps) == [1]  # token 2 is impossible


def test_a_suspected_model_is_sampled_as_the_target_and_not_as_the_draft() -> None:
    def coin(prefix: tuple[int, ...]) -> list[float]:
        return [0.25, 0.75]

    (row,) = teacher_forced_rows(Models(coin, Sampling(0.5), coin, Sampling(2.0), coin), [Completion([], [1])])
    assert row.suspected is not None
    assert row.suspected[0].tolist() == row.p[0].tolist() == pytest.approx([0.1, 0.9])


def test_margins_say_how_far_outside_a_token_is() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0])
    probs = torch.softmax(logits.double(), 0)
    assert cutoff_gap(logits, Sampling(), 3) == CutoffGap(0, 0)
    assert cutoff_gap(logits, Sampling(0), 0) == CutoffGap(0, 0)
    assert cutoff_gap(logits, Sampling(0), 2) == CutoffGap(1.5, 0)
    assert cutoff_gap(logits, Sampling(top_k=2), 2) == CutoffGap(0.5, 0)
    outside = cutoff_gap(logits, Sampling(top_p=0.6), 2)
    assert outside.logit == 0
    assert outside.mass == pytest.approx(float(probs[:2].sum()) - 0.6)
    both = cutoff_gap(logits, Sampling(top_k=2, top_p=0.7), 3)
    assert both.logit == 2
    kept = torch.softmax(logits[[0, 3]].double(), 0)  # the engine kept the token in place of the second one
    assert both.mass == pytest.approx(float(kept[0]) - 0.7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (Completion([], [1]), "no prompt"),
        (Completion([1], [4]), "has the token 4; the vocabulary has the tokens 0 to 3"),
        (Completion([-1], [2]), "has the token -1"),
        (Completion([1] * 10, [0] * 8), "16 positions"),
    ],
)
def test_texts_that_a_model_cannot_judge_are_refused(text: Completion, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        require_completions(llama(), [TEXTS[0], text])
    require_completions(llama(), [Completion([1] * 10, [0] * 7)])  # the last token is never run


def test_models_in_training_and_functions_without_distributions_are_refused() -> None:
    with pytest.raises(ValueError, match="training"):
        require_completions(llama().train(), TEXTS)
    for wrong in ([0.5, 0.4], [1.5, -0.5], [[0.5, 0.5]], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="row of probabilities"):
            require_completions(lambda prefix, wrong=wrong: wrong, [Completion([], [0])])  # type: ignore[misc]
    growing = lambda prefix: [1 / (len(prefix) + 1)] * (len(prefix) + 1)  # noqa: E731
    with pytest.raises(ValueError, match="share a vocabulary"):
        list(teacher_forced_rows(Models(growing), [Completion([], [0, 0])]))


def test_the_models_are_those_that_are_given() -> None:
    target, draft, suspected = (llama(seed=seed) for seed in range(3))
    assert Models(target).all() == [target]
    assert Models(target, draft=draft, suspected=suspected).all() == [target, draft, suspected]


def test_rows_have_the_steps_of_their_completions() -> None:
    given = [Completion([1], [0, 2, 3, 1], steps=[3, 1]), Completion([2], [1, 1], steps=[2])]
    rows = teacher_forced_rows(Models(llama()), given)
    assert [row.steps for row in rows] == [[3, 1], [2]]


FORMS: dict[str, Callable[[list[float]], Any]] = {
    "lists": list,
    "numpy": np.array,
    "float32": lambda probs: torch.tensor(probs, dtype=torch.float32),
    "whole numbers": lambda probs: [1 if at == 0 else 0 for at in range(len(probs))],
}


@pytest.mark.parametrize("draft", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_target_and_draft_may_give_numbers_of_different_kinds(target: str, draft: str) -> None:
    p, q = (FORMS[kind]([0.5, 0.25, 0.25]) for kind in (target, draft))
    report = audit(lambda prefix: p, [[0, 0, 0]] * 2, prompts=[[]] * 2, draft=lambda prefix: q, progress=False)
    assert report.verdict == "not rejected"
