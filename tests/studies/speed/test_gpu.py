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
def test_every_kind_of_item(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := cuda_guard.reason_to_skip():
        pytest.skip(reason)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(gpu, "LARGE", 2**10)
    with simulated_cuda(), torch.inference_mode():
        table = pd.DataFrame(gpu.measure(item, **gpu.STUDY.small))
    assert set(table.machine) == {"simulated"}
    if item.startswith("audit"):
        assert set(table.verdict) == {"not rejected"}
    elif item.startswith("pass"):
        first = table[(table.model == "target") & (table.n == 1)]
        assert (first.cost == 1).all()
        ways = {(way, n) for way in ("graph", "compiled") for n in (1, 16, 64)}
        assert set(zip(first.way, first.rows, strict=True)) == ways
        assert (first.reading > 0).all()
    elif item.startswith("part"):
        assert set(table.part) == {"draft", "target", "rest", "device, of a call"}
    else:
        assert (table[table.way == table.over].speed_up == 1).all()
        assert (table.tokens == gpu.STUDY.small["prompts"] * gpu.STUDY.small["new_tokens"]).all()
        plain = table[table.way.str.startswith("plain")]
        assert (plain.tokens_per_step == 1).all()
        modes = {"plain, eager", "plain, graph"} if item.startswith("call") else {"plain, compiled"}
        assert set(plain.way) == modes
        assert (table.tokens_per_step <= 9).all()
