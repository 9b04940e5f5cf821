"""N-grams against a slow dictionary, and copied continuations against a search."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

import numpy as np
import pytest
import torch

from specnb.distributions import Sampling, standardise_probs
from specnb.drafting.base import Context
from specnb.drafting.ngram import DISCOUNT, NgramDrafter, NgramModel, match_lengths

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
    """Interpolated Kneser-Ney as it is written down: order by order, from dictionaries of sets and counts."""
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
    """After every context: seen, unseen, and with tokens missing anywhere; in odd texts all tokens occur."""
    tokens = text(vocab=VOCAB + seed % 2, seed=seed)
    count = (VOCAB + 1) ** (order - 1)
    contexts = np.array(list(product(range(-1, VOCAB), repeat=order - 1)), dtype=np.int64).reshape(count, order - 1)
    distributions = NgramModel(tokens, order, VOCAB).probs(contexts)
    want = [slow_distribution(tokens.tolist(), tuple(recent), order, VOCAB) for recent in contexts.tolist()]
    assert distributions == pytest.approx(np.array(want), abs=1e-14)


def test_a_context_may_be_longer_than_needed_and_there_may_be_none() -> None:
    model = NgramModel(text(), 2, VOCAB)
    assert np.array_equal(model.probs(np.array([[3, 1, 2, 0]])), model.probs(np.array([[0]])))
    assert model.probs(np.zeros((0, 1), dtype=np.int64)).shape == (0, VOCAB)


def test_the_largest_order_that_fits_does_not_overflow() -> None:
    tokens = np.array([4, 4, 4, 3] * 10)
    assert NgramModel(tokens, 27, VOCAB).probs(tokens[None, :26]).argmax() == tokens[26]


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="they reach from 5 to 5"):
        NgramModel(text(), 2, VOCAB).probs(np.array([[5]]))


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


def test_match_lengths_are_those_of_a_search() -> None:
    for seed in range(20):
        sequence = np.random.default_rng(seed).integers(0, 2, 12).tolist()
        matched = match_lengths(torch.tensor([[*sequence, 1, 1]]), torch.tensor([12]), longest=4)[0].tolist()
        for slot in range(12):
            length = 0
            while length < min(4, slot) and sequence[slot - 1 - length] == sequence[11 - length]:
                length += 1
            assert matched[slot] == length
        assert matched[12:] == [0, 0]
