"""The table of engines belongs to the committed tokens, and no verdict is without its control."""

import json

import pandas as pd
import pytest
import torch

from specnb.notebook.findings import ROOT
from specnb_audit.claimed import claimed_probs
from specnb_audit.token_file import read_tokens
from studies.engines import engines, openvino_rule

TABLE = pd.read_csv(ROOT / "data" / "results" / "engines.csv").set_index("row")
ROWS = engines.rows()


@pytest.mark.parametrize("name", TABLE.index)
def test_the_table_is_of_the_committed_tokens(name: str) -> None:
    row = ROWS[name]
    record = json.loads(row.file.with_name(f"{name}.json").read_text())
    assert engines.digest(row.file) == TABLE.sha256[name] == record["sha256"]
    sequences = read_tokens(row.file)
    assert sum(len(one.tokens) for one in sequences) == TABLE.tokens[name]
    assert len(sequences) == record["completions"]


def test_every_rejected_row_has_a_control_that_was_not_or_has_its_fault() -> None:
    """The top-p of ONNX Runtime GenAI is wrong without speculation too (`data/findings/onnxruntime-genai-top-p.md`)."""
    of_the_engine = {"onnxruntime-none-t07-p09", "onnxruntime-draft-t07-p09"}
    rejected = set(TABLE.index[TABLE.verdict == "rejected"])
    assert of_the_engine <= rejected
    for name in rejected - of_the_engine:
        assert TABLE.verdict[engines.control(ROWS[name])] != "rejected"


def test_a_mended_engine_has_the_control_of_the_release() -> None:
    mended = [row for row in ROWS.values() if row.engine != row.environment]
    assert mended
    assert all(ROWS[str(engines.control(row))].engine == row.environment for row in mended)


def test_the_order_of_filters_is_the_engines_where_it_matters() -> None:
    """Temperature 0.7 and top-p 0.9: llama.cpp has the temperature last, so that top-p keeps more tokens."""
    logits = torch.tensor([3.0, 2.0, 1.5])
    first, last = (ROWS[name].sampling for name in ("openvino-none-t07-p09", "llamacpp-none-t07-p09"))
    assert (claimed_probs(logits, first) > 0).tolist() == [True, True, False]
    assert (claimed_probs(logits, last) > 0).tolist() == [True, True, True]
    assert ROWS["llamacpp-none-t07-k40"].sampling.top_k == 40


def test_rows_have_seeds_of_their_own_and_names_of_their_own() -> None:
    assert len(ROWS) == len({row.number for row in ROWS.values()})
    assert all(row.engine.replace("_", "") in row.name or row.engine == "mlx_lm" for row in ROWS.values())


def test_all_token_files_together_are_small() -> None:
    assert sum(file.stat().st_size for file in engines.TOKENS.glob("*")) < 3_000_000


@pytest.mark.parametrize("kind", openvino_rule.KINDS)
def test_certain_draft_tokens_that_the_target_excludes(kind: str) -> None:
    """p and q are one-hot and differ: all three variants emit a token that the target excludes at its position."""
    p, q = torch.eye(3)[[1, 2]], torch.eye(3)[[0]]
    tokens = openvino_rule.step(kind, p, q, [0], False, torch.Generator().manual_seed(0))
    assert tokens == {"late replacement alone": [2]}.get(kind, [0, 2])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="as released"):
        openvino_rule.step("right", torch.eye(2), torch.eye(2), [0], False, torch.Generator())
