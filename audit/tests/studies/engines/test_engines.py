"""The table of engines belongs to the committed tokens, and no verdict lacks its control."""

from __future__ import annotations

import math

import pytest
import torch

from audit_studies.engines import engines, openvino_rule
from audit_studies.engines.onnxruntime_rule import kept_probs
from specnb.distributions import Sampling, standardise
from specnb_audit.token_file import read_tokens
from studies.files import read_table

TABLE = read_table("audit/results/engines").set_index("row")
ROWS = engines.rows()


def test_the_table_is_of_the_committed_tokens() -> None:
    assert set(TABLE.index) == set(engines.collected())
    for name, line in TABLE.iterrows():
        row = ROWS[str(name)]
        record = engines.record(row)
        assert engines.digest(row.file) == line.sha256 == record["sha256"]
        sequences = read_tokens(row.file)
        assert sum(len(one.tokens) for one in sequences) == line.tokens
        assert len(sequences) == record["completions"]
    assert sum(file.stat().st_size for file in engines.TOKENS.glob("*")) < 3_000_000


def test_every_rejected_row_has_a_control_that_was_not_or_has_its_fault() -> None:
    """ONNX Runtime GenAI is rejected without speculation too:
    `audit/data/findings/onnxruntime-genai-top-p.md`."""
    of_the_engine = {"onnxruntime-none-t07-p09", "onnxruntime-draft-t07-p09"}
    rejected = set(TABLE.index[TABLE.verdict == "rejected"])
    assert of_the_engine <= rejected
    for name in rejected - of_the_engine:
        assert TABLE.verdict[engines.control(ROWS[name])] != "rejected"
    mended = [row for row in ROWS.values() if row.engine != row.released]
    assert mended
    assert all(ROWS[str(engines.control(row))].engine == row.released for row in mended)
    assert all(ROWS[name].target == ROWS[str(engines.control(ROWS[name]))].target for name in rejected - of_the_engine)
    assert len(ROWS) == len({row.number for row in ROWS.values()})


# Rules of engines, as their sources have them


def test_certain_draft_tokens_that_the_target_excludes() -> None:
    """p and q are one-hot and differ: the rule emits a token that the target excludes at its
    position."""
    p, q = torch.eye(3)[[1, 2]], torch.eye(3)[[0]]
    assert openvino_rule.step(p, q, [0], False, torch.Generator().manual_seed(0)) == [0, 2]


def kept_by_the_loop(logits: list[float], temperature: float, top_p: float) -> int:
    """How many tokens are kept: groups of 16, 64, 256 tokens, in none of which the search stops at
    the last token."""
    vocab, largest = len(logits), max(logits)
    weights = sorted((math.exp((logit - largest) / temperature) for logit in logits), reverse=True)
    done, group, so_far = 0, min(16, vocab), 0.0
    while True:
        cutoff = group
        for place in range(done, group):
            so_far += weights[place]
            if so_far >= top_p * (so_far + (vocab - place - 1) * weights[place]):
                cutoff = place + 1
                break
        if cutoff < group or group == vocab:
            return cutoff
        done, group = group, min(4 * group, vocab)


@pytest.mark.parametrize("vocab", [5, 16, 17, 70, 300])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_as_many_tokens_are_kept_as_by_the_loop_and_never_fewer_than_top_p_keeps(vocab: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scales = torch.tensor([1.0, 4.0, 12.0], dtype=torch.float64)[:, None]
    logits = scales * torch.randn(3, vocab, generator=generator, dtype=torch.float64)
    p = kept_probs(logits, 0.7, top_p)
    assert (p > 0).sum(-1).tolist() == [kept_by_the_loop(row, 0.7, top_p) for row in logits.tolist()]
    assert ((p > 0) | (standardise(logits, Sampling(0.7, top_p=top_p)) == 0)).all()
    assert p.sum(-1).tolist() == pytest.approx([1, 1, 1])
