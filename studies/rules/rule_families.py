"""Families of pairs p, q on small vocabularies: random ones of several kinds, and the trained
pair's, reduced."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.distributions import Conditional
from specnb.loading import Pair, load_pair
from studies.speed.pairs import PROMPT_TOKENS, prompts_of

TRAINED = "trained pair"
CONTEXTS = 12  # held-out files of which the trained pair's distributions are taken
Floats = NDArray[np.float64]


def _random(generator: np.random.Generator, vocab: int) -> tuple[Floats, Floats]:
    return generator.dirichlet(np.ones(vocab)), generator.dirichlet(np.ones(vocab))


def _near(generator: np.random.Generator, vocab: int) -> tuple[Floats, Floats]:
    p = generator.dirichlet(np.ones(vocab))
    q = p * np.exp(0.3 * generator.standard_normal(vocab))
    return p, q / q.sum()


def _peaked(generator: np.random.Generator, vocab: int) -> tuple[Floats, Floats]:
    """Most of the probability on one token, half of the time on the same one; no probability below
    0.01 / vocab."""
    p, q = (np.sort(generator.dirichlet(np.full(vocab, 0.2)))[::-1] * 0.99 + 0.01 / vocab for _ in range(2))
    order = generator.permutation(vocab)
    return p[order], q[order] if generator.random() < 0.5 else q[generator.permutation(vocab)]


def _one_in_common(generator: np.random.Generator, vocab: int) -> tuple[Floats, Floats]:
    """Supports that share a single token."""
    order, half = generator.permutation(vocab), vocab // 2
    p, q = np.zeros(vocab), np.zeros(vocab)
    p[order[: half + 1]], q[order[half:]] = (
        generator.dirichlet(np.ones(half + 1)),
        generator.dirichlet(np.ones(vocab - half)),
    )
    return p, q


def _nearly_one_hot(generator: np.random.Generator, vocab: int) -> tuple[Floats, Floats]:
    """p gives one token all but 0.0005, q most."""
    sure = np.eye(vocab)[generator.integers(vocab)]
    return tuple((1 - rest) * sure + rest * generator.dirichlet(np.ones(vocab)) for rest in (5e-4, 0.4))


FAMILIES: dict[str, Callable[[np.random.Generator, int], tuple[Floats, Floats]]] = {
    "random": _random,
    "near": _near,
    "peaked": _peaked,
    "one token in common": _one_in_common,
    "nearly one-hot p": _nearly_one_hot,
}


def conditionals(family: str, vocab: int, seed: int) -> tuple[Conditional, Conditional]:
    """p and q of pair `seed` of a family, drawn anew in each context."""

    @cache
    def both(context: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng([list(FAMILIES).index(family), vocab, seed, len(context), *context])
        p, q = FAMILIES[family](generator, vocab)
        return torch.from_numpy(p), torch.from_numpy(q)

    return lambda context: both(context)[0], lambda context: both(context)[1]


def trained_conditionals(vocab: int, seed: int) -> tuple[Conditional, Conditional]:
    """p and q of the trained pair after the first tokens of held-out file `seed`, reduced to
    `vocab` tokens.

    Token i is the i-th most probable under the target, the last one stands for all others: their
    probability is summed, and they are continued with the most probable of them. Summing hides
    differences between p and q within the rest, so more is accepted than on the whole vocabulary,
    by every rule and by the optimum.
    """
    return lambda context: _reduced(vocab, seed, context)[0], lambda context: _reduced(vocab, seed, context)[1]


@cache
def _reduced(vocab: int, seed: int, context: tuple[int, ...]) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """p and q after the context, the sequence of the model's tokens that it stands for, and the
    token of each index."""
    pair, prompts = _trained()
    if context:
        *_, sequence, ids = _reduced(vocab, seed, context[:-1])
        tokens = [*sequence, ids[context[-1]]]
    else:
        tokens = prompts[seed]
    with torch.inference_mode():
        p, q = (model(torch.tensor([tokens])).logits[0, -1].softmax(-1) for model in (pair.target, pair.draft))
    order = p.argsort(descending=True, stable=True)
    kept, rest = order[: vocab - 1], order[vocab - 1 :]
    p, q = (torch.cat([probs[kept], probs[rest].sum()[None]]).clone() for probs in (p, q))
    return p / p.sum(), q / q.sum(), tokens, order[:vocab].tolist()


@cache
def _trained() -> tuple[Pair, list[list[int]]]:
    pair = load_pair(dtype=torch.float64)
    return pair, prompts_of(pair, "held-out", CONTEXTS, PROMPT_TOKENS)


def conditionals_of(family: str, vocab: int, pairs: int) -> list[tuple[Conditional, Conditional]]:
    """The first `pairs` pairs of a family, or of the trained pair."""
    one = trained_conditionals if family == TRAINED else partial(conditionals, family)
    return [one(vocab, seed) for seed in range(pairs)]
