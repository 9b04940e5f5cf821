"""Grouped-query attention without repeated keys and values: the numbers of transformers, and what
is left to it."""

from typing import Any

import pytest
import torch
from tiny import llama
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specnb.cache import CachedModel
from specnb.fast import NAME, grouped, grouped_attention


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_side_by_side_give_the_numbers_of_repeated_keys(n: int, rows: int) -> None:
    module = llama(dtype=torch.float64).model.layers[0].self_attn
    module.num_key_value_groups = 3
    query, key, value = (torch.randn(rows, heads, m, 8).double() for heads, m in ((6, n), (2, 9), (2, 9)))
    mask = torch.randn(rows, 1, n, 9).double()
    for scaling in (None, 0.3):
        expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
        found, _ = grouped_attention(module, query, key, value, mask, scaling=scaling)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@torch.inference_mode()
def test_the_loop_uses_it_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, used = llama(), list[str]()
    kept = grouped_attention

    def counted(*given: Any, **more: Any) -> Any:
        used.append(model.config._attn_implementation)
        return kept(*given, **more)

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, counted)
    CachedModel(model, 8).run(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), keep=1)
    assert used == [NAME] * 2  # layers
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_only_the_attention_of_transformers_by_that_name_is_replaced(own: str) -> None:
    config = llama().config
    config._attn_implementation = own
    with grouped(config):
        assert config._attn_implementation == (NAME if own == "sdpa" else own)
    with pytest.raises(KeyError), grouped(config):
        raise KeyError
    assert config._attn_implementation == own
