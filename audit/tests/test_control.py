"""What the engine does without speculation is not the speculation's fault."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from reports import report
from samplers import sample_row, tables

from specnb.distributions import Sampling, normalise
from specnb.rules import Rule, token_verification
from specnb_audit import Engine, audit
from specnb_audit.bugs.step import inverted_residual
from specnb_audit.control import compare_with_control, found_kinds, gap_p_value
from specnb_audit.numerics import Numerics
from specnb_audit.report import Report
from specnb_audit.run import Settings, audit_completions
from specnb_audit.teacher_forcing import Completion, Models

TABLE = tables()[0]


def chain(prefix: tuple[int, ...]) -> torch.Tensor:
    return TABLE[prefix[-1]]


def sequences(count: int, n: int, seed: int, rule: Rule = token_verification) -> list[Completion]:
    p, q = tables()
    return [Completion([0], list(sample_row(p, q, n, seed + row, rule).tokens)) for row in range(count)]


def run(given: list[Completion], control: list[Completion], **settings: Any) -> Report:
    tokens, prompts = [one.tokens for one in given], [one.prompt for one in given]
    return audit(chain, tokens, prompts=prompts, engine=Engine(control=control), progress=False, **settings)


def test_what_the_control_has_too_is_the_engines() -> None:
    exact = sequences(8, 50, 0)
    broken, again = (sequences(8, 50, seed, inverted_residual) for seed in (100, 200))
    speculation = run(broken, exact)
    assert speculation.rejected
    assert speculation.control is not None
    assert speculation.control.source == "speculation"
    assert "the speculation's, not in the control" in str(speculation)
    engine = run(broken, again)
    assert engine.control is not None
    assert engine.control.source in ("engine", "both")
    assert engine.control.shared
    assert engine.to_dict()["control"]["report"]["verdict"] == "rejected"
    exact_again = run(exact, exact[::-1])
    assert exact_again.control is not None
    assert exact_again.control.source is None


def test_a_control_that_is_too_short_decides_nothing() -> None:
    cold = normalise(TABLE**1.5)
    here, there = (
        [Completion([0], list(sample_row(cold, cold, 60, seed + row).tokens)) for row in range(count)]
        for seed, count in ((0, 12), (100, 1))
    )
    found = run(here, there).control
    assert found is not None
    assert (found.source, "sharper" in found.undecided) == (None, True)


def coin(prefix: tuple[int, ...]) -> list[float]:
    return [0.5, 0.5]


def completions(*tokens: list[int]) -> list[Completion]:
    return [Completion([], one) for one in tokens]


ONES = ("same-tokens", "noise-of-texts")
"""Kinds to ignore where all sequences are the same."""


def test_the_control_is_audited_with_the_same_bets_and_shown() -> None:
    said: list[str] = []
    exact = completions(*np.random.default_rng(0).integers(2, size=(2, 40)).tolist())
    ones = completions(*[[1] * 40] * 2)
    settings = Settings(progress=said.append, delta=0.01, ignore=ONES)
    models = Models(coin, draft=coin, suspected=lambda prefix: [0.25, 0.75])
    report = audit_completions(models, ones, settings, Engine(control=ones))
    assert report.control is not None
    # The same settings, and the same seed.
    assert report.control.control.by_alternative == report.by_alternative
    assert report.control.control.detectable == {}
    assert (report.control.source, report.control.p_value, report.control.delta) == ("engine", 1.0, 0.01)
    assert len(said) == 2
    assert all("rejected after" in line for line in said)
    quiet = audit_completions(models, exact, settings, Engine(control=exact))
    assert quiet.control is not None
    assert quiet.control.control.detectable == {}
    assert quiet.detectable
    alone = audit_completions(models, ones, settings)
    assert alone.control is None


def test_impossible_tokens_as_in_a_control_that_is_explained_are_excused() -> None:
    """The control's are within the numerics of bfloat16, and those of speculation are up to twice
    as large."""

    class Supposed(Engine):
        def numerics(self, *given: object) -> tuple[None, Any]:
            return None, lambda: Numerics(1, 0.2, 0.2, 0.2, 0.0)

    for gap, excused in ((0.6, True), (0.9, False)):

        def target(prefix: tuple[int, ...], gap: float = gap) -> list[float]:
            weights = np.exp([0.0, -0.35, -gap])
            return list(weights / weights.sum())

        control = [Completion([], [1] * 5 + [0] * 95)]
        given = [Completion([], [2] * 5 + [0] * 95)]
        models, settings = Models(target, Sampling(0)), Settings(progress=False)
        report = audit_completions(models, given, settings, Supposed(control=control))
        assert report.control is not None
        assert report.control.control.verdict == "numerics"
        assert (report.verdict, bool(report.violations)) == (("numerics", False) if excused else ("rejected", True))
        assert report.control.alike == excused
        kinds = (report.control.shared, report.control.only_here, report.control.undecided)
        # Where they are, nothing is left to attribute.
        assert kinds == ([], [], [] if excused else ["impossible"])
        assert len(report.undeclared) == 5 * excused
        also = [Completion([], [2] * 5 + [0] * 95)]
        worse = audit_completions(models, given, settings, Supposed(control=also))
        assert worse.verdict == "rejected"  # what the control has is no numerics either


# By hand


def by_hand(kinds: dict[str, list[float]], **changes: Any) -> Report:
    """A report with these decimal logarithms of e-values, on as many tokens."""
    running = {kind: np.array(values) for kind, values in kinds.items()}
    tokens = max(map(len, kinds.values()), default=4)
    return report(**{"tokens": tokens, "running_by_alternative": running, "delta": 0.01} | changes)


def test_kinds_are_found_by_an_e_value_of_their_number_over_delta() -> None:
    """1/delta is 100, so one kind needs 100 and each of two 200; the largest is first, after
    violations."""
    bar = math.log10(200)
    two = {"argmax": [0.0, bar, 0.0], "sharper": [bar - 1e-9, 0.0, 0.0]}
    assert found_kinds(by_hand(two)) == ["argmax"]
    assert found_kinds(by_hand({"argmax": [2.5], "sharper": [2.6]})) == ["sharper", "argmax"]
    assert found_kinds(by_hand({"argmax": [2.0]})) == ["argmax"]
    assert found_kinds(by_hand({"argmax": [1.99]})) == []
    assert found_kinds(by_hand({"argmax": [3.0]}, violations={"wrong-length": 1})) == ["wrong-length", "argmax"]
    assert found_kinds(by_hand({"argmax": []})) == []
    assert found_kinds(by_hand({})) == []


FOUND = {"argmax": [0.0, 2.0, 5.0, 9.0]}


@pytest.mark.parametrize(
    ("control", "where"),
    [
        ({"argmax": [0.0, 0.0, 0.0, 2.0]}, "shared"),
        ({"argmax": [0.0, 1.99, 0.0, 0.0]}, "only_here"),
        ({"argmax": [0.0, 0.0]}, "only_here"),  # two tokens were enough here
        ({"argmax": [0.0]}, "undecided"),
        ({}, "undecided"),
        # a sign of it, and too little to reject.
        ({"argmax": [2.0, 0.0], "sharper": [0.0, 0.0]}, "undecided"),
        ({"argmax": [1.99, 0.0], "sharper": [0.0, 0.0]}, "only_here"),
    ],
)
def test_where_a_kind_belongs(control: dict[str, list[float]], where: str) -> None:
    """In both; only here, where the control is as long as it took and shows no sign; or
    undecided."""
    found = compare_with_control(by_hand(FOUND), by_hand(control), [], [])
    for name in ("shared", "only_here", "undecided"):
        assert getattr(found, name) == (["argmax"] if name == where else [])
    assert (found.p_value, found.delta, found.alike) == (1.0, 0.01, True)


@pytest.mark.parametrize(("tokens", "where"), [(7, "only_here"), (6, "undecided")])
def test_a_violation_is_absent_from_a_control_as_long_as_it_took(tokens: int, where: str) -> None:
    here = by_hand({}, found_after=7, violations={"wrong-length": 1})
    found = compare_with_control(here, by_hand({}, tokens=tokens), [], [])
    assert getattr(found, where) == ["wrong-length"]
    unknown = by_hand({}, violations={"wrong-length": 1})
    assert compare_with_control(unknown, by_hand({}, tokens=0), [], []).only_here == ["wrong-length"]
    both = compare_with_control(here, by_hand({}, tokens=tokens, violations={"wrong-length": 2}), [], [])
    assert both.shared == ["wrong-length"]


NAN = (math.nan, math.nan)


@pytest.mark.parametrize(
    ("gaps", "control_gaps", "alike", "where"),
    [
        ([(0.1, 0.0)], [(0.05, 0.0)], True, "shared"),  # twice as large
        ([(0.1, 0.0)], [(0.04, 0.0)], False, "undecided"),
        ([(0.0, 0.1)], [(0.0, 0.05)], True, "shared"),
        ([(0.0, 0.1)], [(1.0, 0.04)], False, "undecided"),
        ([NAN], [(1.0, 1.0)], False, "undecided"),  # a gap that is not known may be of any size
        ([NAN], [NAN], True, "shared"),
        ([(0.0, 0.0)], [], False, "undecided"),  # none in the control
        ([(0.1, 0.0)] * 40, [(0.1, 0.0)], False, "only_here"),
        # 8 or more of 9 are here with probability 0.02, 3 tests.
        ([(0.1, 0.0)] * 8, [(0.1, 0.0)], True, "shared"),
        # 9 or more of 10 with probability 0.011.
        ([(0.1, 0.0)] * 9, [(0.1, 0.0)], False, "undecided"),
        ([], [], True, "shared"),
        ([], [(0.1, 0.1)], True, "shared"),
    ],
)
def test_where_impossible_tokens_belong(
    gaps: list[tuple[float, float]], control_gaps: list[tuple[float, float]], alike: bool, where: str
) -> None:
    here = by_hand({}, tokens=1000, violations={"impossible": 1})
    found = compare_with_control(here, by_hand({}, tokens=1000), gaps, control_gaps)
    assert found.alike == alike
    assert [name for name in ("shared", "only_here", "undecided") if getattr(found, name)] == [where]
    assert found.p_value == gap_p_value(gaps, 1000, control_gaps, 1000)


def test_the_p_value_of_exchangeable_gaps_is_one_or_more_in_a_thousand_as_often_as_it_says() -> None:
    generator, alarms = np.random.default_rng(0), 0
    for _ in range(300):
        here, there = ([(gap, 0.0) for gap in generator.exponential(size=generator.poisson(8))] for _ in range(2))
        alarms += gap_p_value(here, 1000, there, 1000) < 0.05
    assert alarms <= 30  # thirty-one or more have a chance of 1e-4 at a rate of 0.05
