"""Acceptance rules: exact for every kind of distribution, equal to a line-by-line oracle, and how often they accept."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import rules_by_hand as by_hand
import torch
from distributions_for_tests import PAIRS, distribution_pair, distributions_along
from torch import Tensor

from specnb.distributions import Conditional, one_hot, overlap, sample
from specnb.enumeration import completed, count_distribution, joint_distribution, step_distribution
from specnb.rules import (
    Rule,
    exact_match,
    greedy_verification,
    lenient_greedy_verification,
    lenient_verification,
    rejection_sampling,
    token_verification,
)

EXACT: tuple[Rule, ...] = (token_verification, rejection_sampling, exact_match)
RULES = (*EXACT, greedy_verification)
ONE_HOT_P = ("one-hot p", "one-hot p and q")
LARGEST = math.nextafter(1.0, 0.0)

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
every_exact_rule = pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.__name__)
every_kind = pytest.mark.parametrize("kind", PAIRS)


def deviation(rule: Rule, p: Conditional, q: Conditional, gamma: int) -> float:
    """The largest difference between the joint distribution of a step, completed by the target, and the target's."""
    have = completed(step_distribution(rule, p, q, gamma), p, gamma + 1)
    return float((have - joint_distribution(p, gamma + 1)).abs().max())  # NaN would not be below any bound


# The exact distribution


@every_kind
@every_exact_rule
@pytest.mark.parametrize(("vocab", "gamma"), [(2, 0), (5, 1), (2, 3), (4, 2), (3, 3)])
def test_a_step_has_the_targets_joint_distribution(rule: Rule, kind: str, vocab: int, gamma: int) -> None:
    assert deviation(rule, *distribution_pair(kind, vocab), gamma) < 1e-12


@pytest.mark.parametrize("kind", ["dense", "zeros in both"])
@every_exact_rule
def test_a_long_step_over_more_tokens_has_it_too(rule: Rule, kind: str) -> None:
    assert deviation(rule, *distribution_pair(kind, vocab=5), gamma=3) < 1e-12


@pytest.mark.parametrize("kind", ONE_HOT_P)
@pytest.mark.parametrize("gamma", range(4))
def test_greedy_verification_is_exact_for_one_hot_p(kind: str, gamma: int) -> None:
    assert deviation(greedy_verification, *distribution_pair(kind, vocab=4), gamma) < 1e-12


def test_greedy_verification_is_not_exact_for_soft_p() -> None:
    assert deviation(greedy_verification, *distribution_pair("dense", vocab=4), gamma=1) > 0.01


def test_the_distributions_of_these_tests_depend_on_the_context() -> None:
    for distributions in distribution_pair("dense", vocab=3):
        contexts = [(), *product(range(3), repeat=1), *product(range(3), repeat=2)]
        for one, other in product(contexts, contexts):
            assert torch.equal(distributions(one), distributions(other)) == (one == other)


# Where nothing is proposed


def lattice(*shape: int, points: int = 16) -> Tensor:
    """Every combination of `points` evenly spread uniforms: distributions in multiples of 1/points come out exactly."""
    middles = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    return torch.cartesian_prod(*[middles] * math.prod(shape)).reshape(-1, *shape)


def sixteenths(*parts: int) -> Tensor:
    return torch.tensor(parts, dtype=torch.float64) / 16


@every_rule
@pytest.mark.parametrize("missing_from", [0, 1])
def test_without_a_proposal_the_next_token_has_the_targets_distribution(rule: Rule, missing_from: int) -> None:
    """q is zero there. What would be accepted behind the gap must not matter either."""
    p = torch.stack([sixteenths(1, 10, 5), sixteenths(0, 7, 9), sixteenths(16, 0, 0)])
    p = one_hot(p.argmax(-1), 3, torch.float64) if rule is greedy_verification else p
    q = torch.stack([sixteenths(4, 8, 4), sixteenths(12, 2, 2)])
    draft_tokens = torch.tensor([1, 1])
    q[missing_from], draft_tokens[missing_from] = 0.0, -1
    uniforms = lattice(3)
    rows = [tensor.expand(len(uniforms), *tensor.shape) for tensor in (p, q, draft_tokens)]
    accepted, token = rule(*rows, *_split(uniforms))  # type: ignore[call-arg]
    assert accepted.max() == missing_from
    at_the_gap = accepted == missing_from
    share = torch.bincount(token[at_the_gap], minlength=3) / at_the_gap.sum()
    assert torch.equal(share.double(), p[missing_from])


