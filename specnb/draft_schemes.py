"""How k draft tokens of one position are proposed: each scheme as the list of all tuples with their probabilities."""

from __future__ import annotations

from itertools import permutations, product
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.distributions import normalise, one_hot


class DraftTuple(NamedTuple):
    """One possible proposal: `tokens` in the order in which they are tested (-1: none), its `probability`, and `q`.

    `q` `(k, vocab)` is, row by row, the distribution that the rule takes each token to be sampled from.
    """

    tokens: tuple[int, ...]
    probability: float
    q: Tensor


def independent(q: Tensor, k: int) -> list[DraftTuple]:
    """k independent samples from q `(vocab,)`, repeats kept.

    >>> [(draft.tokens, draft.probability) for draft in independent(torch.tensor([0.5, 0.5]), 1)]
    [((0,), 0.5), ((1,), 0.5)]
    """
    rows, probs = q.expand(k, -1), q.tolist()
    tuples = [DraftTuple(tokens, _product(probs, tokens), rows) for tokens in product(range(len(q)), repeat=k)]
    return [draft for draft in tuples if draft.probability > 0]


def from_several(q: Tensor) -> list[DraftTuple]:
    """One sample from each of the k rows of q `(k, vocab)`: several draft models."""
    found = []
    for tokens in product(range(q.shape[-1]), repeat=len(q)):
        chance = float(q[torch.arange(len(q)), torch.tensor(tokens)].prod())
        if chance > 0:
            found.append(DraftTuple(tokens, chance, q))
    return found


def without_replacement(q: Tensor, k: int) -> list[DraftTuple]:
    """k samples from q, each from what is left of q, renormalised; -1 and a zero row when nothing is left."""
    found = [DraftTuple((), 1.0, q.new_zeros(0, len(q)))]
    for _ in range(k):
        found = [longer for draft in found for longer in _extended(draft, q)]
    return found


def most_probable(q: Tensor, k: int) -> list[DraftTuple]:
    """The k most probable tokens of q, the most probable first: no randomness, so each row of q is one-hot."""
    top = q.topk(k).indices
    return [DraftTuple(tuple(top.tolist()), 1.0, one_hot(top, len(q), q.dtype))]


def hub_pairs(q: Tensor) -> list[DraftTuple]:
    """SpecHub's pairs (Sun et al., arXiv 2411.05289): x ~ q, then the hub a = argmax q; after x = a one of the others.

    Q(x, a) = q(x) and Q(a, x) = q(a) q(x) / (1 - q(a)) for x other than a. `(a, -1)` if q is one-hot.
    """
    hub, rows = int(q.argmax()), q.expand(2, -1)
    others = [x for x in range(len(q)) if x != hub and q[x] > 0]
    if not others:
        return [DraftTuple((hub, -1), 1.0, rows)]
    rest = float(q[others].sum())
    first = [DraftTuple((x, hub), float(q[x]), rows) for x in others]
    return first + [DraftTuple((hub, x), float(q[hub] * q[x]) / rest, rows) for x in others]


def merged(drafts: list[DraftTuple], shuffled: bool) -> list[DraftTuple]:
    """Equal tokens merged into one child of a tree: each distinct token is tested once, -1 in place of repeats.

    `shuffled`: the distinct children are tested in random order, every order being equally likely (SpecInfer's
    verification); otherwise in the order of their first appearance.
    """
    found = []
    for draft in drafts:
        children = tuple(dict.fromkeys(draft.tokens))
        orders = list(permutations(children)) if shuffled else [children]
        padding = (-1,) * (len(draft.tokens) - len(children))
        found += [DraftTuple(order + padding, draft.probability / len(orders), draft.q) for order in orders]
    return found


def first_appearances(drafts: list[DraftTuple]) -> list[DraftTuple]:
    """Equal tokens merged as in `merged`, in the order of their first appearance, but with the q that they really have.

    A distinct token that appears after others is a sample from q without these, renormalised. Whether there is one says
    nothing about which it is. For independent samples from one q; equal proposals are listed once.

    >>> half = torch.tensor([0.5, 0.5])
    >>> [(draft.tokens, draft.q[1].tolist()) for draft in first_appearances(independent(half, 2))[:2]]
    [((0, -1), [0.0, 0.0]), ((0, 1), [0.0, 1.0])]
    """
    chances: dict[tuple[int, ...], float] = {}
    for draft in merged(drafts, shuffled=False):
        chances[draft.tokens] = chances.get(draft.tokens, 0.0) + draft.probability
    found = []
    for tokens, chance in chances.items():
        q = drafts[0].q.clone()
        for i, token in enumerate(tokens):
            q[i, [x for x in tokens[:i] if x >= 0]] = 0.0
            q[i] = normalise(q[i]) if token >= 0 else 0.0
        found.append(DraftTuple(tokens, chance, q))
    return found


def _extended(draft: DraftTuple, q: Tensor) -> list[DraftTuple]:
    left = q.clone()
    left[[token for token in draft.tokens if token >= 0]] = 0.0
    if not left.sum() > 0:
        return [DraftTuple((*draft.tokens, -1), draft.probability, torch.cat([draft.q, left[None]]))]
    left = normalise(left)
    rows = torch.cat([draft.q, left[None]])
    return [
        DraftTuple((*draft.tokens, x), draft.probability * chance, rows)
        for x, chance in enumerate(left.tolist())
        if chance > 0
    ]


def _product(probs: list[float], tokens: tuple[int, ...]) -> float:
    chance = 1.0
    for token in tokens:
        chance *= probs[token]
    return chance
