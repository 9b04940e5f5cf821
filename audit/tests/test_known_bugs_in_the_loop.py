"""Every bug of the bug suite fails the test of the implementation distribution.

The correct loop passes it in tests/specnb/test_implementation_distribution.py.
"""

from dataclasses import replace
from functools import partial

import pytest
from implementation_distribution import LEVEL, Case, measure, overlap_error

from audit_studies.bugs import known_bugs
from audit_studies.bugs.known_bugs import BuggyDrafter
from specnb.distributions import Sampling

FILTERED = Sampling(0.7, top_k=3)
ROWS = 3_000  # fewer than the test of the correct loop; enough for most bugs
PLAIN = Case("gpt2", "model", 3, rows=ROWS)
FILTER = replace(PLAIN, sampling=FILTERED)
GREEDY = replace(PLAIN, sampling=Sampling(temperature=0))
SHARP = Case("llama", "sharp", 3, rows=ROWS)
NEAR = Case("llama", "near", 3, rows=ROWS)
ENDING = Case("llama", "model", 3, eos=1, rows=ROWS)
SHORT = Case("gpt2", "model", 1, rows=ROWS)

KNOWN_BUGS = known_bugs.known_bugs(FILTERED)
CASES: dict[str, Case] = {
    "eos-inside": ENDING,
    "after-the-end": ENDING,
    "always-accepting": PLAIN,
    "shared-noise": SHORT,
    "one-uniform": replace(SHORT, rows=12_000),
    "zero-uniform": PLAIN,
    "reseeded": PLAIN,
    "rows-share-noise": PLAIN,
    "rejected-stays": SHARP,
    "accepted-is-lost": NEAR,
    "bonus-cache": replace(NEAR, gamma=1),
    "padding-visible": SHARP,
    "positions-of-the-longest": SHARP,
    "wrong-slice": PLAIN,
    "greedy-draft-soft-q": PLAIN,
    "raw-q": FILTER,
    "processors-dropped": FILTER,
    "always-argmax": PLAIN,
    "no-residual": SHORT,
    "inverted-residual": SHORT,
    "wrong-temperature-q": PLAIN,
    "p-mutated": PLAIN,
    "redraw": PLAIN,
    "soft-greedy": GREEDY,
    "filter-order": FILTER,
}
"""Bugs that the joint distribution of the tokens shows."""

TOO_SMALL = ["draw-dtype", "lenience-left-on", "unverified", "merged-children"]
"""Deviations too small for an affordable number of rows; enumeration finds them
(`test_known_bugs`)."""

DRAFT_CASES = ["bonus-missing-in-draft"]
"""Lossless bugs: q is not the draft model's distribution."""


def test_every_bug_has_its_test() -> None:
    assert {*CASES, *TOO_SMALL, *DRAFT_CASES} == set(KNOWN_BUGS)


@pytest.mark.parametrize("name", CASES)
def test_every_bug_is_found(name: str) -> None:
    assert measure(CASES[name], partial(known_bugs.generate, KNOWN_BUGS[name])).probs.p_value < LEVEL


@pytest.mark.parametrize("name", DRAFT_CASES)
def test_every_bug_of_the_draft_cache_is_found(name: str) -> None:
    assert overlap_error("llama", partial(BuggyDrafter, bug=KNOWN_BUGS[name]))[0] > 1e-3