def _split(uniforms: Tensor) -> tuple[Tensor, Tensor]:
    return uniforms[..., :-1], uniforms[..., -1]


# Shapes, types, extremes


def random_case(
    rule: Rule, shape: tuple[int, ...], kind: str = "dense", vocab: int = 5, gamma: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """p, q, drafts and uniforms of each row; a draft in eight is missing."""
    kind = "one-hot p" if rule is greedy_verification else kind
    generator = torch.Generator().manual_seed(0)
    rows = math.prod(shape)
    uniforms = torch.rand(rows, 2 * gamma + 1, generator=generator, dtype=torch.float64)
    ps, qs, drafted = [], [], []
    for row in range(rows):
        p_of, q_of = distribution_pair(kind, vocab, seed=row)
        tokens: tuple[int, ...] = ()
        for i in range(gamma):
            tokens += (int(sample(q_of(tokens), uniforms[row, i])),)
        ps.append(distributions_along(p_of, tokens, gamma + 1))
        qs.append(distributions_along(q_of, tokens, gamma))
        drafted.append(torch.tensor(tokens, dtype=torch.int64))
    p, q, draft_tokens = torch.stack(ps), torch.stack(qs), torch.stack(drafted)
    missing = torch.rand(draft_tokens.shape, generator=generator) < 1 / 8
    q, draft_tokens = q.where(~missing[..., None], 0.0), draft_tokens.where(~missing, -1)
    accept, final = _split(uniforms[:, gamma:])

    def shaped(tensor: Tensor) -> Tensor:
        return tensor.reshape(*shape, *tensor.shape[1:])

    return shaped(p), shaped(q), shaped(draft_tokens), shaped(accept), shaped(final)


@every_rule
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (2, 1, 4)])
def test_any_leading_shape_gives_what_single_rows_give(rule: Rule, shape: tuple[int, ...]) -> None:
    case = random_case(rule, shape)
    accepted, token = rule(*case)
    assert accepted.shape == token.shape == shape
    for row in product(*map(range, shape)):
        alone = rule(*(tensor[row] for tensor in case))
        assert (alone.accepted, alone.token) == (accepted[row], token[row])


@every_rule
def test_no_rows_at_all(rule: Rule) -> None:
    accepted, token = rule(*(tensor[:0] for tensor in random_case(rule, (1,))))
    assert accepted.shape == token.shape == (0,)


@every_rule
def test_gamma_zero(rule: Rule) -> None:
    p, q, draft_tokens, accept, final = random_case(rule, (6,), gamma=0)
    accepted, token = rule(p, q, draft_tokens, accept, final)
    assert torch.equal(accepted, torch.zeros(6, dtype=torch.int64))
    assert torch.equal(token, sample(p[:, 0], final))


