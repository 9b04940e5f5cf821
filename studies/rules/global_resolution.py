"""Global Resolution: the optimal rule for k independent draft tokens of one position, up to a tolerance.

Source: Thomas and Pal, "Global Resolution", arXiv 2511.15898. The paper was not read; the algorithm is taken from two
independent summaries of it (of version 1 and of the ICLR 2026 version) that agree: the optimal set H* (Hu et al.), the
outer residuals (Theorem 6.2), the convex functions Phi and Theta with their truncation (Theorems 6.4 and 6.5) and the
bounds of Lemma 6.6. Neither states the formula of gamma_T, which is therefore our own, in the likeness of epsilon_T,
nor when the minimisation stops: here as soon as the 1-norm of the gradient is at most the tolerance.

Notation: psi(H) = p(H) - q(H)^k. A draft is the set of its distinct tokens, d(D) its probability, and S(x, D) the
probability that D is drafted and x in D is emitted because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import logsumexp
from torch import Tensor

from specnb.rules import PlannedRule
from specnb.trees import independent_children
from studies.rules.optimal_acceptance import proposed_sets
from studies.rules.selection import AtEachNode

Floats = NDArray[np.float64]
Probs = tuple[float, ...]
Flow = dict[frozenset[int], dict[int, float]]  # S(x, D) by draft and token


@dataclass(frozen=True)
class GlobalResolution:
    """What the rule does with k independent samples from one q, with the paper's `tolerance` tau (there 1e-3 and 1e-4).

    Not exact: the paper bounds the 1-norm of the deviation from p by 15 tau (a total variation of 7.5 tau) and the
    acceptance that is missing to the optimum by 10 tau. Takes 2^vocab steps here, where the paper needs fewer.
    """

    tolerance: float

    def __call__(self, p: Tensor, q: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See `specnb.rules.Selection`; row by row, rows of equal p and q are solved once."""
        k = draft_tokens.shape[-1]
        rows = zip(p.reshape(-1, p.shape[-1]), q.reshape(-1, *q.shape[-2:]), draft_tokens.reshape(-1, k), strict=True)
        accept, left = [], []
        for p_row, q_row, tokens in rows:
            probs = tuple(p_row.tolist())
            flow, residual = transport(probs, tuple(q_row[0].tolist()), k, self.tolerance)
            accept.append(_in_turn(flow[frozenset(tokens.tolist())], tokens.tolist()))
            left.append(residual if sum(residual) > 0 else probs)
        return (
            torch.tensor(accept, dtype=p.dtype).reshape(draft_tokens.shape),
            torch.tensor(left, dtype=p.dtype).reshape(p.shape),
        )


def global_resolution(tolerance: float) -> PlannedRule:
    """The rule with this tolerance."""
    return PlannedRule(AtEachNode(GlobalResolution(tolerance)), schemes=(independent_children,))


@lru_cache(maxsize=4096)
def transport(p: Probs, q: Probs, k: int, tolerance: float) -> tuple[Flow, Probs]:
    """S(x, D) / d(D) for every draft D, and what is left of p for the draws in which no draft token is emitted.

    >>> flow, left = transport((0.5, 0.5), (0.75, 0.25), 2, 1e-6)
    >>> {tuple(sorted(draft)): round(sum(shares.values()), 4) for draft, shares in flow.items()}
    {(0,): 0.8889, (0, 1): 1.0, (1,): 1.0}
    """
    drafts = proposed_sets(torch.tensor(q, dtype=torch.float64), k)
    inside = optimal_set(p, q, k)
    flow: Flow = {draft: {} for draft in drafts}
    outer = _outer_residuals(p, q, k, inside)
    kept = _truncated(outer, q, lambda t: 1 - _mass(inside | t, q) ** k, tolerance)
    leaving = {draft: chance for draft, chance in drafts.items() if not draft <= inside and draft <= inside | kept}
    _solve(flow, leaving, {x: outer[x] for x in kept}, False, tolerance)
    own = _mass(inside, q) ** k
    kept = _truncated(inside, q, lambda t: own - _mass(t, q) ** k, tolerance)
    _solve(flow, {draft: drafts[draft] for draft in drafts if draft <= kept}, {x: p[x] for x in kept}, True, tolerance)
    served = np.zeros(len(p))
    for draft, shares in flow.items():
        for x, share in shares.items():
            served[x] += drafts[draft] * share
    return flow, tuple(np.clip(np.array(p) - served, 0, None).tolist())


