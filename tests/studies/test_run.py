"""Items, gathering and records of the experiments, with an experiment that takes no time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from specnb.notebook.findings import ROOT
from studies import run
from studies.run import NAMES, experiment, gather, main, parts, settings_of, stale


class Squares:
    """An experiment without work."""

    TABLE, SETTINGS, SMOKE = "squares", {"count": 3}, {"count": 2}

    @staticmethod
    def items(count: int) -> list[str]:
        return [f"{number}" for number in range(count)]

    @staticmethod
    def measure(item: str, count: int) -> pd.DataFrame:
        return pd.DataFrame({"square": [int(item) ** 2]})

    @staticmethod
    def gather(made: pd.DataFrame) -> pd.DataFrame:
        return made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))
    monkeypatch.setattr(run, "experiment", lambda name: Squares)
    monkeypatch.setattr(run, "code", lambda name: "0123")
    return tmp_path


def test_items_are_gathered_in_their_order_with_a_record(here: Path) -> None:
    for path in reversed(parts("detection")):
        main(["item", "detection", path.stem, str(path)])
    assert pd.read_csv(gather("detection")).square.tolist() == [0, 1, 4]
    record = json.loads((here / "data" / "results" / "squares.record.json").read_text())
    assert (record["experiment"], record["code"], record["settings"]) == ("detection", "0123", {"count": 3})


def test_parts_of_other_code_are_not_gathered(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in parts("detection", smoke=True):
        main(["item", "detection", path.stem, str(path), "--smoke"])
    monkeypatch.setattr(run, "code", lambda name: "4567")
    with pytest.raises(FileNotFoundError):
        gather("detection", smoke=True)


def test_a_table_of_other_code_is_stale(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in parts("detection"):
        main(["item", "detection", path.stem, str(path)])
    gather("detection")
    monkeypatch.setattr(run, "NAMES", ("detection",))
    assert stale(here) == []
    monkeypatch.setattr(run, "code", lambda name: "4567")
    assert stale(here) == ["squares.record.json: made by code 0123, now 4567; `make experiments ONLY=detection` makes "
                           "it again"]  # fmt: skip


def test_stale_tables_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for found, said in (([], "every table was made by the code that is here\n"), (["one", "two"], "one\ntwo\n")):
        monkeypatch.setattr(run, "stale", lambda found=found: found)
        main(["stale"])
        assert capsys.readouterr().out == said


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_items_that_are_file_names(name: str) -> None:
    for smoke in (False, True):
        items = experiment(name).items(**settings_of(name, smoke))
        assert len(set(items)) == len(items) > 0
        assert all(item.replace("-", "").isalnum() for item in items)


@pytest.mark.parametrize("name", NAMES)
def test_every_committed_table_has_a_record(name: str) -> None:
    table = ROOT / "data" / "results" / f"{experiment(name).TABLE}.csv"
    if table.exists():
        record = json.loads(table.with_suffix(".record.json").read_text(encoding="utf-8"))
        assert {"experiment", "code"} <= set(record)


def test_an_unknown_experiment_is_refused() -> None:
    with pytest.raises(ValueError, match="no experiment is called 'other'; there are audit_cost, beam_speeds, "):
        experiment("other")


def test_every_experiment_has_rules(tmp_path: Path) -> None:
    """A dry run of Snakemake has jobs of every experiment."""
    command = [str(Path(sys.executable).parent / "snakemake"), "-s", "experiments.smk", "--workflow-profile", "none"]
    ran = subprocess.run(
        [*command, "--cores", "1", "--dry-run", "--quiet", "host", "--config", "smoke=1"],
        cwd=ROOT, env={**os.environ, "SPECNB_OUT": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert all(f"{name}_item" in ran.stdout + ran.stderr for name in NAMES)
