"""Every bug of the bug suite fails the test of the implementation distribution, which the correct loop passes."""

from functools import partial

import pytest
from implementation_distribution import CASES, GPU_CASES, LEVEL, TESTS, Case, measure, overlap_error, smaller
from loop_bug_cases import CASES as SHOWN
from loop_bug_cases import DRAFT_CASES, KNOWN_BUGS, ROWS, TOO_SMALL

from specnb_audit import known_bugs
from specnb_audit.known_bugs import BuggyDrafter


def test_every_bug_has_its_test() -> None:
    assert {*SHOWN, *TOO_SMALL, *DRAFT_CASES} == set(KNOWN_BUGS)


@pytest.mark.parametrize("name", SHOWN)
def test_every_bug_is_found(name: str) -> None:
    assert measure(SHOWN[name], partial(known_bugs.generate, KNOWN_BUGS[name])).probs.p_value < LEVEL


SOUND = list(dict.fromkeys(smaller(case, ROWS) for case in SHOWN.values()))


def test_the_false_alarms_are_shared_by_all_tests() -> None:
    assert 2 * len([*CASES, *GPU_CASES, *SOUND]) <= TESTS


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_the_same_cases_pass_without_a_bug(case: Case) -> None:
    verdict = measure(case)
    assert verdict.probs.p_value > LEVEL
    assert verdict.acceptance > LEVEL


@pytest.mark.parametrize("name", DRAFT_CASES)
def test_every_bug_of_the_draft_cache_is_found(name: str) -> None:
    assert overlap_error("llama", partial(BuggyDrafter, bug=KNOWN_BUGS[name]))[0] > 1e-3
