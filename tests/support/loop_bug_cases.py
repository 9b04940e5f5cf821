"""Which case of the test of the implementation distribution finds which bug of the bug suite."""

from __future__ import annotations

from dataclasses import replace

from implementation_distribution import Case

from specnb.distributions import Sampling
from specnb_audit.known_bugs import known_bugs

FILTERED = Sampling(0.7, top_k=3)
ROWS = 3_000  # fewer than the test of the correct loop; enough for most bugs
PLAIN = Case("gpt2", "model", 3, rows=ROWS)
FILTER = replace(PLAIN, sampling=FILTERED)
GREEDY = replace(PLAIN, sampling=Sampling(temperature=0))
SHARP = Case("llama", "sharp", 3, rows=ROWS)
NEAR = Case("llama", "near", 3, rows=ROWS)
ENDING = Case("llama", "model", 3, eos=1, rows=ROWS)
SHORT = Case("gpt2", "model", 1, rows=ROWS)

KNOWN_BUGS = known_bugs(FILTERED)
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
"""Deviations too small for an affordable number of rows; enumeration finds them (`test_known_bugs`)."""

DRAFT_CASES = ["bonus-missing-in-draft"]
"""Lossless bugs: q is not the draft model's distribution."""
