"""Beam search with models: as transformers finds it, and the same with any draft; what it ran, and what it refuses."""

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from tiny import LIMIT, gpt2, llama, near_copy, neox, qwen2
from transformers import PreTrainedModel
from tree_bugs import TREE_BUGS

from specnb import beam
from specnb.beam import BeamSearch, TreeModel, beam_search
from specnb.distributions import Sampling
from specnb.models.loading import load_pair
from specnb.notebook import corpus

VOCAB, NEW, PROMPT = 7, 8, [1, 2, 3]
MODELS = {"llama": llama, "gpt2": gpt2, "neox": neox, "qwen2": qwen2}
ENDS: dict[str, list[int] | int | None] = {"no end": None, "one end": 1, "two ends": [1, 4]}
FLOAT32 = 2e-6
"""transformers sums float32 log-probabilities whatever the model's dtype; this is how far its means may be off."""


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


def assert_same(found: BeamSearch, tokens: list[list[int]], scores: list[float], tolerance: float) -> None:
    assert found.tokens == tokens
    assert found.scores == pytest.approx(scores, abs=tolerance)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("eos", ENDS)
@pytest.mark.parametrize("width", [2, 3, 5])
def test_beams_and_scores_are_those_of_transformers(width: int, eos: str, early_stopping: bool | str) -> None:
    for name, length_penalty in (("llama", 1.0), ("gpt2", 0.0), ("neox", 2.0), ("qwen2", -0.5), ("gpt2", 1.0)):
        model = tiny(name)
        wanted: dict[str, Any] = {
            "max_new_tokens": NEW,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
        }
        own = beam_search(model, PROMPT, width=width, eos=ENDS[eos], **wanted)
        assert_same(own, *of_transformers(model, PROMPT, width, ENDS[eos], **wanted), FLOAT32 * NEW)
        draft = near_copy(model, 0.05)
        for draft_width, gamma in ((width, 1), (width, 3), (5, 2)):
            made = beam_search(
                model, PROMPT, draft, width=width, draft_width=draft_width, gamma=gamma, eos=ENDS[eos], **wanted
            )
            assert_same(made, own.tokens, own.scores, 1e-12)


@pytest.mark.parametrize("eos", ENDS)
def test_one_beam_is_greedy_decoding(eos: str) -> None:
    tokens = torch.tensor([PROMPT])
    for make in MODELS.values():
        model: Any = make(VOCAB, dtype=torch.float64)
        with torch.inference_mode():
            greedy = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW,
                eos_token_id=ENDS[eos], pad_token_id=0,
            )  # fmt: skip
        made = beam_search(
            model, PROMPT, gpt2(VOCAB, layers=1), width=1, draft_width=3, max_new_tokens=NEW, eos=ENDS[eos]
        )
        assert made.tokens == [greedy[0, len(PROMPT) :].tolist()]


@pytest.mark.parametrize("newline_ends", [False, True])
def test_the_trained_pair_finds_what_transformers_finds(newline_ends: bool) -> None:
    """In float64. With the newline as an end, beams of different lengths finish and compete."""
    pair = load_pair(dtype=torch.float64)
    prompt = pair.encode(corpus.read("held-out", limit=1)[0][:400])[:24]
    eos = pair.encode("\n")[-1] if newline_ends else pair.tokenizer.eos_token_id
    own = beam_search(pair.target, prompt, width=3, max_new_tokens=12, eos=eos)
    assert_same(own, *of_transformers(pair.target, prompt, 3, eos, max_new_tokens=12), FLOAT32 * 12)
    made = beam_search(pair.target, prompt, pair.draft, width=3, draft_width=8, gamma=3, max_new_tokens=12, eos=eos)
    assert_same(made, own.tokens, own.scores, 1e-12)
    assert made.record.target_passes <= own.record.target_passes
    assert newline_ends == (len(set(map(len, own.tokens))) > 1)


