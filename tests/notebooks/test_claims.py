"""Verdicts come from what a claim needs and from checks that could have failed; parameters are checked first."""

import ast
import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest
import sympy
import torch

from notebooks.support.claims import Answer, Notebook, notebook
from notebooks.support.findings import all_claims
from specnb.measure.statistics import Estimate
from studies.files import notebooks


@pytest.fixture(autouse=True)
def _out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))


@pytest.mark.parametrize(
    ("needs", "noticed", "only_if", "verdict"),
    [
        ([True, True], [True], None, "holds"),
        ([np.bool_(True), np.array(True), torch.tensor(True), sympy.true], [np.bool_(True)], None, "holds"),
        ([True, False], [True], None, "refuted"),
        ([True, None], [True], None, "open"),
        ([None, False], [], None, "refuted"),
        ([True], [True, False], None, "open"),
        ([False], [False], (True, False), "open"),
        ([True], [], (True, False), "holds"),
        ([False], [], (True, False), "conditional"),
        ([False], [], (True, True), "refuted"),
        ([False], [], (False, False), "refuted"),
        ([False], [], (True, None), "refuted"),
        ([None], [], (True, False), "open"),
    ],
)
def test_a_verdict_follows_from_its_checks(
    needs: list[Any], noticed: list[Any], only_if: tuple[Answer, Answer] | None, verdict: str
) -> None:
    with Notebook("02").claim("unbiasedness") as claim:
        for answer in needs:
            claim.needs(answer, "9 passes")
        for found in noticed:
            claim.could_fail(found, "15 would be too many")
        if only_if:
            claim.only_if(*only_if, "the paper's pair")
    assert claim.verdict == verdict
    assert ("Condition: the paper's pair" in claim.evidence) == (verdict == "conditional")


@pytest.mark.parametrize("other", [7, float("nan"), np.float64(1), [True], "yes", torch.tensor(1.0), np.array([True])])
def test_nothing_else_is_a_boolean(other: Any) -> None:
    claim = Notebook("02").claim("unbiasedness")
    for judge in (claim.needs, claim.could_fail, lambda value, words: claim.only_if(value, None, words)):
        with pytest.raises(TypeError, match=f"decided by {re.escape(repr(other))}; give True, False"):
            judge(other, "words")


def test_what_is_judged_is_printed_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nb = Notebook("03")
    with nb.claim("expected-tokens") as claim:
        claim.needs(True, "44 of\n  45")
        claim.could_fail(True, "a wrong formula is off by 0.1")
        claim.number(alpha=Estimate(2 / 3, 0.5, 0.75, 10), n=np.int64(3), found=np.True_, c=Fraction(1, 4), by="x")
    nb.table("sweep", pd.DataFrame({"x": [1 / 3, 2.0]}))
    nb.close()
    printed = capsys.readouterr().out
    assert printed.startswith("      HOLDS  expected-tokens: ")
    assert "\n        yes  44 of 45\n could fail  a wrong formula is off by 0.1\n" in printed
    results = tmp_path / "data" / "results"
    table = pd.read_csv(results / "02.claims.csv").set_index("id")
    assert table.evidence["expected-tokens"] == "44 of 45; a wrong formula is off by 0.1"
    assert set(table.drop("expected-tokens").verdict) == {"open"}
    stored = json.loads((results / "02.numbers.json").read_text())
    alpha = {"value": 0.666667, "low": 0.5, "high": 0.75, "n": 10}
    assert stored["expected-tokens"] == {"alpha": alpha, "n": 3, "found": True, "c": 0.25, "by": "x"}
    assert (results / "02_sweep.csv").read_text() == "x\n0.333333\n2\n"


def test_where_results_are_is_said_in_plain_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not to stderr, which Jupyter shows as if it were an error."""
    monkeypatch.delenv("SPECNB_OUT")
    monkeypatch.setattr("notebooks.support.claims.out", lambda: tmp_path)
    Notebook("00").close()
    assert capsys.readouterr() == (f"Results are in {tmp_path}; SPECNB_OUT names another folder.\n", "")


def test_what_cannot_be_judged_is_refused() -> None:
    nb = Notebook("02")
    with pytest.raises(KeyError, match="not a claim of notebook 02; those are"):
        nb.claim("expected-tokens")
    with pytest.raises(ValueError, match="nothing was needed"), nb.claim("unbiasedness"):
        pass
    with pytest.raises(ZeroDivisionError), nb.claim("unbiasedness"):
        raise ZeroDivisionError
    assert nb.judged["unbiasedness"].verdict == "open"
    for number in (math.nan, math.inf, [1], None):
        with pytest.raises((ValueError, TypeError), match="unbiasedness: x is"):
            nb.claim("unbiasedness").number(x=number)
    with pytest.raises(ValueError, match="its name may have letters"):
        nb.table("../../evil", pd.DataFrame())
    with pytest.raises(ValueError, match="no notebook '99'; there are 00, "):
        Notebook("99")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gamma": 0, "rows": 1}, r"^gamma = 0 is .*: int, draft .* from 1 to 12; rows = 1 is .*\. Change the cell"),
        ({"gamma": "x"}, "^gamma = 'x' is not allowed: int, draft"),
        ({"device": "gpu"}, "^device = 'gpu' is not allowed: str, where the models run, one of cpu, cuda. "),
        (
            {"In": ["seed: int = 1\ngama: int = 3", "x = 1"]},
            r"^there is no parameter gama \(did you mean gamma\?",
        ),
        (
            {"In": ["seed = 1", "# Parameters\nn_step = 9\n"], "rows": 1},
            "^there is no parameter n_step.*; rows = 1 ",
        ),
    ],
)
def test_wrong_parameters_are_named(given: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in given.items():
        monkeypatch.setitem(globals(), name, value)
    with pytest.raises(ValueError, match=says):
        notebook("03")


CLAIMS = all_claims().set_index("id")
CODE = {
    name.split("_")[0]: [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for name, path in notebooks().items()
}


THRESHOLD = re.compile(r"[<>]=? (\d[\d.]*(?:e[+-]?\d+)?)(%?)")


@pytest.mark.parametrize("name", CLAIMS.index[CLAIMS.notebook.isin(CODE)])
def test_the_thresholds_of_a_claim_are_in_the_cell_that_judges_it(name: str) -> None:
    """What `data/claims.csv` says in words, since before the measurement, is what the code compares with."""
    (cell,) = [cell for cell in CODE[CLAIMS.notebook[name]] if f'nb.claim("{name}")' in cell]
    numbers = [node.value for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Constant)]
    wanted = [float(number) / (100 if percent else 1) for number, percent in THRESHOLD.findall(CLAIMS.threshold[name])]
    assert set(wanted) <= {float(value) for value in numbers if isinstance(value, int | float)}
