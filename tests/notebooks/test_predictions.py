"""Every recorded prediction is pooled, in one direction, and judged by one rule."""

from __future__ import annotations

import pandas as pd
import pytest

from notebooks.support.predictions import SETTINGS, pooled, rivals, summary
from studies import study
from studies.files import ROOT


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return pooled()


def table_of(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "data" / "results" / f"{name}.csv")


def test_no_table_with_predictions_is_left_out() -> None:
    tables = {name: {*table_of(name)} for name in study.names() if not study.table_of(name).startswith("audit/")}
    predicted = {name for name, columns in tables.items() if "predicted" in columns}
    assert predicted | {"bench_regimes", "pair_speeds"} == {*SETTINGS}  # the first has its parts


def test_no_timed_speed_up_is_left_out() -> None:
    ways, of_pair, gpu = table_of("workloads").way, table_of("pair_speeds"), table_of("gpu")
    assert len(pooled("workloads")) == ways.str.match("copies|head").sum()
    assert len(pooled("pair_speeds")) == (of_pair.drafter != "none").sum()
    replayed = gpu[gpu.speed_up.notna() & gpu.way.str.match(r"(copies|head|model) \d+, graph")]
    assert {*pooled("gpu").setting} == {*replayed[SETTINGS["gpu"]].astype(str).agg(", ".join, axis=1)}


def test_every_row_but_plain_decoding_is_there_once(rows: pd.DataFrame) -> None:
    for name in SETTINGS:
        table = table_of(name)
        plain = table.filter(regex="^(gamma|nodes)$").eq(0).any(axis=1)
        if "way" in table:
            plain |= table.way.str.startswith("plain")
        given = table.filter(regex="^(measured|speed_up)$").notna().all(axis=1)
        given &= table["predicted"].notna() if "predicted" in table else True
        predicted = table[given & ~plain][SETTINGS[name]].astype(str).agg(", ".join, axis=1)
        assert {*predicted} <= {*rows.setting[rows.table == name]}, name
    assert not rows.duplicated(["table", "setting"]).any()
    assert rows.drop(columns="free").notna().all(axis=None)


def test_the_ratio_is_measured_over_predicted(rows: pd.DataFrame) -> None:
    pd.testing.assert_series_equal(rows.ratio * rows.predicted, rows.measured, check_names=False)
    regimes = table_of("bench_regimes")
    step = regimes.gamma * regimes.c + regimes.v
    found = rows[rows.table == "bench_regimes"].set_index(regimes.index)
    assert found.predicted.to_numpy() == pytest.approx((regimes.tokens_per_step / step).to_numpy())
    assert found.free.to_numpy() == pytest.approx((regimes.tokens_per_step / (step - regimes.v + 1)).to_numpy())


def test_rivals_know_nothing_of_the_row_that_they_predict(rows: pd.DataFrame) -> None:
    found, own = rivals(rows), rows.index[rows.table == "drafters"]
    one = rows.assign(measured=rows.measured.where(rows.index != own[0], 9.0))
    assert rivals(one).of_study[own[0]] == found.of_study[own[0]]
    table = rows.assign(ratio=rows.ratio.where(rows.table != "drafters", 9.0))
    assert (rivals(table).scaled[own] == found.scaled[own]).all()


def test_all_rows_are_summed_up_once(rows: pd.DataFrame) -> None:
    found = summary(rows).set_index("table")
    counts = ["rows", "within", "slower", "faster", "costed", "costed_within", "free_within", "within_one"]
    assert (found.drop(index="all")[counts].sum() == found.loc["all", counts]).all()
    assert (found[["within", "slower", "faster"]].sum(axis=1) == found.rows).all()


def test_every_table_was_made_by_committed_code() -> None:
    commits = {name: study.record_of(name)["commit"] for name in SETTINGS}
    assert not [name for name, commit in commits.items() if "dirty" in commit or commit == "unknown"]
