"""Every known bug of a step changes its enumerated distribution, which the correct step does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from distributions_for_tests import distribution_pair

from specnb.distributions import Conditional, Sampling, residual
from specnb.rules import Outcome, Rule, token_verification
from specnb_audit.bugs import acceptance, replacement
from specnb_audit.bugs.distributions import (
    compounded_temperature,
    drafted_penalised,
    kept_not_normalised,
    of_another_vocabulary,
    soft_capped,
    softmax_per_shard,
)
from specnb_audit.bugs.step import merged_distribution, sampled_as, step_bugs
from specnb_audit.bugs.step_deviation import corrected, deviation, deviation_on_points, step
from specnb_audit.bugs.uniforms import averaged, few_bits
from specnb_audit.known_bugs import MORE_BUGS

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


def near_pair(vocab: int, spread: float = 1.5, noise: float = 0.8) -> tuple[Conditional, Conditional]:
    """p and q whose logits are normal and correlated: some tokens are rare, and the draft is nearly right."""

    @cache
    def both(context: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        random = np.random.default_rng([0, len(context), *context])
        logits = spread * random.standard_normal(vocab)
        pair = np.stack([logits, logits + noise * random.standard_normal(vocab)])
        p, q = torch.softmax(torch.from_numpy(pair), dim=-1)
        return p, q

    return lambda context: both(context)[0], lambda context: both(context)[1]


NEAR_P, NEAR_Q = near_pair(8)


@pytest.mark.parametrize("name", MORE_BUGS)
def test_every_further_bug_is_found(name: str, record_property: Callable[[str, object], None]) -> None:
    """By enumeration, or on points where the bug uses uniforms in a way that no exact rule does."""
    wrong = step(MORE_BUGS[name], NEAR_P, NEAR_Q)
    try:
        found, unavoidable = deviation(wrong, GAMMA), 1e-6
    except ValueError:
        found, unavoidable = deviation_on_points(wrong, GAMMA), deviation_on_points(corrected(wrong), GAMMA)
    record_property("total_variation", found)
    print(f"{name}: total variation {found:.4f}")
    assert found > 3 * unavoidable


@pytest.mark.parametrize("rule", [bug.rule for bug in MORE_BUGS.values()])
def test_where_no_token_was_proposed_none_is_accepted(rule: Rule) -> None:
    p, nothing = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.5, 0.5]]), torch.zeros(2, 2)
    outcome = rule(p, nothing, torch.tensor([-1, -1]), torch.zeros(2), torch.tensor(0.5))
    assert outcome.accepted == 0


# By hand: p/q of the draft tokens 0, 0 is 1/2 and 1 in the first pair; token 0 comes first in every distribution.

HALVES = torch.tensor([[0.25, 0.75], [0.8, 0.2], [0.5, 0.5]]), torch.tensor([[0.5, 0.5], [0.8, 0.2]])


def outcome_of(rule: Rule, accept: list[float], final: float, p: torch.Tensor = HALVES[0]) -> Outcome:
    """What `rule` makes of the draft tokens 0, 0 of the pair `HALVES`, or of its q and another p."""
    return rule(p, HALVES[1], torch.zeros(2, dtype=torch.int64), torch.tensor(accept), torch.tensor(final))


@pytest.mark.parametrize(
    ("rule", "accept", "final", "expected"),
    [
        (token_verification, [0.4, 0.6], 0.6, (2, 1)),
        (acceptance.cumulated_ratio, [0.4, 0.6], 0.7, (1, 0)),  # 0.6 is above 1/2 * 1; p = q, so p follows
        (acceptance.cumulated_ratio, [0.4, 0.4], 0.7, (2, 1)),
        (acceptance.threshold_added, [0.54, 0.0], 0.6, (2, 1)),
        (acceptance.threshold_added, [0.56, 0.0], 0.6, (0, 1)),
        (acceptance.all_accepted_counted, [0.6, 0.9], 0.7, (1, 0)),  # the second passes, the first does not
        (acceptance.last_accepted_replaced, [0.4, 0.6], 0.7, (1, 0)),  # (2, 1) before; p at position 1 is 0.8, 0.2
        (acceptance.last_accepted_replaced, [0.6, 0.6], 0.1, (0, 1)),  # nothing accepted: the residual as usual
        (acceptance.argmax_accepted, [0.6, 0.9], 0.9, (0, 1)),
        (acceptance.probable_accepted, [0.6, 0.9], 0.9, (2, 1)),  # p = 0.25 is enough
        (acceptance.typical_acceptance, [0.9, 0.9], 0.9, (2, 1)),
        (replacement.last_not_tested, [0.4, 0.6], 0.9, (1, 1)),
        (replacement.absolute_residual, [0.6, 0.0], 0.4, (0, 0)),  # |p - q| is 1/4 for both, the residual token 1 alone
        (replacement.softmax_of_the_residual, [0.6, 0.0], 0.4, (0, 0)),  # 1/(1 + e^(1/4)) is 0.44
        (replacement.softmax_of_the_residual, [0.6, 0.0], 0.5, (0, 1)),
        (replacement.bonus_argmax, [0.4, 0.6], 0.9, (2, 0)),  # the lower index among equals
        (few_bits, [0.4, 0.6], 0.5001, (2, 1)),
        (averaged, [0.4, 0.6], 0.49, (2, 0)),
        (averaged, [0.51, 0.6], 0.1, (0, 1)),
    ],
)
def test_rules_by_hand(rule: Rule, accept: list[float], final: float, expected: tuple[int, int]) -> None:
    outcome = outcome_of(rule, accept, final)
    assert (int(outcome.accepted), int(outcome.token)) == expected


def test_an_improbable_draft_token_is_discarded_even_if_it_would_be_accepted() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[0.04, 0.96]])
    draft_tokens, accept = torch.tensor([0]), torch.tensor([0.0])
    assert token_verification(p, q, draft_tokens, accept, torch.tensor(0.9)).accepted == 1
    for final, token in ((0.9, 1), (0.1, 0)):
        outcome = acceptance.improbable_discarded(p, q, draft_tokens, accept, torch.tensor(final))
        assert (int(outcome.accepted), int(outcome.token)) == (0, token)


def test_a_penalty_counts_the_draft_tokens_before_a_position() -> None:
    """Both draft tokens are accepted; the bonus token has 1/(1 + e^(1/2)) = 0.38 for token 0 in place of 1/2."""
    assert [int(outcome_of(drafted_penalised, [0.0, 0.0], final).token) for final in (0.37, 0.39)] == [0, 1]
    assert outcome_of(drafted_penalised, [0.51, 0.0], 0.1).accepted == 0  # the first position has none


def test_changes_of_distributions_by_hand() -> None:
    probs = torch.tensor([[0.1, 0.3, 0.4, 0.2], [0.0, 0.2, 0.3, 0.5]])
    shards = torch.tensor([[1 / 8, 3 / 8, 1 / 3, 1 / 6], [0.0, 1 / 2, 3 / 16, 5 / 16]])
    assert torch.allclose(softmax_per_shard(probs), shards)
    assert of_another_vocabulary(probs)[0].tolist() == probs[0, [1, 2, 3, 0]].tolist()
    assert torch.allclose(kept_not_normalised(probs)[0], torch.tensor([0.0, 0.3, 0.4, 0.2]))
    cooled = [sampled_as(Sampling(0.9**times))(probs[times - 1]) for times in (1, 2)]
    assert torch.allclose(compounded_temperature(probs), torch.stack(cooled))
    capped = soft_capped(probs)
    assert torch.allclose(capped.sum(dim=-1), torch.ones(2))
    assert ((capped == 0) == (probs == 0)).all()
    assert (probs[0].argsort() == capped[0].argsort()).all()
    assert capped[0].max() < probs[0].max()


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
