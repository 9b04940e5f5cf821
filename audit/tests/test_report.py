"""Reports as text and JSON: compared with files, and what their verdicts rest on."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reports import report, require_as_in

from specnb_audit.numerics import Impossible, Rate
from specnb_audit.report import ControlComparison, Report

FOLDER = Path(__file__).parent / "reports"
"""What is said in each of `CASES`. With SPECNB_WRITE_REPORTS=1 these files are written instead of
compared; read their differences before you commit them."""
NEAR = Impossible(0, 1, 5, 0.25, 0.0)
CROSSED = np.array([1.0, 5.0, 7.0, 6.5])
BOTH = {"argmax": np.array([0.0, 1.0, 9.0, 8.0]), "sharper": np.array([0.0, 1.0, 2.0, 3.5])}


def control(**changes: Any) -> ControlComparison:
    """A comparison in which nothing was found."""
    return ControlComparison(report(detectable={}), [], [], 1.0, 1e-6)._replace(**changes)


CASES: dict[str, dict[str, Any]] = {
    "nothing found": {"detectable": {"sharper": math.nan, "argmax": 0.123, "flatter": 0.01}, "notes": ["one", "two"]},
    "suspicious from an e-value of 100 on": {"running": np.array([0.0, 2.0, 1.0, 1.0]), "detectable": {},
        "numerics": None},
    "rejected": {"found_after": 3, "running": CROSSED, "running_by_alternative": BOTH,
        "breakdown": {"token": [("3", 1, 2.0), ("7", 2, 6.0), ("8", 1, 1.0), ("9", 1, 4.0)]}},
    "violations": {"found_after": 1, "running": np.full(4, np.inf),
        "violations": {"impossible": 1000, "wrong-length": 1},
        "impossible": [NEAR._replace(position=at) for at in range(6)],
        "borderline": [NEAR._replace(sequence=1, position=at) for at in range(6)],
        "undeclared": [NEAR._replace(sequence=2, position=at) for at in range(6)], "impossible_summary": "so many",
        "breakdown": {"token": [("7", 2, 6.0)]}, "numerics": None},
    "rows that share noise": {"found_after": 1000, "running": CROSSED,
        "running_by_alternative": {"same-tokens": np.full(4, 9.0)}, "rows_alone": report(tokens=2000, sequences=1500),
        "numerics": None},
    "an e-value that the numerics explain": {"numerics_only": True, "running": CROSSED, "detectable": {}},
    "near ties of an unknown dtype": {"numerics_only": True, "undeclared": [NEAR], "detectable": {},
        "numerics": None},
    "near ties as in the control": {"numerics_only": True, "undeclared": [NEAR], "detectable": {}, "numerics": None,
        "control": control(control=report(impossible_summary="as many"))},
    "rejected, with a control": {"found_after": 3, "running": CROSSED, "running_by_alternative": BOTH,
        "numerics": None,
        "control": control(shared=["argmax", "shifted"], only_here=["impossible"], undecided=["sharper"])},
}  # fmt: skip


def made(changes: dict[str, Any]) -> Report:
    return report(**({} if changes.get("found_after") is None else {"detectable": {}}) | changes)


@pytest.mark.parametrize("case", CASES)
def test_reports_are_as_they_were(case: str) -> None:
    found = made(CASES[case])
    name = re.sub(r"[^a-z0-9]+", "-", case)
    require_as_in(FOLDER / f"{name}.txt", f"{found}\n")
    if case in WHOLE:
        require_as_in(FOLDER / f"{name}.json", json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n")


WHOLE = (
    "nothing found",
    "suspicious from an e-value of 100 on",
    "violations",
    "near ties as in the control",
    "rows that share noise",
)
"""The cases whose JSON is compared too."""


def test_a_kind_is_named_above_half_the_exponent_of_one_over_delta_and_three_at_most() -> None:
    """1/delta is 10^6, so an e-value above 10^3 is named."""
    values = {"argmax": 3.0, "sharper": 3.1, "flatter": 5.0, "shifted": 4.0, "redraw": 3.2}
    running = {name: np.full(4, value) for name, value in values.items()}
    words = str(report(found_after=1, running_by_alternative=running, detectable={}))
    assert re.findall("looks like (.*) [(]", words) == ["flatter", "shifted", "redraw"]
    few = {name: running[name] for name in ("argmax", "sharper")}
    assert re.findall("looks like (.*) [(]", str(report(found_after=1, running_by_alternative=few))) == ["sharper"]


def test_impossible_tokens_whose_number_is_suspicious_are_no_pass() -> None:
    assert report(rate=Rate(4, 2, 0.1, 3.0, None)).undecided
    assert not report(rate=Rate(4, 2, 0.1, 1.0, None)).undecided


def test_the_first_line_says_what_the_control_has_too_where_lesser_kinds_are_undecided() -> None:
    also = control(shared=["argmax"], undecided=["sharper"])
    assert report(found_after=1, running_by_alternative=BOTH, control=also).headline.endswith("control deviates alike")


def test_verdict_and_diagnosis_of_each_outcome() -> None:
    kinds = {"running_by_alternative": BOTH}
    rejected = report(found_after=1, **kinds)
    alone, broken = report(), report(found_after=1)
    outcomes = {
        "rejected": [rejected, report(found_after=0), report(found_after=1, numerics_only=True, rows_alone=broken)],
        "dependent": [report(found_after=1, numerics_only=only, rows_alone=alone) for only in (False, True)],
        "numerics": [report(numerics_only=True), report(numerics_only=True, rows_alone=alone)],
        "not rejected": [alone, report(rows_alone=alone)],
    }  # fmt: skip
    for verdict, found in outcomes.items():
        assert [one.verdict for one in found] == [verdict] * len(found)
        assert {one.rejected for one in found} == {verdict in ("rejected", "dependent")}
    assert (rejected.diagnosis, rejected.by_alternative) == ("argmax", {"argmax": 8.0, "sharper": 3.5})
    assert report(numerics_only=True, **kinds).diagnosis == "argmax"
    assert report(found_after=1, violations={"impossible": 1}, **kinds).diagnosis == "impossible"
    assert report(violations={"impossible": 1}, **kinds).diagnosis is None
