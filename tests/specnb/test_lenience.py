"""Lenience: the distribution that the rule gives, by enumeration and by formula; its bound; and planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, distributions_along, examples
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from tiny import llama, near_copy
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding import generate as loop
from specnb.decoding.generate import Study, forget_compiled, generate
from specnb.decoding.step import Batch
from specnb.distributions import Conditional, Sampling, overlap, residual, sample, total_variation
from specnb.drafting.model import ModelDrafter
from specnb.enumeration import Emissions, step_distribution
from specnb.rules import (
    Outcome,
    Rule,
    greedy_verification,
    lenient_greedy_verification,
    lenient_verification,
    token_verification,
)
from specnb.theory import (
    lenient_distribution,
    lenient_overlap,
    lenient_total_variation,
    max_acceptance,
    sequence_log_probability,
)

LENIENCES = (1.0, 0.9, 0.5, 0.3, 0.1, 1e-6)
every_kind = pytest.mark.parametrize("kind", PAIRS)
every_lenience = pytest.mark.parametrize("lenience", LENIENCES)


def step_by_formula(p: Conditional, q: Conditional, gamma: int, lenience: float) -> Emissions:
    """The closed form of a whole step: drafts kept along the way, then a replacement or the bonus."""
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


def apart(rule: Rule, p: Conditional, q: Conditional, gamma: int, lenience: float) -> float:
    """How far the enumerated step of `rule` is from the closed form; inf if enumeration refuses the rule."""
    try:
        have = step_distribution(rule, p, q, gamma, lenience=lenience)
    except ValueError:
        return np.inf
    want = step_by_formula(p, q, gamma, lenience)
    return max(abs(have.get(tokens, 0.0) - want.get(tokens, 0.0)) for tokens in have.keys() | want.keys())


# The distribution of a step


@every_kind
@every_lenience
def test_a_step_has_the_distribution_of_the_closed_form(kind: str, lenience: float) -> None:
    assert apart(lenient_verification(lenience), *distribution_pair(kind, vocab=3), 2, lenience) < 1e-12


def test_a_lenient_rule_is_refused_by_an_enumeration_that_does_not_know_its_lenience() -> None:
    with pytest.raises(ValueError, match="changes its answer inside a cell"):
        step_distribution(lenient_verification(0.5), *distribution_pair("dense", vocab=3), gamma=1)


def test_cells_for_a_lenience_change_nothing_about_other_rules() -> None:
    p, q = distribution_pair("dense", vocab=3)
    finer, plain = (step_distribution(token_verification, p, q, 2, lenience=lenience) for lenience in (0.5, 1.0))
    assert finer == pytest.approx(plain, abs=1e-14)


@every_kind
@every_lenience
def test_the_emitted_distribution_by_its_properties(kind: str, lenience: float) -> None:
    for seed in range(20):
        p, q = (distributions(()) for distributions in distribution_pair(kind, 6, seed))
        probs = lenient_distribution(p, q, lenience)
        assert float(probs.sum()) == pytest.approx(1, abs=1e-12)
        assert (probs <= p / lenience + 1e-12).all()
        assert (probs <= torch.maximum(p, q) + 1e-12).all()
        least = (1 - lenient_overlap(p, q, lenience)) / (1 - overlap(p, q)).clamp_min(1e-300)
        assert (probs >= p * least.clamp(0, 1) - 1e-9).all()
        distance = float(total_variation(probs, p))
        assert float(lenient_total_variation(p, q, lenience)) == pytest.approx(distance, abs=1e-12)


@every_lenience
def test_the_bound_is_reached_where_the_draft_is_too_sure(lenience: float) -> None:
    p, q = torch.tensor([1e-8, 1 - 1e-8]).double(), torch.tensor([0.5, 0.5]).double()
    assert float(lenient_distribution(p, q, lenience)[0] / p[0]) == pytest.approx(1 / lenience, rel=1e-6)


def test_a_possible_token_can_become_impossible() -> None:
    p, q = torch.full((8,), 1 / 8).double(), torch.tensor([0.5, 0.5] + [0.0] * 6).double()
    assert torch.equal(lenient_distribution(p, q, 0.25), q)
    assert (lenient_distribution(p, q, 0.26) > 0).all()


@every_kind
def test_alpha_rises_and_is_concave_in_one_over_l(kind: str) -> None:
    p, q = (distributions(()) for distributions in distribution_pair(kind, 6))
    alphas = np.array([float(lenient_overlap(p, q, 1 / float(x))) for x in np.linspace(1, 20, 96)])
    assert (np.diff(alphas) >= -1e-12).all()
    assert (np.diff(alphas, 2) <= 1e-12).all()
    assert float(lenient_overlap(p, q, 1.0)) == float(overlap(p, q))


# Lenience 1 is exact, bit for bit


@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(PAIRS)))
@examples
def test_lenience_one_is_the_exact_rule_bit_for_bit(seed: int, kind: str) -> None:
    p, q = distribution_pair(kind, 5, seed)
    generator = torch.Generator().manual_seed(seed)
    accept, final = torch.rand(64, 3, generator=generator), torch.rand(64, generator=generator)
    tokens = tuple(torch.randint(5, (3,), generator=generator).tolist())
    distributions = (
        distributions_along(p, tokens, 4).expand(64, 4, 5),
        distributions_along(q, tokens, 3).expand(64, 3, 5),
    )
    draft_tokens = torch.tensor(tokens).expand(64, 3)
    for lenient, exact in (
        (lenient_verification(1.0), token_verification),
        (lenient_greedy_verification(1), greedy_verification),
    ):
        for have, want in zip(
            lenient(*distributions, draft_tokens, accept, final),
            exact(*distributions, draft_tokens, accept, final),
            strict=True,
        ):
            assert torch.equal(have, want)


def test_lenience_one_gives_the_same_sequences_in_the_loop_and_less_gives_others() -> None:
    target = llama(vocab=16)
    settings: dict[str, Any] = {"gamma": 3, "max_new_tokens": 10, "seed": 5, "progress": False}

    def sequences(draft: PreTrainedModel | ModelDrafter | None, rule: Rule) -> list[list[int]]:
        return generate(target, [[1, 2], [3], [0, 5, 4]] * 4, draft, rule=rule, **settings).tokens

    draft = near_copy(target, 0.3)
    assert sequences(draft, lenient_verification(1.0)) == sequences(draft, token_verification)
    assert sequences(draft, lenient_verification(0.2)) != sequences(draft, token_verification)
    certain = ModelDrafter(draft, Sampling(temperature=0))
    greedy = generate(target, [[1, 2], [3], [0, 5, 4]] * 4, sampling=Sampling(temperature=0), **settings).tokens
    assert sequences(certain, lenient_greedy_verification(1.0)) == greedy
    assert sequences(certain, lenient_greedy_verification(0.2)) != greedy


@pytest.mark.parametrize("rule", [lenient_verification, lenient_greedy_verification])
def test_equal_rules_share_a_compiled_batch(rule: Callable[[float], Rule], monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    class CountedBatch(Batch):
        def __init__(self, *settings: Any) -> None:
            built.append(self)
            super().__init__(*settings)

    monkeypatch.setattr(loop, "Compiled", lambda function: function)
    target = llama(vocab=16)
    for lenience, batches in ((0.5, 1), (1 / 2, 1), (0.4, 2)):
        asked: dict[str, Any] = {"rule": rule(lenience), "compile": True, "study": Study(batch_class=CountedBatch)}
        generate(target, [[1, 2]], max_new_tokens=2, progress=False, **asked)
        assert len(built) == batches
    forget_compiled()


# Temperature 0


def greedily(lenience: float, p: list[float], draft: int) -> tuple[int, int]:
    distributions, nothing = torch.tensor([p, p]), torch.zeros(1, len(p))
    outcome = lenient_greedy_verification(lenience)(
        distributions, nothing, torch.tensor([draft]), torch.zeros(1), torch.zeros(())
    )
    return int(outcome.accepted), int(outcome.token)


@pytest.mark.parametrize(("lenience", "draft", "accepted"), [(1, 0, 1), (1, 1, 0), (0.5, 1, 1), (0.5, 2, 0)])
def test_greedy_lenience_by_hand(lenience: float, draft: int, accepted: int) -> None:
    assert greedily(lenience, [0.5, 0.3, 0.2], draft) == (accepted, 0)


def test_greedy_lenience_is_a_strict_inequality() -> None:
    assert greedily(0.5, [0.5, 0.25, 0.25], 1) == (0, 0)


def test_greedy_lenience_one_rejects_a_token_tied_with_the_argmax() -> None:
    assert greedily(1.0, [0.4, 0.4, 0.2], 1) == (0, 0)
    assert greedily(0.99, [0.4, 0.4, 0.2], 1) == (1, 0)


def test_greedy_lenience_without_a_draft_emits_the_argmax() -> None:
    assert greedily(0.01, [0.3, 0.7], -1) == (0, 1)


# What any rule can reach


def most_by_linear_programme(p: Tensor, q: Tensor, budget: float) -> float:
    """max sum m over accepted masses m and emitted distributions s: m <= q, m <= s, and s at most `budget` from p."""
    vocab = len(p)
    eye, none = np.eye(vocab), np.zeros((vocab, vocab))
    # Unknowns m, s, d with d >= s - p and d >= 0; the sum of d is the total variation.
    greater_mask = np.block([[eye, -eye, none], [none, eye, -eye], [np.zeros(2 * vocab), np.ones(vocab)]])
    ends = np.concatenate([np.zeros(vocab), p.numpy(), [budget]])
    bounds = [(0, float(mass)) for mass in q] + [(0, None)] * (2 * vocab)
    sums = np.concatenate([np.zeros(vocab), np.ones(vocab), np.zeros(vocab)])[None]
    solved = linprog(np.repeat([-1.0, 0.0, 0.0], vocab), greater_mask, ends, sums, [1.0], bounds)
    return -float(solved.fun)


@every_kind
@pytest.mark.parametrize("budget", [0.0, 0.1, 0.5])
def test_no_rule_accepts_more_for_its_distance(kind: str, budget: float) -> None:
    p, q = (distributions(()) for distributions in distribution_pair(kind, 5))
    assert float(max_acceptance(p, q, budget)) == pytest.approx(most_by_linear_programme(p, q, budget), abs=1e-9)


@every_kind
@every_lenience
def test_lenience_attains_that_maximum(kind: str, lenience: float) -> None:
    p, q = (distributions(()) for distributions in distribution_pair(kind, 5))
    budget = float(total_variation(lenient_distribution(p, q, lenience), p))
    assert float(lenient_overlap(p, q, lenience)) == pytest.approx(float(max_acceptance(p, q, budget)), abs=1e-12)


# Whole sequences


def sequence_probability(p: Conditional, q: Conditional, gamma: int, lenience: float, tokens: tuple[int, ...]) -> float:
    """The probability that a sequence made of enumerated steps begins with `tokens`."""

    def begins(start: int) -> float:
        rest, before = tokens[start:], tokens[:start]
        step = step_distribution(
            lenient_verification(lenience), lambda c: p(before + c), lambda c: q(before + c), gamma, lenience=lenience
        )
        whole = sum(chance for emitted, chance in step.items() if emitted[: len(rest)] == rest)
        return whole + sum(step.get(rest[:n], 0.0) * begins(start + n) for n in range(1, len(rest)))

    return begins(0)


@pytest.mark.parametrize("kind", ["dense", "zeros in both"])
@pytest.mark.parametrize("gamma", [1, 2])
def test_the_probability_of_a_sequence_sums_over_its_divisions_into_steps(kind: str, gamma: int) -> None:
    p, q = distribution_pair(kind, vocab=2)
    sequences = list(product(range(2), repeat=4))
    ps, qs = (torch.stack([distributions_along(side, tokens, 4) for tokens in sequences]) for side in (p, q))
    have = sequence_log_probability(ps, qs, torch.tensor(sequences), gamma, lenience=0.4).exp()
    for row, tokens in enumerate(sequences):
        for n in range(1, 5):
            assert float(have[row, n - 1]) == pytest.approx(
                sequence_probability(p, q, gamma, 0.4, tokens[:n]), abs=1e-12
            )


def test_with_lenience_one_a_sequence_has_the_targets_probability() -> None:
    p, q = distribution_pair("dense", vocab=3)
    sequences = list(product(range(3), repeat=3))
    ps, qs = (torch.stack([distributions_along(side, tokens, 3) for tokens in sequences]) for side in (p, q))
    have = sequence_log_probability(ps, qs, torch.tensor(sequences), 2, lenience=1.0)
    want = ps.gather(-1, torch.tensor(sequences)[..., None])[..., 0].log().cumsum(1)
    torch.testing.assert_close(have, want, atol=1e-12, rtol=0)


# Bad input


@pytest.mark.parametrize("lenience", [0, -0.5, 1.0000001, 2, float("nan"), float("inf")])
@pytest.mark.parametrize("rule", [lenient_verification, lenient_greedy_verification])
def test_a_lenience_outside_its_range_is_refused(rule: Callable[[float], Rule], lenience: float) -> None:
    with pytest.raises(ValueError, match=r"lenience is .*\(0, 1\], where 1 is exact"):
        rule(lenience)


@pytest.mark.parametrize("budget", [-0.1, 1.1, float("nan")])
def test_a_budget_that_is_no_distance_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match=r"total variation lies in \[0, 1\]"):
        max_acceptance(torch.ones(1), torch.ones(1), budget)


# Planted bugs: each is seen in the distribution of a step

HALF = 0.5


def with_residual(of: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """The lenient test, and after a rejection another distribution than Algorithm 1's residual."""

    def rule(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        accepted = lenient_verification(HALF)(p, q, draft_tokens, accept, final).accepted
        after = torch.cat([of(p[..., :-1, :], q), p[..., -1:, :]], dim=-2)
        return Outcome(accepted, sample(after.take_along_dim(accepted[..., None, None], dim=-2).squeeze(-2), final))

    return rule


def on_uniforms(scale: float) -> Rule:
    return lambda p, q, draft_tokens, accept, final: token_verification(p, q, draft_tokens, scale * accept, final)


def on_distributions(p_scale: float, q_scale: float) -> Rule:
    return lambda p, q, draft_tokens, accept, final: token_verification(
        p_scale * p, q_scale * q, draft_tokens, accept, final
    )


BUGS: dict[str, Rule] = {
    "lenience forgotten": token_verification,
    "q divided by l": on_uniforms(1 / HALF),
    "l applied twice": on_uniforms(HALF**2),
    "l in the residual as well": with_residual(lambda p, q: residual(p, HALF * q)),
    "l in the residual on p": with_residual(lambda p, q: residual(HALF * p, q)),
    "q / l in the residual": with_residual(lambda p, q: residual(p, q / HALF)),
    "p after a rejection": with_residual(lambda p, q: p),
    "q after a rejection": with_residual(lambda p, q: q),
    "l multiplies p": on_distributions(HALF, 1.0),
}


def test_the_rule_of_the_planted_bugs_is_right_without_a_bug() -> None:
    assert apart(with_residual(residual), *distribution_pair("dense", vocab=4), 2, HALF) < 1e-12


@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_is_seen(bug: str) -> None:
    distance = apart(BUGS[bug], *distribution_pair("dense", vocab=4), 2, HALF)
    print(f"{bug}: {distance:.4f}")
    assert distance > 1e-3


@pytest.mark.parametrize("lenience", [0.3, 0.5])
def test_greedy_lenience_with_the_printed_inequality_is_seen(lenience: float) -> None:
    """As A.5 prints it, p(x) <= l max p: even l = 1 then accepts whatever is drafted."""
    p, q = distribution_pair("dense", vocab=4)

    def printed(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        chosen = p[..., :-1, :].gather(-1, draft_tokens[..., None])[..., 0]
        accepted = (chosen <= lenience * p[..., :-1, :].amax(-1)).long().cumprod(-1).sum(-1)
        return Outcome(accepted, p.argmax(-1).gather(-1, accepted[..., None])[..., 0])

    def floor_kept(rule: Rule) -> bool:
        emitted = step_distribution(rule, p, q, gamma=1)
        return all(float(p(())[tokens[0]]) >= lenience * float(p(()).max()) for tokens in emitted)

    assert floor_kept(lenient_greedy_verification(lenience))
    assert not floor_kept(printed)


# Batches, dtypes and ends


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_forms_of_broadcast_batches(dtype: torch.dtype) -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0]], [[0.25, 0.25, 0.5]]], dtype=dtype)  # (2, 1, 3)
    q = torch.tensor([[0.125, 0.125, 0.75], [0.0, 1.0, 0.0]], dtype=dtype)  # (2, 3)
    # min(p / (1/2), q), and the overlaps
    assert lenient_overlap(p, q, 0.5).tolist() == [[0.25, 1.0], [1.0, 0.5]]
    assert lenient_total_variation(p, q, 0.5).tolist() == [[0.0, 0.5], [0.25, 0.25]]
    assert lenient_distribution(p, q, 0.5).tolist() == [
        [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]],
        [[0.125, 0.125, 0.75], [1 / 6 if dtype == torch.float64 else pytest.approx(1 / 6), 0.5, pytest.approx(1 / 3)]],
    ]
    assert max_acceptance(p, q, 0.25).tolist() == [[0.5, 0.75], [1.0, 0.5]]
    for found in (lenient_overlap(p, q, 0.5), lenient_distribution(p, q, 0.5), max_acceptance(p, q, 0.5)):
        assert found.dtype == dtype


