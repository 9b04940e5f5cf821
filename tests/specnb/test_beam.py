"""Beam search against plain Python, every drafted tree and transformers; planted bugs must be
found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beam_bugs import TREE_BUGS
from tiny import LIMIT, gpt2, llama, mistral, near_copy, neox, qwen2, tokenizer
from transformers import PreTrainedModel

from specnb import beam
from specnb.beam import BeamSettings, beam_search, best, extend, start
from specnb.check import Check
from specnb.copies import PromptLookupDrafter
from specnb.loading import Pair

# The search on given scores.


def test_of_many_ties_the_first_candidates_are_taken() -> None:
    """Torch keeps the order of up to 16 equal numbers in any sort, and that of more only in a
    stable one."""
    totals = torch.zeros(4, 100)
    totals[:, ::3] = 1.0
    parents, tokens, _ = best(totals, 40)
    assert (parents, tokens) == ([0] * 34 + [1] * 6, [*range(0, 100, 3), *range(0, 18, 3)])


def test_a_distribution_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(FloatingPointError, match="have NaN; look for an overflow in the model"):
        extend(start(), torch.tensor([[0.0, torch.nan]]), BeamSettings(width=1, max_new_tokens=2))


# The search with models.

VOCAB, NEW, PROMPT = 7, 8, [1, 2, 3]
MODELS = {"llama": llama, "gpt2": gpt2, "neox": neox, "qwen2": qwen2, "mistral": mistral}
ENDS: dict[str, list[int] | int | None] = {"no end": None, "one end": 1, "two ends": [1, 4]}
FLOAT32 = 2e-6
"""transformers sums float32 log-probabilities whatever the model's dtype; this is how far its means
may be off."""


def tiny(name: str = "llama") -> PreTrainedModel:
    return MODELS[name](VOCAB, dtype=torch.float64)


def of_transformers(
    model: Any, prompt: list[int], width: int, eos: list[int] | int | None, **more: Any
) -> tuple[list[list[int]], list[float]]:
    """Beams and scores of `generate`, without the padding behind an end."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), num_beams=width, num_return_sequences=width,
            do_sample=False, eos_token_id=eos, pad_token_id=model.config.vocab_size - 1,
            output_scores=True, return_dict_in_generate=True, **more,
        )  # fmt: skip
    ends = eos if isinstance(eos, list) else [eos]
    rows = [row[len(prompt) :] for row in made.sequences.tolist()]
    cut = [next((at + 1 for at, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, cut, strict=True)], made.sequences_scores.tolist()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("eos", ENDS)
def test_beams_and_scores_are_those_of_transformers(eos: str, early_stopping: bool | str) -> None:
    penalties = {"llama": 1.0, "gpt2": 0.0, "neox": 2.0, "qwen2": -0.5, "mistral": 1.0}
    for (name, penalty), width in zip(penalties.items(), (2, 3, 5, 3, 9), strict=True):  # 9: more than there are tokens
        model = tiny(name)
        asked: dict[str, Any] = {"max_new_tokens": NEW, "length_penalty": penalty, "early_stopping": early_stopping}
        own = beam_search(model, PROMPT, width=width, eos=ENDS[eos], **asked)
        tokens, scores = of_transformers(model, PROMPT, width, ENDS[eos], **asked)
        assert own.tokens == tokens
        assert own.scores == pytest.approx(scores, abs=FLOAT32 * NEW)
        for gamma in (1, 3):
            made = beam_search(
                model, PROMPT, near_copy(model, 0.05), width=width, draft_width=8, gamma=gamma, eos=ENDS[eos], **asked
            )
            assert made.tokens == own.tokens
            assert made.scores == pytest.approx(own.scores, abs=1e-12)


@pytest.mark.parametrize("bug", TREE_BUGS)
def test_planted_bugs_of_the_tree_change_the_beams_and_are_refused(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Planted in the speculative search alone, against the right one: by the scores of the best and
    the last beam. Without that comparison the beams are others."""
    model = tiny("gpt2")
    draft, prompts = near_copy(model, 0.05), [[1, 2, token] for token in range(VOCAB)]
    right = [beam_search(model, prompt, width=3, max_new_tokens=10).tokens for prompt in prompts]
    monkeypatch.setattr(beam, "TreeModel", TREE_BUGS[bug])

    def made(prompt: list[int]) -> list[list[int]]:
        return beam_search(model, prompt, draft, width=3, gamma=2, max_new_tokens=10).tokens

    refused = 0
    for prompt in prompts:
        try:
            made(prompt)
        except TypeError:
            refused += 1
    assert refused
    monkeypatch.setattr(Check, "score", lambda *given: None)
    assert [made(prompt) for prompt in prompts] != right


@pytest.mark.parametrize("width", [2, VOCAB + 1])
def test_a_search_ends_where_every_token_is_an_end(width: int) -> None:
    found = beam_search(tiny(), PROMPT, width=width, max_new_tokens=3, eos=list(range(VOCAB)))
    assert all(len(tokens) == 1 for tokens in found.tokens)
    assert found.scores == sorted(found.scores, reverse=True)
    assert len(found.tokens) == min(width, VOCAB)


def test_the_record_counts_levels_and_forward_passes() -> None:
    model = tiny()
    alone = beam_search(model, PROMPT, width=3, max_new_tokens=NEW).record
    assert alone.nodes.tolist() == [1] + [3] * (NEW - 1)
    assert alone.levels.tolist() == [1] * NEW
    perfect = beam_search(model, PROMPT, model, width=3, draft_width=3, gamma=3, max_new_tokens=NEW).record
    assert perfect.levels.tolist() == [4, 4]
    # The root or the three beams, and three levels of three.
    assert perfect.nodes.tolist() == [10, 12]
    assert perfect.target_passes == 2
    assert len(perfect.states) == NEW + 1


def test_a_pair_and_a_text_are_taken_as_in_generate() -> None:
    pair = Pair(llama(dtype=torch.float64), llama(dtype=torch.float64, seed=3), tokenizer())
    asked: dict[str, Any] = {"width": 2, "gamma": 2, "max_new_tokens": 5}
    made, alone = beam_search(pair, "one two", **asked), beam_search(pair.target, [0, 1, 2], **asked)
    assert made.tokens == alone.tokens
    assert made.texts == pair.tokenizer.batch_decode(made.tokens, skip_special_tokens=True)
    assert (made.record.target_passes < 5, alone.record.target_passes, alone.texts) == (True, 5, None)


def test_the_last_positions_can_be_searched() -> None:
    model, prompt = gpt2(VOCAB, dtype=torch.float64), [1] * (LIMIT - 3)
    own = beam_search(model, prompt, width=2, max_new_tokens=3)
    assert beam_search(model, prompt, model, width=2, gamma=5, max_new_tokens=3).tokens == own.tokens


@pytest.mark.parametrize(
    "wrong",
    [
        *({"length_penalty": penalty} for penalty in (float("nan"), 2**24, -1100, 700.0)),
        {"width": 0}, {"prompt": [[1], [2]]}, {"draft": PromptLookupDrafter(VOCAB)},
        {"early_stopping": "always"}, {"early_stopping": 1}, {"gamma": 0}, {"eos": 7},
        {"max_new_tokens": LIMIT}, {"target": llama(VOCAB).train()},
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"target": llama(VOCAB), "prompt": PROMPT, "draft": llama(VOCAB)}
    numbers = {"width": 3, "draft_width": 4, "gamma": 2, "max_new_tokens": 4}
    with pytest.raises((ValueError, TypeError)):
        beam_search(**(good | numbers | wrong))


def test_beams_that_do_not_fit_are_refused_before_any_model_runs() -> None:
    with pytest.raises(MemoryError, match=r"^1000000 beams need .* GB left: ask for fewer beams or tokens$"):
        beam_search(tiny(), PROMPT, tiny(), width=10**6, max_new_tokens=6)
