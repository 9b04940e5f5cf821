"""Known bugs: each changes the enumerated distribution of a step, and runs in the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import distribution_pair
from tiny import llama, near_copy

from audit_studies.bugs.known_bugs import (
    EXACT,
    KNOWN_BUGS,
    MORE_BUGS,
    generate,
    known_bugs,
)
from audit_studies.bugs.step import merged_distribution, step_bugs
from audit_studies.power.step_deviation import corrected, deviation, deviation_on_points, step
from specnb.distributions import Conditional, Sampling, residual
from specnb.rules import Rule
from specnb.sampler import generate as plain_generate

VOCAB, GAMMA = 4, 2
NOT_ENUMERABLE = {"one-uniform", "reseeded", "inverted-residual", "lenience-left-on", "unverified", "merged-children"}
"""Bugs that use uniforms in a way that no exact rule does: enumeration raises for them."""


def near_pair(vocab: int, spread: float = 1.5, noise: float = 0.8) -> tuple[Conditional, Conditional]:
    """p and q whose logits are normal and correlated: some tokens are rare, and the draft is nearly
    right."""

    @cache
    def both(context: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        random = np.random.default_rng([0, len(context), *context])
        logits = spread * random.standard_normal(vocab)
        pair = np.stack([logits, logits + noise * random.standard_normal(vocab)])
        p, q = torch.softmax(torch.from_numpy(pair), dim=-1)
        return p, q

    return lambda context: both(context)[0], lambda context: both(context)[1]


P, Q = distribution_pair("dense", 4)
NEAR_P, NEAR_Q = near_pair(8)
SUITE = step_bugs(Sampling(top_k=3, top_p=0.9))
STEPS = {name: step(bug, P, Q) for name, bug in SUITE.items()} | {
    name: step(bug, NEAR_P, NEAR_Q) for name, bug in MORE_BUGS.items()
}


@pytest.mark.parametrize("name", STEPS)
def test_every_bug_of_a_step_changes_its_distribution(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """By enumeration, or on points where the bug uses uniforms in a way that no exact rule does."""
    wrong = STEPS[name]
    try:
        found, unavoidable = deviation(wrong, GAMMA), 1e-6
    except ValueError:
        assert name not in SUITE or name in NOT_ENUMERABLE
        found, unavoidable = deviation_on_points(wrong, GAMMA), deviation_on_points(corrected(wrong), GAMMA)
    record_property("total_variation", found)
    assert found > 3 * unavoidable
    if name in SUITE:
        assert deviation(corrected(wrong), GAMMA) < 1e-12


@pytest.mark.parametrize("rule", [bug.rule for bug in MORE_BUGS.values()])
def test_where_no_token_was_proposed_none_is_accepted(rule: Rule) -> None:
    p, nothing = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.5, 0.5]]), torch.zeros(2, 2)
    outcome = rule(p, nothing, torch.tensor([-1, -1]), torch.zeros(2), torch.tensor(0.5))
    assert outcome.accepted == 0


@pytest.mark.parametrize("kind", ["dense", "zeros in p", "zeros in q", "disjoint"])
def test_two_merged_draft_tokens_have_the_distribution_of_the_tree(kind: str) -> None:
    """Every pair of drafts and both orders, by hand."""
    p_distributions, q_distributions = distribution_pair(kind, VOCAB)
    p, q = p_distributions(()), q_distributions(())
    emitted = torch.zeros(VOCAB, dtype=torch.float64)
    for x, y in product(range(VOCAB), repeat=2):
        remaining, probs = (q[x] * q[y]).item(), p
        # The order of two independent drafts is random already.
        for child in [x, y] if x != y else [x]:
            taken = remaining * min(1.0, (probs[child] / q[child]).item() if q[child] > 0 else 0.0)
            emitted[child] += taken
            remaining, probs = remaining - taken, residual(probs, q)
        emitted += remaining * probs
    assert torch.allclose(merged_distribution(p, q), emitted, atol=1e-12)


# In the loop


TARGET = llama()
DRAFT = near_copy(TARGET, noise=0.3)
PROMPTS = [[0], [1, 2, 3]]
SETTINGS: dict[str, Any] = {"gamma": 3, "max_new_tokens": 8, "seed": 5, "progress": False}


def test_without_a_bug_it_is_the_loop_itself() -> None:
    assert generate(EXACT, TARGET, PROMPTS, DRAFT, **SETTINGS).tokens == (
        plain_generate(TARGET, PROMPTS, DRAFT, **SETTINGS).tokens
    )


@pytest.mark.parametrize("name", KNOWN_BUGS | MORE_BUGS)
def test_every_bug_generates(name: str) -> None:
    bug = (known_bugs(Sampling(top_k=2)) | MORE_BUGS)[name]
    made = generate(bug, TARGET, PROMPTS, DRAFT, **SETTINGS)
    assert [len(tokens) for tokens in made.tokens] == [8, 8]
