"""Prompts and end tokens as users give them: what a tokenizer pads, what is no list of tokens,
names of other tools."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
from tiny import llama, without_tokenizer
from transformers import BatchEncoding

from specnb.acceptance import measure_acceptance
from specnb.beam import beam_search
from specnb.sampler import Hooks, generate
from specnb.speedup import recommend_gamma

PADDED, MASK = [[0, 0, 2], [3, 1, 2]], [[0, 1, 1], [1, 1, 1]]
LEFT, RIGHT = torch.tensor([[0, 1], [2, 3]]), np.array([[2, 3], [1, 0]])


def padding(token: int = 0, name: str = "pad_token_id") -> Any:
    model = llama()
    setattr(model.config, name, token)
    return model


def tokens(prompts: Any, target: Any = None, **more: Any) -> list[list[int]]:
    return generate(target or llama(), prompts, None, max_new_tokens=4, progress=False, **more).tokens


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_the_mask_of_a_tokenizer_leaves_the_padding_out(kind: Any) -> None:
    given = BatchEncoding({"input_ids": kind(PADDED), "attention_mask": kind(MASK)})
    assert tokens(given, padding()) == tokens([[0, 2], [3, 1, 2]])
    assert tokens(dict(given)) == tokens([[0, 2], [3, 1, 2]])
    boolean = kind(MASK) if kind is list else kind(MASK) == 1
    assert tokens(dict(given) | {"attention_mask": boolean}) == tokens([[0, 2], [3, 1, 2]])
    assert tokens({"input_ids": kind(PADDED)}) == tokens(PADDED)


def test_padding_that_nobody_masked_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"prompt 0 begins with the padding token 0, which the model would read; give"):
        tokens(LEFT, padding())
    for named in ("pad_token_id", "eos_token_id"):  # many tokenizers pad with the token that ends a text
        with pytest.raises(ValueError, match=r"prompt 1 ends with the padding token 0"):
            tokens(RIGHT, padding(0, named))
    for kind in (list, torch.tensor):
        with pytest.raises(ValueError, match=r"prompt 0 begins with the padding token 0"):
            tokens({"input_ids": kind(PADDED)}, padding())


def test_a_padding_token_that_may_be_text_is_none() -> None:
    """In lists once, or at lengths that differ; where all rows begin with it, it is the
    begin-of-text token."""
    assert tokens(LEFT.tolist(), padding()) == tokens(LEFT) == tokens(LEFT, padding(7))
    assert tokens([[0, 0, 2], [3, 1]], padding()) == tokens([[0, 0, 2], [3, 1]])
    both = torch.tensor([[0, 1], [0, 3]])
    assert tokens(both, padding()) == tokens(both)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([range(10**9)], "prompt 0 has more than 16,777,216 tokens, which no model reads; shorten it"),
        ([[1], range(10**30)], "prompt 1 has more than 16,777,216 tokens"),
        (["hello"], "prompt 0 is the text 'hello'; give its tokens, such as pair.encode(text)"),
        ("hello", "prompts is 'hello'; it must be a list of prompts, each a list of tokens: [pair.encode(text)]"),
        (torch.tensor(3), "prompts is tensor(3); it must be"),
        (np.array(3), "prompts is array(3); it must be"),
        (torch.tensor([[1, 2]]).to_sparse(), "prompts is tensor(indices="),
        ([torch.tensor([1, 2]).to_sparse()], "prompt 0 is tensor(indices="),
        (torch.empty(1, 2, dtype=torch.int64, device="meta"), "prompt 0 is tensor(..., device='meta'"),
        (
            [np.ma.masked_array([1, 2], mask=[False, True])],
            "prompt 0 is masked_array(data=[1, --], mask=",
        ),
        ({"text": "hello"}, "prompts is {'text': 'hello'}; it must be a list"),
        ({"input_ids": PADDED, "attention_mask": MASK[:1]}, "input_ids and attention_mask of the prompts differ"),
        ({"input_ids": PADDED, "attention_mask": [[0] * 3, [1] * 3]}, "prompt 0 is empty; give at least one token"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused_in_one_line(prompts: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}") as raised:
        tokens(prompts)
    assert "\n" not in str(raised.value)


def test_numbers_without_an_end_are_not_counted_through() -> None:
    with pytest.raises(TypeError, match=r"^eos is range\(0, 1000000000\); it must be a token"):
        tokens([[1]], eos=range(10**9))
    with pytest.raises(ValueError, match=r"there are 1 prompts and 1000000000000 rows"):
        tokens([[1]], hooks=Hooks(rows=range(10**12)))


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("temperature", r"give sampling=Sampling\(temperature=...\)"),
        ("top_p", r"give sampling=Sampling\(top_p=...\)"),
        ("eos_token_id", "give eos$"),
        ("num_beams", "give specnb.beam_search"),
        ("typo", "give those that there are: target, prompts, draft, gamma, "),
    ],
)
def test_a_setting_of_another_name_is_said_to_be_elsewhere(setting: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"^there is no argument {setting}; {advice}"):
        tokens([[1]], **{setting: 0.5})


def test_the_other_functions_say_so_too() -> None:
    pair = without_tokenizer(llama(), llama())
    calls: list[tuple[Any, Any]] = [
        (beam_search, llama()), (measure_acceptance, llama()), (recommend_gamma, pair)
    ]  # fmt: skip
    for function, first in calls:
        assert "sampling" in inspect.signature(function).parameters or function is beam_search
        with pytest.raises(TypeError, match="there is no argument temperature; give sampling"):
            function(first, [[1]], temperature=0.5)
