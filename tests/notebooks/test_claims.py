"""Verdicts come from conditions in the cell and from checks that could have failed; parameters are
checked first."""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from notebooks.support.claims import Notebook, notebook
from notebooks.support.findings import ELSEWHERE, all_claims
from specnb.statistics import Estimate
from studies.files import notebooks

pytestmark = pytest.mark.usefixtures("own_results")


CLAIM = {"notebook": "02", "source": "leviathan", "place": "3.1", "about": "mathematics", "statement": "it is so",
         "only_if": "it is cold"}  # fmt: skip


def _judged(claims: dict[str, dict[str, Any]]) -> Notebook:
    nb = Notebook("02")
    nb.claims = claims
    return nb


@pytest.mark.parametrize(
    ("changes", "conditions", "verdict"),
    [
        ({}, {"holds": True}, "holds"),
        ({}, {"holds": np.True_, "control": torch.tensor(True)}, "holds"),
        ({}, {"holds": False}, "refuted"),
        ({}, {"holds": True, "control": False}, "open"),
        ({}, {"holds": False, "control": False, "only_if": (True, False)}, "open"),
        ({}, {"holds": False, "undecided": True}, "open"),
        ({}, {"holds": False, "only_if": (True, False)}, "conditional"),
        ({}, {"holds": False, "only_if": (True, True)}, "refuted"),
        ({}, {"holds": False, "only_if": (False, False)}, "refuted"),
        ({}, {"holds": True, "only_if": (True, False)}, "holds"),
        ({"about": "accelerators"}, {"holds": True}, "open"),
        ({"about": "large models"}, {"holds": False}, "open"),
        ({"about": "accelerators", "measured": "one H200"}, {"holds": True}, "holds"),
    ],
)
def test_a_verdict_follows_from_the_conditions(
    changes: dict[str, str], conditions: dict[str, Any], verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nb = _judged({"so": CLAIM | changes})
    nb.claim("so", **conditions)
    assert nb.judged["so"].verdict == verdict
    limit = ", only if it is cold" if verdict == "conditional" else ""
    assert capsys.readouterr().out == f"{verdict}: so (Leviathan 3.1){limit}\n"


def test_what_is_judged_is_stored_with_the_conditions_as_written(tmp_path: Path) -> None:
    nb = _judged({"so": CLAIM, "cold": CLAIM | {"source": "beyond", "place": "-"}, "another": CLAIM})
    error, right, other = 2e-16, 9, 0.25
    nb.claim("so", error < 1e-12 and right == 9,
             control=other > 0.1, error=error, right=right, other=Estimate(2 / 3, 0.5, 0.75, 10))  # fmt: skip
    nb.claim("cold", right < 9, only_if=(right == 9, right < 9), c=Fraction(1, 4), by="x", found=np.True_)
    nb.table("sweep", pd.DataFrame({"x": [1 / 3, 2.0]}))
    nb.close()
    results = tmp_path / "data" / "results"
    table = pd.read_csv(results / "02.claims.csv").set_index("id")
    conditions = "error < 1e-12 and right == 9; control: other > 0.1"
    assert table.evidence["so"] == f"{conditions}; error = 0; right = 9; other = 0.667 [0.5, 0.75]"
    conditions = "right < 9; only_if: (right == 9, right < 9); only if it is cold"
    assert table.evidence["cold"] == f"{conditions}; c = 0.25; by = x; found = True"
    assert tuple(table.loc["another", ["verdict", "evidence"]]) == ("open", "not checked by this run")
    stored = json.loads((results / "02.numbers.json").read_text())
    assert stored["so"] == {"error": 0, "right": 9, "other": {"value": 0.666667, "low": 0.5, "high": 0.75, "n": 10}}
    assert (results / "02_sweep.csv").read_text() == "x\n0.333333\n2\n"


def test_what_cannot_be_judged_is_refused() -> None:
    nb = _judged({"so": CLAIM})
    with pytest.raises(KeyError, match="not a claim of notebook 02; those are"):
        nb.claim("expected-tokens", True)
    for condition in (0.3, "yes"):
        with pytest.raises(TypeError, match="a condition of so is"):
            nb.claim("so", condition)
    for number in (math.nan, [1]):
        with pytest.raises((ValueError, TypeError), match="so: error is"):
            nb.claim("so", True, error=number)


def test_wrong_parameters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the cell that ran last, and values that are not allowed."""
    monkeypatch.setitem(globals(), "In", ["seed: int = 1\ngama: int = 3", "x = 1"])
    monkeypatch.setitem(globals(), "rows", 1)
    says = r"^there is no parameter gama \(did you mean gamma\?.*; rows = 1 is .*\. Change the cell"
    with pytest.raises(ValueError, match=says):
        notebook("03")


CLAIMS = all_claims()
FIELDS = {"source", "place", "about", "notebook", "statement", "only_if", "measured"}
SUBJECTS = {"mathematics", "algorithm", "this code", "accelerators", "large models"}


@pytest.mark.parametrize("name", CLAIMS)
def test_the_registry_has_statement_source_and_place(name: str) -> None:
    claim = CLAIMS[name]
    assert claim["about"] in SUBJECTS
    assert "measured" not in claim or claim["about"] in ELSEWHERE
    assert set(claim) <= FIELDS


def test_the_first_cell_of_a_notebook_quotes_what_this_run_found(capsys: pytest.CaptureFixture[str]) -> None:
    nb = Notebook("00")
    nb.quotes("What is speculative decoding")
    assert not capsys.readouterr().out
    nb.quotes("What is speculative decoding", "-1 tokens")
    assert capsys.readouterr().out == "With these parameters the first cell would say: -1 tokens\n"


@pytest.mark.parametrize("path", notebooks().values(), ids=notebooks())
def test_the_first_cell_of_a_committed_notebook_quotes_what_it_found(path: Path) -> None:
    assert '"With these parameters the first cell would say' not in path.read_text(encoding="utf-8")
