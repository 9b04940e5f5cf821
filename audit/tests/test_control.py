"""What the engine does without speculation is not the speculation's fault."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from reports import report
from samplers import sample_row, tables

from audit_studies.bugs.step import inverted_residual
from specnb.distributions import Sampling
from specnb.rules import Rule, token_verification
from specnb_audit import Auditor, Engine, audit
from specnb_audit.control import Side, compare_with_control, more_p_value, side_of
from specnb_audit.numerics import Numerics
from specnb_audit.report import Report
from specnb_audit.run import Settings, audit_completions
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows

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


NONE = Side(4, [])
FOUND = {"argmax": [0.0, 2.0, 5.0, 9.0]}


@pytest.mark.parametrize(
    ("control", "where"),
    [
        ({"argmax": [0.0, 0.0, 0.0, 2.0]}, "shared"),
        ({"argmax": [0.0, 0.0]}, "only_here"),  # two tokens were enough here
        ({"argmax": [0.0]}, "undecided"),
        # a sign of it, and too little to reject.
        ({"argmax": [2.0, 0.0], "sharper": [0.0, 0.0]}, "undecided"),
        ({"argmax": [1.99, 0.0], "sharper": [0.0, 0.0]}, "only_here"),
    ],
)
def test_where_a_kind_belongs(control: dict[str, list[float]], where: str) -> None:
    """In both; only here, where the control is as long as it took and shows no sign; or
    undecided."""
    found = compare_with_control(by_hand(FOUND), by_hand(control), NONE, NONE)
    for name in ("shared", "only_here", "undecided"):
        assert getattr(found, name) == (["argmax"] if name == where else [])
    assert (found.p_value, found.delta, found.alike) == (1.0, 0.01, True)


NAN = (math.nan, math.nan)


@pytest.mark.parametrize(
    ("gaps", "control_gaps", "alike", "where"),
    [
        ([(0.1, 0.0)], [(0.05, 0.0)], True, "shared"),  # twice as large
        ([(0.1, 0.0)], [(0.04, 0.0)], False, "undecided"),
        ([NAN], [(1.0, 1.0)], False, "undecided"),  # a gap that is not known may be of any size
        ([(0.0, 0.0)], [], False, "undecided"),  # none in the control
        ([(0.1, 0.0)] * 40, [(0.1, 0.0)], False, "only_here"),
        # If they are equally many, 8 or more of 9 are here with probability 0.02, in one of 4 tests.
        ([(0.1, 0.0)] * 8, [(0.1, 0.0)], True, "shared"),
        # 9 or more of 10 with probability 0.011: not alike; nor more than twice as many.
        ([(0.1, 0.0)] * 9, [(0.1, 0.0)], False, "undecided"),
        # 19 or more of 20 with probability 0.0033, if they may be twice as many.
        ([(0.1, 0.0)] * 19, [(0.1, 0.0)], False, "undecided"),
        ([(0.1, 0.0)] * 21, [(0.1, 0.0)], False, "only_here"),
        ([], [(0.1, 0.1)], True, "shared"),
    ],
)
def test_where_impossible_tokens_belong(
    gaps: list[tuple[float, float]], control_gaps: list[tuple[float, float]], alike: bool, where: str
) -> None:
    here = by_hand({}, tokens=1000, violations={"impossible": 1})
    sides = Side(1000, gaps), Side(1000, control_gaps)
    found = compare_with_control(here, by_hand({}, tokens=1000), *sides)
    assert found.alike == alike
    assert [name for name in ("shared", "only_here", "undecided") if getattr(found, name)] == [where]
    assert found.p_value == more_p_value(*sides)


@pytest.mark.parametrize("factor", [1, 2])
def test_the_p_value_is_one_or_more_in_a_thousand_as_often_as_it_says(factor: int) -> None:
    """Also where other kernels make impossible tokens twice as many and twice as large, half of them
    the draft's."""
    generator, alarms = np.random.default_rng(0), 0
    for _ in range(300):
        here, there = (
            Side(1000, [(gap * times, 0.0) for gap in generator.exponential(size=generator.poisson(8 * times))])
            for times in (factor, 1)
        )
        here, there = (one._replace(drafted=generator.binomial(len(one.gaps), 0.5)) for one in (here, there))
        alarms += more_p_value(here, there, factor) < 0.05
    assert alarms <= 30  # thirty-one or more have a chance of 1e-4 at a rate of 0.05


