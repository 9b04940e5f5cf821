"""N-grams against a slow dictionary, and a mixture that tells its parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from drafter_kinds import TableDrafter, table
from tiny import llama

from specnb.distributions import Sampling, standardise_probs
from specnb.drafters import Context, TreeDrafter
from specnb.rules import Outcome
from specnb.sampler import generate
from studies.drafters.tables import (
    DISCOUNT,
    MixtureDrafter,
    NgramDrafter,
    NgramModel,
    UniformDrafter,
    require_number,
)

VOCAB = 5


def text(length: int = 60, vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    """Random, but some tokens are common and some successions forbidden."""
    generator = np.random.default_rng(seed)
    tokens = [0]
    while len(tokens) < length:
        token = min(int(generator.exponential(1.5)), vocab - 2)  # the last token never occurs
        if (tokens[-1] + token) % 4 != 3:
            tokens.append(token)
    return np.array(tokens)


def slow_distribution(tokens: list[int], context: tuple[int, ...], order: int, vocab: int) -> list[float]:
    """Interpolated Kneser-Ney as it is written down: order by order, from dictionaries of sets and
    counts."""
    probs = [1 / vocab] * vocab
    for n in range(1, order + 1):
        recent = context[len(context) - n + 1 :]
        counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        if n == order:
            for i in range(len(tokens) - n + 1):
                counts[tuple(tokens[i : i + n - 1])][tokens[i + n - 1]] += 1
        else:
            for gram in {tuple(tokens[i : i + n + 1]) for i in range(len(tokens) - n)}:
                counts[gram[1:-1]][gram[-1]] += 1
        after = counts.get(recent)
        if not after:
            continue
        total = sum(after.values())
        freed = DISCOUNT * len(after) / total
        probs = [max(after[x] - DISCOUNT, 0) / total + freed * probs[x] for x in range(vocab)]
    return probs


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(2))
def test_distributions_are_those_of_the_slow_dictionary(order: int, seed: int) -> None:
    """After every context: seen, unseen, and with tokens missing anywhere; in odd texts all tokens
    occur."""
    tokens = text(vocab=VOCAB + seed % 2, seed=seed)
    count = (VOCAB + 1) ** (order - 1)
    contexts = np.array(list(product(range(-1, VOCAB), repeat=order - 1)), dtype=np.int64).reshape(count, order - 1)
    distributions = NgramModel(tokens, order, VOCAB).probs(contexts)
    want = [slow_distribution(tokens.tolist(), tuple(recent), order, VOCAB) for recent in contexts.tolist()]
    assert distributions == pytest.approx(np.array(want), abs=1e-14)


def test_the_largest_order_that_fits_does_not_overflow() -> None:
    tokens = np.array([4, 4, 4, 3] * 10)
    assert NgramModel(tokens, 27, VOCAB).probs(tokens[None, :26]).argmax() == tokens[26]


@pytest.mark.parametrize(
    "make",
    [
        lambda: NgramModel(text(), 2, VOCAB).probs(np.array([[5]])),
        lambda: NgramModel(np.array([0, 5]), 1, 5),
        lambda: NgramModel(np.array([0, 1]), 28, 5),
        lambda: MixtureDrafter(UniformDrafter(4), UniformDrafter(4), 1.5),
        lambda: MixtureDrafter(UniformDrafter(4), TreeDrafter(llama(), (-1,))),
    ],
)
def test_what_would_count_or_mix_wrongly_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError), match=" "):
        make()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0), Sampling(0.5, top_k=2)], ids=str)
def test_the_drafter_has_the_distributions_of_its_table(sampling: Sampling) -> None:
    """Also where the sequence is shorter than the context that the order asks for."""
    model = NgramModel(text(), 4, VOCAB)
    tokens, lengths = torch.tensor([[1, 4, 4, 4], [0, 2, 4, 4], [0, 2, 1, 4]]), torch.tensor([1, 2, 3])
    proposal = NgramDrafter(model, sampling).propose(Context(tokens, lengths), torch.full((3, 2), 0.4).double())
    recents = np.array([[-1, -1, 1], [-1, 0, 2], [0, 2, 1]])
    later = np.column_stack([recents, proposal.draft_tokens[:, 0].numpy()])[:, 1:]
    for position, contexts in enumerate((recents, later)):
        expected = standardise_probs(torch.from_numpy(model.probs(contexts)), sampling)
        assert torch.equal(proposal.q[:, position], expected)


class Told(TableDrafter):
    """Counts the steps that it is told of."""

    steps = 0

    def update(self, context: Context, outcome: Outcome) -> None:
        self.steps += 1


def test_the_parts_of_a_mixture_are_told_what_became_of_its_tokens() -> None:
    first, second = Told(table()), Told(table())
    made = generate(llama(), [[1]], MixtureDrafter(first, second, 0.5), gamma=2, max_new_tokens=6)
    assert first.steps == second.steps == made.record.target_passes[0]


def test_a_number_lies_in_the_interval_or_at_its_ends() -> None:
    require_number(most=1.0, one=0, other=1)
    for value in (-1e-9, 1.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"weight is .*; it must lie in \[0, 1\]"):
            require_number(most=1.0, weight=value)
