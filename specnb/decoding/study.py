"""`Study`: what `generate` records or replaces so that its loop can be studied."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from specnb.arguments import shown
from specnb.decoding.step import Batch
from specnb.decoding.tree_step import TreeBatch
from specnb.sampling.tree_verification import TreeRule
from specnb.sampling.verification import Rule


@dataclass(frozen=True)
class Study:
    """What is recorded, or replaced, to study the loop of `generate`; nothing by default.

    rows         numbers of the prompts in place of 0, 1, ... The tokens of a prompt depend on the seed, its number, the
                 prompt and the settings, and not on the batch, so one prompt can be generated again alone
    timed        record the seconds of each part of a step; the host then waits for the device after each part
    keep_probs   return the target's distribution of every new token: that many tokens times the vocabulary
    batch_class  what makes the steps, for a loop that differs from this one: a subclass of `Batch`, the default, or of
                 `TreeBatch` for a tree. Known bugs are such classes (`specnb.audit.bugs.loop`)

    `generate` checks the values.

    >>> Study(rows=[3], timed=True)
    Study(rows=[3], timed=True, keep_probs=False, batch_class=None)
    """

    rows: Collection[int] | None = None
    timed: bool = False
    keep_probs: bool = False
    batch_class: type[Batch] | None = None

    def batch_class_for(self, rule: Rule | TreeRule) -> type[Batch]:
        """The class that makes the steps for the kind of draft tokens that `rule` verifies.

        Raises `TypeError` for a `batch_class` that cannot.

        >>> from specnb.sampling.verification import token_verification
        >>> Study().batch_class_for(token_verification).__name__
        'Batch'
        """
        given: Any = self.batch_class
        needed: type[Batch] = TreeBatch if isinstance(rule, TreeRule) else Batch
        if given is None:
            return needed
        is_batch = isinstance(given, type) and issubclass(given, Batch)
        if not is_batch or issubclass(given, TreeBatch) != (needed is TreeBatch):
            raise TypeError(f"batch_class is {given!r}; for this rule it must be a subclass of {needed.__name__}")
        chosen: type[Batch] = given
        return chosen


def require_study(study: object) -> None:
    """Raises `TypeError` for anything but a `Study`.

    >>> require_study(True)
    Traceback (most recent call last):
        ...
    TypeError: study is True; it must be a specnb.Study, such as Study(timed=True)
    """
    if not isinstance(study, Study):
        raise TypeError(f"study is {shown(study)}; it must be a specnb.Study, such as Study(timed=True)")
