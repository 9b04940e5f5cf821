"""Every recorded prediction is pooled, in one direction, and judged by one rule."""

from __future__ import annotations

import pandas as pd
import pytest

from notebooks.support.predictions import SETTINGS, WHOLE_CALLS, pooled, summary, within
from studies import study
from studies.files import ROOT


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return pooled()


def test_no_table_with_predictions_is_left_out() -> None:
    tables = list((ROOT / "data" / "results").glob("[a-z]*.csv"))
    predicted = {path.stem for path in tables if {"predicted", "measured"} <= {*pd.read_csv(path, nrows=1)}}
    assert predicted <= {*SETTINGS}
    assert {*WHOLE_CALLS} < {*SETTINGS}


def test_every_row_but_plain_decoding_is_there(rows: pd.DataFrame) -> None:
    for name in SETTINGS:
        table = pd.read_csv(ROOT / "data" / "results" / f"{name}.csv")
        plain = (table.get("gamma", table.get("nodes")) == 0).sum()
        untimed = table.filter(regex="^(measured|speed_up)$").isna().any(axis=1) & (table.get("gamma") != 0)
        assert (rows.table == name).sum() == len(table) - plain - untimed.sum()
    assert not rows.duplicated(["table", "setting"]).any()
    assert rows.notna().all()[["predicted", "measured", "measured_low", "measured_high", "ratio", "machine"]].all()


def test_the_ratio_is_measured_over_predicted(rows: pd.DataFrame) -> None:
    pd.testing.assert_series_equal(rows.ratio * rows.predicted, rows.measured, check_names=False)
    of_tokens = rows[rows.table.isin({"bench_regimes", *WHOLE_CALLS} - {"encoder_decoder_speeds"})]
    assert of_tokens.predicted.to_numpy() == pytest.approx((of_tokens.tokens_per_step / of_tokens.step_cost).to_numpy())


def test_the_summary_counts_every_row(rows: pd.DataFrame) -> None:
    told = summary(rows).set_index("table")
    assert told.rows["all"] == len(rows) == told.rows.drop("all").sum()
    assert told.within["all"] == within(rows.ratio).sum() == told.within.drop("all").sum()
    assert told.worst["all"] in set(rows.ratio)


def test_a_table_of_uncommitted_code_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for commit, clean in (("0123456789ab", True), ("0123456789ab-dirty, 1", False), ("unknown", False)):
        monkeypatch.setattr(study, "record_of", lambda name, by=commit: {"commit": by})
        assert study.is_clean("any") is clean
