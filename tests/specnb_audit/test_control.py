"""The control: what the engine does without speculation is not the speculation's fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reports import report
from samplers import SAMPLER_BUGS, sample_row, tables

from specnb.distributions import Sampling
from specnb_audit import Aim, Engine, audit
from specnb_audit.control import ControlComparison, compare_with_control, found_kinds, gap_p_value
from specnb_audit.numerics import Numerics
from specnb_audit.report import Report
from specnb_audit.run import Settings, audit_completions
from specnb_audit.teacher_forcing import Completion, Models

TABLE = tables()[0]


def chain(prefix: tuple[int, ...]) -> torch.Tensor:
    return TABLE[prefix[-1]]


def sequences(count: int, n: int, seed: int, **bug: object) -> list[Completion]:
    p, q = tables()
    return [Completion([0], list(sample_row(p, q, n, seed + row, **bug).tokens)) for row in range(count)]  # type: ignore[arg-type]


def run(given: list[Completion], control: list[Completion], **settings: Any) -> Report:
    tokens, prompts = [one.tokens for one in given], [one.prompt for one in given]
    return audit(chain, tokens, prompts=prompts, engine=Engine(control=control), progress=False, **settings)


def test_what_the_control_has_too_is_the_engines() -> None:
    exact, bug = sequences(12, 60, 0), SAMPLER_BUGS["inverted residual"].settings
    broken, again = sequences(12, 60, 100, **bug), sequences(12, 60, 200, **bug)
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


def greedy(seed: int, flips: int, n: int = 200) -> list[Completion]:
    """The argmax at every position but `flips`, which have the second token."""
    generator = np.random.default_rng(seed)
    flipped = set(generator.choice(n, size=flips, replace=False).tolist())
    tokens = [0]
    for at in range(n):
        tokens.append(int(TABLE[tokens[-1]].topk(2).indices[int(at in flipped)]))
    return [Completion([0], tokens[1:])]


def explained_by_control(flips: int, control_flips: int) -> Report:
    """The engine's dtype is taken to explain the control's tokens; more of them are another matter."""
    models = Models(chain, Sampling(0))
    numerics = Numerics(1, logit=5.0, tv=0.0, tv_mean=0.0, nats=0.0)

    class Known(Engine):
        def numerics(self, *arguments: object) -> tuple[None, Callable[[], Numerics]]:
            return None, lambda: numerics

    return audit_completions(
        models, greedy(0, flips), Settings(progress=False), Known(control=greedy(1, control_flips))
    )


def test_as_many_near_ties_as_the_control_are_numerics() -> None:
    report = explained_by_control(5, 6)
    assert report.verdict == "numerics"
    assert report.control is not None
    assert report.control.alike
    assert "numerics as in the control" in str(report)


def test_the_p_value_of_exchangeable_gaps_is_one_or_more_in_a_thousand_as_often_as_it_says() -> None:
    generator, alarms = np.random.default_rng(0), 0
    for _ in range(300):
        here, there = ([(gap, 0.0) for gap in generator.exponential(size=generator.poisson(8))] for _ in range(2))
        alarms += gap_p_value(here, 1000, there, 1000) < 0.05
    assert alarms <= 30  # thirty-one or more have a chance of 1e-4 at a rate of 0.05


@pytest.mark.parametrize(("here", "there"), [([(0.1, 0.0)] * 40, []), ([(2.0, 0.0)] * 40, [(0.1, 0.0)] * 40)])
def test_more_or_larger_gaps_are_found(here: list[tuple[float, float]], there: list[tuple[float, float]]) -> None:
    assert gap_p_value(here, 1000, there, 1000) < 1e-6
    assert gap_p_value(there, 1000, here, 1000) > 0.5
    assert gap_p_value(here, 1000, here, 1000) > 0.5


def test_the_p_value_of_tokens_that_the_control_lacks_is_the_chance_that_all_are_here() -> None:
    """Each of three tests has this chance: that of the number, of the logits and of the mass."""
    chance = math.comb(1000, 3) / math.comb(2500, 3)
    assert gap_p_value([(0.1, 0.2)] * 3, 1000, [], 1500) == pytest.approx(3 * chance)


def test_rows_that_share_noise_are_dependent_and_each_is_right() -> None:
    rows = sequences(12, 60, 0)
    shared = [row for row in rows for _ in range(3)]
    report = run(shared, [])
    assert report.verdict == "dependent"
    assert report.rejected
    assert report.rows_alone is not None
    assert report.rows_alone.sequences == 12
    assert "rows share noise; those that share none do not deviate" in str(report)
    ignored = run(shared[:6], [], aim=Aim(ignore=("noise-of-texts", "same-tokens")))
    assert "same-tokens" not in ignored.by_alternative
    with pytest.raises(ValueError, match="ignore has nonsense"):
        run(rows, [], aim=Aim(ignore=("nonsense",)))


def test_violations_can_be_ignored() -> None:
    given: dict[str, Any] = {"prompts": [[0]], "progress": False, "max_new_tokens": 5}
    assert audit(chain, [[1, 2]], **given).violations == {"wrong-length": 1}
    assert not audit(chain, [[1, 2]], aim=Aim(ignore=("wrong-length",)), **given).rejected


def test_a_suspected_model_is_found_sooner_than_by_any_other_bet() -> None:
    """Noise in the logits without direction: only the likelihood ratio against the noisy model knows it."""
    generator = torch.Generator().manual_seed(0)
    noisy = TABLE.log() + 0.3 * torch.randn(TABLE.shape, generator=generator, dtype=torch.float64)
    noisy = torch.softmax(noisy, dim=-1)
    given = []
    for row in range(25):
        given.append(Completion([0], list(sample_row(noisy, noisy, 120, row).tokens)))
    blind = run(given, [])
    known = run(given, [], aim=Aim(suspected=lambda prefix: noisy[prefix[-1]]))
    assert known.diagnosis == "suspected-model"
    assert known.found_after is not None
    assert known.found_after < (blind.found_after or known.tokens)
    exact = run(sequences(25, 60, 500), [], aim=Aim(suspected=lambda prefix: noisy[prefix[-1]]))
    assert not exact.rejected


def test_impossible_tokens_that_the_control_lacks_are_the_speculations() -> None:
    def certain(prefix: tuple[int, ...]) -> list[float]:
        return [1.0, 0.0]

    possible = Engine(control=[Completion([], [0] * 40)])
    report = audit(certain, [[1] * 40], prompts=[[]], engine=possible, progress=False)
    assert report.control is not None
    assert (report.control.shared, report.control.only_here) == ([], ["impossible"])


def test_near_ties_as_in_the_control_are_called_the_engines_own() -> None:
    report = explained_by_control(5, 6)
    assert "the same engine without speculation has as many impossible tokens, and as large ones" in str(report)


# By hand


def by_hand(kinds: dict[str, list[float]], **changes: Any) -> Report:
    """A report with these decimal logarithms of e-values, on as many tokens."""
    running = {kind: np.array(values) for kind, values in kinds.items()}
    tokens = max(map(len, kinds.values()), default=4)
    return report(**{"tokens": tokens, "running_by_alternative": running, "delta": 0.01} | changes)


@pytest.mark.parametrize(
    ("shared", "only_here", "source"),
    [([], [], None), (["argmax"], [], "engine"), ([], ["argmax"], "speculation"), (["argmax"], ["sharper"], "both")],
)
def test_the_source_of_the_deviations(shared: list[str], only_here: list[str], source: str | None) -> None:
    assert ControlComparison(report(), shared, only_here, 1.0, 0.01).source == source


IMPOSSIBLE = "  impossible tokens are about as many and as large as the control's"
MORE = (
    "  impossible tokens are more or larger than the control's: where they are alike, that is said with probability "
    "at most 0.01"
)
UNDECIDED = "  it is not decided whether impossible tokens are more or larger than the control's"


@pytest.mark.parametrize(
    ("p_value", "alike", "line"),
    [
        (1.0, True, []),
        (0.5, True, [f"{IMPOSSIBLE} (p = 0.5)"]),
        (1.0, False, [f"{UNDECIDED} (p = 1)"]),
        (0.02, False, [f"{UNDECIDED} (p = 0.02)"]),
        (0.01, False, [f"{UNDECIDED} (p = 0.01)"]),
        (0.00123, False, [f"{MORE} (p = 0.0012)"]),
        (0.001, True, [f"{MORE} (p = 0.001)"]),
    ],
)
def test_what_is_said_of_impossible_tokens(p_value: float, alike: bool, line: list[str]) -> None:
    control = report(tokens=1000, impossible_summary="so many")
    found = ControlComparison(control, [], [], p_value, 0.01, alike)
    assert found.lines() == ["control (1,000 tokens without speculation): not rejected; so many", *line]
    assert ControlComparison(report(tokens=1), ["a", "b"], ["c", "d"], 1.0, 0.01, True, ["e", "f"]).lines() == [
        "control (1 token without speculation): not rejected",
        "  the engine's own, in the control too: a, b",
        "  the speculation's, not in the control: c, d",
        "  the engine's or the speculation's, which the control does not decide: e, f",
    ]
    assert ControlComparison(report(), [], [], 1.0, 0.01)[5:] == (True, ())


def test_kinds_are_found_by_an_e_value_of_their_number_over_delta() -> None:
    """1/delta is 100, so one kind needs 100 and each of two 200; the largest is first, after violations."""
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
        ({"argmax": [2.0, 0.0], "sharper": [0.0, 0.0]}, "undecided"),  # a sign of it, and too little to reject
        ({"argmax": [1.99, 0.0], "sharper": [0.0, 0.0]}, "only_here"),
    ],
)
def test_where_a_kind_belongs(control: dict[str, list[float]], where: str) -> None:
    """In both; only here, where the control is as long as it took and shows no sign; or undecided."""
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
        ([(0.1, 0.0)] * 8, [(0.1, 0.0)], True, "shared"),  # 8 or more of 9 are here with probability 0.02, 3 tests
        ([(0.1, 0.0)] * 9, [(0.1, 0.0)], False, "undecided"),  # 9 or more of 10 with probability 0.011
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


@pytest.mark.parametrize(("factor", "where"), [(1.0, "undecided"), (1 + 1e-9, "only_here")])
def test_more_impossible_tokens_are_the_speculations_at_a_p_value_below_delta(factor: float, where: str) -> None:
    gaps, control_gaps = [(0.1, 0.0)] * 9, [(0.1, 0.0)]
    delta = factor * gap_p_value(gaps, 1000, control_gaps, 1000)
    here = by_hand({}, tokens=1000, violations={"impossible": 9}, delta=delta)
    found = compare_with_control(here, by_hand({}, tokens=1000), gaps, control_gaps)
    assert getattr(found, where) == ["impossible"]


def more_than(count: int, n: int, marked: int, total: int) -> float:
    """The chance that `count` or more of `marked` among `total` tokens are among the first `n`."""
    ways = [math.comb(n, here) * math.comb(total - n, marked - here) for here in range(count, marked + 1)]
    return sum(ways) / math.comb(total, marked)


@pytest.mark.parametrize(
    ("gaps", "control_gaps", "larger"),
    [
        ([(0.1, 0.0)] * 5, [(0.1, 0.0)], (0, 0)),
        ([(0.2, 0.0)] * 5, [(0.1, 0.0)], (5, 0)),
        ([(0.2, 0.3), (0.0, 0.1), (0.3, 0.0)], [(0.1, 0.2), (0.2, 0.1)], (1, 1)),
        ([NAN, (0.1, 0.1)], [(0.2, 0.2)], (1, 1)),  # what is not known counts as larger here
        ([(0.1, 0.1)] * 2, [NAN], (2, 2)),  # and in the control as none
        ([(-0.1, 0.0)] * 2, [], (0, 0)),
        ([], [(0.1, 0.1)], (0, 0)),
        ([(0.5, 0.5)] * 4, [(0.1, 0.9), NAN], (4, 0)),
    ],
)
def test_the_p_value_is_that_of_three_exact_tests(
    gaps: list[tuple[float, float]], control_gaps: list[tuple[float, float]], larger: tuple[int, int]
) -> None:
    """Of the number, and of how many are beyond the control's largest, by logit and by mass; three times the least."""
    n, control_n = 60, 90
    chances = [more_than(len(gaps), n, len(gaps) + len(control_gaps), n + control_n)] if gaps else [1.0]
    chances += [more_than(count, n, count, n + control_n) if count else 1.0 for count in larger]
    assert gap_p_value(gaps, n, control_gaps, control_n) == pytest.approx(min(1.0, 3 * min(chances)), rel=1e-9)
