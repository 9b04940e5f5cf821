"""The command of the bench: which stages and pairs it measures, and what it records."""

import json
from pathlib import Path

import pytest

from studies.speed.bench import __main__ as bench


def test_what_was_measured_with_is_recorded_by_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))
    monkeypatch.setattr(bench, "STAGES", {"walltime": lambda *how: asked.append(how)})
    for machine, names in (("one", ["trained"]), ("another", ["synthetic", "trained"])):
        monkeypatch.setattr(bench, "machine", lambda machine=machine: machine)
        bench.run_stages(["walltime"], 7, names)
    assert asked == [(7, ["trained"]), (7, ["synthetic", "trained"])]
    recorded = json.loads((tmp_path / "data" / "results" / "bench.json").read_text())
    assert {machine: stages["walltime"]["parameters"]["pairs"] for machine, stages in recorded.items()} == {
        "one": ["trained"], "another": ["synthetic", "trained"],
    }  # fmt: skip
