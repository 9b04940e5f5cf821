"""Decide whether a verification rule or a drafter is exact, how far it is off, and how many tokens its steps emit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.arguments import require_whole, whole
from specnb.distributions import Conditional, total_variation
from specnb.drafters import Drafter
from specnb.enumeration import (
    ChangesInsideError,
    Emissions,
    completed,
    draft_trees,
    drafts_of,
    emissions,
    estimated_distribution,
    expected_accepted,
    joint_distribution,
    step_distribution,
)
from specnb.rules import Rule, block_verification, token_verification
from specnb.trees import Scheme, chain, independent_children, node_depths

EXACT = 1e-12  # the largest total variation of an enumerated rule that is called exact
BISECTED = 1e-6  # the same of a drafter, whose q may be in float32
LARGEST = 8  # tokens of a vocabulary that `judge_drafter` enumerates
MARGIN = 3  # an estimated rule may be off by so many times what token verification is off on the same points

Array = NDArray[np.float64]
Pair = tuple[Conditional, Conditional]  # distributions of target and draft after each prefix


class Prefix(NamedTuple):
    """The beginning of a sequence, and its probability under the target and under the rule."""

    tokens: tuple[int, ...]
    target: float
    rule: float


class Case(NamedTuple):
    """The outcome for one pair; `resolution` is what an exact rule may be off by."""

    where: str
    total_variation: float
    resolution: float
    worst: Prefix
    accepted: float

    @property
    def excess(self) -> tuple[bool, float]:
        return self.total_variation > self.resolution, self.total_variation


@dataclass(frozen=True)
class Judgement:
    """The outcome of `judge_rule`; `str` says it in words.

    Attributes
    ----------
    worst
        The case with the largest total variation from the target.
    tokens_per_step, token_verification, block_verification
        Expected tokens of these rules with the most draft tokens; means over all pairs.
    optimum
        The same of the best exact rule; None for trees.
    """

    rule: str
    worst: Case
    cases: int
    tokens_per_step: float
    token_verification: float
    block_verification: float
    optimum: float | None

    @property
    def exact(self) -> bool:
        return not self.worst.excess[0]

    def __str__(self) -> str:
        worst, (tokens, target, under_rule) = self.worst, self.worst.worst
        estimated = worst.resolution > EXACT
        verdict = "NOT exact" if not self.exact else "not told from an exact rule" if estimated else "exact"
        amount = f"below {EXACT:g}" if verdict == "exact" else f"{worst.total_variation:.2g}"
        lines = [f"{self.rule} is {verdict}: total variation {amount} in the worst of {self.cases} cases"]
        if estimated:
            lines += [f"  estimated on quasi-random points: an exact rule has up to {worst.resolution:.1g} there"]
        if not self.exact:
            lines += [
                f"  worst prefix: {tokens}, probability {target:.4f} under the target, {under_rule:.4f} under the rule",
                f"  ({worst.where})",
            ]
        beside_it = {"token verification": self.token_verification, "block verification": self.block_verification}
        if self.optimum is not None:
            beside_it["the best exact rule"] = self.optimum
        beside = ", ".join(f"{name} {value:.3f}" for name, value in beside_it.items())
        return "\n".join([*lines, f"tokens per step: {self.tokens_per_step:.3f} ({beside})"])


def judge_rule(
    rule: Rule,
    gamma: int | Sequence[int] = 3,
    pairs: Mapping[str, Pair] | None = None,
    scheme: Scheme = independent_children,
) -> Judgement:
    """Decide whether `rule` is exact, and count the tokens of its steps.

    Steps are enumerated on pairs of distributions that depend on the context, some with impossible
    or missing draft tokens. A rule whose thresholds no known plan has is estimated instead.

    Parameters
    ----------
    gamma
        The most draft tokens of a chain, or the parents of a tree.
    pairs
        Names, each with float64 distributions of target and draft; by default `random_pairs`.
    scheme
        How siblings of a tree are sampled.

    Examples
    --------
    >>> from specnb.rules import lenient_verification
    >>> print(judge_rule(lenient_verification(0.5), gamma=2))
    lenient_verification(0.5) is NOT exact: total variation 0.32 in the worst of 32 cases
      worst prefix: (2, 2), probability 0.2771 under the target, 0.0209 under the rule
      (3 tokens, any p and q, seed 1, gamma 2)
    tokens per step: 2.072 (token verification 1.966, block verification 1.971, the best exact rule 1.971)
    """
    most = whole(gamma)
    if most is not None:
        require_whole(gamma=(most, 1))
    shapes = [tuple(gamma)] if most is None else [chain(n) for n in range(1, most + 1)]  # type: ignore[arg-type]
    pairs = random_pairs(3) | random_pairs(4) if pairs is None else pairs
    cases = [_case(rule, name, pair, parents, scheme) for parents in shapes for name, pair in pairs.items()]

    def mean(accepted: Callable[[Conditional, Conditional], float]) -> float:
        return 1 + float(np.mean([accepted(*pair) for pair in pairs.values()]))

    def accepted_by(known: Rule) -> float:
        return mean(lambda p, q: expected_accepted(step_distribution(known, p, q, shapes[-1], scheme=scheme)))

    return Judgement(
        rule=str(getattr(rule, "__name__", rule)),
        worst=max(cases, key=lambda case: case.excess),
        cases=len(cases),
        tokens_per_step=1 + float(np.mean([case.accepted for case in cases[-len(pairs) :]])),
        token_verification=accepted_by(token_verification),
        block_verification=accepted_by(block_verification),
        optimum=None if most is None else mean(lambda p, q: optimal_accepted(p, q, most)),
    )


@dataclass(frozen=True)
class DrafterJudgement:
    """The outcome of `judge_drafter`; `str` says it in words.

    Attributes
    ----------
    prefixes, proposing
        Number of prefixes, and of those after which a token was proposed.
    drafted
        Expected draft tokens of a step, the mean over the prefixes.
    """

    drafter: str
    worst: Case
    prefixes: int
    proposing: int
    drafted: float

    @property
    def exact(self) -> bool:
        return not self.worst.excess[0]

    def __str__(self) -> str:
        worst, (tokens, target, here) = self.worst, self.worst.worst
        verdict = "exact" if self.exact else "NOT exact"
        amount = f"below {worst.resolution:g}" if self.exact else f"{worst.total_variation:.2g}"
        lines = [f"{self.drafter} is {verdict}: total variation {amount} after the worst of {self.prefixes} prefixes"]
        if not self.exact:
            lines += [f"  {worst.where}: {tokens} has probability {target:.4f} under the target, and {here:.4f} here"]
        lines += [f"it proposes {self.drafted:.2f} tokens a step, and something after {self.proposing} of the prefixes"]
        return "\n".join(lines)


def judge_drafter(
    drafter: Drafter,
    gamma: int = 2,
    prefixes: Sequence[Sequence[int]] | None = None,
    rule: Rule = token_verification,
) -> DrafterJudgement:
    """Decide whether `drafter`, over at most `LARGEST` tokens, reports the q that it samples from.

    After each of `prefixes`, by default 24 random ones, with another target each time, the joint
    distribution of a step and what follows is compared with the target's. Raises `ValueError` if
    nothing is ever proposed, and as `drafts_of`.

    Examples
    --------
    >>> from specnb.ngram import PromptLookupDrafter
    >>> print(judge_drafter(PromptLookupDrafter(3, shortest=1)))
    PromptLookupDrafter is exact: total variation below 1e-06 after the worst of 24 prefixes
    it proposes 1.50 tokens a step, and something after 18 of the prefixes
    """
    require_whole(gamma=(gamma, 1))
    vocab, name = drafter.vocab, type(drafter).__name__
    if vocab > LARGEST:
        raise ValueError(f"{name} has a vocabulary of {vocab} tokens; judge one over at most {LARGEST}")
    random = np.random.default_rng(0)
    texts = [random.integers(vocab, size=1 + n // 2).tolist() for n in range(24)] if prefixes is None else prefixes
    parents = chain(gamma) if drafter.parents is None else drafter.parents
    cases, drafted = [], []
    for number, text in enumerate(texts):
        (p, _), prefix = _pair(vocab, "any p and q", number), tuple(text)
        drafts = drafts_of(drafter, prefix, len(parents))
        drafted.append(float(drafts.probability @ (drafts.tokens >= 0).sum(dim=1).double()))
        cases.append(_compared(f"after {prefix}", emissions(rule, drafts, p, parents), p, parents, BISECTED))
    if not any(drafted):
        raise ValueError(
            f"{name} proposes nothing after any of the {len(texts)} prefixes; give prefixes for which it does"
        )
    worst = max(cases, key=lambda case: case.excess)
    return DrafterJudgement(name, worst, len(cases), sum(map(bool, drafted)), float(np.mean(drafted)))


def _compared(
    where: str,
    emitted: Emissions,
    p: Conditional,
    parents: tuple[int, ...],
    resolution: float,
    control: Emissions | None = None,
) -> Case:
    length = max(node_depths(parents)) + 1
    want = joint_distribution(p, length)

    def off(have: Tensor) -> float:
        return float(total_variation(have.flatten(), want.flatten()))

    have = completed(emitted, p, length)
    if control is not None:
        resolution = MARGIN * off(completed(control, p, length))
    return Case(where, off(have), resolution, worst_prefix(have, want), expected_accepted(emitted))


def _case(rule: Rule, name: str, pair: Pair, parents: tuple[int, ...], scheme: Scheme) -> Case:
    where = f"{name}, gamma {len(parents)}"
    try:
        emitted, control = _emitted(rule, *pair, parents, scheme)
    except Exception as error:
        error.add_note(f"It was a step with {where}; where none is proposed, the draft token is -1 and its q is 0.")
        raise
    return _compared(where, emitted, pair[0], parents, EXACT, control)


def _emitted(
    rule: Rule, p: Conditional, q: Conditional, parents: tuple[int, ...], scheme: Scheme
) -> tuple[Emissions, Emissions | None]:
    """What the rule emits; if that is only estimated, also what token verification emits on the same points."""
    try:
        return step_distribution(rule, p, q, parents, scheme=scheme), None
    except ChangesInsideError:
        drafts = draft_trees(parents, q, scheme)
        emitted, control = (estimated_distribution(each, drafts, p, parents) for each in (rule, token_verification))
        return emitted, control


def worst_prefix(have: Tensor, want: Tensor) -> Prefix:
    """The shortest prefix whose probabilities differ most in two joint distributions."""
    worst = []  # of each length
    while have.dim():
        off = (have - want).abs()
        tokens = tuple(int(at) for at in np.unravel_index(int(off.argmax()), off.shape))
        worst.append((float(off[tokens]), Prefix(tokens, float(want[tokens]), float(have[tokens]))))
        have, want = have.sum(-1), want.sum(-1)
    return max(reversed(worst), key=lambda each: round(each[0], 12))[1]


def optimal_accepted(p: Conditional, q: Conditional, gamma: int) -> float:
    """The largest expected number of accepted draft tokens of any exact rule for a chain.

    Notes
    -----
    The sum over all sequences x of the least q(x_1..x_j) p(x_j+1..x_n | x_1..x_j), j = 0 .. n; no
    exact rule accepts x with a larger probability, and block verification attains it
    (arXiv:2403.10444).
    """

    def accepted_after(prefix: tuple[int, ...], kept: float, drafted: float) -> float:
        if len(prefix) == gamma:
            return 0.0
        total = 0.0
        for x, (target, draft) in enumerate(zip(p(prefix).tolist(), q(prefix).tolist(), strict=True)):
            least = min(kept * target, drafted * draft)
            total += least + accepted_after((*prefix, x), least, drafted * draft)
        return total

    return accepted_after((), 1.0, 1.0)


def random_pairs(vocab: int, seeds: int = 2) -> dict[str, Pair]:
    """Pairs of distributions over `vocab` tokens that depend on the context, by name."""
    return {f"{vocab} tokens, {kind}, seed {seed}": _pair(vocab, kind, seed) for kind in KINDS for seed in range(seeds)}


def _pair(vocab: int, kind: str, seed: int) -> Pair:
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
