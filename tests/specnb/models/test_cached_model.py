"""What a cached model keeps of a forward pass."""

from typing import Any

import pytest
import torch
from tiny import llama

from specnb.models.cached_model import CachedModel, prefill


@torch.inference_mode()
def test_hidden_states_are_those_of_the_model_and_move_with_the_cache() -> None:
    model = llama(dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 3], [3, 0, 1]])
    runner: Any = CachedModel(model, 5)
    runner.record_hidden_states((0, -1), batch=2)
    runner.run(tokens, torch.arange(3).expand(2, -1), keep=1)
    states = model(tokens, output_hidden_states=True).hidden_states
    expected = torch.cat([states[0], states[-1]], dim=-1)
    assert torch.allclose(runner.hidden_states[:, :3], expected, atol=1e-10)
    assert not runner.hidden_states[:, 3:].any()

    keys = runner.cache.ragged[0].keys.clone()
    runner.move(torch.tensor([[2, 1], [0, 2]]), torch.tensor([[1, 2], [3, 4]]))  # the first row swaps two slots
    assert torch.allclose(runner.hidden_states[0, [2, 1]], expected[0, 1:], atol=1e-10)
    assert torch.allclose(runner.hidden_states[1, 3:], expected[1, [0, 2]], atol=1e-10)
    assert torch.equal(runner.cache.ragged[0].keys[0, :, [2, 1]], keys[0, :, [1, 2]])
    assert torch.equal(runner.cache.ragged[0].keys[1, :, 3:], keys[1, :, [0, 2]])
    runner.clear()
    assert not runner.hidden_states.any()


def test_hidden_layers_have_a_range() -> None:
    with pytest.raises(ValueError, match=r"hidden layers \(3,\) are asked for, .* has the hidden states -3 to 2"):
        CachedModel(llama(), 4).record_hidden_states((3,), batch=1)


@torch.inference_mode()
def test_the_first_tokens_of_a_cache_may_be_those_of_some_rows_only() -> None:
    """As when the prompts before had one token, and a drafter was not asked until one of them was replaced."""
    model = llama(dtype=torch.float64)
    tokens, lengths = torch.tensor([[1, 0, 0], [3, 2, 1]]), torch.tensor([1, 3])
    runner = CachedModel(model, 4)
    prefill(runner, tokens, lengths, torch.tensor([1]))
    logits = runner.run(tokens.gather(1, lengths[:, None] - 1), lengths[:, None] - 1, keep=1)
    alone = [model(tokens[row : row + 1, :length]).logits[:, -1:] for row, length in enumerate(lengths.tolist())]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=0, atol=1e-12)
