"""Options that each work alone, in combinations: what the report says must be true of the tokens that were audited."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samplers import sample_row, tables

from specnb.audit import Aim, audit, explanations
from specnb.audit.report import Report

P, Q = tables()
END = 5


def chain(prefix: tuple[int, ...]) -> torch.Tensor:
    return P[prefix[-1]]


def rows(count: int, n: int, seed: int = 0) -> list[list[int]]:
    return [list(sample_row(P, Q, n, seed + row).tokens) for row in range(count)]


def run(given: list[list[int]], **settings: Any) -> Report:
    return audit(chain, given, prompts=[[0]] * len(given), progress=False, **settings)


def test_rows_that_a_stopped_audit_has_not_read_are_not_said_to_be_independent() -> None:
    report = run(rows(1, 60) * 8, stop=True)
    assert report.sequences == 2
    assert report.verdict == "dependent"
    assert report.rows_alone is not None
    assert report.rows_alone.sequences == 1


def test_shared_noise_is_found_in_rows_that_are_cut_at_their_end_token() -> None:
    """The evidence of a row has as many tokens as were audited, not as many as the row."""
    three_times = [row for row in rows(12, 60) for _ in range(3)]
    steps = [[2] * 30] * 36
    for settings in ({}, {"steps": steps}):
        report = run(three_times, eos=END, aim=Aim(ignore=("after-the-end",)), **settings)
        assert report.tokens < 36 * 60
        assert report.rows_alone is not None
        assert report.rows_alone.sequences == 12
        assert report.rows_alone.tokens * 3 == report.tokens


def test_it_is_said_how_many_rows_were_searched_for_shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "REMEMBERED", 400)
    report = run([row for row in rows(12, 60) for _ in range(3)])
    assert report.rows_alone is not None
    assert report.rows_alone.sequences == 3
    assert "note: shared noise was looked for in the first 7 sequences" in report.lines()