@every_rule
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.float64)])
def test_float32_distributions_give_the_same_answers(rule: Rule, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The same but where a uniform lies within rounding of an edge, and none of these does."""
    p, q, draft_tokens, accept, final = random_case(rule, (400,), vocab=4)
    accepted, token = rule(p.to(dtypes[0]), q.to(dtypes[1]), draft_tokens, accept, final)
    want = rule(p, q, draft_tokens, accept, final)
    assert torch.equal(accepted, want.accepted)
    assert torch.equal(token, want.token)


@every_kind
@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_impossible_is_emitted_for_any_uniform(rule: Rule, kind: str, dtype: torch.dtype) -> None:
    """Not for 0 and for the largest number below 1 either, where rounding decides."""
    p, q, draft_tokens, _, _ = random_case(rule, (12,), kind, gamma=2)
    extremes = torch.tensor([0.0, 5e-324, 0.5, LARGEST], dtype=torch.float64)
    for uniforms in torch.cartesian_prod(extremes, extremes, extremes):
        accept, final = _split(uniforms.expand(12, 3))
        accepted, token = rule(p.to(dtype), q.to(dtype), draft_tokens, accept, final)
        block = torch.cat([draft_tokens, draft_tokens[:, :1]], dim=1).scatter(1, accepted[:, None], token[:, None])
        chances = p.to(dtype).gather(-1, block.clamp_min(0)[..., None])[..., 0]
        emitted = torch.arange(3) <= accepted[:, None]
        assert (block[emitted] >= 0).all()
        assert (chances[emitted] > 0).all()


def test_a_token_that_the_target_never_samples_is_not_accepted_even_for_a_uniform_of_zero() -> None:
    p, q = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5]])
    outcome = token_verification(p, q, torch.tensor([1]), torch.zeros(1), torch.tensor(0.5))
    assert (int(outcome.accepted), int(outcome.token)) == (0, 0)


@every_rule
def test_a_rule_does_not_change_its_arguments(rule: Rule) -> None:
    case = random_case(rule, (5,))
    before = [tensor.clone() for tensor in case]
    rule(*case)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(case, before, strict=True))


@pytest.mark.parametrize("rule", [token_verification, exact_match, rejection_sampling])
def test_at_temperature_zero_rules_agree_with_greedy_verification(rule: Rule) -> None:
    case = random_case(greedy_verification, (300,), vocab=3)
    if rule is rejection_sampling:  # it accepts when q is certain as well
        case = (
            case[0],
            one_hot(case[2].clamp_min(0), 3, torch.float64).where((case[2] >= 0)[..., None], 0.0),
            *case[2:],
        )
    want, have = greedy_verification(*case), rule(*case)
    assert torch.equal(have.accepted, want.accepted)
    assert torch.equal(have.token, want.token)
    assert want.accepted.unique().tolist() == [0, 1, 2, 3]


# Acceptance probability


def first_acceptance(rule: Rule, p: Conditional, q: Conditional) -> float:
    return float(1 - count_distribution(step_distribution(rule, p, q, gamma=1), gamma=1)[0])


def predicted(rule: Rule, p: Tensor, q: Tensor) -> float:
    if rule is token_verification:
        return float(overlap(p, q))  # Theorem 3.5
    if rule is rejection_sampling:
        return min(float(q[x] / p[x]) for x in range(len(p)) if p[x] > 0)  # appendix A.2
    return float(p @ q)


@every_kind
@every_exact_rule
@pytest.mark.parametrize("seed", range(3))
def test_acceptance_agrees_with_the_closed_forms(rule: Rule, kind: str, seed: int) -> None:
    p, q = distribution_pair(kind, vocab=4, seed=seed)
    assert first_acceptance(rule, p, q) == pytest.approx(predicted(rule, p(()), q(())), abs=1e-12)


@every_kind
@pytest.mark.parametrize("seed", range(3))
def test_no_other_rule_accepts_more_often_than_token_verification(kind: str, seed: int) -> None:
    p, q = (distributions(()) for distributions in distribution_pair(kind, vocab=4, seed=seed))
    best = predicted(token_verification, p, q)
    assert predicted(rejection_sampling, p, q) <= best + 1e-12
    assert predicted(exact_match, p, q) <= best + 1e-12


def test_neither_of_the_other_two_rules_always_accepts_more() -> None:
    fair, sure = (torch.tensor(probs, dtype=torch.float64) for probs in ([0.5, 0.5], [1.0, 0.0]))
    acceptance = {
        (rule, name): first_acceptance(rule, lambda _: fair, lambda _, q=q: q)  # type: ignore[misc]
        for rule in (rejection_sampling, exact_match)
        for name, q in (("fair", fair), ("sure", sure))
    }
    assert acceptance[rejection_sampling, "fair"] == pytest.approx(1)
    assert acceptance[exact_match, "fair"] == pytest.approx(1 / 2)
    assert acceptance[rejection_sampling, "sure"] == pytest.approx(0)
    assert acceptance[exact_match, "sure"] == pytest.approx(1 / 2)


# Beside their definitions in plain Python

DEFINITIONS: dict[Rule, Callable[..., tuple[int, int]]] = {
    token_verification: by_hand.token_by_token,
    rejection_sampling: by_hand.rejection,
    exact_match: by_hand.matching,
    greedy_verification: by_hand.greedy,
    lenient_verification(0.4): partial(by_hand.token_by_token, lenience=0.4),
    lenient_greedy_verification(0.4): partial(by_hand.greedy, lenience=0.4),
}
every_definition = pytest.mark.parametrize("rule", DEFINITIONS, ids=lambda rule: getattr(rule, "__name__", str(rule)))


@every_definition
@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_a_rule_decides_as_its_definition(rule: Rule, gamma: int) -> None:
    """For every kind of distributions and any draft tokens: impossible ones and missing ones too."""
    generator = torch.Generator().manual_seed(gamma)
    for kind in PAIRS:
        if kind == "nearly equal":
            continue  # there rounding decides
        p, q, tokens, accept, final = random_case(token_verification, (2, 8), kind, vocab=3, gamma=gamma)
        swapped = (torch.rand(tokens.shape, generator=generator) < 1 / 3) & (tokens >= 0)
        tokens = torch.where(swapped, torch.randint(3, tokens.shape, generator=generator), tokens)
        found = rule(p, q, tokens, accept, final)
        assert found.accepted.dtype == found.token.dtype == torch.int64
        for row in product(range(2), range(8)):
            one = [part[row].tolist() for part in (p, q, tokens, accept, final)]
            assert (int(found.accepted[row]), int(found.token[row])) == DEFINITIONS[rule](*one), one


@every_definition
def test_everything_is_calculated_on_the_device_of_the_arguments(rule: Rule) -> None:
    """Whatever the default device is."""
    for gamma in (0, 2):
        case = random_case(token_verification, (5,), gamma=gamma)
        want = rule(*case)
        with torch.device("meta"):
            found = rule(*case)
        assert all(map(torch.equal, found, want))


@every_definition
def test_of_one_possible_token_everything_is_accepted(rule: Rule) -> None:
    for gamma in (0, 1, 3):
        ones, uniforms = torch.ones(2, gamma + 1, 1), torch.full((2, gamma), 0.9)
        tokens = torch.zeros(2, gamma, dtype=torch.int64)
        found = rule(ones, ones[:, :gamma], tokens, uniforms, torch.zeros(2))
        assert (found.accepted.tolist(), found.token.tolist()) == ([gamma, gamma], [0, 0])


@pytest.mark.parametrize(
    ("rule", "threshold"),
    [(token_verification, 0.5), (rejection_sampling, 1 / 3), (lenient_verification(0.75), 2 / 3)],
    ids=["token verification", "rejection sampling", "lenient verification"],
)
def test_a_uniform_equal_to_the_acceptance_probability_rejects(rule: Rule, threshold: float) -> None:
    """p/q is 1/2 for the draft token and 3/2 for the other, so M = 3/2."""
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    draft_token, final = torch.tensor([0]), torch.tensor(0.9, dtype=torch.float64)
    for uniform, accepted in ((threshold - 1e-9, 1), (threshold + 1e-9, 0)):
        assert rule(p, q, draft_token, torch.tensor([uniform], dtype=torch.float64), final).accepted == accepted
    if rule is token_verification:
        assert rule(p, q, draft_token, torch.tensor([0.5], dtype=torch.float64), final).accepted == 0


def test_rules_with_a_lenience_are_values() -> None:
    allowed = "it must lie in (0, 1], where 1 is exact and less accepts more"
    for made in (lenient_verification, lenient_greedy_verification):
        assert made(0.5) == made(0.5) != made(0.25)
        assert hash(made(0.5)) == hash(made(0.5))
        assert made(1).lenience == 1
        with pytest.raises(AttributeError):
            made(0.5).lenience = 0.25  # type: ignore[misc]
        for wrong in (0, 1.5, -1):
            with pytest.raises(ValueError) as error:  # noqa: PT011
                made(wrong)
            assert str(error.value) == f"lenience is {wrong}; {allowed}"
