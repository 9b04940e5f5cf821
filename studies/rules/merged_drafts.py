"""Several draft tokens for one position: how they are proposed, and what merging equal ones into
one child does."""

from __future__ import annotations

from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from specnb.distributions import normalise
from specnb.enumeration import Drafts, draft_trees, expected_accepted, multiplied
from specnb.rules import PlannedRule
from specnb.trees import Scheme, distinct_children, independent_children, top_children
from studies.rules.published_rules import hub_children


def proposed(q: Tensor, k: int, scheme: Scheme) -> Drafts:
    """Every proposal of k tokens after q `(vocab,)` by `scheme`."""
    return draft_trees((-1,) * k, lambda _: q, scheme)


independent = partial(proposed, scheme=independent_children)  # k samples from q, repeats kept
# k samples, each from what is left of q.
without_replacement = partial(proposed, scheme=distinct_children)
most_probable = partial(proposed, scheme=top_children)
hub_pairs = partial(proposed, scheme=hub_children)  # SpecHub's pairs; k is 2


def from_several(q: Tensor) -> Drafts:
    """One sample from each of the k rows of q `(k, vocab)`: several draft models."""
    return proposed(q[0], len(q), lambda own, earlier: q[len(earlier)].expand_as(own))


def merged(drafts: Drafts, shuffled: bool) -> Drafts:
    """Equal tokens merged into one child of a tree: each distinct token is tested once, -1 in place
    of repeats.

    `shuffled`: the distinct children are tested in random order, every order being equally likely
    (SpecInfer's verification); otherwise in the order of their first appearance. q is taken to be
    what it was before.
    """
    tokens, rows, chances = [], [], []
    for draft, q, chance in zip(drafts.tokens.tolist(), drafts.q, drafts.probability.tolist(), strict=True):
        children = tuple(dict.fromkeys(draft))
        orders = list(permutations(children)) if shuffled else [children]
        tokens += [[*order, *[-1] * (len(draft) - len(children))] for order in orders]
        rows += [q] * len(orders)
        chances += [chance / len(orders)] * len(orders)
    found = torch.tensor(tokens)
    return Drafts(
        found, torch.stack(rows).where(found[..., None] >= 0, 0.0), torch.tensor(chances, dtype=torch.float64)
    )


def first_appearances(drafts: Drafts) -> Drafts:
    """Equal tokens merged in the order of their first appearance, but with the q that they really
    have.

    A distinct token that appears after others is a sample from q without these, renormalised.
    Whether there is one says nothing about which it is. For independent samples from one q; equal
    proposals are listed once.
    """
    chances: dict[tuple[int, ...], float] = {}
    once = merged(drafts, shuffled=False)
    for tokens, chance in zip(map(tuple, once.tokens.tolist()), once.probability.tolist(), strict=True):
        chances[tokens] = chances.get(tokens, 0.0) + chance
    rows = []
    for tokens in chances:
        q = drafts.q[0].clone()
        for i, token in enumerate(tokens):
            q[i, [x for x in tokens[:i] if x >= 0]] = 0.0
            q[i] = normalise(q[i]) if token >= 0 else 0.0
        rows.append(q)
    return Drafts(
        torch.tensor(list(chances)), torch.stack(rows), torch.tensor(list(chances.values()), dtype=torch.float64)
    )


def selected(rule: PlannedRule, p: Tensor, drafts: Drafts) -> tuple[Tensor, float]:
    """The distribution `(vocab,)` of the first token that is emitted, and the probability that it
    was a draft token.

    >>> from specnb.rules import recursive_rejection
    >>> p, q = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.75, 0.25]).double()
    >>> selected(recursive_rejection, p, independent(q, 1))
    (tensor([0.5000, 0.5000], dtype=torch.float64), 0.75)
    """
    emitted = multiplied(rule, drafts, lambda _: p, (-1,) * drafts.tokens.shape[1])
    first = torch.zeros_like(p)
    for tokens, chance in emitted.items():
        first[tokens[0]] += chance
    return first, expected_accepted(emitted)
