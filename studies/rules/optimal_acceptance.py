"""The best that any exact rule can do: linear programs, solved by HiGHS with the dual checked.

- Several draft tokens for one position: the optimal transport from tuples of draft tokens to the
  target's token that maximises the probability that the token is one of the tuple (Sun et al.,
  SpecTr, arXiv 2310.15141; Khisti et al., arXiv 2410.18234; Hu et al., arXiv 2502.18779).
- Blocks: the largest expected number of accepted draft tokens over all exact rules for chains and
  trees, which may know p and q for every context, also off the drafted paths.

Sizes: only the set of distinct tokens of a tuple matters, so the program has at most 2^vocab rows
whatever k is: k = 8 with vocabulary 8 has 1,024 variables. Lists of tuples (`optimal_selection`)
grow as vocab^k: 5^4 takes well under a second, 5^8 does not. Chains have vocab^gamma rows:
vocabulary 4 with gamma = 3 (1,024 variables) takes well under a second, vocabulary 5 with gamma = 4
(15,625) is beyond it. Of k independent chains only the set of distinct ones matters: 8 chains of
two tokens, vocabulary 3, are at most 511 sets; of three tokens, vocabulary 2, at most 255; three
tokens of vocabulary 3 (2^27 sets) are out of reach. Probabilities below about 1e-6 make dual prices
so large that the optimum can no longer be proved to 1e-9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch import Tensor

from specnb.distributions import Conditional
from specnb.enumeration import Drafts, joint_distribution

TOLERANCE = 1e-9
SCALE = 1e4  # of all rows: HiGHS drops coefficients below 1e-9, which improbable sequences have


class Optimum(NamedTuple):
    """`value` of the best exact rule and `gap`, how far the two solutions of the program are from
    proving it.

    gap is the duality gap, plus the largest violation of a dual constraint (the variables sum to 1
    at most), plus the violations of the primal constraints at their dual prices.
    """

    value: float
    gap: float


Entries = list[tuple[int, int, float]]  # row, column, coefficient
Floats = NDArray[np.float64]
Sets = dict[frozenset[int], float]
Tree = frozenset[tuple[int, ...]]


def optimal_selection(p: Tensor, drafts: Drafts) -> Optimum:
    """The largest probability with which an exact rule can accept one of several draft tokens.

    p is `(vocab,)`; `drafts` lists every tree of depth 1. Maximises the flow from the trees to the
    tokens in them, at most the probability of each tree out of it and at most p(x) into each token.

    >>> import torch
    >>> from studies.rules.merged_drafts import independent
    >>> p, q = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.75, 0.25]).double()
    >>> round(optimal_selection(p, independent(q, 1)).value, 9)
    0.75
    """
    sets: Sets = {}
    for draft, chance in zip(drafts.tokens.tolist(), drafts.probability.tolist(), strict=True):
        tokens = frozenset(x for x in draft if x >= 0)
        sets[tokens] = sets.get(tokens, 0.0) + chance
    return optimal_cover(p, sets)


def optimal_cover(p: Tensor, sets: Mapping[frozenset[int], float]) -> Optimum:
    """`optimal_selection` for the probabilities with which each set of distinct tokens is
    proposed."""
    arcs = [(i, x) for i, tokens in enumerate(sets) for x in sorted(tokens)]
    entries = [(i, column, 1.0) for column, (i, _) in enumerate(arcs)]
    entries += [(len(sets) + x, column, 1.0) for column, (_, x) in enumerate(arcs)]
    return _maximum(np.ones(len(arcs)), entries, np.array([*sets.values(), *p.tolist()]), equal=False)


def proposed_sets(q: Tensor, k: int) -> Sets:
    """The probability of each set of distinct tokens among k independent samples from q.

    >>> import torch
    >>> {tuple(sorted(tokens)): chance for tokens, chance in proposed_sets(torch.tensor([0.75, 0.25]), 2).items()}
    {(0,): 0.5625, (0, 1): 0.375, (1,): 0.0625}
    """
    shares = {x: share for x, share in enumerate(q.tolist()) if share > 0}
    found: Sets = {frozenset(): 1.0}
    for _ in range(k):
        longer: Sets = {}
        for tokens, chance in found.items():
            for x, share in shares.items():
                longer[tokens | {x}] = longer.get(tokens | {x}, 0.0) + chance * share
        found = longer
    return found


def optimal_chains(p: Conditional, q: Conditional, gamma: int, k: int = 1) -> Optimum:
    """The largest expected number of accepted draft tokens of any exact rule for k independent
    chains of `gamma`.

    A rule emits the first n draft tokens of a chain and one token more, with probabilities that may
    depend on the whole draft and on p and q everywhere. It is exact if what it emits, continued by
    p, has the target's joint distribution.
    """
    chains = list(product(range(len(p(()))), repeat=gamma))
    sets = proposed_sets(torch.tensor([_chance(q, chain, 0) for chain in chains], dtype=torch.float64), k)
    return optimal_tree(p, {_prefixes([chains[i] for i in ids]): chance for ids, chance in sets.items()}, gamma)


def optimal_tree(p: Conditional, trees: Mapping[Tree, float], depth: int) -> Optimum:
    """The same for draft trees and their probabilities; a tree is the set of the paths of tokens to
    its nodes."""
    vocab = len(p(()))
    target = joint_distribution(p, depth + 1).flatten().tolist()
    entries: Entries = []
    gain: list[float] = []
    for row, tree in enumerate(trees):
        for accepted in sorted({(), *tree}):
            for y in range(vocab):
                emitted = (*accepted, y)
                entries.append((row, len(gain), 1.0))
                for rest in product(range(vocab), repeat=depth - len(accepted)):
                    place = int(np.ravel_multi_index(emitted + rest, (vocab,) * (depth + 1)))
                    entries.append((len(trees) + place, len(gain), _chance(p, emitted + rest, len(emitted))))
                gain.append(float(len(accepted)))
    return _maximum(np.array(gain), entries, np.array([*trees.values(), *target]), equal=True)


def drafted_trees(drafts: Drafts, parents: tuple[int, ...]) -> dict[Tree, float]:
    """The trees of `specnb.enumeration.draft_trees` as `optimal_tree` takes them."""
    found: dict[Tree, float] = {}
    for tokens, chance in zip(drafts.tokens.tolist(), drafts.probability.tolist(), strict=True):
        paths = [prefix_of(node, parents, tokens) for node in range(len(parents))]
        nodes = frozenset(path for path in paths if -1 not in path)
        found[nodes] = found.get(nodes, 0.0) + chance
    return found


def _prefixes(chains: Sequence[tuple[int, ...]]) -> Tree:
    return frozenset(chain[:n] for chain in chains for n in range(1, len(chain) + 1))


def _chance(probs: Conditional, tokens: tuple[int, ...], start: int) -> float:
    chance = 1.0
    for i in range(start, len(tokens)):
        chance *= float(probs(tokens[:i])[tokens[i]])
    return chance


def _maximum(gain: Floats, entries: Entries, limits: Floats, equal: bool) -> Optimum:
    """The maximum of gain x, x >= 0, subject to A x <= limits, or = limits; the dual solution
    bounds the error.

    Raises `RuntimeError` if the program is not solved to 1e-9.
    """
    rows, columns, values = zip(*entries, strict=True)
    matrix = SCALE * coo_array((values, (rows, columns)), shape=(len(limits), len(gain))).tocsr()
    limits = SCALE * limits
    sides = {"A_eq": matrix, "b_eq": limits} if equal else {"A_ub": matrix, "b_ub": limits}
    solved = linprog(-gain, **sides, bounds=(0, None), method="highs-ds")
    if solved.status != 0:
        raise RuntimeError(f"the linear program was not solved ({solved.message}); try a smaller vocabulary or chain")
    prices = -(solved.eqlin if equal else solved.ineqlin).marginals
    unpaid = max(0.0, float((gain - matrix.T @ prices).max()), 0.0 if equal else float((-prices).max()))
    excess = matrix @ solved.x - limits
    excess = np.abs(excess) if equal else excess.clip(0)
    gap = abs(float(limits @ prices) + solved.fun) + unpaid + float(np.abs(prices) @ excess)
    if gap > TOLERANCE:
        raise RuntimeError(
            f"the dual solution proves the optimum to {gap:.1e} only, not to {TOLERANCE}; very small probabilities "
            "cause this: leave them out or make them larger"
        )
    return Optimum(-float(solved.fun), gap)


def prefix_of(node: int, parents: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens from the root to `node`, its own included; () for the root, -1."""
    return () if node < 0 else (*prefix_of(parents[node], parents, tokens), tokens[node])
