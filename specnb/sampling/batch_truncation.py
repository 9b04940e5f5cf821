"""What becomes of a row's law when its neighbours have a say in how many tokens it keeps.

Batches whose rows must stay equally long are often kept so by giving some rows fewer tokens than they accepted. A
`Cut` changes what a rule decided for one row, given what the others accepted; every cut can be enumerated
(`law_beside`), since a neighbour matters through its count alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specnb.exact import Emissions, Laws, count_law, step_law
from specnb.law import draw
from specnb.verify import Outcome, Rule, token_verification

Cut = Callable[[Outcome, Tensor, Tensor, Tensor, Tensor], Outcome]
"""From an outcome `(batch,)`, the drafts that the others accepted `(batch,)`, p, drafts and the final uniform."""


def each_its_own(outcome: Outcome, others: Tensor, p: Tensor, drafts: Tensor, final: Tensor) -> Outcome:
    """Every row keeps what it accepted, and the token that follows: `others` are not asked."""
    return outcome


def at_the_shortest(outcome: Outcome, others: Tensor, p: Tensor, drafts: Tensor, final: Tensor) -> Outcome:
    """All rows keep as many tokens as the one that has fewest; in longer rows the last of them is an accepted draft.

    Exact: whether a row goes on is known before its next token is, so it stops at a stopping time.
    """
    longer = outcome.accepted > others
    next_draft = drafts.gather(-1, others.clamp_max(drafts.shape[-1] - 1)[:, None])[:, 0]
    return Outcome(outcome.accepted.minimum(others), torch.where(longer, next_draft, outcome.token))


def redrawn_at_the_shortest(outcome: Outcome, others: Tensor, p: Tensor, drafts: Tensor, final: Tensor) -> Outcome:
    """All rows keep as many drafts as the one that accepted fewest; longer rows then draw a token from p.

    Not exact: at that place a row that rejects keeps its correction, and one that accepts loses its draft, so
    accepted tokens are thrown away more often than corrections.
    """
    law = p.gather(-2, others.clamp_max(drafts.shape[-1])[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]
    longer = outcome.accepted > others
    return Outcome(outcome.accepted.minimum(others), torch.where(longer, draw(law, final), outcome.token))


def short_of_the_longest(outcome: Outcome, others: Tensor, p: Tensor, drafts: Tensor, final: Tensor) -> Outcome:
    """n_max - n of the gamma drafts are dropped and no more, as the walk-through's section 6.3 has it word for word.

    Not exact: gamma - n_max rejected drafts stay in every row.
    """
    most = outcome.accepted.maximum(others)
    return Outcome(drafts.shape[-1] - (most - outcome.accepted), outcome.token)


def beside(cut: Cut, others: int, rule: Rule = token_verification) -> Rule:
    """`rule` and then `cut`, for a row beside one that accepted `others` drafts."""

    def cut_rule(p: Tensor, q: Tensor, drafts: Tensor, accept_uniforms: Tensor, final_uniform: Tensor) -> Outcome:
        outcome = rule(p, q, drafts, accept_uniforms, final_uniform)
        return cut(outcome, torch.full_like(outcome.accepted, others), p, drafts, final_uniform)

    return cut_rule


def law_beside(cut: Cut, p: Laws, q: Laws, gamma: int, others: Tensor) -> Emissions:
    """What a row emits in one step beside a row that emits 1 .. gamma + 1 tokens with probabilities `others`.

    The law of each such sequence (`specnb.exact.completed` says whether the step is exact). Of several neighbours,
    `others` is the law of the shortest.
    """
    emitted: Emissions = {}
    for accepted, chance in enumerate(others.tolist()):
        for tokens, share in step_law(beside(cut, accepted), p, q, gamma).items():
            emitted[tokens] = emitted.get(tokens, 0.0) + chance * share
    return emitted


def tokens_law(p: Laws, q: Laws, gamma: int) -> Tensor:
    """The law `(gamma + 1,)` of how many tokens a row emits that nobody cuts."""
    return count_law(step_law(token_verification, p, q, gamma), gamma)


def shortest_law(counts: Tensor, rows: int) -> Tensor:
    """The law of the fewest tokens that any of `rows` independent rows emits, each 1 .. gamma + 1 by `counts`."""
    at_least = counts.flip(0).cumsum(0).flip(0) ** rows
    return -at_least.diff(append=at_least.new_zeros(1))