def test_a_prefix_counts_once() -> None:
    """Greedy decoding of one prompt again errs again, and is no further evidence."""

    def near(prefix: tuple[int, ...]) -> list[float]:
        return [0.6, 0.4] if len(prefix) < 3 else [0.4, 0.6]

    given = [Completion([0], tokens) for tokens in ([1, 0, 1], [1, 0, 1], [1, 1], [0, 0])]
    auditor = Auditor()
    for row in teacher_forced_rows(Models(near, Sampling(0), draft=lambda prefix: [0.1, 0.9]), given):
        auditor.add(row)
    side = side_of(auditor, given)
    assert len(auditor.impossible.gaps) == 4
    # The prefixes are 0; 0, 1; 0, 1, 0; and 0, 0. Only after the first is a token impossible.
    assert (side.n, len(side.gaps), side.drafted) == (4, 1, 1)


def greedy(relaxed: bool, noise: float, seed: int) -> list[Completion]:
    """Greedy tokens of logits with noise; `relaxed` keeps the draft's where it is nearly as likely."""
    random, made = np.random.default_rng(seed), list[Completion]()
    for start in range(40):
        text = [start % len(TABLE)]
        for at in range(25):
            logits = (TABLE[text[-1]].log() + AT[at]).numpy()
            best = int((logits + noise * random.standard_normal(len(logits))).argmax())
            drafted = int(drafts(tuple([0] * at + text[-1:])).argmax())
            text.append(drafted if relaxed and logits[drafted] > logits.max() - 0.25 else best)
        made.append(Completion([start % len(TABLE)], text[1:]))
    return made


AT = torch.from_numpy(np.random.default_rng(8).normal(0, 0.5, (26, len(TABLE))))
OTHER = torch.from_numpy(np.random.default_rng(9).normal(0, 0.3, (26, *TABLE.shape)))


def moved(prefix: tuple[int, ...]) -> torch.Tensor:
    return torch.softmax(TABLE[prefix[-1]].log() + AT[len(prefix) - 1], dim=-1)


def drafts(prefix: tuple[int, ...]) -> torch.Tensor:
    return torch.softmax(moved(prefix).log() + OTHER[len(prefix) - 1, prefix[-1]], dim=-1)


class Coarse(Engine):
    """An engine of a known dtype, whose noise is taken to be larger than it is."""

    def numerics(self, *given: object) -> tuple[Numerics, None]:
        return Numerics(1, 0.5, 0.2, 0.2, 0.0, spread=0.2), None


@pytest.mark.parametrize("relaxed", [True, False])
def test_impossible_tokens_that_are_mostly_the_drafts_are_no_pass(relaxed: bool) -> None:
    given = greedy(relaxed, 0.05, 0)[:10]
    tokens, prompts = [one.tokens for one in given], [one.prompt for one in given]
    settings: dict[str, Any] = {"sampling": Sampling(0), "draft": drafts, "progress": False}
    report = audit(moved, tokens, prompts=prompts, engine=Coarse(), **settings)
    assert report.verdict == "not rejected"
    assert ("the draft's most probable token" in report.undecided) is relaxed, report


class Rounded(Engine):
    """An engine of unknown dtype, of whose impossible tokens bfloat16 would explain each."""

    def numerics(self, *given: object) -> tuple[None, Any]:
        return None, lambda: Numerics(1, 0.2, 0.2, 0.2, 0.0, spread=0.05)


@pytest.mark.parametrize(("relaxed", "verdict"), [(True, "rejected"), (False, "numerics")])
def test_draft_tokens_that_are_nearly_the_argmax_are_found_beside_a_control(relaxed: bool, verdict: str) -> None:
    given, control = greedy(relaxed, 0.05, 0), greedy(False, 0.05, 1)
    tokens, prompts = [one.tokens for one in given], [one.prompt for one in given]
    settings: dict[str, Any] = {"sampling": Sampling(0), "draft": drafts, "progress": False}
    report = audit(moved, tokens, prompts=prompts, engine=Rounded(control=control), **settings)
    print(report)
    assert report.verdict == verdict
    assert report.control is not None
    assert report.control.source == ("speculation" if relaxed else None)


def test_what_the_control_has_too_is_said_in_the_first_line() -> None:
    given = greedy(False, 1.0, 2)
    tokens, prompts = [one.tokens for one in given], [one.prompt for one in given]
    engine = Engine(control=greedy(False, 1.0, 3))
    report = audit(moved, tokens, prompts=prompts, sampling=Sampling(0), engine=engine, progress=False)
    assert report.rejected
    assert "the control deviates alike: the engine's own, not the speculation's" in report.headline
