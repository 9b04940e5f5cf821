"""Every bug of the bug suite fails the test of the implementation distribution.

The correct loop passes it in tests/specnb/decoding/test_implementation_distribution.py.
"""

from functools import partial

import pytest
from implementation_distribution import LEVEL, measure, overlap_error
from loop_bug_cases import CASES, DRAFT_CASES, KNOWN_BUGS, TOO_SMALL

from specnb_audit import known_bugs
from specnb_audit.known_bugs import BuggyDrafter


def test_every_bug_has_its_test() -> None:
    assert {*CASES, *TOO_SMALL, *DRAFT_CASES} == set(KNOWN_BUGS)


@pytest.mark.parametrize("name", CASES)
def test_every_bug_is_found(name: str) -> None:
    assert measure(CASES[name], partial(known_bugs.generate, KNOWN_BUGS[name])).probs.p_value < LEVEL


@pytest.mark.parametrize("name", DRAFT_CASES)
def test_every_bug_of_the_draft_cache_is_found(name: str) -> None:
    assert overlap_error("llama", partial(BuggyDrafter, bug=KNOWN_BUGS[name]))[0] > 1e-3