def optimal_set(p: Probs, q: Probs, k: int) -> frozenset[int]:
    """H*: where psi is smallest, among the sets of tokens with the largest q/p; p(H*) + 1 - q(H*)^k is the optimum."""
    order = sorted(range(len(p)), key=lambda x: -(q[x] / p[x] if p[x] > 0 else np.inf if q[x] > 0 else 0.0))
    return min((frozenset(order[:n]) for n in range(len(p) + 1)), key=lambda s: _psi(s, p, q, k))


def _psi(tokens: frozenset[int], p: Probs, q: Probs, k: int) -> float:
    return _mass(tokens, p) - _mass(tokens, q) ** k


def _mass(tokens: frozenset[int], probs: Probs) -> float:
    return sum(probs[x] for x in sorted(tokens))


def _outer_residuals(p: Probs, q: Probs, k: int, inside: frozenset[int]) -> dict[int, float]:
    """How much of each p(x) outside H* the drafts not within H* serve (Theorem 6.2); these sum to 1 - q(H*)^k."""
    outside = [x for x in range(len(p)) if x not in inside]

    def least(within: frozenset[int]) -> float:
        free = [x for x in outside if x not in within]
        return min(_psi(within | set(more), p, q, k) for n in range(len(free) + 1) for more in combinations(free, n))

    served, before = {}, least(inside | set(outside))
    for i, x in enumerate(outside):
        after = least(inside | set(outside[i + 1 :]))
        served[x] = max(0.0, p[x] + after - before)
        before = after
    return served


def _truncated(
    tokens: Iterable[int], q: Probs, missing: Callable[[frozenset[int]], float], tolerance: float
) -> frozenset[int]:
    """T: the fewest `tokens`, largest q first, for which the mass of the drafts left out is at most the tolerance."""
    order = sorted(tokens, key=lambda x: -q[x])
    shortened = (frozenset(order[:n]) for n in range(len(order)))
    return next((kept for kept in shortened if missing(kept) <= tolerance), frozenset(order))


def _solve(
    flow: Flow, drafts: dict[frozenset[int], float], wanted: dict[int, float], slack: bool, tolerance: float
) -> None:
    """Minimises Phi (without slack) or Theta (with) over the tokens of `wanted` and enters S(x, D) / d(D) into `flow`.

    S(x, D) = d(D) e^alpha_x / (slack, 0 or 1, + sum of e^alpha over D's tokens), whose sum over D is to be `wanted`.
    """
    tokens = sorted(wanted)
    chosen = [draft for draft in drafts if draft & wanted.keys()]
    if not chosen:
        return
    member = np.array([[x in draft for x in tokens] for draft in chosen])
    chance, goal = np.array([drafts[draft] for draft in chosen]), np.array([wanted[x] for x in tokens])

    def logs(alpha: Floats) -> tuple[Floats, Floats]:
        """alpha of the tokens of each draft, -inf for others, and the logarithm of its denominator."""
        own = np.where(member, alpha, -np.inf)
        return own, logsumexp(np.column_stack([own, np.full(len(own), 0.0 if slack else -np.inf)]), axis=1)

    def shares(alpha: Floats) -> Floats:
        own, total = logs(alpha)
        return np.exp(own - total[:, None])

    def objective(alpha: Floats) -> tuple[float, Floats]:
        return float(chance @ logs(alpha)[1] - goal @ alpha), chance @ shares(alpha) - goal

    def stop(intermediate_result: Any) -> None:
        if np.abs(objective(intermediate_result.x)[1]).sum() <= tolerance:
            raise StopIteration

    start = np.zeros(len(tokens))
    options = {"ftol": 0.0, "gtol": tolerance / len(tokens) / 100, "maxiter": 10_000, "maxfun": 100_000}
    if np.abs(objective(start)[1]).sum() > tolerance:
        start = minimize(objective, start, jac=True, method="L-BFGS-B", callback=stop, options=options).x
    for draft, row in zip(chosen, shares(start), strict=True):
        flow[draft] = {x: float(share) for x, share in zip(tokens, row, strict=True) if share > 0}


def _in_turn(shares: dict[int, float], tokens: list[int]) -> list[float]:
    """The probability of accepting each draft token if those before it were rejected; repeats are never accepted."""
    accept, left = [], 1.0
    for i, x in enumerate(tokens):
        share = shares.get(x, 0.0) if x not in tokens[:i] else 0.0
        accept.append(min(1.0, share / left) if left > 0 else 0.0)
        left -= share
    return accept
