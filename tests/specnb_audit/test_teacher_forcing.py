"""Distributions along existing texts are those of full runs, whether texts run together, alone or in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ARCHITECTURES, llama, next_distributions
from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb_audit import audit, teacher_forcing
from specnb_audit.bets import CutoffGap, Row
from specnb_audit.teacher_forcing import (
    Completion,
    Models,
    cutoff_gap,
    require_completions,
    teacher_forced_pass,
    teacher_forced_rows,
)

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


def passes(model: PreTrainedModel) -> list[tuple[list[list[int]], int, bool, bool]]:
    """A list to which every forward pass of `model` adds its tokens, logits to keep, and use of a cache (new, old)."""
    seen: list[tuple[list[list[int]], int, bool, bool]] = []

    def record(module: object, given: tuple[object, ...], more: dict[str, Any]) -> None:
        old = more.get("past_key_values") is not None
        seen.append((more["input_ids"].tolist(), more["logits_to_keep"], more["use_cache"], old))

    model.register_forward_pre_hook(record, with_kwargs=True)
    return seen


def rows_of(model: Any, texts: list[Completion], sampling: Sampling = Sampling(), **more: Any) -> list[Row]:
    with torch.inference_mode():
        return list(teacher_forced_rows(Models(model, sampling, **more), texts))


def test_texts_share_a_pass_with_padding_on_the_right_and_no_more_logits_than_needed() -> None:
    """All but the last token is given, and the logits from the end of the shortest prompt on are kept."""
    model = llama()
    seen = passes(model)
    rows_of(model, TEXTS)
    assert seen == [([[1, 0, 2, 3, 0, 0], [2, 3, 0, 0, 0, 0], [0, 0, 3, 2, 1, 0]], 6, False, False)]
    seen.clear()
    rows_of(model, TEXTS[1:])
    assert seen == [([[2, 3, 0, 0, 0, 0], [0, 0, 3, 2, 1, 0]], 5, False, False)]
    seen.clear()
    teacher_forced_pass(model, TEXTS[2:])
    assert seen == [([[0, 0, 3, 2, 1, 0]], 5, False, False)]


@pytest.mark.parametrize(
    ("logits", "pieces"),
    [
        (28, [[0, 0, 3, 2, 1, 0]]),  # 7 tokens with a vocabulary of 4
        (27, [[0, 0, 3, 2, 1, 0]]),  # pieces of 6 tokens, and there are no more
        (20, [[0, 0, 3, 2, 1], [0]]),
        (11, [[0, 0], [3, 2], [1, 0]]),
        (3, [[0], [0], [3], [2], [1], [0]]),  # one token at least
    ],
)
def test_a_text_that_is_too_long_is_run_in_pieces(
    logits: int, pieces: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_forcing, "LOGITS", logits)
    model = llama()
    seen = passes(model)
    teacher_forced_pass(model, TEXTS[2:])
    if logits == 28:
        assert seen == [(pieces, 5, False, False)]
    else:
        assert seen == [([piece], len(piece), True, number > 0) for number, piece in enumerate(pieces)]


def lengths(sizes: list[int | None], limit: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How texts of these lengths are grouped, where `limit` tokens fit into a pass."""
    monkeypatch.setattr(teacher_forcing, "LOGITS", 2 * limit)
    asked: list[tuple[int, ...]] = []
    given = [None if size is None else Completion([1], [0] * (size - 1)) for size in sizes]
    groups = list(teacher_forcing._batches(given, lambda prefix: asked.append(prefix) or [0.5, 0.5]))
    assert asked == [(1,)]  # the vocabulary is asked for once
    return [[len(one.prompt) + len(one.tokens) for one in group] for group in groups]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([5, 5], [[5, 5]]),  # padded to the longest, as many as fit
        ([5, 5, 1], [[5, 5], [1]]),
        ([5, 6], [[5], [6]]),
        ([6, 4], [[6], [4]]),
        ([2] * 6, [[2] * 5, [2]]),
        ([20, 1, 5, 5, 5], [[20], [1, 5], [5, 5]]),  # what is too long is alone, and forgotten afterwards
        ([5, 6, 1], [[5], [6], [1]]),
        ([6, 5, 5], [[6], [5, 5]]),
        ([1, None, 1, 1], [[1], [1, 1]]),  # no more are ready
        ([None, 1, None, None, 2], [[1], [2]]),
        ([9, None, 5, 5], [[9], [5, 5]]),
    ],
)
def test_texts_are_grouped_in_order_up_to_the_limit(
    sizes: list[int | None], groups: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lengths(sizes, 10, monkeypatch) == groups


def test_the_limit_is_eight_million_logits() -> None:
    assert teacher_forcing.LOGITS == 8 * 1024**2


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_pieces_of_a_text_say_where_they_are(size: int, small_runs: Callable[[int], None]) -> None:
    """Put together, pieces have the tokens, steps and gaps of the whole; a text without tokens has a row of its own."""
    small_runs(size)
    model = llama(dtype=torch.float64)
    text, empty = Completion([1, 2, 0], [3, 1, 0, 2, 2], steps=[2, 1, 2]), Completion([2], [])
    given = [empty, text, empty, text._replace(steps=[9]), text._replace(steps=None)]
    rows = rows_of(model, given, Sampling(top_k=1), draft=model, suspected=model)
    whole = rows_of(model, [text], Sampling(top_k=1))[0] if size == 100 else None
    texts: list[list[Row]] = []
    for row in rows:
        if not row.continues:
            texts.append([])
        texts[-1].append(row)
    assert [list(text[0].prompt) for text in texts] == [[2], [1, 2, 0], [2], [1, 2, 0], [1, 2, 0]]
    for pieces, steps in zip(texts, ([], [2, 1, 2], [], [9], None), strict=True):
        sizes = [len(one.tokens) for one in pieces]
        assert [one.more for one in pieces] == [True] * (len(pieces) - 1) + [False]
        for one in pieces:
            assert one.p.shape == (len(one.tokens), 4)
        if sum(sizes) == 0:
            assert (sizes, pieces[0].q, pieces[0].steps, pieces[0].cutoff_gaps) == ([0], None, None, {})
            continue
        if size < 100:
            assert sizes == {1: [1] * 5, 2: [2, 2, 1], 3: [1, 3, 1]}[size]
        assert [token for one in pieces for token in one.tokens] == [3, 1, 0, 2, 2]
        if steps == [2, 1, 2]:
            assert all(sum(one.steps or []) == len(one.tokens) for one in pieces)
            assert whole is None or pieces[0].steps == steps
        else:
            assert all(one.steps == steps for one in pieces)
        logits = [one.q for one in pieces]
        assert all(q is not None and q.dtype == torch.float64 and q.shape[1] == 4 for q in logits)
        assert all(one.suspected is not None and torch.equal(one.suspected, one.p) for one in pieces)
        assert all(one.raw is None for one in pieces)
        p = torch.cat([one.p for one in pieces])
        impossible = [at for at, token in enumerate(text.tokens) if p[at, token] == 0]
        assert 0 < len(impossible) < 5
        assert [at for one in pieces for at in one.cutoff_gaps] == impossible
        for one in pieces:
            for at, gap in one.cutoff_gaps.items():
                q = torch.cat([one.q for one in pieces if one.q is not None])[at]
                assert gap == pytest.approx((float(q.max().log() - q[text.tokens[at]].log()), 0.0))


def test_the_draft_has_a_raw_distribution_where_its_own_settings_differ_from_it() -> None:
    coin, text = (lambda prefix: [0.25, 0.75]), Completion([], [1])
    for sampling, raw in ((Sampling(), None), (Sampling(0.5), [0.25, 0.75])):
        (row,) = teacher_forced_rows(Models(coin, Sampling(2.0), coin, sampling), [text])
        assert row.q is not None
        assert row.q[0].tolist() == pytest.approx([0.25, 0.75] if raw is None else [0.1, 0.9])
        assert raw == (None if row.raw is None else pytest.approx(row.raw[0].tolist()))
        assert row.suspected is None


@pytest.mark.parametrize("size", [2, 100])
def test_a_model_that_always_returns_all_logits(size: int, small_runs: Callable[[int], None]) -> None:
    small_runs(size)
    wanted = rows_of(llama(dtype=torch.float64), TEXTS[1:])
    model = llama(dtype=torch.float64)
    forward = model.forward

    def all_logits(input_ids: torch.Tensor, **more: Any) -> Any:
        return forward(input_ids=input_ids, use_cache=more["use_cache"], past_key_values=more.get("past_key_values"))

    model.forward = all_logits
    for found, one in zip(rows_of(model, TEXTS[1:]), wanted, strict=True):
        assert found.tokens == one.tokens
        assert torch.allclose(found.p, one.p, atol=1e-12)


SUM = "it must be one row of probabilities that sum to 1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([0.5, 0.4], f"the distribution after 2 tokens has shape (2,) and sum 0.9; {SUM}"),
        ([0.5, 0.5011], f"the distribution after 2 tokens has shape (2,) and sum 1.0011; {SUM}"),
        ([0.5, 0.4989], f"the distribution after 2 tokens has shape (2,) and sum 0.9989; {SUM}"),
        ([1.5, -0.5], f"the distribution after 2 tokens has shape (2,) and sum 1; {SUM}"),
        ([[0.5, 0.5]], f"the distribution after 2 tokens has shape (1, 2) and sum 1; {SUM}"),
        (1.0, f"the distribution after 2 tokens has shape () and sum 1; {SUM}"),
        ([float("nan"), 1.0], f"the distribution after 2 tokens has shape (2,) and sum nan; {SUM}"),
    ],
)
def test_a_distribution_that_is_none_is_described(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        teacher_forcing.vocabulary(lambda prefix: given, [1, 0])


@pytest.mark.parametrize("total", [0.9991, 1.0009])
def test_distributions_may_be_rounded(total: float) -> None:
    p = [total - 0.5, 0.5, 0.0]
    assert teacher_forcing.vocabulary(lambda prefix: p, [1]) == 3
    (row,) = rows_of(lambda prefix: p, [Completion([], [0])])
    assert row.p[0].tolist() == pytest.approx([(total - 0.5) / total, 0.5 / total, 0])


def test_distributions_have_the_dtype_of_the_function_or_float64() -> None:
    for kind, dtype in (("lists", torch.float64), ("numpy", torch.float64), ("float32", torch.float32),
                        ("whole numbers", torch.float64)):  # fmt: skip
        (row,) = rows_of(lambda prefix, kind=kind: FORMS[kind]([1.0, 0.0]), [Completion([], [0, 0])])
        assert (row.p.dtype, row.p.tolist()) == (dtype, [[1, 0], [1, 0]])
    (row,) = rows_of(lambda prefix: torch.tensor([1, 0]), [Completion([], [0])])
    assert row.p.dtype == torch.float64


def test_the_refusals_in_full() -> None:
    """And what is at the border of each, which is accepted."""
    model = llama()
    refusals = {
        "sequence 1 has no prompt; a model needs at least one token, such as beginning-of-sequence": Completion(
            [], [1]
        ),
        "sequence 1 has the token 4; the vocabulary has the tokens 0 to 3: was another tokenizer used?": (
            Completion([1, 4], [5])
        ),
        "sequence 1 has the token -1; the vocabulary has the tokens 0 to 3: was another tokenizer used?": (
            Completion([1], [-1])
        ),
        "sequence 1 has 18 tokens with its prompt, and the model has 16 positions; cut the sequence, or generate "
        "shorter ones": Completion([1] * 10, [0] * 8),
    }
    for words, text in refusals.items():
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            require_completions(model, [TEXTS[0], text])
        with pytest.raises(ValueError, match=f"^{re.escape(words.replace('sequence 1', 'line 7'))}$"):
            require_completions(model, [TEXTS[0], text], names=["line 2", "line 7"])
    require_completions(model, [Completion([1] * 10, [0] * 7), Completion([0, 3], [3, 0])])
    with pytest.raises(ValueError, match=r"^the model is in training mode, where .*; call its eval\(\) first$"):
        require_completions(llama().train(), TEXTS)

    def coin(prefix: tuple[int, ...]) -> list[float]:
        return [0.5, 0.5] + [0.0] * (prefix == (1, 0))

    require_completions(coin, [Completion([], [1] * 40)])  # a function has no limit, and needs no prompt
    with pytest.raises(ValueError, match=r"^sequence 0 has the token 2; the vocabulary has the tokens 0 to 1: "):
        require_completions(coin, [Completion([], [2])])
    words = (
        "a distribution has 3 entries and the target's vocabulary 2; target and draft must share a vocabulary that "
        "never changes"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        rows_of(coin, [Completion([1], [0, 1])])


def test_models_without_settings_are_not_changed_by_any() -> None:
    coin = lambda prefix: [0.5, 0.5]  # noqa: E731
    assert Models(coin) == (coin, Sampling(), None, Sampling(), None)
    assert Models(coin, suspected=coin, draft=coin).all() == [coin] * 3
    assert Completion([1], [2]).steps is None
