"""Converted models are compared with the originals before tokens are collected from them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from studies.engines import engines_collect, engines_converted
from studies.engines.engines import rows
from studies.engines.engines_converted import ENGINES, LIMIT, MODELS, PROMPTS, TABLE, check, differences, main

TRUE = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], dtype=torch.float64).log()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """An engine whose converted models give what the list holds last; its version is 1.2."""
    made = [TRUE + 3.0]  # logits are known up to a constant

    def answer(python: str, code: str) -> str:
        return "1.2" if "metadata" in code else json.dumps(made[-1].tolist())

    for module in (engines_collect, engines_converted):
        monkeypatch.setattr(module, "answer", answer)
    monkeypatch.setattr(engines_converted, "original_logits", lambda name, prompts: TRUE)
    return made


def test_each_engine_has_a_line_for_each_model(engine: list[torch.Tensor], tmp_path: Path) -> None:
    table = tmp_path / "converted.csv"
    for name in ("openvino", "mlx_lm"):
        check(name, "python", table)
    engine.append(TRUE + torch.tensor([0.0, 1e-4, 0.0]))
    check("openvino", "python", table)  # again: its lines are replaced
    found = pd.read_csv(table)
    assert found.engine.tolist() == ["mlx_lm"] * 2 + ["openvino"] * 2
    assert found.model.tolist() == [*MODELS] * 2
    assert found.version.eq(1.2).all()
    assert found.prompts.eq(PROMPTS).all()
    assert found.log_probability.tolist() == pytest.approx([0, 0, 7.5e-5, 7.5e-5], rel=0.05, abs=1e-12)
    assert found.total_variation.tolist() == pytest.approx([0, 0, 2.5e-5, 2.5e-5], rel=0.05, abs=1e-12)


def test_a_model_that_is_further_off_is_refused(engine: list[torch.Tensor], tmp_path: Path) -> None:
    engine.append(TRUE.roll(1, dims=1))
    with pytest.raises(ValueError, match=r"target as converted for openvino has a total variation of 0\.25 to"):
        check("openvino", "python", tmp_path / "converted.csv")
    assert not (tmp_path / "converted.csv").exists()
    engine.append(TRUE * torch.nan)
    with pytest.raises(ValueError, match="total variation of nan"):
        check("openvino", "python", tmp_path / "converted.csv")


def test_the_original_is_the_checkpoint() -> None:
    made = engines_converted.original_logits("draft", [[0, 5], [0, 199, 32]])
    assert made.shape == (2, 4096)
    assert made.dtype == torch.float64
    assert differences(made, made + 1.0)["total_variation"] < 1e-12


def test_the_command_takes_engines_that_convert(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["transformers", "python"])
    assert "invalid choice" in capsys.readouterr().err


def test_the_committed_table_is_of_every_engine_that_converts() -> None:
    """And each such engine has rows; the others read the checkpoint with transformers' names."""
    table = pd.read_csv(TABLE)
    assert sorted(set(table.engine)) == sorted(ENGINES)
    assert (table.groupby("engine").model.apply(list).map(tuple) == MODELS).all()
    assert (table.total_variation < LIMIT).all()
    assert {*ENGINES} <= {row.environment for row in rows().values()}
