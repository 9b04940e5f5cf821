"""Hierarchical drafts of the first layers, on a tiny model: all of its layers are the target
itself."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tiny import llama

from studies.real import early_exits


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_all_layers_are_accepted_and_cost_a_target_pass_each(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    target, tokenizer = llama(layers=2), SimpleNamespace(eos_token_id=None)
    monkeypatch.setattr(early_exits, "model_and_tokenizer", lambda dtype: (target, tokenizer))
    monkeypatch.setattr(early_exits, "prompts_of", lambda tokenizer, kind, count: [[row % 4] for row in range(count)])
    asked = {"layers": [1, 2], "temperatures": [temperature], "prompts": 8, "new_tokens": 6, "gamma": 2}
    first, every = early_exits.measure("chat", **asked)  # type: ignore[arg-type]
    assert np.isclose(every["alpha"], 1)
    assert (every["tokens_per_step"], every["c"]) == (3, 1)
    assert 0 < first["alpha"] < 1
    assert first["c"] < 1
    for line in (first, every):
        assert 1 <= line["passes"] <= 2
        assert np.isclose(line["alone"], line["tokens_per_step"] / (1 + 2 * line["c"]))
        assert np.isclose(line["nested"], line["tokens_per_step"] / (1 + line["passes"] * line["c"]))
