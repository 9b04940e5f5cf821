"""Timed generators run on every prompt and write as many tokens as asked."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specnb.distributions import Sampling
from specnb.models.loading import Pair, load_pair
from studies.speed.bench.generators import (
    PROMPT_TOKENS,
    pairs_named,
    prompts_for,
    specnb_generate,
    time_generators,
    transformers_generate,
)


def test_every_generator_runs_on_every_prompt_in_random_order() -> None:
    ran: list[tuple[str, int]] = []

    def generator(name: str) -> Callable[[list[int]], None]:
        return lambda prompt: ran.append((name, prompt[0]))

    generators = {name: generator(name) for name in "abc"}
    seconds = time_generators(generators, [[row] for row in range(8)], torch.device("cpu"))
    assert list(seconds.columns) == list("abc")
    assert seconds.shape == (8, 3)
    assert (seconds > 0).all(axis=None)
    warm, counted = ran[:3], ran[3:]
    assert sorted(warm) == [("a", 0), ("b", 0), ("c", 0)]
    assert sorted(counted) == sorted((name, row) for name in "abc" for row in range(8))
    assert len({tuple(name for name, row in counted if row == at) for at in range(8)}) > 1


@pytest.mark.parametrize("gamma", [0, 2])
def test_specnb_writes_as_many_tokens_as_asked(pair: Pair, gamma: int) -> None:
    assert [len(tokens) for tokens in specnb_generate(pair, gamma, 7)([1, 2]).tokens] == [7]


def test_specnb_runs_the_prompt_in_as_many_rows_as_asked(pair: Pair) -> None:
    made = specnb_generate(pair, 2, 5, rows=3, sampling=Sampling(0))([1, 2])
    assert made.tokens == [made.tokens[0]] * 3


@pytest.mark.parametrize(("assisted", "gamma"), [(False, None), (True, 2), (True, None)])
@pytest.mark.filterwarnings("ignore")  # transformers warns of its own settings
def test_transformers_writes_as_many_tokens_as_asked(pair: Pair, assisted: bool, gamma: int | None) -> None:
    torch.manual_seed(0)
    run = transformers_generate(pair.target, pair.draft if assisted else None, gamma, 7)
    assert run([1, 2]).shape == (1, 9)


def test_prompts_are_of_one_length_and_the_same_each_time(pair: Pair) -> None:
    made = prompts_for(pair, "synthetic", 3)
    assert np.shape(made) == (3, PROMPT_TOKENS)
    assert np.shape(prompts_for(pair, "synthetic", 2, 7)) == (2, 7)
    assert made == prompts_for(pair, "synthetic", 3)
    assert max(map(max, made)) < 64


def test_more_prompts_than_held_out_files_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1000 prompts were asked for, but \d+ files are held out"):
        prompts_for(load_pair(), "trained", 1000)


def test_pairs_are_loaded_by_name_as_asked() -> None:
    made = pairs_named(["trained"], dtype=torch.float64)
    assert list(made) == ["trained"]
    assert made["trained"].target.dtype == torch.float64
