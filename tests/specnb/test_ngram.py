"""N-grams against a slow dictionary, and copied continuations against a search."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specnb.distributions import Sampling, standardise_probs
from specnb.drafters import Context
from specnb.ngram import DISCOUNT, PER_MATCH, NgramDrafter, NgramModel, PromptLookupDrafter, latest_match, match_lengths

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
        lambda: PromptLookupDrafter(4, longest=1, shortest=2),
    ],
)
def test_what_would_count_wrongly_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=" "):
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


SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@given(row=SEQUENCES, longest=st.integers(1, 5))
def test_matches_are_those_of_a_search(row: list[int], longest: int) -> None:
    """And the latest of the longest; none in slots beyond the row."""
    lengths = [
        next(n for n in range(longest + 1) if n == min(longest, slot) or row[slot - 1 - n] != row[-1 - n])
        for slot in range(len(row))
    ]
    found = match_lengths(torch.tensor([[*row, 1, 1]]), torch.tensor([len(row)]), longest)[0]
    assert found.tolist() == [*lengths, 0, 0]
    best = max(lengths)
    place = max(slot for slot in range(len(row)) if lengths[slot] == best) if best else 0
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
    counts = [0]
    for sequence, drafted in zip(rows, draft_tokens.tolist(), strict=True):
        place, matched = latest_match(np.array(sequence), drafter.longest)
        matched = matched if matched >= shortest else 0
        counts.append(matched)
        copied = (sequence[place:] * gamma)[: min(gamma, PER_MATCH * matched)]
        assert drafted == copied + [-1] * (len(drafted) - len(copied))
    assert draft_tokens.shape[1] == min(gamma, PER_MATCH * max(counts))
    assert torch.equal(q, torch.nn.functional.one_hot(draft_tokens + 1, 4)[..., 1:].float())