def test_a_budget_of_zero_and_one() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    assert float(max_acceptance(p, q, 0)) == 0.75
    assert float(max_acceptance(p, q, 1)) == 1.0
    for wrong in (-1e-9, 1 + 1e-9):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            max_acceptance(p, q, wrong)
        assert str(error.value) == f"budget is {wrong}; a total variation lies in [0, 1]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_the_probability_of_a_sequence_step_by_step(gamma: int, dtype: torch.dtype) -> None:
    """A sum over the place of each token in its step: draft token, recovered token or bonus token."""
    generator = torch.Generator().manual_seed(gamma)
    p, q = (torch.softmax(2 * torch.randn(3, 5, 4, generator=generator).double(), -1).to(dtype) for _ in range(2))
    tokens, lenience = torch.randint(4, (3, 5), generator=generator), 0.5
    found = sequence_log_probability(p, q, tokens, gamma, lenience)
    assert found.shape == (3, 5)
    assert found.dtype == dtype
    with torch.device("meta"):
        assert torch.equal(sequence_log_probability(p, q, tokens, gamma, lenience), found)

    def begins(row: int, at: int, place: int, end: int) -> float:
        if at == end:
            return 1.0
        x, own_p, own_q = int(tokens[row, at]), p[row, at].tolist(), q[row, at].tolist()
        if place == gamma:
            return float(own_p[x]) * begins(row, at + 1, 0, end)
        kept = [min(a / lenience, b) for a, b in zip(own_p, own_q, strict=True)]
        left = [max(0.0, a - b) for a, b in zip(own_p, own_q, strict=True)]
        recovered = (1 - sum(kept)) * left[x] / sum(left)
        return float(kept[x] * begins(row, at + 1, place + 1, end) + recovered * begins(row, at + 1, 0, end))

    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    for row, n in product(range(3), range(1, 6)):
        assert float(found[row, n - 1].exp()) == pytest.approx(begins(row, 0, 0, n), rel=tolerance)


def test_a_sequence_that_cannot_occur_has_probability_zero_from_there_on() -> None:
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]]]).double()
    found = sequence_log_probability(p, p, torch.tensor([[0, 1, 0]]), gamma=2, lenience=0.5)
    assert found[0, 0] == pytest.approx(np.log(0.5))
    assert found[0, 1] == -np.inf
    assert found[0, 2] == -np.inf
