"""Decide whether a verification rule or a drafter is exact, by how much not, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.distributions import Conditional, total_variation
from specnb.drafters import Drafter
from specnb.enumeration import (
    Emissions,
    completed,
    draft_trees,
    drafts_of,
    emissions,
    expected_accepted,
    joint_distribution,
    step_distribution,
)
from specnb.rules import Rule, block_verification, token_verification
from specnb.trees import Scheme, chain, independent_children, node_depths

EXACT = 1e-12  # the largest total variation of an enumerated rule that is called exact
BISECTED = 1e-6  # the same of a drafter, whose q may be in float32
KNOWN = {"token verification": token_verification, "block verification": block_verification}

Array = NDArray[np.float64]
Conditionals = tuple[Conditional, Conditional]  # distributions of target and draft after each prefix


class Prefix(NamedTuple):
    """The beginning of a sequence, and its probability under the target and here."""

    tokens: tuple[int, ...]
    target: float
    here: float


class Case(NamedTuple):
    """A step, how far it is off, how far an exact one may be, and its expected number of tokens."""

    where: str
    total_variation: float
    allowed: float
    worst: Prefix
    tokens: float

    @property
    def excess(self) -> tuple[bool, float]:
        return not self.total_variation <= self.allowed, self.total_variation


@dataclass(frozen=True)
class Judgement:
    """The outcome of `judge_rule` and `judge_drafter`; `str` says it in words.

    Attributes
    ----------
    tokens_per_step
        Expected tokens of a step with the most draft tokens, on average over pairs or prefixes.
    beside
        The same of known rules; no exact one for a chain has more than block verification.
    """

    name: str
    worst: Case
    cases: int
    tokens_per_step: float
    beside: dict[str, float] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return not self.worst.excess[0]

    def __str__(self) -> str:
        where, amount, allowed, (tokens, target, here), _ = self.worst
        if self.exact:
            lines = [f"{self.name} is exact: total variation below {allowed:.1g} in all {self.cases} cases"]
        else:
            lines = [
                f"{self.name} is NOT exact: total variation {amount:.2g} in the worst of {self.cases} cases",
                f"  worst prefix: {tokens}, probability {target:.4f} under the target, {here:.4f} here",
                f"  ({where})",
            ]
        beside = ", ".join(f"{name} {value:.3f}" for name, value in self.beside.items())
        return "\n".join([*lines, f"tokens per step: {self.tokens_per_step:.3f}" + (f" ({beside})" if beside else "")])


def judge_rule(
    rule: Rule,
    gamma: int | Sequence[int] = 3,
    pairs: Mapping[str, Conditionals] | None = None,
    scheme: Scheme = independent_children,
) -> Judgement:
    """Decide whether a `PlannedRule` is exact, and count the tokens of its steps.

    Parameters
    ----------
    gamma
        The most draft tokens of a chain, or the parents of a tree, whose siblings `scheme` samples.
    pairs
        Names, each with float64 distributions of target and draft; by default `random_pairs`, some
        with impossible or missing draft tokens.

    Examples
    --------
    >>> print(judge_rule(block_verification, gamma=2))
    traversal_verification is exact: total variation below 1e-12 in all 32 cases
    tokens per step: 1.971 (token verification 1.966, block verification 1.971)
    """
    shapes = [chain(n) for n in range(1, gamma + 1)] if isinstance(gamma, int) else [tuple(gamma)]
    pairs = random_pairs(3) | random_pairs(4) if pairs is None else pairs
    cases = []
    for parents in shapes:
        for name, (p, q) in pairs.items():
            emitted = emissions(rule, draft_trees(parents, q, scheme), p, parents)
            cases.append(_compared(f"{name}, gamma {len(parents)}", emitted, p, parents, EXACT))

    def tokens_per_step(known: Rule) -> float:
        steps = [step_distribution(known, p, q, shapes[-1], scheme=scheme) for p, q in pairs.values()]
        return 1 + float(np.mean([expected_accepted(step) for step in steps]))

    return Judgement(
        name=str(getattr(rule, "__name__", rule)),
        worst=max(cases, key=lambda case: case.excess),
        cases=len(cases),
        tokens_per_step=float(np.mean([case.tokens for case in cases[-len(pairs) :]])),
        beside={name: tokens_per_step(KNOWN[name]) for name in KNOWN},
    )


def judge_drafter(drafter: Drafter, gamma: int = 2, prefixes: Sequence[Sequence[int]] | None = None) -> Judgement:
    """Decide whether `drafter`, over a few tokens, reports the q that it samples from.

    After each of `prefixes`, by default 24 random ones, with another target each time, the joint
    distribution of a step and what follows is compared with the target's. Raises `TypeError` for a
    drafter that reads hidden states, `ValueError` if nothing is proposed, and as `drafts_of`: a draft
    token that is possible needs a probability of 1/128 at least, as in a small vocabulary.

    Examples
    --------
    >>> from specnb.copies import PromptLookupDrafter
    >>> print(judge_drafter(PromptLookupDrafter(3, shortest=1)))
    PromptLookupDrafter is exact: total variation below 1e-06 in all 18 cases
    tokens per step: 1.371
    """
    vocab, name = drafter.vocab, type(drafter).__name__
    if drafter.hidden_layers:
        raise TypeError(f"{name} reads hidden states: compare completions at temperature 0 with those of draft=None")
    random = np.random.default_rng(0)
    texts = [random.integers(vocab, size=1 + n // 2).tolist() for n in range(24)] if prefixes is None else prefixes
    parents = chain(gamma) if drafter.parents is None else drafter.parents
    cases = []
    for number, text in enumerate(texts):
        (p, _), prefix = _pair(vocab, "any p and q", number), tuple(text)
        drafts = drafts_of(drafter, prefix, len(parents))
        if bool((drafts.tokens >= 0).any()):
            emitted = emissions(token_verification, drafts, p, parents)
            cases.append(_compared(f"after {prefix}", emitted, p, parents, BISECTED))
    if not cases:
        raise ValueError(f"{name} proposes nothing after any of {len(texts)} prefixes; give prefixes for which it does")
    tokens_per_step = float(np.mean([case.tokens for case in cases]))
    return Judgement(name, max(cases, key=lambda case: case.excess), len(cases), tokens_per_step)


def _compared(where: str, emitted: Emissions, p: Conditional, parents: tuple[int, ...], allowed: float) -> Case:
    length = max(node_depths(parents)) + 1
    have, want = completed(emitted, p, length), joint_distribution(p, length)
    off = float(total_variation(have.flatten(), want.flatten()))
    return Case(where, off, allowed, worst_prefix(have, want), 1 + expected_accepted(emitted))


def worst_prefix(have: Tensor, want: Tensor) -> Prefix:
    """The shortest prefix whose probabilities differ most in two joint distributions."""
    worst = []  # of each length
    while have.dim():
        off = (have - want).abs()
        tokens = tuple(int(at) for at in np.unravel_index(int(off.argmax()), off.shape))
        worst.append((float(off[tokens]), Prefix(tokens, float(want[tokens]), float(have[tokens]))))
        have, want = have.sum(-1), want.sum(-1)
    return max(reversed(worst), key=lambda each: round(each[0], 12))[1]


def random_pairs(vocab: int) -> dict[str, Conditionals]:
    """Pairs of distributions over `vocab` tokens that depend on the context, by name."""
    return {f"{vocab} tokens, {kind}, seed {seed}": _pair(vocab, kind, seed) for kind in KINDS for seed in range(2)}


def _pair(vocab: int, kind: str, seed: int) -> Conditionals:
    @cache
    def both(prefix: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        # With the length, because numpy takes seeds that differ in trailing zeros for the same.
        random = np.random.default_rng([seed, len(prefix), *prefix])
        p, q = KINDS[kind](random, random.dirichlet(np.ones(vocab), size=2))
        return torch.from_numpy(p), torch.from_numpy(q)

    return lambda prefix: both(prefix)[0], lambda prefix: both(prefix)[1]


def _with_zeros(random: np.random.Generator, pair: Array) -> Array:
    possible = random.random(pair.shape) > 1 / 3
    possible[np.arange(2), random.integers(pair.shape[1], size=2)] = True
    kept: Array = pair * possible
    return np.asarray(kept / kept.sum(axis=1, keepdims=True))


def _near(p: Array, power: float) -> Array:
    return np.stack([p, p**power / (p**power).sum()])


# How a pair is made for a prefix, from two random distributions `(2, vocab)`
KINDS: dict[str, Callable[[np.random.Generator, Array], Array]] = {
    "any p and q": lambda random, pair: pair,
    "q near p": lambda random, pair: _near(pair[0], random.choice([0.98, 1.3])),
    "impossible tokens": _with_zeros,
    "no draft token after some prefixes": lambda random, pair: pair * np.array([[1], [random.random() > 1 / 3]]),
}
