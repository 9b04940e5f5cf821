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
    """Checks and notes; nothing without steps. The last step of a sequence may be cut, and is left
    out."""
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
    rows = teacher_forced_rows(models._replace(suspected=None, faults=False), given)
    for row in rows:
        assert row.q is not None
        one = overlap(row.p, row.q.to(row.p.dtype)).tolist()
        for at, (position, goes_on) in enumerate(_places(row.steps or [])):
            is_cut = at + 1 == len(row.tokens) and not row.more
            if position < max(longest - 1, 1) and not is_cut:
                tests, accepted = tests + 1, accepted + goes_on
                expected += one[at]
                variance += one[at] * (1 - one[at])
    if tests < FEWEST or abs(accepted - expected) < CLEAR * math.sqrt(variance + 1):
        return never * (tests >= FEWEST), notes
    rule = f"where Algorithm 1 would accept {expected / tests:.2f}"
    less = "; drafter and verification may see other distributions, or another rule is used" * (accepted < expected)
    found = never[0] if never else f"{accepted / tests:.2f} of the draft tokens are accepted"
    return [f"{found}, {rule}{less}"], notes


def _places(steps: Sequence[int]) -> list[tuple[int, bool]]:
    """The position of each token in its step, and whether the step goes on."""
    return [(position, position + 1 < size) for size in steps for position in range(size)]
