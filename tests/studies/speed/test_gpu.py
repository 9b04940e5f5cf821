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
    if "over" in table:
        assert (table[table.way == table.over].speed_up == 1).all()
        assert (table[table.way.str.startswith("plain")].tokens_per_step == 1).all()
