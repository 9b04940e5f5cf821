"""The probability that the lenient rule gives to whole sequences, by formula and by enumerated
steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from distributions_for_tests import distribution_pair, distributions_along

from specnb.enumeration import step_distribution
from specnb.rules import lenient_verification
from studies.rules.lenient_sequences import sequence_log_probability


@pytest.mark.parametrize("kind", ["dense", "zeros in both"])
@pytest.mark.parametrize("gamma", [1, 2])
def test_the_probability_of_a_sequence_sums_over_its_divisions_into_steps(kind: str, gamma: int) -> None:
    p, q = distribution_pair(kind, vocab=2)

    def chance_that_it_begins_with(tokens: tuple[int, ...], start: int = 0) -> float:
        """The probability that a sequence made of enumerated steps begins with `tokens`."""
        rest, before = tokens[start:], tokens[:start]
        rule = lenient_verification(0.4)
        step = step_distribution(rule, lambda c: p(before + c), lambda c: q(before + c), gamma)
        whole = sum(chance for emitted, chance in step.items() if emitted[: len(rest)] == rest)
        parts = (step.get(rest[:n], 0.0) * chance_that_it_begins_with(tokens, start + n) for n in range(1, len(rest)))
        return whole + sum(parts)

    sequences = list(product(range(2), repeat=4))
    ps, qs = (torch.stack([distributions_along(side, tokens, 4) for tokens in sequences]) for side in (p, q))
    have = sequence_log_probability(ps, qs, torch.tensor(sequences), gamma, lenience=0.4).exp()
    for row, tokens in enumerate(sequences):
        for n in range(1, 5):
            assert float(have[row, n - 1]) == pytest.approx(chance_that_it_begins_with(tokens[:n]), abs=1e-12)
