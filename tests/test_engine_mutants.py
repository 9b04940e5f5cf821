"""A test that has never failed proves nothing: every planted bug of the loop fails the engine-law test."""

import pytest
from engine_law import measure, smaller
from engine_mutants import DRAFT_MUTANTS, MUTANTS
from test_engine_law import CASES, GPU_CASES, LEVEL, TESTS, overlap_error

ROWS = 3_000  # far fewer than the real test draws, and already enough


@pytest.mark.parametrize("name", MUTANTS)
def test_every_engine_mutant_is_caught(name, monkeypatch):
    plant, case = MUTANTS[name]
    plant(monkeypatch)
    assert measure(smaller(case, ROWS)).law.p_value < LEVEL


SOUND = list(dict.fromkeys(case for _, case in MUTANTS.values()))


def test_the_false_alarms_are_shared_by_all_tests():
    assert 2 * len([*CASES, *GPU_CASES, *SOUND]) <= TESTS


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_the_same_cases_pass_without_a_mutant(case):
    verdict = measure(smaller(case, ROWS))
    assert verdict.law.p_value > LEVEL
    assert verdict.acceptance > LEVEL


@pytest.mark.parametrize("name", DRAFT_MUTANTS)
def test_every_mutant_of_the_draft_s_cache_is_caught(name, monkeypatch):
    DRAFT_MUTANTS[name](monkeypatch)
    assert overlap_error("llama")[0] > 1e-3
