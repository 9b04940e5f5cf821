"""The one way in which studies run, and what is committed of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from studies import study
from studies.files import ROOT
from studies.real import smollm2
from studies.study import Study, find, names, run, table_of

FIELDS = {"study", "commit", "date", "settings", "processor", "threads", "device", "system", "python", "packages"}


class Made:
    """A study of two items, which says what it was asked for and may be interrupted."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.broken = False

    def measure(self, item: str, size: int) -> Iterator[dict[str, Any]]:
        if self.broken:
            raise InterruptedError
        self.asked.append((item, size))
        yield {"item": item, "value": size / 3, "found": 7 if item == "a" else None}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    found = Made()
    kept = Study(found.measure, {"size": 2}, {"size": 1}, ("a", "b"), ("b",), lambda table: table.assign(more=1))
    monkeypatch.setattr(study, "find", lambda name: kept)
    monkeypatch.setattr(study, "commit", lambda: "c0ffee")
    return found


def test_a_table_and_its_record(made: Made, tmp_path: Path) -> None:
    path = run("it", out=tmp_path)
    assert path == tmp_path / "data" / "results" / "it.csv"
    assert path.read_text() == "item,value,found,more\na,0.666667,7,1\nb,0.666667,,1\n"
    record = json.loads(path.with_suffix(".record.json").read_text())
    assert set(record) == FIELDS
    assert (record["study"], record["commit"], record["settings"]) == ("it", "c0ffee", {"size": 2})


def test_an_interrupted_run_goes_on_and_another_commit_begins_anew(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("it", ["b"], out=tmp_path) is None
    made.broken = True
    with pytest.raises(InterruptedError):
        run("it", out=tmp_path)
    made.broken = False
    run("it", out=tmp_path)
    assert made.asked == [("b", 2), ("a", 2)]
    monkeypatch.setattr(study, "commit", lambda: "decaf")
    run("it", out=tmp_path)
    assert made.asked[2:] == [("a", 2), ("b", 2)]


@pytest.mark.parametrize("code", ["c0ffee-dirty", "unknown"])
def test_rows_of_code_that_is_not_known_are_measured_together(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(study, "commit", lambda: code)
    for _ in range(2):
        assert run("it", out=tmp_path) is not None
    assert run("it", ["a"], out=tmp_path) is None
    assert made.asked == [("a", 2), ("b", 2)] * 2 + [("a", 2)]


def test_a_small_run_is_apart_from_committed_tables(made: Made, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("it", small=True, out=tmp_path) == tmp_path / "build" / "small" / "it.csv"
    assert made.asked == [("b", 1)] * 2
    assert not (tmp_path / "data").exists()


def test_unknown_names_are_refused_with_those_that_there_are(made: Made) -> None:
    with pytest.raises(ValueError, match="it has no item c; it has a, b"):
        run("it", ["a", "c"])
    with pytest.raises(ValueError, match="no study is called 'other'; there are adaptive_lengths, "):
        find("other")


@pytest.mark.parametrize("name", names())
def test_every_study_has_a_table_with_a_record_of_its_settings(name: str) -> None:
    """A timed table can only be checked for saying on what and when it was measured."""
    own = find(name)
    assert set(own.settings) <= set(own.small)
    # a simulated device takes tiny models only.
    assert name == "gpu" or set(own.small_items) <= set(own.items)
    table = ROOT / table_of(name)
    record = json.loads(table.with_suffix(".record.json").read_text())
    assert set(record) >= FIELDS
    assert record["study"] == name
    assert all(record[field] for field in ("commit", "date", "processor", "threads"))
    assert record["packages"].keys() == {*study.PACKAGES}
    assert set(own.settings) == set(record["settings"])
    assert len(pd.read_csv(table)) >= 1


QUICK = ("adaptive_lengths", "block_against_token", "recommendation", "t5_passes")
ELSEWHERE = ("gpu", "encoder_decoder_speeds")  # on a simulated device, and with tiny models
OF_THE_REAL_MODEL = ("early_exits", "real_audit", "real_head", "real_passes", "real_steps", "step_profile", "workloads")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in names() if name not in ELSEWHERE and table_of(name).startswith("data/")
    ],
)  # fmt: skip
def test_a_small_run_has_the_columns_of_the_committed_table(name: str, tmp_path: Path) -> None:
    if name in OF_THE_REAL_MODEL and not smollm2.FILE.exists():
        pytest.skip("the real model is not here")
    path = run(name, small=True, out=tmp_path)
    assert path is not None
    assert set(pd.read_csv(ROOT / table_of(name))) <= set(pd.read_csv(path))


def test_every_record_belongs_to_a_study() -> None:
    files = [file for folder in ("data", "audit/data") for file in (ROOT / folder / "results").glob("*.record.json")]
    records = {file.relative_to(ROOT).as_posix().replace(".record.json", ".csv") for file in files}
    assert records == {table_of(name) for name in names()}
