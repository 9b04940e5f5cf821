"""A test that has never failed proves nothing: every bug of the museum fails the engine-law test in the real loop."""

from functools import partial

import pytest
from engine_law import measure, smaller
from engine_mutants import CASES as SHOWN
from engine_mutants import DRAFT_CASES, MUSEUM, ROWS, TOO_SMALL
from test_engine_law import CASES, GPU_CASES, LEVEL, TESTS, overlap_error

from specnb.audit import museum


def test_every_bug_has_its_test():
    assert {*SHOWN, *TOO_SMALL, *DRAFT_CASES} == set(MUSEUM)


@pytest.mark.parametrize("name", SHOWN)
def test_every_engine_mutant_is_caught(name):
    assert measure(SHOWN[name], partial(museum.generate, MUSEUM[name])).law.p_value < LEVEL


SOUND = list(dict.fromkeys(smaller(case, ROWS) for case in SHOWN.values()))


def test_the_false_alarms_are_shared_by_all_tests():
    assert 2 * len([*CASES, *GPU_CASES, *SOUND]) <= TESTS


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_the_same_cases_pass_without_a_mutant(case):
    verdict = measure(case)
    assert verdict.law.p_value > LEVEL
    assert verdict.acceptance > LEVEL


@pytest.mark.parametrize("name", DRAFT_CASES)
def test_every_mutant_of_the_draft_s_cache_is_caught(name):
    with museum.planted(MUSEUM[name]):
        assert overlap_error("llama")[0] > 1e-3


def test_a_bug_is_taken_out_again():
    for mutant in MUSEUM.values():
        with museum.planted(mutant):
            pass
    assert overlap_error("llama")[0] < 1e-9
