"""Lenience: the distribution that the rule gives, by enumeration and by formula, and that of whole
sequences."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, lenient_distribution

from specnb.distributions import Conditional
from specnb.enumeration import Emissions, step_distribution
from specnb.rules import Rule, lenient_greedy_verification, lenient_verification


def step_by_formula(p: Conditional, q: Conditional, gamma: int, lenience: float) -> Emissions:
    """The closed form of a whole step: drafts kept along the way, then a replacement or the
    bonus."""
    emitted: Emissions = {}
    for n in range(gamma + 1):
        for draft_tokens in product(range(len(p(()))), repeat=n):
            along = [(p(draft_tokens[:i]), q(draft_tokens[:i]), x) for i, x in enumerate(draft_tokens)]
            chance = float(np.prod([float(torch.minimum(a / lenience, b)[x]) for a, b, x in along]))
            p_next, q_next = p(draft_tokens), q(draft_tokens)
            kept = torch.minimum(p_next / lenience, q_next)
            final = p_next if n == gamma else lenient_distribution(p_next, q_next, lenience) - kept
            emitted |= {(*draft_tokens, x): chance * float(final[x]) for x in range(len(final))}
    return emitted


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("lenience", [1.0, 0.9, 0.5, 0.1, 1e-6])
def test_a_step_has_the_distribution_of_the_closed_form(kind: str, lenience: float) -> None:
    p, q = distribution_pair(kind, vocab=3)
    have = step_distribution(lenient_verification(lenience), p, q, 2)
    want = step_by_formula(p, q, 2, lenience)
    assert max(abs(have.get(tokens, 0.0) - want.get(tokens, 0.0)) for tokens in have.keys() | want.keys()) < 1e-12


@pytest.mark.parametrize("lenience", [0, 1.0000001, float("nan")])
@pytest.mark.parametrize("rule", [lenient_verification, lenient_greedy_verification])
def test_a_lenience_outside_its_range_is_refused(rule: Callable[[float], Rule], lenience: float) -> None:
    with pytest.raises(ValueError, match="lenience is"):
        rule(lenience)
