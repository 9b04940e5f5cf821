"""From a speed-up back to the cost of a step: of one line by part, with nothing assumed; of several
lines a + b gamma, the best gamma and the acceptance below which speculation does not pay."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.theory import best_improvement, expected_tokens, solve_alpha
from specnb_audit import explain, fit_steps, predict
from specnb_audit.cli import main

examples = settings(derandomize=True, deadline=None, database=None, max_examples=60)
COSTS = st.floats(0, 2)


@given(tokens=st.floats(1, 5), c=COSTS, v=st.floats(1, 4), rest=COSTS)
@examples
def test_what_predict_adds_up_explain_takes_apart(tokens: float, c: float, v: float, rest: float) -> None:
    setting: dict[str, Any] = {"tokens_per_step": tokens, "gamma": 4, "cost_ratio": c, "verify_cost": v, "plain": 1000}
    speedup = predict(**setting, overhead_ms=rest).speedup.value
    del setting["plain"]
    found = explain(speedup=speedup, **setting)
    assert found.cost == pytest.approx(4 * c + v + rest)
    assert {name: part.value for name, part in found.parts.items()} == pytest.approx(
        {"drafting": 4 * c, "verification": v}
    )
    assert found.rest.value == pytest.approx(rest, abs=1e-9)
    assert found.rest_is == "overhead and the prompt"
    whole = explain(speed=speedup * 1000, plain=1000, **setting, overhead_ms=rest)
    assert whole.rest.value == pytest.approx(0, abs=1e-9)
    assert whole.rest_is == "the prompt"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"speedup": 0, "tokens_per_step": 2}, "speedup is 0"),
        ({"tokens_per_step": 2, "speed": 100}, "the speed-up is missing"),
        ({"tokens_per_step": 2, "speed": 100, "plain": 50, "speedup": 1.5}, "speedup is 1.5, and speed / plain is 2"),
        ({"speedup": 2, "tokens_per_step": 2, "overhead_ms": 1}, "overhead_ms needs plain"),
    ],
)
def test_impossible_numbers_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(**setting)


def test_a_step_that_costs_less_than_a_forward_pass_of_the_target_is_contradictory() -> None:
    for speedup, held in ((2.4, False), (1.9, True)):  # 0.83 and 1.05 plain steps
        assert ("contradict each other" in str(explain(speedup=speedup, tokens_per_step=2))) is not held
    assert "contradict each other" in str(explain(speedup=1.9, tokens_per_step=2, gamma=3, cost_ratio=0.3))


def test_the_advice_is_for_the_part_without_which_it_would_be_fastest() -> None:
    found = str(explain(speedup=1.5, tokens_per_step=2.5, gamma=4, cost_ratio=0.12, verify_cost=1.02))
    assert "drafting: 0.48; without it 2.11" in found
    assert "try first: a cheaper drafter" in found


# Several lines


def lines_of(a: float, b: float, alpha: float, gammas: list[int], plain: float = 100.0) -> list[tuple[float, ...]]:
    """What would be measured if a step cost a + b gamma."""
    tokens = expected_tokens(alpha, gammas)
    return [(gamma, n, plain * n / (a + b * gamma)) for gamma, n in zip(gammas, tokens.tolist(), strict=True)]


@given(
    a=st.floats(0.5, 3), b=st.floats(0.01, 1), alpha=st.floats(0.1, 0.95), gammas=st.sampled_from([[1, 3], [2, 4, 8]])
)
@examples
def test_the_cost_the_best_gamma_and_the_break_even_are_those_that_made_the_lines(
    a: float, b: float, alpha: float, gammas: list[int]
) -> None:
    found = fit_steps(lines_of(a, b, alpha, gammas), plain=100.0)
    assert (found.fixed.value, found.per_token.value) == pytest.approx((a, b))
    assert found.speedup is not None
    assert found.break_even is not None
    tried = np.arange(1, 2 * gammas[-1] + 1)
    speeds = expected_tokens(alpha, tried) / (a + b * tried)
    assert found.speedup.value == pytest.approx(speeds.max())
    assert speeds[int(found.best_gamma.value) - 1] == pytest.approx(speeds.max())
    pays = [float(solve_alpha(a + b * k, int(k))) for k in tried if 1 <= a + b * k <= k + 1]
    least = 0 if min(a + b * tried) <= 1 else min(pays, default=math.inf)
    assert found.break_even.value == pytest.approx(least, abs=2e-3)
    for part in (found.fixed, found.per_token, found.best_gamma, found.speedup, found.break_even):
        assert part.low <= part.value <= part.high


def test_the_interval_covers_the_cost_as_often_as_it_says() -> None:
    random, held, runs = np.random.default_rng(5), np.zeros(3), 200
    for _ in range(runs):
        lines = [
            (k, n, speed * np.exp(0.05 * random.standard_normal()))
            for k, n, speed in lines_of(1.2, 0.2, 0.7, [1, 3, 5])
        ]
        found = fit_steps(lines, plain=100 * np.exp(0.05 * random.standard_normal()))
        assert found.speedup is not None
        best = float(best_improvement(0.7, 0.2, lambda n: np.full(np.shape(n), 1.2)))
        truths = ((found.fixed, 1.2), (found.per_token, 0.2), (found.speedup, best))
        held += [part.low <= truth <= part.high for part, truth in truths]
    # 95% of 200 is 190; below 180 with a probability of less than 1e-4.
    assert (held >= 180).all(), held


def test_a_step_that_would_take_no_time_without_drafts_is_all_drafting() -> None:
    found = fit_steps([(1, 1.9, 190 / 0.9), (4, 4.5, 450 / 3.9)], plain=100.0)  # 0.9 and 3.9 plain steps
    assert found.fixed.value == 0 < found.fixed.high
    assert found.per_token.value == pytest.approx((1 / 0.9 + 4 / 3.9) / (1 / 0.9**2 + 16 / 3.9**2))


def test_steps_that_seem_to_become_cheaper_cost_the_same_at_every_gamma() -> None:
    found = fit_steps([(2, 2.2, 110.0), (4, 2.9, 147.9)], plain=100.0)  # 2.00 and 1.96 plain steps
    assert found.per_token.value == 0 < found.per_token.high
    assert 1.96 < found.fixed.value < 2


def test_two_lines_predict_a_third_that_was_measured() -> None:
    """vLLM issue 20780: an EAGLE-3 head of Llama-3.1-8B at gamma 2, 4 and 7, 7.07 ms a token without."""
    lines = [(2, 2.36, 1000 / 4.32), (4, 3.08, 1000 / 4.05), (7, 3.54, 1000 / 4.29)]
    found = fit_steps([lines[0], lines[2]], plain=1000 / 7.07)
    said = predict(tokens_per_step=3.08, gamma=4, step_cost=(found.fixed, found.per_token)).speedup
    assert said.value == pytest.approx(7.07 / 4.05, rel=0.03)
    assert said.low < 7.07 / 4.05 < said.high
    assert found.best_gamma.low <= 4 <= found.best_gamma.high


@pytest.mark.parametrize(
    ("a", "b", "alpha", "said"),
    [
        (1.05, 0.1, 0.8, "at this acceptance: on"),
        (1.6, 0.2, 0.3, "at this acceptance: off"),
        (1.3, 0.2, 0.5, "too close to tell"),
        (1.89, 1.3, 0.9, "off: at no acceptance does a gamma pay"),  # the fit by hand of vLLM issue 47277 has 0.73
    ],
)
def test_it_says_whether_to_speculate(a: float, b: float, alpha: float, said: str) -> None:
    assert said in str(fit_steps(lines_of(a, b, alpha, [1, 3]), plain=100.0))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "need whole gammas, two different ones"),
        ([(1, 1.8, 140.0), (1, 1.9, 100.0)], r"all lines are at gamma = 1, where a step took 1\.29, 1\.90 plain steps"),
        ([(1, 2.8, 140.0), (4, 2.9, 150.0)], "tokens_per_step is 2.8; with gamma = 1"),
        ([(2, 2.3, 67.0), (4, 2.1, 66.0)], "more draft tokens gave fewer tokens"),
        ([(0, 1.0, 150.0), (2, 2.4, 100.0), (4, 3.0, 110.0)], "plain is 100.0, and the line at gamma = 0 has 150"),
        ([(2, 2.4, 100.0), (4, 3.0, 180.0)], "the lines contradict each other: more draft tokens took less time"),
    ],
)
def test_lines_that_cannot_be_are_refused(lines: list[tuple[float, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_steps(lines, plain=100.0)


def test_the_command_fits_lines_and_explains_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--line", "1", "1.8", "140", "--line", "4", "2.9", "150", "--plain", "100"]) == 0
    assert capsys.readouterr().out == f"{fit_steps([(1, 1.8, 140), (4, 2.9, 150)], plain=100)}\n"
    assert main(["explain", "--tokens-per-step", "1.97", "--gamma", "1", "--speed", "128.3", "--plain", "342.2"]) == 0
    assert capsys.readouterr().out == f"{explain(tokens_per_step=1.97, gamma=1, speed=128.3, plain=342.2)}\n"
    assert main(["explain", "--line", "1", "1.8", "140", "--line", "4", "2.9", "150", "--gpu", "H100"]) == 2
    assert capsys.readouterr().err == "specnb-audit: --line and gpu exclude each other\n"
