"""Which ways to keep the rows of a batch equally long are exact, by enumeration."""

from collections.abc import Callable

import pytest
import torch
from tiny import distributions_after, gpt2, llama, near_copy
from torch import Tensor
from transformers import PreTrainedModel

from specnb.distributions import Conditional
from specnb.enumeration import completed, joint_distribution, step_distribution
from specnb.rules import Outcome, token_verification
from specnb.sampler import generate
from studies.batching import batch_truncation
from studies.batching.batch_truncation import (
    Truncation,
    keep_all,
    truncate_and_resample,
    truncate_as_printed,
    truncate_to_shortest,
)

TRUNCATIONS: dict[Truncation, bool] = {
    keep_all: True, truncate_to_shortest: True, truncate_and_resample: False, truncate_as_printed: False,
}  # fmt: skip
EXACT = 1e-12


def distributions(
    make: Callable[..., PreTrainedModel], prompt: list[int], length: int
) -> tuple[Conditional, Conditional]:
    target = make(vocab=3)
    return distributions_after(target, prompt, length), distributions_after(near_copy(target, 0.5), prompt, length)


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_which_truncations_keep_the_distribution_of_a_row(
    truncation: Truncation, make: Callable[..., PreTrainedModel], gamma: int
) -> None:
    p, q = distributions(make, [1], gamma + 1)
    others = batch_truncation.emitted_count_distribution(*distributions(make, [2, 0], gamma + 1), gamma)
    emitted = batch_truncation.distribution_with_neighbour(truncation, p, q, gamma, others)
    assert sum(emitted.values()) == pytest.approx(1, abs=EXACT)
    distance = float((completed(emitted, p, gamma + 1) - joint_distribution(p, gamma + 1)).abs().sum() / 2)
    if TRUNCATIONS[truncation]:
        assert distance < EXACT
    # With one draft token nothing is truncated wrongly.
    elif (truncation, gamma) != (truncate_as_printed, 1):
        assert distance > 0.01


def test_truncated_rows_stay_independent() -> None:
    """Not only each row's distribution: the joint distribution of both is the product."""
    gamma, length = 2, 3
    pairs = [distributions(llama, prompt, length) for prompt in ([1], [2, 0])]
    first, second = (step_distribution(token_verification, p, q, gamma) for p, q in pairs)
    joint = torch.zeros((27, 27), dtype=torch.float64)
    for mine, chance in first.items():
        for other, also in second.items():
            end = min(len(mine), len(other))
            ends = (
                completed({mine[:end]: 1.0}, pairs[0][0], length),
                completed({other[:end]: 1.0}, pairs[1][0], length),
            )
            joint += chance * also * torch.outer(*(own.flatten() for own in ends))
    target = [joint_distribution(p, length).flatten() for p, _ in pairs]
    assert float((joint - torch.outer(*target)).abs().sum()) < EXACT


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_truncations_work_in_the_loop_as_enumerated(truncation: Truncation) -> None:
    """A rule of the loop sees the whole batch; two rows of it are each other's neighbour."""
    target = llama(dtype=torch.float64)
    kept = []

    def rule(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        outcome = token_verification(p, q, draft_tokens, accept, final)
        made = truncation(outcome, outcome.accepted.flip(0), p, draft_tokens, final)
        kept.append((outcome.accepted.tolist(), made.accepted.tolist()))
        return made

    generate(target, [[1], [2, 0]], near_copy(target, 0.5), gamma=3, max_new_tokens=8, rule=rule, progress=False)
    expected: dict[Truncation, Callable[[list[int]], list[int]]] = {
        keep_all: lambda pair: pair,
        truncate_to_shortest: lambda pair: [min(pair)] * 2,
        truncate_and_resample: lambda pair: [min(pair)] * 2,
        truncate_as_printed: lambda pair: [3 - max(pair) + n for n in pair],
    }
    assert kept
    assert all(made == expected[truncation](accepted) for accepted, made in kept)
