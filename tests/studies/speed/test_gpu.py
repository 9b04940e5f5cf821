"""The study of a GPU, on the simulated one: every kind of item runs; plain decoding is as fast as
itself."""

from __future__ import annotations

import cuda_guard
import pandas as pd
import pytest
import torch
from simulated_cuda import simulated_cuda

from studies.speed import gpu


@pytest.mark.parametrize("item", gpu.STUDY.small_items)
def test_every_kind_of_item(item: str) -> None:
    if reason := cuda_guard.reason_to_skip():
        pytest.skip(reason)
    with simulated_cuda(), torch.inference_mode():
        table = pd.DataFrame(gpu.measure(item, **gpu.STUDY.small))
    assert set(table.machine) == {"simulated"}
    if item.startswith("audit"):
        assert set(table.verdict) == {"not rejected"}
    elif item.startswith("pass"):
        first = table[(table.model == "target") & (table.n == 1)]
        assert (first.cost == 1).all()
        assert set(zip(first.way, first.rows, strict=True)) == {(way, n) for way in ("eager", "graph") for n in (1, 16)}
    else:
        assert (table[table.way == table.over].speed_up == 1).all()
        assert (table.tokens == gpu.STUDY.small["prompts"] * gpu.STUDY.small["new_tokens"]).all()
        plain = table[table.way.str.startswith("plain")]
        assert (plain.tokens_per_step == 1).all()
        assert set(plain.way) == {"plain, eager", "plain, graph"}
        assert (table.tokens_per_step <= 9).all()
