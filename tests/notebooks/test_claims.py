"""Verdicts come from what a claim needs and from checks that could have failed; parameters are
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

from notebooks.support import rules as rules_of
from notebooks.support.claims import Notebook, Verdict, notebook
from notebooks.support.findings import ELSEWHERE, all_claims, as_number
from specnb.statistics import Estimate


@pytest.fixture(autouse=True)
def _out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))


HOLDS: dict[str, Any] = {
    "notebook": "02", "source": "leviathan", "place": "3.1", "about": "mathematics", "statement": "it is so",
    "rule": "error < 1e-12 and right == cases", "control": "other > 0.1",
    "only_if": {"words": "the paper's pair", "inside": "pair < 1e-12", "outside": "rest < 1e-12"},
    "numbers": {"error": "of the enumerated mean"},
}  # fmt: skip
TRUE: dict[str, Any] = {"error": 1e-16, "right": 9, "cases": 9, "other": 0.2, "pair": 0.0, "rest": 1.0}
UNSURE = Estimate(0.0, -1.0, 1.0, 5)


@pytest.mark.parametrize(
    ("changes", "numbers", "verdict"),
    [
        ({}, {}, "holds"),
        ({}, {"error": np.float64(1e-16), "right": torch.tensor(9)}, "holds"),
        ({}, {"right": 8}, "conditional"),
        ({}, {"right": 8, "pair": 1.0}, "refuted"),
        ({}, {"right": 8, "rest": 0.0}, "refuted"),
        ({}, {"right": 8, "rest": UNSURE}, "refuted"),
        ({}, {"error": UNSURE}, "open"),
        ({}, {"error": UNSURE, "right": 8, "pair": 1.0}, "refuted"),
        ({}, {"other": 0.1}, "open"),
        ({}, {"other": UNSURE}, "open"),
        ({"about": "accelerators"}, {}, "open"),
        ({"about": "large models"}, {"right": 8}, "open"),
        ({"about": "accelerators", "measured": "one H200"}, {}, "holds"),
    ],
)
def test_a_verdict_follows_from_the_rule(changes: dict[str, str], numbers: dict[str, Any], verdict: str) -> None:
    given = {name: as_number(value, name) for name, value in (TRUE | numbers).items()}
    judged = Verdict("so", HOLDS | changes, given)
    assert judged.verdict == verdict
    assert ("only if: the paper's pair" in judged.evidence) == (verdict == "conditional")


def test_what_is_judged_is_printed_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nb = Notebook("02")
    nb.claims = {"so": HOLDS, "another": HOLDS}
    share = Estimate(2 / 3, 0.5, 0.75, 10)
    nb.claim("so", **TRUE, share=share, c=Fraction(1, 4), by="x", found=np.True_)
    nb.table("sweep", pd.DataFrame({"x": [1 / 3, 2.0]}))
    nb.close()
    assert capsys.readouterr().out.splitlines()[:5] == [
        "      HOLDS  so: it is so (leviathan, 3.1)",
        "        yes  error (rounding) < 1e-12",
        "        yes  right (9) == cases (9)",
        "    control  other (0.2) > 0.1",
        "             error: of the enumerated mean",
    ]
    results = tmp_path / "data" / "results"
    table = pd.read_csv(results / "02.claims.csv").set_index("id")
    assert table.evidence["so"] == "error (rounding) < 1e-12; right (9) == cases (9); control: other (0.2) > 0.1"
    assert tuple(table.loc["another", ["verdict", "evidence"]]) == ("open", "not checked by this run")
    stored = json.loads((results / "02.numbers.json").read_text())["so"]
    assert stored["share"] == {"value": 0.666667, "low": 0.5, "high": 0.75, "n": 10}
    assert (stored["right"], stored["c"], stored["by"], stored["found"]) == (9, 0.25, "x", True)
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
    nb.claims = {"so": HOLDS}
    with pytest.raises(KeyError, match="the rule of 'so' needs right, other, pair; error, cases, rest were given"):
        nb.claim("so", error=0.0, cases=3, rest=1.0)
    for number in (math.nan, math.inf, [1], None):
        with pytest.raises((ValueError, TypeError), match="so: error is"):
            nb.claim("so", **TRUE | {"error": number})
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


CLAIMS = all_claims()
FIELDS = {"source", "place", "about", "notebook", "statement", "rule", "control", "only_if", "numbers"}
SUBJECTS = {"mathematics", "algorithm", "this code", "accelerators", "large models"}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_registered_claim_has_a_rule_that_could_fail_and_that_the_source_itself_would_pass(name: str) -> None:
    claim = CLAIMS[name]
    assert set(claim) <= FIELDS | {"source_numbers", "measured"}
    assert claim["about"] in SUBJECTS
    condition = claim.get("only_if", {"inside": "", "outside": ""})
    rules = [claim["rule"], claim.get("control"), condition["inside"], condition["outside"]]
    asked = {word for rule in rules if rule for word in rules_of.names(rule)}
    assert asked == set(claim["numbers"]), "each number of a rule is explained, and no other"
    assert claim.get("control") or claim["about"] in ELSEWHERE, "nothing shows that the check could fail"
    assert "measured" not in claim or claim["about"] in ELSEWHERE
    if "source_numbers" in claim:
        assert rules_of.decide(claim["rule"], claim["source_numbers"]) is True
