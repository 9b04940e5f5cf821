"""N-grams against a slow dictionary, and copied continuations against a search."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specnb.distributions import Sampling, standardise_probs
from specnb.drafters import Context
from specnb.ngram import (
    DISCOUNT,
    PER_MATCH,
    NgramDrafter,
    NgramModel,
    PromptLookupDrafter,
    latest_match,
    match_lengths,
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


SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@given(row=SEQUENCES, longest=st.integers(1, 5))
def test_the_latest_match_is_that_of_all_lengths(row: list[int], longest: int) -> None:
    matched = match_lengths(torch.tensor([row]), torch.tensor([len(row)]), longest)[0]
    best = int(matched.max())
    place = int((matched == best).nonzero()[-1]) if best else 0
    assert latest_match(np.array(row), longest) == (place, best)


@given(rows=st.lists(SEQUENCES, min_size=1, max_size=3), gamma=st.integers(0, 9), shortest=st.integers(1, 3))
def test_a_copy_is_what_follows_the_place_again_and_again(rows: list[list[int]], gamma: int, shortest: int) -> None:
    """In each row as if it were alone; -1 stands in slots without a token."""
    tokens = torch.full((len(rows), 15), -1)
    for row, sequence in zip(tokens, rows, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    context = Context(tokens, torch.tensor(list(map(len, rows))))
    drafter = PromptLookupDrafter(3, shortest=shortest)
    draft_tokens, q = drafter.propose(context, torch.zeros(len(rows), gamma))
    counts = drafter.matched(context)
    assert counts is not None
    for sequence, drafted, count in zip(rows, draft_tokens.tolist(), counts.tolist(), strict=True):
        place, matched = latest_match(np.array(sequence), drafter.longest)
        matched = matched if matched >= shortest else 0
        assert count == matched
        copied = (sequence[place:] * gamma)[: min(gamma, PER_MATCH * matched)]
        assert drafted == copied + [-1] * (len(drafted) - len(copied))
    assert draft_tokens.shape[1] == min(gamma, PER_MATCH * max(counts))
    assert torch.equal(q, torch.nn.functional.one_hot(draft_tokens + 1, 4)[..., 1:].float())


def test_a_place_whose_copy_was_rejected_is_not_taken_next() -> None:
    """The token in the place of the rejected one is another, so nothing agrees there."""
    drafter = PromptLookupDrafter(9)
    tokens = torch.tensor([[1, 2, 3, 4, 1, 2, 7]])
    assert drafter.propose(Context(tokens, torch.tensor([6])), torch.zeros(1, 1)).draft_tokens.tolist() == [[3]]
    assert drafter.propose(Context(tokens, torch.tensor([7])), torch.zeros(1, 1)).draft_tokens.tolist() == [[]]
