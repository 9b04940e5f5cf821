"""Which ways to keep the rows of a batch equally long are exact, by enumeration."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import distributions_after, gpt2, llama, near_copy
from torch import Tensor
from transformers import PreTrainedModel

from specnb import theory
from specnb.decoding.generate import generate
from specnb.distributions import Conditional
from specnb.enumeration import completed, count_distribution, joint_distribution, step_distribution
from specnb.rules import Outcome, Rule, exact_match, rejection_sampling, token_verification
from studies.batching import batch_truncation
from studies.batching.batch_truncation import Truncation

EXACT = [batch_truncation.keep_all, batch_truncation.truncate_to_shortest]
WRONG = [batch_truncation.truncate_and_resample, batch_truncation.truncate_as_printed]


def distributions(
    make: Callable[..., PreTrainedModel], prompt: list[int], length: int, noise: float = 0.5
) -> tuple[Conditional, Conditional]:
    target = make(vocab=3)
    return distributions_after(target, prompt, length), distributions_after(near_copy(target, noise), prompt, length)


def distance(truncation: Truncation, gamma: int, make: Callable[..., PreTrainedModel] = llama) -> float:
    p, q = distributions(make, [1], gamma + 1)
    others = batch_truncation.emitted_count_distribution(*distributions(make, [2, 0], gamma + 1), gamma)
    emitted = batch_truncation.distribution_with_neighbour(truncation, p, q, gamma, others)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    return float((completed(emitted, p, gamma + 1) - joint_distribution(p, gamma + 1)).abs().sum() / 2)


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("truncation", EXACT)
def test_exact_truncations_keep_the_distribution_of_every_row(
    truncation: Truncation, make: Callable[..., PreTrainedModel], gamma: int
) -> None:
    assert distance(truncation, gamma, make) < 1e-12


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_resampling_where_a_draft_token_was_accepted_is_not_exact(
    make: Callable[..., PreTrainedModel], gamma: int
) -> None:
    assert distance(batch_truncation.truncate_and_resample, gamma, make) > 0.01


@pytest.mark.parametrize("gamma", [2, 3])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_truncation_as_printed_is_not_exact(make: Callable[..., PreTrainedModel], gamma: int) -> None:
    assert distance(batch_truncation.truncate_as_printed, gamma, make) > 0.05


@pytest.mark.parametrize("rule", [token_verification, exact_match, rejection_sampling])
def test_the_resampled_token_is_biased_towards_the_recovered_token(rule: Rule) -> None:
    """The deviation of one draft's distribution, derived: P(the other rejects) (1 - beta) (recovered - p)."""
    p, q = (torch.tensor(probs, dtype=torch.float64) for probs in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    others = torch.tensor([0.4, 0.6], dtype=torch.float64)
    steps = [
        step_distribution(
            batch_truncation.TruncatedRule(batch_truncation.truncate_and_resample, n, rule),
            lambda _: p,
            lambda _: q,
            1,
        )
        for n in (0, 1)
    ]
    first = torch.zeros(3, dtype=torch.float64)
    for chance, emitted in zip(others.tolist(), steps, strict=True):
        for tokens, share in emitted.items():
            first[tokens[0]] += chance * share
    plain = step_distribution(rule, lambda _: p, lambda _: q, 1)
    rejected = torch.tensor([plain.get((x,), 0.0) for x in range(3)], dtype=torch.float64)
    assert torch.allclose(first - p, others[0] * (rejected - rejected.sum() * p), rtol=0, atol=1e-12)


def test_truncated_rows_stay_independent() -> None:
    """Not only each row's distribution: the joint distribution of both is the product."""
    gamma, length = 2, 3
    pairs = [distributions(llama, prompt, length) for prompt in ([1], [2, 0])]
    steps = [step_distribution(token_verification, p, q, gamma) for p, q in pairs]
    joint = torch.zeros((27, 27), dtype=torch.float64)
    sequences = {}

    def rest(row: int, tokens: tuple[int, ...]) -> Tensor:
        key = (row, tokens)
        if key not in sequences:
            sequences[key] = completed({tokens: 1.0}, pairs[row][0], length).flatten()
        return sequences[key]

    for mine, chance in steps[0].items():
        for other, also in steps[1].items():
            end = min(len(mine), len(other))
            joint += chance * also * torch.outer(rest(0, mine[:end]), rest(1, other[:end]))
    target = [joint_distribution(p, length).flatten() for p, _ in pairs]
    assert float((joint - torch.outer(*target)).abs().sum()) < 1e-12


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_tokens_of_a_batch_truncated_to_its_shortest_row(alpha: float, rows: int) -> None:
    """With iid acceptance every draft survives if all rows accept it: Equation 1 with alpha to the power of rows."""
    counts = torch.from_numpy(theory.count_distribution(alpha, 4))
    shortest = batch_truncation.shortest_count_distribution(counts, rows)
    assert shortest.sum() == pytest.approx(1)
    mean = float(shortest @ torch.arange(1, 6, dtype=torch.float64))
    assert mean == pytest.approx(float(theory.expected_tokens(alpha**rows, 4)))


def test_the_shortest_of_several_rows_by_counting() -> None:
    counts = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    expected = np.zeros(3)
    for index in np.ndindex(3, 3, 3):
        expected[min(index)] += float(counts[list(index)].prod())
    assert batch_truncation.shortest_count_distribution(counts, 3).numpy() == pytest.approx(expected)


@pytest.mark.parametrize("truncation", [*EXACT, *WRONG])
def test_truncations_work_in_the_loop_as_enumerated(truncation: Truncation) -> None:
    """A rule of the loop sees the whole batch; two rows of it are each other's neighbour."""
    target = llama(dtype=torch.float64)
    draft = near_copy(target, noise=0.5)
    kept = []

    def rule(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        outcome = token_verification(p, q, draft_tokens, accept, final)
        made = truncation(outcome, outcome.accepted.flip(0), p, draft_tokens, final)
        kept.append((outcome.accepted.tolist(), made.accepted.tolist()))
        return made

    generate(target, [[1], [2, 0]], draft, gamma=3, max_new_tokens=8, rule=rule, progress=False)
    accepted_counts: dict[str, Callable[[list[int]], list[int]]] = {
        "keep_all": lambda pair: pair,
        "truncate_to_shortest": lambda pair: [min(pair)] * 2,
        "truncate_and_resample": lambda pair: [min(pair)] * 2,
        "truncate_as_printed": lambda pair: [3 - max(pair) + n for n in pair],
    }
    expected = accepted_counts[truncation.__name__]
    assert kept
    assert all(made == expected(accepted) for accepted, made in kept)


def test_the_distribution_of_counts_is_that_of_the_rule() -> None:
    p, q = distributions(gpt2, [1], 3)
    assert torch.equal(
        batch_truncation.emitted_count_distribution(p, q, 2),
        count_distribution(step_distribution(token_verification, p, q, 2), 2),
    )


# By hand


@pytest.mark.parametrize("others", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_each_truncation_by_hand(accepted: int, others: int) -> None:
    """Of a row with draft tokens 4, 5, 6 that emits 9; the target's distributions are one-hot at 1, 2, 3, 0."""
    p = torch.eye(10)[[1, 2, 3, 0]].expand(2, 4, 10)
    draft_tokens, uniforms = torch.tensor([[4, 5, 6]]).expand(2, 3), torch.tensor([0.5, 0.0])
    outcome = Outcome(torch.tensor([accepted, accepted]), torch.tensor([9, 9]))
    given = (outcome, torch.full((2,), others), p, draft_tokens, uniforms)
    shorter, kept = accepted > others, min(accepted, others)
    want = {
        batch_truncation.keep_all: (accepted, 9),
        batch_truncation.truncate_to_shortest: (kept, [4, 5, 6, 9][kept] if shorter else 9),
        batch_truncation.truncate_and_resample: (kept, [1, 2, 3, 0][kept] if shorter else 9),
        batch_truncation.truncate_as_printed: (3 - (max(accepted, others) - accepted), 9),
    }
    for truncation, (number, token) in want.items():
        found = truncation(*given)
        assert found.accepted.tolist() == [number] * 2
        assert found.token.tolist() == [token] * 2


def test_a_truncated_rule_is_a_value_with_algorithm_1_by_default() -> None:
    keep, shortest = batch_truncation.keep_all, batch_truncation.truncate_to_shortest
    made = batch_truncation.TruncatedRule(keep, 1)
    assert made == batch_truncation.TruncatedRule(keep, 1, token_verification)
    assert hash(made) == hash(batch_truncation.TruncatedRule(keep, 1))
    others: list[tuple[Any, ...]] = [(shortest, 1), (keep, 2), (keep, 1, exact_match)]
    for other in others:
        assert made != batch_truncation.TruncatedRule(*other)
    with pytest.raises(AttributeError):
        made.others = 2  # type: ignore[misc]


def test_a_row_beside_others_is_the_mixture_over_their_numbers() -> None:
    p, q = (torch.tensor(probs, dtype=torch.float64) for probs in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    others = torch.tensor([0.25, 0.75], dtype=torch.float64)
    for truncation in EXACT + WRONG:
        found = batch_truncation.distribution_with_neighbour(truncation, lambda _: p, lambda _: q, 1, others)
        want: dict[tuple[int, ...], float] = {}
        for number, chance in enumerate(others.tolist()):
            rule = batch_truncation.TruncatedRule(truncation, number)
            for tokens, share in step_distribution(rule, lambda _: p, lambda _: q, 1).items():
                want[tokens] = want.get(tokens, 0.0) + chance * share
        assert found == pytest.approx(want, abs=1e-15)


def test_the_shortest_row_in_numbers() -> None:
    counts = torch.tensor([0.5, 0.25, 0.25])
    assert batch_truncation.shortest_count_distribution(counts, 1).tolist() == [0.5, 0.25, 0.25]
    assert batch_truncation.shortest_count_distribution(counts, 2).tolist() == [0.75, 0.1875, 0.0625]
