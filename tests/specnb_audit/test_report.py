"""Reports as text, JSON and HTML."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from reports import report

from specnb_audit.alternatives import ALTERNATIVES
from specnb_audit.control import ControlComparison
from specnb_audit.numerics import Impossible
from specnb_audit.report import KINDS, NOT_COVERED, VIOLATIONS, Report


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


NEAR = Impossible(0, 1, 5, 0.25, 0.0)
AUDITED = "audit of 4 tokens in 1 sequence, false-alarm rate at most 1e-06"
TV = "total variation per token: a lower bound on it is estimated as 0.0100, 95% interval [0.0000, 0.0500]"
NUMERICS = (
    "numerics: the target's forward passes over one token differ from its pass over the whole sequence by up to 1e-05 "
    "in a logit and 1e-06 in total variation (3 positions)"
)
QUIET = """\
would have been found with probability 0.9 from this total variation per token on, each kind alone:
  0.0100  flatter: {flatter}
  0.1230  argmax: {argmax}
  none    sharper: {sharper}
  0.1230  any one of the kinds with a figure
  (mixed into every token alike; none: not at this length)
not covered: {not_covered}"""
CROSSED = np.array([1.0, 5.0, 7.0, 6.5])
BOTH = {"argmax": np.array([0.0, 1.0, 9.0, 8.0]), "sharper": np.array([0.0, 1.0, 2.0, 3.5])}
UNDECLARED = f"impossible by no more than those of bfloat16 would explain: {NEAR}"
NEAR_TIES = [
    AUDITED,
    "NUMERICS: the tokens deviate from the target, by no more than numerics explain",
    "  all impossible tokens lie within the noise of bfloat16: if the engine computes in bfloat16, give its",
    "  dtype (--engine-dtype bfloat16, or --dtype bfloat16 for the target too);",
    "  if it computes in float32, say so (--engine-dtype float32), and they reject exactness",
    "e-value: 10^-0.1, largest 10^0.3",
    UNDECLARED,
    TV,
]


def control(**changes: Any) -> ControlComparison:
    """A comparison in which nothing was found."""
    return ControlComparison(report(detectable={}), [], [], 1.0, 1e-6)._replace(**changes)


TEXTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing found": (
        {"detectable": {"sharper": math.nan, "argmax": 0.123, "flatter": 0.01}, "notes": ["one", "two"]},
        [
            AUDITED,
            "no deviation was found; the deviations that would have been detected are listed below",
            "e-value: 10^-0.1, largest 10^0.3",
            TV,
            NUMERICS,
            QUIET.format(**ALTERNATIVES, not_covered=NOT_COVERED),
            "note: one",
            "note: two",
        ],
    ),
    "no kind would have been found": (
        {"detectable": {"sharper": math.nan}, "numerics": None, "tokens": 1, "sequences": 2000},
        [
            "audit of 1 token in 2,000 sequences, false-alarm rate at most 1e-06",
            "no deviation was found; the deviations that would have been detected are listed below",
            "e-value: 10^-0.1, largest 10^0.3",
            TV,
            "would have been found with probability 0.9 from this total variation per token on, each kind alone:",
            f"  none    sharper: {ALTERNATIVES['sharper']}",
            "  (mixed into every token alike; none: not at this length)",
            f"not covered: {NOT_COVERED}",
        ],
    ),
    "suspicious from an e-value of 100 on": (
        {"running": np.array([0.0, 2.0, 1.0, 1.0]), "detectable": {}, "numerics": None},
        [
            AUDITED,
            "not rejected, and suspicious: an exact sampler reaches an e-value of 10^2.0 with probability at most "
            "0.01; audit more tokens",
            f"  most evidence is for sharper (e-value 10^0.5): {ALTERNATIVES['sharper']}",
            "e-value: 10^1.0, largest 10^2.0",
            TV,
        ],
    ),
    "rejected": (
        {
            "found_after": 3,
            "running": CROSSED,
            "running_by_alternative": BOTH,
            "breakdown": {"token": [("3", 1, 2.0), ("7", 2, 6.0), ("8", 1, 1.0), ("9", 1, 4.0)]},
        },
        [
            AUDITED,
            "REJECTED after 3 tokens: the tokens do not have the target's distribution",
            f"  looks like argmax (e-value 10^8.0): {ALTERNATIVES['argmax']}",
            f"  looks like sharper (e-value 10^3.5): {ALTERNATIVES['sharper']}",
            "  most evidence by token: 7 (10^6.0), 9 (10^4.0), 3 (10^2.0)",
            "e-value: 10^6.5, largest 10^7.0",
            TV,
            NUMERICS,
        ],
    ),
    "violations": (
        {
            "found_after": 1,
            "running": np.full(4, np.inf),
            "violations": {"impossible": 1000, "wrong-length": 1},
            "impossible": [NEAR._replace(position=at) for at in range(6)],
            "borderline": [NEAR._replace(sequence=1, position=at) for at in range(6)],
            "undeclared": [NEAR._replace(sequence=2, position=at) for at in range(6)],
            "impossible_summary": "so many",
            "breakdown": {"token": [("7", 2, 6.0)]},
            "numerics": None,
        },
        [
            f"{AUDITED}; so many",
            "REJECTED after 1 token: the tokens do not have the target's distribution",
            f"  impossible: {VIOLATIONS['impossible']} (1,000)",
            f"  wrong-length: {VIOLATIONS['wrong-length']} (1)",
            "e-value: infinite",
            *[f"impossible: {NEAR._replace(position=at)}" for at in range(5)],
            *[
                f"impossible by no more than the numerics explain: {NEAR._replace(sequence=1, position=at)}"
                for at in range(5)
            ],
            *[
                f"impossible by no more than those of bfloat16 would explain: {NEAR._replace(sequence=2, position=at)}"
                for at in range(5)
            ],
            TV,
        ],
    ),
    "violations without tokens": (
        {"found_after": 0, "tokens": 0, "violations": {"wrong-length": 1}, "numerics": None},
        [
            "audit of 0 tokens in 1 sequence, false-alarm rate at most 1e-06",
            "REJECTED after 0 tokens: the tokens do not have the target's distribution",
            f"  wrong-length: {VIOLATIONS['wrong-length']} (1)",
            "e-value: infinite",
            TV,
        ],
    ),
    "a violation beside evidence": (
        {"found_after": 1, "violations": {"wrong-length": 1}, "running_by_alternative": BOTH, "numerics": None},
        [
            AUDITED,
            "REJECTED after 1 token: the tokens do not have the target's distribution",
            f"  wrong-length: {VIOLATIONS['wrong-length']} (1)",
            f"  looks like argmax (e-value 10^8.0): {ALTERNATIVES['argmax']}",
            f"  looks like sharper (e-value 10^3.5): {ALTERNATIVES['sharper']}",
            "e-value: infinite",
            TV,
        ],
    ),
    "many kinds of many families": (
        {
            "found_after": 1,
            "running": np.full(4, 60.0),
            "running_by_alternative": {
                name: np.full(4, value)
                for name, value in (("argmax", 50.1), ("shifted", 60.0), ("redraw", 55.0), ("one-uniform", 50.0))
            },
            "numerics": None,
        },
        [
            AUDITED,
            "REJECTED after 1 token: the tokens do not have the target's distribution",
            f"  looks like shifted (e-value 10^60.0): {ALTERNATIVES['shifted']}",
            f"  looks like redraw (e-value 10^55.0): {ALTERNATIVES['redraw']}",
            f"  looks like argmax (e-value 10^50.1): {ALTERNATIVES['argmax']}",
            "  e-values above 10^50.0 for kinds of 3 families (temperature and filters, context, verification of "
            "drafts): probably broken in more than one way, and the kinds named need not be among them",
            "e-value: 10^60.0, largest 10^60.0",
            TV,
        ],
    ),
    "large e-values of two families": (
        {
            "found_after": 1,
            "running": np.full(4, 60.0),
            "running_by_alternative": {name: np.full(4, 60.0) for name in ("argmax", "sharper", "shifted")},
            "numerics": None,
        },
        [
            AUDITED,
            "REJECTED after 1 token: the tokens do not have the target's distribution",
            *[
                f"  looks like {name} (e-value 10^60.0): {ALTERNATIVES[name]}"
                for name in ("argmax", "sharper", "shifted")
            ],
            "e-value: 10^60.0, largest 10^60.0",
            TV,
        ],
    ),
    "rows that share noise": (
        {
            "found_after": 1000,
            "running": CROSSED,
            "running_by_alternative": {"same-tokens": np.full(4, 9.0)},
            "rows_alone": report(tokens=2000, sequences=1500),
            "numerics": None,
        },
        [
            AUDITED,
            "DEPENDENT after 1,000 tokens: rows share noise; those that share none do not deviate",
            f"  looks like same-tokens (e-value 10^9.0): {ALTERNATIVES['same-tokens']}",
            "  1,500 rows share no noise with an earlier one: in 2,000 tokens no deviation was found (largest e-value "
            "10^0.3; 1 of 2 kinds would not have been found)",
            "e-value: 10^6.5, largest 10^7.0",
            TV,
        ],
    ),
    "one row that shares no noise": (
        {
            "found_after": 1,
            "running": CROSSED,
            "running_by_alternative": {"same-tokens": np.full(4, 9.0)},
            "rows_alone": report(tokens=1, numerics_only=True, detectable={"argmax": 0.25, "sharper": 0.125}),
            "numerics": None,
        },
        [
            AUDITED,
            "DEPENDENT after 1 token: rows share noise; those that share none do not deviate",
            f"  looks like same-tokens (e-value 10^9.0): {ALTERNATIVES['same-tokens']}",
            "  1 row shares no noise with an earlier one: in 1 token deviations are explained by numerics (largest "
            "e-value 10^0.3; a deviation of any kind would have been found from a total variation of 0.25 on)",
            "e-value: 10^6.5, largest 10^7.0",
            TV,
        ],
    ),
    "rows that share noise, and a few tokens without": (
        {
            "found_after": 1,
            "running": CROSSED,
            "running_by_alternative": {"same-tokens": np.full(4, 9.0)},
            "rows_alone": report(tokens=9, sequences=2, detectable={"argmax": float("nan")}),
            "numerics": None,
        },
        [
            AUDITED,
            "DEPENDENT after 1 token: rows share noise; those that share none do not deviate",
            f"  looks like same-tokens (e-value 10^9.0): {ALTERNATIVES['same-tokens']}",
            "  2 rows share no noise with an earlier one: in 9 tokens no deviation was found (largest e-value 10^0.3; "
            "too few tokens to find any kind of deviation)",
            "e-value: 10^6.5, largest 10^7.0",
            TV,
        ],
    ),
    "an e-value that the numerics explain": (
        {"numerics_only": True, "running": CROSSED, "detectable": {}},
        [
            AUDITED,
            "NUMERICS: the tokens deviate from the target, by no more than numerics explain",
            "  an engine whose numerics are of the measured size is called rejected with probability at most 1e-06",
            "e-value: 10^6.5, largest 10^7.0",
            TV,
            NUMERICS,
        ],
    ),
    "near ties of an unknown dtype": (
        {"numerics_only": True, "undeclared": [NEAR], "detectable": {}, "numerics": None},
        [
            *NEAR_TIES,
        ],
    ),
    "near ties and evidence beside them": (
        {"numerics_only": True, "undeclared": [NEAR], "running": CROSSED, "detectable": {}, "numerics": None},
        [
            AUDITED,
            "NUMERICS: the tokens deviate from the target, by no more than numerics explain",
            "  all impossible tokens lie within the noise of bfloat16; the possible ones deviate too, which that",
            "  noise does not explain: compare the settings claimed with those of the engine",
            f"  most evidence is for sharper (e-value 10^0.5): {ALTERNATIVES['sharper']}",
            "e-value: 10^6.5, largest 10^7.0",
            UNDECLARED,
            TV,
        ],
    ),
    "near ties as in the control": (
        {
            "numerics_only": True,
            "undeclared": [NEAR],
            "detectable": {},
            "numerics": None,
            "control": control(control=report(impossible_summary="as many")),
        },
        [
            AUDITED,
            "NUMERICS: the tokens deviate from the target, by no more than numerics explain",
            "  the same engine without speculation has as many impossible tokens, and as large ones",
            "e-value: 10^-0.1, largest 10^0.3",
            f"impossible by no more than numerics as in the control would explain: {NEAR}",
            TV,
            "control (4 tokens without speculation): not rejected; as many",
        ],
    ),
    "near ties unlike the control's": (
        {
            "numerics_only": True,
            "undeclared": [NEAR],
            "detectable": {},
            "numerics": None,
            "control": control(control=report(tokens=1, impossible_summary="fewer"), alike=False, p_value=0.5),
        },
        [
            *NEAR_TIES,
            "control (1 token without speculation): not rejected; fewer",
            "  it is not decided whether impossible tokens are more or larger than the control's (p = 0.5)",
        ],
    ),
    "rejected, with a control": (
        {
            "found_after": 3,
            "running": CROSSED,
            "running_by_alternative": BOTH,
            "numerics": None,
            "control": control(shared=["argmax", "shifted"], only_here=["impossible"], undecided=["sharper"]),
        },
        [
            AUDITED,
            "REJECTED after 3 tokens: the tokens do not have the target's distribution",
            f"  looks like argmax (e-value 10^8.0): {ALTERNATIVES['argmax']}",
            f"  looks like sharper (e-value 10^3.5): {ALTERNATIVES['sharper']}",
            "e-value: 10^6.5, largest 10^7.0",
            TV,
            "control (4 tokens without speculation): not rejected",
            "  the engine's own, in the control too: argmax, shifted",
            "  the speculation's, not in the control: impossible",
            "  the engine's or the speculation's, which the control does not decide: sharper",
            f"  shifted: {ALTERNATIVES['shifted']}",
            f"  impossible: {VIOLATIONS['impossible']}",
        ],
    ),
    "numerics only, with a kind that the control shares": (
        {
            "numerics_only": True,
            "running": CROSSED,
            "running_by_alternative": BOTH,
            "numerics": None,
            "detectable": {},
            "control": control(shared=["argmax"]),
        },
        [
            AUDITED,
            "NUMERICS: the tokens deviate from the target, by no more than numerics explain",
            "  an engine whose numerics are of the measured size is called rejected with probability at most 1e-06",
            "e-value: 10^6.5, largest 10^7.0",
            TV,
            "control (4 tokens without speculation): not rejected",
            "  the engine's own, in the control too: argmax",
            f"  argmax: {ALTERNATIVES['argmax']}",
        ],
    ),
}


@pytest.mark.parametrize("situation", TEXTS)
def test_the_whole_text(situation: str) -> None:
    changes, lines = TEXTS[situation]
    found = report(**({} if changes.get("found_after") is None else {"detectable": {}}) | changes)
    assert str(found) == "\n".join(lines)


def test_a_kind_is_named_above_half_the_exponent_of_one_over_delta_and_three_at_most() -> None:
    """1/delta is 10^6, so an e-value above 10^3 is named."""
    values = {"argmax": 3.0, "sharper": 3.1, "flatter": 5.0, "shifted": 4.0, "redraw": 3.2}
    running = {name: np.full(4, value) for name, value in values.items()}
    words = str(report(found_after=1, running_by_alternative=running, detectable={}))
    assert re.findall("looks like (.*) [(]", words) == ["flatter", "shifted", "redraw"]
    few = {name: running[name] for name in ("argmax", "sharper")}
    assert re.findall("looks like (.*) [(]", str(report(found_after=1, running_by_alternative=few))) == ["sharper"]


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


def test_e_values_at_the_end_and_at_their_largest() -> None:
    found = report(running=CROSSED)
    assert (found.log10_e, found.log10_e_peak) == (6.5, 7.0)
    for count, value in ((1, (math.inf, math.inf)), (0, (6.5, 7.0))):
        violated = report(running=CROSSED, violations={"impossible": count})
        assert (violated.log10_e, violated.log10_e_peak) == value
    words = {value: str(report(running=np.full(4, value))) for value in (-math.inf, -0.04, 0.06, 12.34)}
    found_words = [re.findall("e-value: (.*), largest (.*)", text)[0] for text in words.values()]
    assert found_words == [("0",) * 2, ("10^0.0",) * 2, ("10^0.1",) * 2, ("10^12.3",) * 2]


def test_the_whole_report_in_json_types() -> None:
    tv = {"value": 0.01, "low": 0.0, "high": 0.05, "n": 4}
    numerics = {"positions": 3, "logit": 1e-5, "tv": 1e-6, "tv_mean": 1e-7, "nats": 0.0, "spread": 0.0}
    source = {"source": "the target's forward passes over one token differ from its pass over the whole sequence"}
    plain = {
        "verdict": "not rejected",
        "rejected": False,
        "diagnosis": None,
        "delta": 1e-6,
        "tokens": 4,
        "sequences": 1,
        "found_after": None,
        "interrupted": False,
        "log10_e": -0.1,
        "log10_e_peak": 0.3,
        "log10_e_by_alternative": {"sharper": 0.5, "argmax": 0.0},
        "violations": {},
        "impossible": [],
        "borderline": [],
        "undeclared": [],
        "impossible_summary": "",
        "breakdown": {},
        "tv_lower_bound": tv,
        "detectable": {"argmax": 0.123, "sharper": "nan"},
        "numerics": numerics | source,
        "control": None,
        "rows_alone": None,
        "notes": [],
    }
    assert report().to_dict() == plain
    near = [Impossible(0, 1, 5, 0.25, math.nan)]
    near_dict = {"sequence": 0, "position": 1, "token": 5, "logit": 0.25, "mass": "nan"}
    changes: dict[str, object] = {
        "found_after": 1,
        "interrupted": True,
        "running": np.full(4, -np.inf),
        "impossible": near,
        "borderline": near * 2,
        "undeclared": near * 3,
        "breakdown": {"token": [("7", 2, math.inf)]},
        "numerics": None,
        "notes": ["one"],
        "control": control(control=report(), shared=["a"], only_here=["b"], undecided=["c"], p_value=0.5),
        "rows_alone": report(),
    }
    assert report(**changes).to_dict() == plain | {
        "verdict": "dependent",
        "rejected": True,
        "diagnosis": "sharper",
        "found_after": 1,
        "interrupted": True,
        "log10_e": "-inf",
        "log10_e_peak": "-inf",
        "impossible": [near_dict],
        "borderline": [near_dict] * 2,
        "undeclared": [near_dict] * 3,
        "breakdown": {"token": [{"group": "7", "tokens": 2, "log10_e": "inf"}]},
        "numerics": None,
        "notes": ["one"],
        "control": {
            "source": "both",
            "shared": ["a"],
            "only_here": ["b"],
            "undecided": ["c"],
            "p_value": 0.5,
            "report": plain,
        },
        "rows_alone": plain,
    }


def test_the_whole_page() -> None:
    """Values of 1e-3 (the lowest height), 1, 100 (1/delta) and 10^2.6 (the top, if nothing is larger)."""
    given = report(
        delta=1e-2,
        running=np.array([-4.0, 0.0, 2.0, 2.6]),
        running_by_alternative={"argmax": np.full(4, 2.6)},
        numerics=None,
        detectable={"sharper": math.nan, "argmax": 0.123},
        notes=["a < b"],
    )
    one, bar = (160 - 150 * (value + 3) / 5.6 for value in (0, 2))
    chart = (
        '<svg viewBox="0 0 640 180" width="640" role="img" aria-label="e-value against tokens">'
        f'<line x1="40" x2="630" y1="{one:.1f}" y2="{one:.1f}" stroke="#bbb"/>'
        f'<text x="2" y="{one + 4:.1f}" font-size="11">10^0</text>'
        f'<line x1="40" x2="630" y1="{bar:.1f}" y2="{bar:.1f}" stroke="#b2182b"/>'
        f'<text x="2" y="{bar + 4:.1f}" font-size="11">10^2</text>'
        '<polyline fill="none" stroke="#2166ac" stroke-width="1.5" '
        f'points="40.0,160.0 187.5,{one:.1f} 335.0,{bar:.1f} 482.5,10.0"/>'
        '<text x="40" y="176" font-size="11">e-value after 1 to 4 tokens</text></svg>'
    )
    kinds = [html.escape(ALTERNATIVES[name]) for name in ("argmax", "sharper")]
    assert given.to_html() == (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>audit</title><body>'
        '<div style="font-family:sans-serif;max-width:60em"><h2 style="color:#2166ac">not rejected</h2>'
        f'{chart}<pre style="white-space:pre-wrap">'
        "audit of 4 tokens in 1 sequence, false-alarm rate at most 0.01\n"
        "not rejected, and suspicious: an exact sampler reaches an e-value of 10^2.6 with probability at most 0.003; "
        "audit more tokens; the deviations that would have been detected are listed below\n"
        f"  most evidence is for argmax (e-value 10^2.6): {kinds[0]}\n"
        f"e-value: 10^2.6, largest 10^2.6\n{TV}\nnote: a &lt; b</pre>"
        "<p>would have been found with probability 0.9 from this total variation per token on, each kind alone:</p>"
        f"<table><tr><td>0.1230</td><td>argmax</td><td>{kinds[0]}</td></tr>"
        f"<tr><td>none</td><td>sharper</td><td>{kinds[1]}</td></tr></table>"
        f"<p>not covered: {html.escape(NOT_COVERED)}</p></div></body></html>\n"
    )


def test_the_page_shows_the_verdict_in_its_colour_and_no_table_after_a_finding() -> None:
    alone = report()
    colours = {
        "#b2182b": [report(found_after=1, detectable={}), report(found_after=1, rows_alone=alone, detectable={})],
        "#b07c00": [report(numerics_only=True, detectable={})],
        "#2166ac": [report(detectable={})],
    }
    for colour, found in colours.items():
        for one in found:
            assert f'<h2 style="color:{colour}">{one.verdict}</h2>' in one.to_html()
            assert "<table>" not in one.to_html()
    assert "<svg" not in report(tokens=0).to_html()
    assert "<svg" in report(tokens=1).to_html()


@pytest.mark.parametrize(
    ("largest", "top", "said"), [(6.0, 7.8, ""), (12.0, 12.0, ""), (40.0, 18.0, ", drawn up to 10^18")]
)
def test_the_top_of_the_chart(largest: float, top: float, said: str) -> None:
    """1.3 times the exponent of 1/delta at least, and 3 times it at most."""
    page = report(running=np.array([0.0, largest, 0.0, 0.0])).to_html()
    points = re.search(r'points="([^"]*)"', page)
    assert points is not None
    heights = [float(point.split(",")[1]) for point in points[1].split()]
    wanted = [160 - 150 * (3 + value) / (top + 3) for value in (0, min(largest, top))]
    assert heights[:2] == pytest.approx(wanted, abs=0.051)
    assert f"e-value after 1 to 4 tokens{said}<" in page


def test_a_long_chart_has_600_points_and_the_last_token() -> None:
    page = report(tokens=2000, running=np.linspace(0, 1, 2000)).to_html()
    points = re.search(r'points="([^"]*)"', page)
    assert points is not None
    found = points[1].split()
    assert len(found) == 600
    assert found[0].startswith("40.0,")
    assert found[-1] == f"{40 + 590 * 1999 / 2000:.1f},{160 - 150 * 4 / 10.8:.1f}"
    assert "after 1 to 2,000 tokens" in page


def test_a_report_cannot_be_changed_and_shares_nothing_by_default() -> None:
    one, other = report(), report()
    with pytest.raises(FrozenInstanceError):
        one.tokens = 5  # type: ignore[misc]
    for name in ("violations", "impossible", "borderline", "undeclared", "breakdown", "notes"):
        assert not getattr(one, name)
        assert getattr(one, name) is not getattr(other, name)
    bare = {name: getattr(one, name) for name in (
        "delta", "tokens", "sequences", "found_after", "numerics_only", "running", "running_by_alternative", "tv"
    )}  # fmt: skip
    assert Report(**bare).detectable == {}
    assert (Report(**bare).numerics, one.control, one.rows_alone, one.interrupted) == (None, None, None, False)
