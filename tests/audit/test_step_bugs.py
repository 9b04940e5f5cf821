"""Every known bug of a step changes its enumerated distribution, which the correct step does not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from distributions_for_tests import distribution_pair

from specnb.audit.bugs.later import LATER_BUGS
from specnb.audit.bugs.latest import LATEST_BUGS
from specnb.audit.bugs.step import merged_distribution, step_bugs
from specnb.audit.bugs.step_deviation import Step, corrected, deviation, deviation_on_points, step
from specnb.sampling.distributions import Sampling, residual
from specnb.sampling.verification import token_verification

VOCAB, GAMMA = 4, 2
P, Q = distribution_pair("dense", VOCAB)
BUGS = step_bugs(Sampling(top_k=3, top_p=0.9))
NOT_ENUMERABLE = {"one-uniform", "reseeded", "inverted-residual", "lenience-left-on", "unverified", "merged-children"}
"""Bugs that use uniforms in a way that no exact rule does: enumeration raises for them."""

every_bug = pytest.mark.parametrize("name", BUGS)


@every_bug
def test_every_bug_is_found(name: str, record_property: Callable[[str, object], None]) -> None:
    wrong = step(BUGS[name], P, Q)
    if name in NOT_ENUMERABLE:
        with pytest.raises(ValueError, match="changes its answer inside a cell"):
            deviation(wrong, GAMMA)
        found, unavoidable = deviation_on_points(wrong, GAMMA), deviation_on_points(corrected(wrong), GAMMA)
        assert found > 3 * unavoidable
    else:
        found = deviation(wrong, GAMMA)
    record_property("total_variation", found)
    print(f"{name}: total variation {found:.4f}")
    assert found > 1e-6


@every_bug
def test_the_correct_step_has_no_deviation(name: str) -> None:
    assert deviation(corrected(step(BUGS[name], P, Q)), GAMMA) < 1e-12


@every_bug
def test_points_and_enumeration_agree(name: str) -> None:
    one = step(BUGS[name], P, Q)
    one = corrected(one) if name in NOT_ENUMERABLE else one
    assert deviation_on_points(one, GAMMA) == pytest.approx(deviation(one, GAMMA), abs=0.01)


def assert_found(wrong: Step) -> None:
    if wrong.rule is token_verification:
        assert deviation(wrong, GAMMA) > 1e-6
        return
    found, unavoidable = deviation_on_points(wrong, GAMMA), deviation_on_points(corrected(wrong), GAMMA)
    assert found > 3 * unavoidable


@pytest.mark.parametrize("name", LATER_BUGS)
def test_every_later_bug_is_found(name: str) -> None:
    assert_found(step(LATER_BUGS[name], P, Q))


def uneven(context: tuple[int, ...]) -> torch.Tensor:
    """P with a tail that a top-p of 0.98, and of 0.999, cuts."""
    return torch.softmax(6 * P(context).log(), dim=-1)


@pytest.mark.parametrize("name", LATEST_BUGS)
def test_every_latest_bug_is_found(name: str) -> None:
    assert_found(step(LATEST_BUGS[name], uneven, Q))


def test_one_uniform_in_every_test_hardly_changes_the_first_token() -> None:
    reseeded = step(BUGS["reseeded"], P, Q)
    assert deviation_on_points(reseeded, 1) < 0.1 * deviation_on_points(reseeded, GAMMA)


@pytest.mark.parametrize("kind", ["dense", "zeros in p", "zeros in q", "disjoint"])
def test_two_merged_draft_tokens_have_the_distribution_of_the_tree(kind: str) -> None:
    """Every pair of drafts and both orders, by hand."""
    p_distributions, q_distributions = distribution_pair(kind, VOCAB)
    p, q = p_distributions(()), q_distributions(())
    emitted = torch.zeros(VOCAB, dtype=torch.float64)
    for x, y in product(range(VOCAB), repeat=2):
        remaining, probs = (q[x] * q[y]).item(), p
        for child in [x, y] if x != y else [x]:  # the order of two independent drafts is random already
            taken = remaining * min(1.0, (probs[child] / q[child]).item() if q[child] > 0 else 0.0)
            emitted[child] += taken
            remaining, probs = remaining - taken, residual(probs, q)
        emitted += remaining * probs
    assert torch.allclose(merged_distribution(p, q), emitted, atol=1e-12)
