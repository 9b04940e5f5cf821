"""Reports as text, JSON and HTML."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from reports import report

from specnb.audit.alternatives import ALTERNATIVES
from specnb.audit.control import ControlComparison
from specnb.audit.impossible import Impossible
from specnb.audit.report import KINDS, VIOLATIONS


def test_without_a_finding_the_report_lists_what_is_detectable() -> None:
    quiet = report()
    assert quiet.verdict == "not rejected"
    assert quiet.diagnosis is None
    assert quiet.log10_e == -0.1
    assert quiet.log10_e_peak == 0.3
    assert list(quiet.by_alternative) == ["sharper", "argmax"]
    words = str(quiet)
    assert "passed" not in words
    lines = words.splitlines()
    assert f"  0.1230  argmax: {ALTERNATIVES['argmax']}" in lines
    assert f"  none    sharper: {ALTERNATIVES['sharper']}" in lines
    assert "  0.1230  any one of the kinds with a figure" in lines
    assert "noise without direction" in words
    assert "a lower bound on it is estimated as 0.0100, 95% interval [0.0000, 0.0500]" in words


def test_strong_evidence_short_of_a_rejection_asks_for_more_tokens() -> None:
    """One engine's wrong temperature gave an e-value of 10^5.9 at a false-alarm rate of 1e-6."""
    running = np.array([0.1, 5.9, 5.0])
    said = str(report(running=running, found_after=None))
    assert "suspicious: an exact sampler reaches an e-value of 10^5.9 with probability at most 1e-06" in said
    assert "no deviation was found" not in said
    assert f"most evidence is for sharper (e-value 10^0.5): {ALTERNATIVES['sharper']}" in said
    assert "no deviation was found" in str(report(running=running.clip(max=1.9), found_after=None))


def test_a_rejection_names_the_alternative_and_its_breakdown() -> None:
    found = report(
        found_after=3,
        running=np.array([1.0, 5.0, 7.0, 8.0]),
        running_by_alternative={"argmax": np.full(4, 9.0), "sharper": np.zeros(4)},
        breakdown={"token": [("7", 2, 6.0), ("3", 1, 2.0)]},
        detectable={},
    )
    assert found.verdict == "rejected"
    assert found.diagnosis == "argmax"
    words = str(found)
    assert ALTERNATIVES["argmax"] in words
    assert ALTERNATIVES["sharper"] not in words
    assert "after 3 tokens" in words
    assert "most evidence by token: 7 (10^6.0), 3 (10^2.0)" in words


def test_every_kind_that_a_report_names_is_explained_in_it() -> None:
    """Those of the diagnosis, of the control, and of what would have been found."""
    control = ControlComparison(report(), ["argmax", "shifted"], ["impossible"], 1.0, 1e-6)
    found = report(
        found_after=3,
        running_by_alternative={"argmax": np.full(4, 9.0), "sharper": np.zeros(4)},
        control=control,
        detectable={},
    )
    words = str(found)
    for kind in ("argmax", "shifted", "impossible"):
        assert words.count(f"{kind}: {KINDS[kind]}") == 1 or words.count(KINDS[kind]) == 1, kind
    quiet = str(report(detectable=dict.fromkeys(KINDS, 0.1)))
    assert all(f"{kind}: {meaning}" in quiet for kind, meaning in KINDS.items())


def test_violations_come_first() -> None:
    found = report(
        found_after=2,
        running=np.array([0.0, np.inf, np.inf, np.inf]),
        violations={"impossible": 1},
        impossible=[Impossible(0, 1, 5, 0.25, float("nan"))],
    )
    assert found.diagnosis == "impossible"
    assert VIOLATIONS["impossible"] in str(found)
    assert "e-value: infinite" in str(found)
    assert "token 5 (its logit is 0.25 below the smallest one kept)" in str(found)
    assert str(Impossible(0, 1, 5, float("nan"), float("nan"))) == "sequence 0, position 1: token 5"
    assert "likelier tokens have 0.2 more than top-p" in str(Impossible(0, 1, 5, 0.0, 0.2))


@pytest.mark.parametrize("infinite", [False, True])
def test_json_has_no_infinities(infinite: bool) -> None:
    running = np.array([0.0, np.inf if infinite else 1.0])
    read = json.loads(json.dumps(report(tokens=2, running=running).to_dict(), allow_nan=False))
    assert read["detectable"]["sharper"] == "nan"
    assert read["log10_e"] == ("inf" if infinite else 1.0)
    assert read["tv_lower_bound"] == {"value": 0.01, "low": 0.0, "high": 0.05, "n": 4}


@pytest.mark.parametrize("changes", [{}, {"found_after": 1, "running": np.full(4, np.inf)}, {"numerics_only": True}])
def test_the_page_stands_alone(changes: dict[str, object]) -> None:
    page = report(**changes).to_html()
    assert page.startswith("<!doctype html>")
    assert report(**changes).verdict in page
    assert "<polyline" in page
    assert "nan,nan" not in page
    assert "://" not in page
    assert "<script" not in page
    assert report(notes=["<b>"], **changes).to_html().count("<b>") == 0


def test_the_chart_has_the_e_value_at_the_heights_of_its_lines() -> None:
    """Values of 1, 1/delta and below 1/1000; a value above three times the exponent of 1/delta is cut off."""
    page = report(delta=1e-2, tokens=5, running=np.array([-9.0, -3.0, 0.0, 2.0, 100.0])).to_html()
    one, bar = (float(at) for at in re.findall(r'<line [^>]*y1="([^"]*)"', page))
    points = re.search(r'points="([^"]*)"', page)
    assert points is not None
    x, y = zip(*(map(float, point.split(",")) for point in points[1].split()), strict=True)
    assert sorted(x) == list(x)
    assert y[0] == y[1] == 160  # the lowest height: what is below it is drawn at it
    assert y[2:] == (one, bar, 10)
    assert (one, bar) == pytest.approx((160 - 150 * 3 / 9, 160 - 150 * 5 / 9), abs=0.05)  # of -3 to 6
    assert "drawn up to 10^6" in page
