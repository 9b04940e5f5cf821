"""Drafters: whatever proposes tokens, together with the exact distribution each of them was drawn from.

The contract of losslessness is here: `Proposal.q` is the distribution after every processor, in the dtype that
was used to draw. A deterministic drafter's distribution is one-hot; where it has nothing to propose, the draft
is -1 and its distribution zero, and the step goes on without it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Proposal(NamedTuple):
    """Drafted tokens `(batch, gamma)`, -1 for none, and the distribution q `(batch, gamma, vocab)` of each."""

    draft_tokens: Tensor
    q: Tensor


@runtime_checkable
class Drafter(Protocol):
    """What the decoding loop asks of a drafter. `tokens` `(batch, slots)` hold each row's text so far in
    its first `lengths` `(batch,)` entries; entries behind that mean nothing."""

    vocab: int

    def start(self, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Forget what went before; a new batch begins. Raises before anything is generated. Or only the texts in
        `rows` `(n,)` are new, and the others go on: that is asked only where texts follow each other in a row."""

    def propose(self, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Proposal:
        """One draft for each of the `uniforms` `(batch, gamma)`, which are all the randomness there is.

        Drafts are int64, each in the vocabulary or -1. Their q is float32 or float64, 0 or more everywhere, and sums
        to 1 for each draft, to 0 where it is -1. The loop raises `TypeError` or `ValueError` for anything else.
        """
