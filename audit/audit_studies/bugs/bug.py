"""What every known bug has in common, and the bugs that can run in the decoding loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from specnb.cache import CachedModel
from specnb.distributions import Sampling
from specnb.rules import Rule, token_verification
from specnb.step import Batch

Change = Callable[[Tensor], Tensor]
"""Changes the distributions `(..., positions, vocab)` that a model has at temperature 1."""

UNFILTERED = Sampling()


@dataclass(frozen=True)
class Bug:
    """A bug of a step or of the loop, as changes of a correct step; what is None is as it should be.

    description  what is wrong
    reported_in  issues or projects where it was reported; "-" where it was made up
    held_out     whether no bet of the audit was designed for it, so that it may judge its power
    rule         the verification rule
    claimed      the sampling settings that the tokens should have
    p, q         make what the rule reads from the target's and the draft's distributions at
                 temperature 1
    sampled      makes the distribution that draft tokens are sampled from, position by position
    batch        what makes the steps of the loop (`audit_studies.bugs.loop`)
    draft_class  the draft model with its cache
    lossless     whether the output still has the target's distribution
    """

    name: str
    description: str
    reported_in: str
    _: KW_ONLY
    held_out: bool = False
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
        bugs[name] = Bug(name, words, reported_in, held_out=held_out, rule=rule)
        return rule

    return register
