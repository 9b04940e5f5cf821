"""What the sizes of steps say beside the distribution of the tokens: whether draft tokens are
accepted as often as Algorithm 1 would, and whether a bonus token can have been given.

They are no part of the verdict: a rule that accepts too little may still be exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specnb.distributions import overlap
from specnb_audit.explanations import beginning
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows

FEWEST = 20  # tests of a draft token
CLEAR = 5.0  # standard deviations


def step_findings(models: Models, completions: Sequence[Completion]) -> tuple[list[str], list[str]]:
    """Checks and notes; nothing without steps.

    Tests of draft tokens leave out the first step of a sequence, which may have had no draft, and its last token,
    where a step may be cut.
    """
    given = beginning([one for one in completions if one.steps and len(one.steps) > 1])
    sizes = [size for one in given for size in (one.steps or [])[:-1]]
    if not sizes:
        return [], []
    longest = max(sizes)
    notes = [
        f"steps emit up to {longest:,} tokens, as with {longest - 1:,} draft tokens and a bonus token; if the engine "
        f"drafts {longest:,}, the bonus token is never given"
    ] * (longest > 1)
    never = ["no step emitted more than one token: no draft token was ever accepted"] * (longest == 1)
    if models.draft is None:
        return never * (len(sizes) >= FEWEST), notes
    tests, accepted, expected, variance = 0, 0, 0.0, 0.0
    places = (place for one in given for place in _places(one.steps or []))
    for row in teacher_forced_rows(models._replace(suspected=None, faults=False), given):
        assert row.q is not None
        for beta, (position, goes_on, is_seen) in zip(overlap(row.p, row.q).tolist(), places, strict=False):
            if position < max(longest - 1, 1) and is_seen:
                tests, accepted = tests + 1, accepted + goes_on
                expected, variance = expected + beta, variance + beta * (1 - beta)
    if tests < FEWEST or abs(accepted - expected) < CLEAR * math.sqrt(variance + 1):
        return never * (tests >= FEWEST), notes
    rule = f"where Algorithm 1 would accept {expected / tests:.2f}"
    less = "; drafter and verification may see other distributions, steps draft fewer tokens, or another rule is used"
    found = never[0] if never else f"{accepted / tests:.2f} of the draft tokens are accepted"
    return [f"{found}, {rule}{less * (accepted < expected)}"], notes


def _places(steps: Sequence[int]) -> list[tuple[int, bool, bool]]:
    """For each token, its position in its step, whether the step goes on, and whether that tells acceptance."""
    places = [(at, at + 1 < size, step > 0) for step, size in enumerate(steps) for at in range(size)]
    return [*places[:-1], (*places[-1][:2], False)]
