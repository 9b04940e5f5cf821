"""The smallest part of every deterministic table of the audit's studies, computed again: equal to
the committed rows.

Not computed again: `false_alarms`, whose rows are sums over hundreds of audits. Evidence of
decoding in float32 has a tolerance: another processor rounds in other ways.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from audit_studies.engines import engines
from audit_studies.power import anytime, audit_comparison, bug_suite, engine_checks
from audit_studies.power.compared_samples import LENGTH, greedy_mismatch
from audit_studies.power.random_pair import random_pair
from specnb.loading import load_pair
from studies.files import read_table
from studies.study import find


def committed(name: str, **values: Any) -> pd.DataFrame:
    """The rows of a committed table that have these values."""
    table = read_table(f"audit/results/{name}")
    for column, value in values.items():
        table = table[table[column] == value]
    assert len(table), f"{name} has no such rows"
    return table.reset_index(drop=True)


def test_audit_comparison() -> None:
    """Greedy decoding with a bug of the cache, in float64."""
    name = "rejected-stays"
    differs = greedy_mismatch(audit_comparison.SUITE[name], random_pair(), 0, audit_comparison.GREEDY // LENGTH)
    found = [
        ("greedy", budget, float(not differs[at].any()))
        for budget in audit_comparison.BUDGETS
        for at in audit_comparison.pieces(budget, audit_comparison.PIECES, audit_comparison.GREEDY)
    ]
    rows = committed("audit_comparison", bug=name, test="greedy")
    pd.testing.assert_frame_equal(audit_comparison.counted(name, found), rows, check_dtype=False)


def test_anytime() -> None:
    made = anytime.measure("raw-q", **find("anytime").settings)
    pd.testing.assert_frame_equal(made, committed("anytime", bug="raw-q"), check_dtype=False)


def test_engine_checks() -> None:
    name = "raw-q"
    made = pd.DataFrame(engine_checks.measure(name, **find("engine_checks").settings))
    assert made.to_dict("list") == committed("engine_checks", bug=name).to_dict("list")


def test_bug_suite() -> None:
    """The first group of audits of a bug that the first tokens show."""
    name = "after-the-end"
    made = bug_suite.audited(bug_suite.BUG_SUITE[name], load_pair(), range(bug_suite.GROUP))
    rows = committed("bug_suite", bug=name)
    assert [one.kind for one in made] == rows.kind[: len(made)].tolist()
    assert [one.found_after for one in made] == pytest.approx(rows.found_after[: len(made)].tolist(), abs=2)


def test_engines() -> None:
    """The audit of committed tokens of another engine."""
    (made,) = engines.measure("openvino-none-t0", **find("engines").settings)
    (row,) = committed("engines", row="openvino-none-t0").to_dict("records")
    for name in ("engine", "version", "tokens", "verdict", "impossible", "sha256"):
        assert made[name] == row[name], name
    assert made["log10_e"] == pytest.approx(row["log10_e"], abs=1e-3)
