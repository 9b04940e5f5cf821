"""What every known bug has in common, and the bugs that can run in the decoding loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from specnb.cache import CachedModel
from specnb.distributions import Sampling
from specnb.rules import Rule, token_verification
from specnb.step import Batch

Kind = Literal["step", "loop", "beam", "tree"]
Change = Callable[[Tensor], Tensor]
"""Changes the distributions `(..., positions, vocab)` that a model has at temperature 1."""

UNFILTERED = Sampling()


@dataclass(frozen=True)
class KnownBug:
    """An entry of the registry: `kind` is the part of the implementation that has the bug.

    description  what is wrong
    reported_in  issues or projects where it was reported; "-" where it was made up for tests
    held_out     whether no bet of the audit was designed for it, so that it may judge the audit's
                 power
    """

    name: str
    description: str
    reported_in: str
    kind: Kind
    held_out: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Bug(KnownBug):
    """A bug of a step or of the loop, as changes of a correct step. What is None is as it should
    be.

    rule         the verification rule
    claimed      the sampling settings that the tokens should have
    p, q         make what the rule reads from the target's and the draft's distributions at
                 temperature 1
    sampled      makes the distribution that draft tokens are sampled from, position by position
    batch        what makes the steps of the loop (`specnb_audit.bugs.loop`)
    draft_class  the draft model with its cache
    lossless     whether the output still has the target's distribution
    """

    rule: Rule = token_verification
    claimed: Sampling = UNFILTERED
    p: Change | None = None
    q: Change | None = None
    sampled: Change | None = None
    batch: type[Batch] | None = None
    draft_class: type[CachedModel] | None = None
    lossless: bool = False

    @property
    def in_loop(self) -> bool:
        """Whether a part of the loop is replaced, so that rows of a batch may affect each other."""
        return self.batch is not None or self.draft_class is not None


def registered(bugs: dict[str, Bug], reported_in: str, held_out: bool = True) -> Callable[[Rule], Rule]:
    """Enters the rule that it decorates into `bugs`; the rule's name and docstring say which bug it
    has."""

    def register(rule: Rule) -> Rule:
        name, words = rule.__name__.replace("_", "-"), " ".join((rule.__doc__ or "").split())
        bugs[name] = Bug(name, words, reported_in, "step", held_out=held_out, rule=rule)
        return rule

    return register
