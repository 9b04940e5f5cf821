"""A race runs everybody on everything, and transformers is asked for what we are asked for."""

import numpy as np
import pytest
import torch

from specnb.experiments.side_by_side import (
    PROMPT_TOKENS,
    prompts_for,
    specnb_generate,
    time_side_by_side,
    transformers_generate,
)
from specnb.models.synthetic import Shape, synthetic_pair
from specnb.sampling.distributions import Sampling


@pytest.fixture(scope="module")
def pair():
    return synthetic_pair(0.7, Shape(1, 32, 32, 2), Shape(1, 16, 16, 1), vocab=64, context=64)


def test_everybody_runs_on_every_prompt_in_changing_order():
    ran = []
    samplers = {name: lambda prompt, name=name: ran.append((name, prompt[0])) for name in "abc"}
    seconds = time_side_by_side(samplers, [[row] for row in range(8)])
    assert list(seconds.columns) == list("abc")
    assert seconds.shape == (8, 3)
    assert (seconds > 0).all(axis=None)
    warm, counted = ran[:3], ran[3:]
    assert warm == [("a", 0), ("b", 0), ("c", 0)]
    assert sorted(counted) == sorted((name, row) for name in "abc" for row in range(8))
    assert len({tuple(name for name, row in counted if row == at) for at in range(8)}) > 1


@pytest.mark.parametrize("gamma", [0, 2])
def test_ours_writes_as_many_tokens_as_asked(pair, gamma):
    assert [len(text) for text in specnb_generate(pair, gamma, 7)([1, 2]).tokens] == [7]


def test_ours_runs_the_prompt_in_as_many_rows_as_asked(pair):
    made = specnb_generate(pair, 2, 5, rows=3, sampling=Sampling(0))([1, 2])
    assert made.tokens == [made.tokens[0]] * 3


@pytest.mark.parametrize(("assisted", "gamma"), [(False, None), (True, 2), (True, None)])
@pytest.mark.filterwarnings("ignore")  # transformers warns of its own settings
def test_transformers_writes_as_many_tokens_as_asked(pair, assisted, gamma):
    torch.manual_seed(0)
    run = transformers_generate(pair.target, pair.draft if assisted else None, gamma, 7)
    assert run([1, 2]).shape == (1, 9)


def test_prompts_are_of_one_length_and_the_same_each_time(pair):
    made = prompts_for(pair, "synthetic", 3)
    assert np.shape(made) == (3, PROMPT_TOKENS)
    assert np.shape(prompts_for(pair, "synthetic", 2, 7)) == (2, 7)
    assert made == prompts_for(pair, "synthetic", 3)
    assert max(map(max, made)) < 64