@pytest.mark.parametrize("bug", TREE_BUGS)
def test_bugs_of_the_tree_change_the_beams(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Planted in the speculative search alone, against the right one."""
    model = tiny("gpt2")
    right = [beam_search(model, [1, 2, token], width=3, max_new_tokens=10) for token in range(VOCAB)]
    monkeypatch.setattr(beam, "TreeModel", TREE_BUGS[bug].model)
    draft = near_copy(model, 0.05)
    wrong = [beam_search(model, [1, 2, token], draft, width=3, gamma=2, max_new_tokens=10) for token in range(VOCAB)]
    assert any(made.tokens != own.tokens for made, own in zip(wrong, right, strict=True))


# What was run.


def test_the_record_counts_the_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = TreeModel._run
    monkeypatch.setattr(TreeModel, "_run", lambda self, paths: (seen.append((self, len(paths))), run(self, paths)))
    model = tiny()
    record = beam_search(
        model, PROMPT, near_copy(model, 0.05), width=3, draft_width=5, gamma=2, max_new_tokens=NEW
    ).record
    target = [nodes for distributions, nodes in seen if distributions.runner.model is model]
    draft = [nodes for distributions, nodes in seen if distributions.runner.model is not model]
    assert record.nodes.tolist() == target
    assert [nodes for step in record.draft_nodes for nodes in step] == draft
    assert record.levels.sum() == NEW == len(record.states) - 1
    assert record.target_passes == len(target) < NEW
    assert max(target) <= 3 + 5 * 2
    assert record.levels.max() <= 3


def test_a_search_without_a_draft_makes_one_forward_pass_per_level() -> None:
    record = beam_search(tiny(), PROMPT, width=3, max_new_tokens=NEW).record
    assert record.nodes.tolist() == [1] + [3] * (NEW - 1)
    assert record.levels.tolist() == [1] * NEW
    assert record.draft_nodes == [()] * NEW


def test_a_perfect_draft_needs_one_forward_pass_for_gamma_plus_one_levels() -> None:
    model = tiny()
    record = beam_search(model, PROMPT, model, width=3, draft_width=3, gamma=3, max_new_tokens=NEW).record
    assert record.levels.tolist() == [4, 4]
    assert record.nodes.tolist() == [10, 12]


def test_the_last_positions_can_be_searched() -> None:
    model = gpt2(VOCAB, dtype=torch.float64)
    prompt = [1] * (LIMIT - 3)
    own = beam_search(model, prompt, width=2, max_new_tokens=3)
    assert beam_search(model, prompt, model, width=2, gamma=5, max_new_tokens=3).tokens == own.tokens


# Bad input.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 0}, "width is 0"),
        ({"draft_width": 0}, "draft_width is 0"),
        ({"draft_width": 2}, "draft_width is 2 and width 3: fewer drafted beams than beams"),
        ({"gamma": 0}, "gamma is 0; it must be a whole number from 1"),
        ({"gamma": 1.5}, r"gamma is 1\.5"),
        ({"sampling": Sampling(temperature=0.7)}, "beam search does not sample, so it takes no temperature"),
        ({"sampling": 0.7}, r"sampling is 0\.7"),
        ({"width": 9, "draft_width": 9}, "width is 9, and 7 tokens of the vocabulary are not in eos"),
        ({"draft_width": 6, "eos": [1, 4]}, "draft_width is 6, and 5 tokens"),
        ({"eos": 7}, "eos has the token 7"),
        ({"prompt": []}, "prompt 0 is empty"),
        ({"prompt": [9]}, "prompt 0 has the token 9"),
        ({"max_new_tokens": LIMIT}, f"and LlamaForCausalLM has {LIMIT}"),
        ({"early_stopping": None}, "early_stopping is None"),
        ({"draft": llama(5)}, "target has 7 tokens and the draft 5"),
    ],
)
def test_bad_input_is_refused(wrong: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "prompt": PROMPT,
        "draft": llama(VOCAB),
        "width": 3,
        "draft_width": 4,
        "gamma": 2,
        "max_new_tokens": 4,
    }
    with pytest.raises(ValueError, match=message):
        beam_search(llama(VOCAB), **(good | wrong))


def test_models_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(TypeError, match="training mode"):
        beam_search(llama(VOCAB).train(), PROMPT, max_new_tokens=2)
    with pytest.raises(TypeError, match="no model of transformers"):
        beam_search(llama(VOCAB), PROMPT, "a draft", max_new_tokens=2)  # type: ignore[arg-type]


# Settings, sizes, and what is shown.


def test_settings_that_are_left_out_have_these_values() -> None:
    defaults = {name: one.default for name, one in inspect.signature(beam_search).parameters.items()}
    assert defaults.pop("target") is defaults.pop("prompt") is inspect.Parameter.empty
    nothing = dict.fromkeys(("draft", "draft_width", "eos", "sampling"))
    numbers = {"width": 4, "gamma": 4, "max_new_tokens": 64, "length_penalty": 1.0}
    assert defaults == {**nothing, **numbers, "early_stopping": False, "progress": True}
    assert defaults["early_stopping"] is False
    assert defaults["progress"] is True


def test_twice_as_many_beams_are_drafted_as_are_kept_by_default() -> None:
    model = tiny()
    draft = near_copy(model, 0.05)
    two = beam_search(model, PROMPT, draft, width=2, gamma=2, max_new_tokens=4)
    four = beam_search(model, PROMPT, draft, width=2, draft_width=4, gamma=2, max_new_tokens=4)
    assert two.record.draft_nodes == four.record.draft_nodes
    other = beam_search(model, PROMPT, draft, width=2, draft_width=3, gamma=2, max_new_tokens=4)
    assert two.record.draft_nodes != other.record.draft_nodes


def test_what_a_search_returns_cannot_be_changed() -> None:
    made = beam_search(tiny(), PROMPT, width=2, max_new_tokens=3)
    for one, field in ((made, "tokens"), (made.record, "levels")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, field, [])
    assert isinstance(made.record.levels, np.ndarray)
    assert isinstance(made.record.nodes, np.ndarray)
    assert made.record.target_passes == 3
    assert made.record.draft_nodes == [()] * 3
    assert made.record.nodes.tolist() == [1, 2, 2]
    assert made.record.levels.tolist() == [1, 1, 1]
    finished = made.record.states[-1].finished
    assert made.tokens == [list(beam.path) for beam in finished]
    assert made.scores == [beam.score for beam in finished]


@pytest.mark.parametrize("width", [1, 3])
def test_caches_have_slots_for_all_beams_and_draft_tokens(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level of every beam, one level more, and what is drafted."""
    made: list[tuple[PreTrainedModel, int]] = []

    class Counted(TreeModel):
        def __init__(self, model: PreTrainedModel, prompt: list[int], capacity: int) -> None:
            super().__init__(model, prompt, capacity)
            made.append((model, capacity))

    monkeypatch.setattr(beam, "TreeModel", Counted)
    target, draft = tiny(), near_copy(tiny(), 0.05)
    beam_search(target, PROMPT, width=width, gamma=2, max_new_tokens=5)
    beam_search(target, PROMPT, draft, width=width, draft_width=4, gamma=2, max_new_tokens=5)
    alone = width * 5 + width
    assert made == [(target, alone), (target, alone + 4 * 2), (draft, alone + 4 * 2)]


@pytest.mark.parametrize("progress", [False, True])
def test_the_bar_counts_levels(progress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Bar:
        def __init__(self, **settings: Any) -> None:
            self.settings = settings
            self.moves: list[int] = []
            bars.append(self)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            return

        def update(self, by: int) -> None:
            self.moves.append(by)

    monkeypatch.setattr(beam, "tqdm", Bar)
    model = tiny()
    made = beam_search(model, PROMPT, near_copy(model, 0.05), width=2, gamma=2, max_new_tokens=NEW, progress=progress)
    ((settings, moves),) = [(bar.settings, bar.moves) for bar in bars]
    assert settings == {"total": NEW, "desc": "levels", "delay": 3, "leave": False, "disable": not progress}
    assert moves == made.record.levels.tolist()
    assert sum(moves) == NEW
    assert max(moves) > 1


def test_ends_are_counted_once_and_in_any_order() -> None:
    model = tiny()
    wanted: dict[str, Any] = {"width": 3, "max_new_tokens": NEW}
    assert (
        beam_search(model, PROMPT, eos=[4, 1, 4], **wanted).tokens
        == beam_search(model, PROMPT, eos=[1, 4], **wanted).tokens
    )
    # Five tokens of the vocabulary are no end.
    beam_search(model, PROMPT, eos=[4, 1, 4], width=5, max_new_tokens=3)
    with pytest.raises(ValueError, match="width is 6, and 5 tokens of the vocabulary are not in eos"):
        beam_search(model, PROMPT, eos=[4, 1, 4], width=6, max_new_tokens=3)


FEWER = "fewer drafted beams than beams cannot cover them; draft at least as many"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"sampling": 0.7},
            "sampling is 0.7; beam search does not sample, so it takes no temperature: use generate",
        ),
        ({"width": 3, "draft_width": 2}, f"draft_width is 2 and width 3: {FEWER}"),
        ({"width": 2, "draft_width": 1}, f"draft_width is 1 and width 2: {FEWER}"),
        ({"draft_width": 0}, "draft_width is 0; it must be a whole number from 1"),
        ({"gamma": 0}, "gamma is 0; it must be a whole number from 1"),
        (
            {"width": 8, "draft_width": 8},
            "width is 8, and 7 tokens of the vocabulary are not in eos; choose at most 7",
        ),
        (
            {"width": 7, "draft_width": 8},
            "draft_width is 8, and 7 tokens of the vocabulary are not in eos; choose at most 7",
        ),
        ({"width": 4}, "draft_width is 8, and 7 tokens of the vocabulary are not in eos; choose at most 7"),
    ],
)
def test_what_is_refused_is_refused_with_this_message(wrong: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"width": 3, "gamma": 2, "max_new_tokens": 4}
    model = llama(VOCAB)
    with pytest.raises(ValueError, match=r"sampling|width|gamma") as caught:
        beam_search(model, PROMPT, model, **(good | wrong))
    assert str(caught.value) == message


def test_as_many_beams_as_there_are_tokens_and_the_least_numbers_are_accepted() -> None:
    model = llama(VOCAB)
    found = beam_search(model, PROMPT, model, width=VOCAB, draft_width=VOCAB, gamma=1, max_new_tokens=1)
    assert len(found.tokens) == VOCAB
    assert len(beam_search(model, PROMPT, width=VOCAB, max_new_tokens=1).tokens) == VOCAB


@pytest.mark.parametrize("unread", [{"gamma": 0}, {"draft_width": 1}, {"gamma": 0, "draft_width": 0}], ids=str)
def test_without_a_draft_its_settings_are_not_looked_at(unread: dict[str, Any]) -> None:
    plain = beam_search(tiny(), PROMPT, width=2, max_new_tokens=3)
    assert beam_search(tiny(), PROMPT, width=2, max_new_tokens=3, **unread).tokens == plain.tokens
