"""Tokens that the target gives probability zero under the settings claimed, sorted by what explains them.

At temperature 0 and with top-k or top-p a sampler that computes with other rounding errors emits such tokens now and
then: near ties, where the smallest error decides. They say nothing about the sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from specnb_audit.numerics import Numerics

LISTED = 100  # tokens of each class kept with all details


class Impossible(NamedTuple):
    """A token of probability zero.

    sequence, position  where it is, both counted from 0
    token               its id
    logit               how far its logit is below the smallest one that argmax or top-k keeps; NaN without logits
    mass                the probability of likelier tokens in excess of top-p; NaN without logits

    >>> print(Impossible(sequence=3, position=17, token=5, logit=0.25, mass=0.0))
    sequence 3, position 17: token 5 (its logit is 0.25 below the smallest one kept)
    """

    sequence: int
    position: int
    token: int
    logit: float
    mass: float

    def __str__(self) -> str:
        gaps = [] if not self.logit > 0 else [f"its logit is {self.logit:.3g} below the smallest one kept"]
        gaps += [] if not self.mass > 0 else [f"likelier tokens have {self.mass:.3g} more than top-p"]
        place = f"sequence {self.sequence}, position {self.position}: token {self.token}"
        return f"{place} ({' and '.join(gaps)})" if gaps else place


class ImpossibleTokens:
    """The impossible tokens of an audit, in three classes:

    violations  no numerics considered explain them
    borderline  the engine's `numerics` explain them
    undeclared  those of bfloat16 would (`undeclared`, measured at the first token that needs it), and nobody said
                which dtype the engine computes in

    >>> found = ImpossibleTokens(numerics=None, undeclared=None)
    >>> found.add(Impossible(0, 0, 5, 0.25, 0.0))
    'violations'
    """

    def __init__(self, numerics: Numerics | None, undeclared: Callable[[], Numerics] | None) -> None:
        self.numerics = numerics
        self._measure = undeclared
        self.listed: dict[str, list[Impossible]] = {"violations": [], "borderline": [], "undeclared": []}
        self.gaps: list[tuple[float, float]] = []  # logit and mass of each, whatever its class
        self.counts = dict.fromkeys(self.listed, 0)

    @cached_property
    def undeclared(self) -> Numerics | None:
        """The numerics of bfloat16, or None where the engine's dtype is known."""
        return None if self._measure is None else self._measure()

    def add(self, one: Impossible) -> str:
        """The class of `one`, which is recorded in it."""
        self.gaps.append((one.logit, one.mass))
        if self.numerics is not None and self.numerics.explains(one.logit, one.mass):
            name = "borderline"
        elif one.logit == one.logit and self.undeclared is not None and self.undeclared.explains(one.logit, one.mass):
            name = "undeclared"
        else:
            name = "violations"
        self.listed[name] += [one][: LISTED - len(self.listed[name])]
        self.counts[name] += 1
        return name

    def excuse(self) -> None:
        """Moves the violations to the class `undeclared`: a control has as many, and as large ones."""
        moved = self.listed["undeclared"] + self.listed["violations"]
        self.listed |= {"undeclared": moved[:LISTED], "violations": []}
        self.counts["undeclared"] += self.counts["violations"]
        self.counts["violations"] = 0

    def summary(self, tokens: int) -> str:
        """How many of `tokens` tokens are impossible, and the largest gaps; empty without any."""
        return summary(self.gaps, tokens)


def summary(gaps: list[tuple[float, float]], tokens: int) -> str:
    """The number, share and size of impossible tokens in words.

    >>> summary([(0.25, 0.0)], 100)
    '1 of 100 tokens is impossible (1%), by up to 0.25 in a logit'
    """
    if not gaps:
        return ""
    logit, mass = (
        max((value for value in column if value == value), default=0.0) for column in zip(*gaps, strict=True)
    )
    sizes = [f"{logit:.2g} in a logit"] * (logit > 0) + [f"{mass:.2g} in top-p"] * (mass > 0)
    share = f"{len(gaps):,} of {tokens:,} tokens {'is' if len(gaps) == 1 else 'are'} impossible"
    by = f", by up to {' and '.join(sizes)}" if sizes else ""
    percent = float(f"{100 * len(gaps) / max(tokens, 1):.2g}")
    return f"{share} ({percent:g}%){by}"
