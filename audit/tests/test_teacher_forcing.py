"""Distributions along existing texts are those of full runs, whether texts run together, alone or
in pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, llama, next_distributions
from transformers import BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM

from specnb.distributions import Sampling
from specnb_audit import teacher_forcing
from specnb_audit.bets import Row
from specnb_audit.teacher_forcing import (
    Completion,
    Models,
    _read,
    agrees_in_pieces,
    require_completions,
    teacher_forced_logits,
    teacher_forced_rows,
)

TEXTS = [Completion([1], [0, 2, 3, 1]), Completion([2, 3, 0], [1]), Completion([0, 0], [3, 2, 1, 0, 2])]
SHARP = Sampling(0.7, top_k=3, top_p=0.9)


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Two texts at most run together, and longer ones in pieces of `size` tokens."""
    return lambda size: monkeypatch.setattr(teacher_forcing, "LOGITS", 4 * size)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("size", [1, 5, 10**6])
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


@torch.inference_mode()
def test_a_draft_with_more_tokens_is_restricted_to_those_of_the_target() -> None:
    target, draft = llama(4, dtype=torch.float64), llama(6, seed=5, dtype=torch.float64)
    (row,) = teacher_forced_rows(Models(target, draft=draft), [Completion([3, 1], [2, 3, 0])])
    logits = draft(input_ids=torch.tensor([[3, 1, 2, 3]]), use_cache=False).logits[0, 1:, :4]
    torch.testing.assert_close(row.q, torch.softmax(logits, dim=-1), atol=1e-9, rtol=0)


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


def rows_of(model: Any, texts: list[Completion], sampling: Sampling = Sampling(), **more: Any) -> list[Row]:
    with torch.inference_mode():
        return list(teacher_forced_rows(Models(model, sampling, **more), texts))


@pytest.mark.parametrize("size", [2, 10**6])
def test_a_sequence_beyond_a_longrope_has_the_factors_of_its_whole_length(
    size: int, small_runs: Callable[[int], None]
) -> None:
    """Beside short ones, which keep theirs, and never in pieces, the first of which would be short."""
    small_runs(size)
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 6, "factor": 2.0}
    sizes: dict[str, Any] = {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16, "initializer_range": 1.0}
    factors = {"short_factor": [1.0, 1.0], "long_factor": [4.0, 9.0]}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope | factors)).double().eval()
    given = [Completion([1], [0, 2, 3]), Completion([2, 3], [0, 1] * 5), Completion([1, 1], [0, 2, 1])]
    require_completions(model, given)
    whole = []
    for one in given:
        logits = model(torch.tensor([[*one.prompt, *one.tokens[:-1]]])).logits[0, len(one.prompt) - 1 :]
        whole.append(logits.softmax(-1))
    found = torch.cat([row.p for row in rows_of(model, given)])
    assert torch.allclose(found, torch.cat(whole), atol=1e-9)
    short = model(torch.tensor([[2, 3, 0]])).logits[0, 1:].softmax(-1)
    assert (short - whole[1][:2]).abs().max() > 0.01


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_pieces_of_a_text_say_where_they_are(size: int, small_runs: Callable[[int], None]) -> None:
    """Put together, pieces have the tokens, steps and gaps of the whole; a text without tokens has
    a row of its own."""
    model, text = llama(dtype=torch.float64), Completion([1, 2, 0], [3, 1, 0, 2, 2], steps=[2, 1, 2], batch="a")
    (whole,) = rows_of(model, [text], Sampling(top_k=1), draft=model)
    small_runs(size)
    empty, *pieces, end = rows_of(
        model, [Completion([2], []), text, Completion([2], [])], Sampling(top_k=1), draft=model
    )
    for one in (empty, end):
        assert (one.tokens, one.q, one.continues, one.more, one.p.shape) == ([], None, False, False, (0, 4))
    sizes = [len(one.tokens) for one in pieces]
    assert sizes == {1: [1] * 5, 2: [2, 2, 1], 3: [1, 3, 1], 100: [5]}[size]
    assert [one.continues for one in pieces] == [False] + [True] * (len(pieces) - 1)
    assert [one.more for one in pieces] == [True] * (len(pieces) - 1) + [False]
    assert [token for one in pieces for token in one.tokens] == text.tokens
    for name in ("p", "q"):
        found = torch.cat([getattr(one, name) for one in pieces])
        assert torch.allclose(found, getattr(whole, name), atol=1e-12)
    assert [sum(one.steps or []) for one in pieces] == sizes
    gaps = {at: gap for one in pieces for at, gap in one.cutoff_gaps.items()}
    assert list(gaps) == list(whole.cutoff_gaps)
    assert 0 < len(gaps) < 5
    assert all(gaps[at] == pytest.approx(whole.cutoff_gaps[at]) for at in gaps)
    assert {(tuple(one.prompt), one.batch) for one in pieces} == {((1, 2, 0), "a")}


def test_a_function_beside_a_model_that_is_read_in_pieces(small_runs: Callable[[int], None]) -> None:
    draft = llama(dtype=torch.float64)
    small_runs(2)
    row, *_ = rows_of(lambda prefix: [0.25] * 4, TEXTS[:1], draft=draft)
    assert row.q is not None
    assert row.q.shape == (4, 4)


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


def test_completions_that_a_model_cannot_judge_are_named() -> None:
    """The last token is never run, so one more than the model's positions is accepted."""
    model = llama()
    require_completions(model, [Completion([1] * 10, [0] * 7), Completion([0, 3], [3, 0])])
    long = "has 18 tokens with its prompt, and the model has 16 positions; cut the sequence, or generate shorter ones"
    for names, name in ((None, "sequence 1"), (["line 2", "line 7"], "line 7")):
        with pytest.raises(ValueError, match=f"^{name} {long}$"):
            require_completions(model, [TEXTS[0], Completion([1] * 10, [0] * 8)], names)
    with pytest.raises(ValueError, match=r"^the model is in training mode, where .*; call its eval\(\) first$"):
        require_completions(llama().train(), TEXTS)
    growing = lambda prefix: [1 / (len(prefix) + 1)] * (len(prefix) + 1)  # noqa: E731
    with pytest.raises(ValueError, match=r"^a distribution has 2 entries and the target's vocabulary 1; target and"):
        rows_of(growing, [Completion([], [0, 0])])


def test_a_model_that_sees_the_future_is_refused() -> None:
    sizes: dict[str, Any] = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = BertLMHeadModel(BertConfig(**sizes, num_attention_heads=2, initializer_range=1.0)).eval()
    with pytest.raises(ValueError, match=r"BertLMHeadModel cannot be audited: .* depend on the tokens after it"):
        require_completions(model, [Completion([3], [4, 5])])


def test_a_model_that_cannot_go_on_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a model whose cache loses a token gives other distributions in pieces."""
    model = llama(24, dtype=torch.float64)
    completion = Completion([3], [5, 6, 7, 8, 3, 4, 5, 6])
    (whole,) = _read(model, [completion])
    monkeypatch.setattr(teacher_forcing, "LOGITS", 4 * 24)
    assert agrees_in_pieces(model)

    def forgets(module: Any, args: Any, given: dict[str, Any], output: Any) -> Any:
        if output.past_key_values is not None:
            output.past_key_values.crop(-1)
        return output

    forgetful = copy.deepcopy(model)
    forgetful.register_forward_hook(forgets, with_kwargs=True)
    assert not agrees_in_pieces(forgetful)
    pieces = [logits for _, _, logits, _ in teacher_forced_logits(Models(forgetful), [completion])]
    assert torch.equal(torch.cat(pieces), whole)
