"""N-gram models against counts by hand and a slow dictionary; the drafter's distribution is the one it draws from."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

import numpy as np
import pytest
import torch

from specnb.distributions import Sampling, sample, standardise_probs
from specnb.drafting.base import Context
from specnb.drafting.ngram import DISCOUNT, NgramDrafter, NgramModel

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


def contexts(length: int) -> np.ndarray:
    """All of them, with nothing (-1) at the front as well."""
    return np.array(list(product(range(-1, VOCAB), repeat=length)), dtype=np.int64).reshape(
        (VOCAB + 1) ** length, length
    )


# The model


def test_unigram_by_hand() -> None:
    """Counts 3, 1, 0: each seen one gives up the discount, and the two discounts are spread evenly."""
    probs = NgramModel(np.array([0, 1, 0, 0]), order=1, vocab=3).probs(contexts(0))
    freed = 2 * 0.75 / 4 / 3
    assert probs == pytest.approx(np.array([[2.25 / 4 + freed, 0.25 / 4 + freed, freed]]))


def test_bigram_by_hand() -> None:
    """After 0 come 1, 1, 2; and as a unigram 0 follows two different tokens, 1 and 2 one each."""
    model = NgramModel(np.array([0, 1, 0, 1, 0, 2, 0]), order=2, vocab=3)
    below = [1.25 / 4 + 0.75 * 3 / 4 / 3, 0.25 / 4 + 0.75 * 3 / 4 / 3, 0.25 / 4 + 0.75 * 3 / 4 / 3]
    freed = 0.75 * 2 / 3
    after_0 = [freed * below[0], 1.25 / 3 + freed * below[1], 0.25 / 3 + freed * below[2]]
    assert model.probs(np.array([[0], [-1]])) == pytest.approx(np.array([after_0, below]))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_distributions_are_those_of_the_slow_dictionary(order: int, seed: int) -> None:
    """After every context: seen, unseen, and with tokens missing anywhere; in odd texts all tokens occur."""
    tokens = text(vocab=VOCAB + seed % 2, seed=seed)
    recents = contexts(order - 1)
    distributions = NgramModel(tokens, order, VOCAB).probs(recents)
    want = [slow_distribution(tokens.tolist(), tuple(recent), order, VOCAB) for recent in recents.tolist()]
    assert distributions == pytest.approx(np.array(want), abs=1e-14)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_distributions_sum_to_one_and_leave_nothing_impossible(order: int) -> None:
    distributions = NgramModel(text(), order, VOCAB).probs(contexts(order - 1))
    assert distributions.sum(axis=1) == pytest.approx(1, abs=1e-14)
    assert distributions.min() > 0


def test_an_unseen_context_leaves_the_distribution_of_the_order_below() -> None:
    bigram, trigram = NgramModel(text(), 2, VOCAB), NgramModel(text(), 3, VOCAB)
    never = VOCAB - 1
    unseen = trigram.probs(np.array([[never, 0], [never, never]]))
    assert unseen[0] == pytest.approx(trigram.probs(np.array([[-1, 0]]))[0])
    assert unseen[1] == pytest.approx(trigram.probs(np.array([[-1, -1]]))[0])
    assert bigram.probs(np.array([[never]])) == pytest.approx(bigram.probs(np.array([[-1]])))


def test_longer_contexts_than_needed_are_cut() -> None:
    model = NgramModel(text(), 2, VOCAB)
    assert np.array_equal(model.probs(np.array([[3, 1, 2, 0]])), model.probs(np.array([[0]])))


def test_no_contexts_at_all() -> None:
    assert NgramModel(text(), 3, VOCAB).probs(contexts(2)[:0]).shape == (0, VOCAB)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_bits_are_the_sum_over_the_tokens(order: int, chunk: int) -> None:
    model, tokens = NgramModel(text(), order, VOCAB), text(40, seed=9)
    want = 0.0
    for i, token in enumerate(tokens):
        recent = np.concatenate([np.full(order - 1, -1), tokens[:i]])[i : i + order - 1]
        want -= np.log2(model.probs(recent[None])[0, token])
    assert model.bits(tokens, chunk) == pytest.approx(want)


def test_bits_are_few_for_tokens_that_repeat() -> None:
    tokens = np.tile([0, 3, 1, 2], 50)
    assert NgramModel(tokens, 2, VOCAB).bits(tokens) < 0.2 * NgramModel(tokens, 1, VOCAB).bits(tokens)


@pytest.mark.parametrize(
    ("tokens", "order", "vocab", "message"),
    [
        ([0, 1], 0, 5, "order is 0; with 5 tokens it can be 1 to 27"),
        ([0, 1], 28, 5, "order is 28; with 5 tokens it can be 1 to 27"),
        ([0, 1], 5, 50_257, "order is 5; with 50257 tokens it can be 1 to 4"),
        ([0, 1], 3, 5, "2 tokens are too few to count 3-grams"),
        ([0, 5], 1, 5, "tokens must lie in 0 to 4; they reach from 0 to 5"),
        ([-1, 2], 1, 5, "they reach from -1 to 2"),
    ],
)
def test_impossible_models_are_refused(tokens: list[int], order: int, vocab: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramModel(np.array(tokens), order, vocab)


@pytest.mark.parametrize("call", ["probs", "bits"])
def test_tokens_outside_the_vocabulary_are_refused(call: str) -> None:
    model = NgramModel(text(), 2, VOCAB)
    with pytest.raises(ValueError, match="they reach from 5 to 5"):
        getattr(model, call)(np.array([[5]]) if call == "probs" else np.array([5]))


def test_the_largest_order_that_fits_does_not_overflow() -> None:
    tokens = np.array([4, 4, 4, 3] * 10)
    model = NgramModel(tokens, 27, VOCAB)
    assert model.probs(tokens[None, :26]).argmax() == tokens[26]


# The drafter


@pytest.mark.parametrize("order", [1, 2, 3])
def test_draft_tokens_come_from_the_reported_distribution(order: int) -> None:
    """Just inside both ends of every cell of both uniforms; the second distribution depends on the first draft."""
    model = NgramModel(text(), order, VOCAB)
    prompt = [2, 0, 1]

    def probs(drafted: list[int]) -> np.ndarray:
        recent = (prompt + drafted)[len(prompt + drafted) - order + 1 :]
        return np.asarray(model.probs(np.array([recent], dtype=np.int64))[0])

    uniforms, want = [], []
    for x, y in product(range(VOCAB), repeat=2):
        ends = [np.append(0, probs(drafted).cumsum())[token : token + 2] for drafted, token in (([], x), ([x], y))]
        for first, second in product(ends[0] + [1e-12, -1e-12], ends[1] + [1e-12, -1e-12]):
            uniforms.append([first, second])
            want.append([x, y])
    tokens = torch.tensor([*prompt, 4, 4]).expand(len(want), 5)  # what stands behind the text means nothing
    lengths = torch.full((len(want),), len(prompt))
    drafter = NgramDrafter(model)
    drafter.start(Context(tokens, lengths))
    proposal = drafter.propose(Context(tokens, lengths), torch.tensor(uniforms, dtype=torch.float64))
    assert proposal.draft_tokens.tolist() == want
    for row, (x, _) in enumerate(want):
        assert np.array_equal(proposal.q[row].numpy(), [probs([]), probs([x])])


def test_rows_of_different_lengths_see_their_own_sequence() -> None:
    """Also where the text is shorter than the context that the order asks for."""
    model = NgramModel(text(), 4, VOCAB)
    tokens = torch.tensor([[1, 4, 4, 4, 4, 4], [0, 2, 4, 4, 4, 4], [0, 1, 0, 2, 1, 4]])
    lengths = torch.tensor([1, 2, 5])
    uniforms = torch.rand(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    proposal = NgramDrafter(model).propose(Context(tokens, lengths), uniforms)
    recents = [[-1, -1, 1], [-1, 0, 2], [0, 2, 1]]
    assert np.array_equal(proposal.q[:, 0].numpy(), model.probs(np.array(recents)))
    longer = np.column_stack([recents, proposal.draft_tokens[:, 0].numpy()])[:, 1:]
    assert np.array_equal(proposal.q[:, 1].numpy(), model.probs(longer))
    assert torch.equal(proposal.draft_tokens, sample(proposal.q, uniforms))


@pytest.mark.parametrize(("order", "batch", "gamma"), [(1, 1, 1), (1, 3, 4), (2, 2, 1), (3, 4, 5)])
def test_shapes_of_a_proposal(order: int, batch: int, gamma: int) -> None:
    drafter = NgramDrafter(NgramModel(text(), order, VOCAB))
    tokens = torch.zeros(batch, 8, dtype=torch.int64)
    uniforms = torch.full((batch, gamma), 0.5, dtype=torch.float64)
    proposal = drafter.propose(Context(tokens, torch.full((batch,), 3)), uniforms)
    assert drafter.vocab == VOCAB
    assert proposal.draft_tokens.shape == (batch, gamma)
    assert proposal.q.shape == (batch, gamma, VOCAB)
    assert proposal.q.dtype == torch.float64


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(0.5), Sampling(top_k=2)], ids=str)
def test_a_drafter_may_sample_otherwise_and_says_so(sampling: Sampling) -> None:
    model = NgramModel(text(), 2, VOCAB)
    tokens, lengths = torch.tensor([[0, 1, 4, 4], [2, 4, 4, 4]]), torch.tensor([2, 1])
    uniforms = torch.rand(2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    proposal = NgramDrafter(model, sampling).propose(Context(tokens, lengths), uniforms)
    recent = np.stack([[1, 2], proposal.draft_tokens[:, 0].numpy()])
    for at in range(2):
        assert torch.equal(
            proposal.q[:, at], standardise_probs(torch.from_numpy(model.probs(recent[at][:, None])), sampling)
        )
    assert torch.equal(proposal.draft_tokens, sample(proposal.q, uniforms))
