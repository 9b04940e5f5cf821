"""What an engine does to single tokens beside sampling, as each line of a token file declares it.

As in vLLM, tokens are removed from the target's logits before temperature and filters; a draft's
distributions stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specnb.arguments import require_whole, token_list, whole_numbers


@dataclass(frozen=True)
class Constraints:
    """The constraints of one sequence; places are counted from 0 at its first new token.

    Parameters
    ----------
    forced : sequence of int
        Places whose token the engine chose itself, as at the end of a thinking budget: nothing is
        tested there.
    min_tokens : int
        Number of tokens before which no end token is possible.
    allowed : sequence, optional
        The tokens that are possible, or a list (None for all) for each place, as a grammar gives
        it.

    Examples
    --------
    >>> Constraints(forced=[3], allowed=[[5, 7], None])
    Constraints(forced=(3,), min_tokens=0, allowed=((5, 7), None))
    """

    forced: Sequence[int] = ()
    min_tokens: int = 0
    allowed: Sequence[int] | Sequence[Sequence[int] | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "forced", tuple(self.forced))
        for place in self.forced:
            require_whole(forced=(place, 0))
        require_whole(min_tokens=(self.min_tokens, 0))
        if self.allowed is None:
            return
        flat = whole_numbers(self.allowed)
        each: list[Any] = [flat] if flat is not None else list(self.allowed)
        lists = [one if one is None else tuple(token_list("allowed", one)) for one in each]
        if () in lists:
            raise ValueError("a list of allowed tokens is empty; some token must be possible")
        object.__setattr__(self, "allowed", lists[0] if flat is not None else tuple(lists))

    def _is_flat(self) -> bool:
        return bool(self.allowed) and isinstance(self.allowed[0], int)  # type: ignore[index]  # not None

    def at(self, place: int) -> Sequence[int] | None:
        """The tokens allowed at a place; None: all."""
        if self.allowed is None or self._is_flat():
            return self.allowed  # type: ignore[return-value]
        return self.allowed[place] if place < len(self.allowed) else None  # type: ignore[return-value]

    def require_possible(self, tokens: Sequence[int], vocab: int, name: str) -> None:
        """Raises `ValueError` for tokens outside the vocabulary, and for places of another
        sequence."""
        if self.forced and max(self.forced) >= len(tokens):
            raise ValueError(f"{name} has {len(tokens)} tokens, and place {max(self.forced)} is said to be forced")
        if self.allowed is None:
            return
        if not self._is_flat() and len(self.allowed) != len(tokens):
            raise ValueError(f"{name} has {len(tokens)} tokens, and allowed tokens for {len(self.allowed)} places")
        places = [0] if self._is_flat() else range(len(tokens))
        outside = [token for place in places for token in self.at(place) or () if not 0 <= token < vocab]
        if outside:
            raise ValueError(f"{name} allows the token {outside[0]}; the vocabulary has the tokens 0 to {vocab - 1}")


NO_CONSTRAINTS = Constraints()


def constrained(
    logits: Tensor, constraints: Constraints, tokens: Sequence[int], start: int = 0, ends: Collection[int] = ()
) -> Tensor:
    """`logits` `(n, vocab)` of the `tokens` from `start` on, minus infinity for what is impossible;
    `ends` are the end tokens.

    >>> constrained(torch.zeros(2, 2), Constraints(forced=[0], min_tokens=2), [1, 1], ends=[0])
    tensor([[-inf, 0.],
            [-inf, 0.]])
    """
    if constraints == NO_CONSTRAINTS:
        return logits
    logits = logits.clone()
    for at in range(len(logits)):
        place = start + at
        allowed = [tokens[place]] if place in constraints.forced else constraints.at(place)
        if allowed is not None:
            kept = logits[at, list(allowed)]
            logits[at] = -torch.inf
            logits[at, list(allowed)] = kept
        if place < constraints.min_tokens and place not in constraints.forced:
            logits[at, list(ends)] = -torch.inf
    return logits
