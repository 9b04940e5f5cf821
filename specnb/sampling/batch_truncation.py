"""What becomes of a row's distribution when its neighbours have a say in how many tokens it keeps.

Batches whose rows must stay equally long are often kept so by giving some rows fewer tokens than they accepted. A
`Cut` changes what a rule decided for one row, given what the others accepted; every cut can be enumerated
(`law_beside`), since a neighbour matters through its count alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specnb.sampling.distributions import sample
from specnb.sampling.enumeration import Conditional, Emissions, count_distribution, step_distribution
from specnb.sampling.verification import Outcome, Rule, token_verification

Truncation = Callable[[Outcome, Tensor, Tensor, Tensor, Tensor], Outcome]
"""From an outcome `(batch,)`, the drafts that the others accepted `(batch,)`, p, drafts and the final uniform."""


def keep_all(outcome: Outcome, others: Tensor, p: Tensor, draft_tokens: Tensor, final: Tensor) -> Outcome:
    """Every row keeps what it accepted, and the token that follows: `others` are not asked."""
    return outcome


def truncate_to_shortest(outcome: Outcome, others: Tensor, p: Tensor, draft_tokens: Tensor, final: Tensor) -> Outcome:
    """All rows keep as many tokens as the one that has fewest; in longer rows the last of them is an accepted draft.

    Exact: whether a row goes on is known before its next token is, so it stops at a stopping time.
    """
    longer = outcome.accepted > others
    next_draft = draft_tokens.gather(-1, others.clamp_max(draft_tokens.shape[-1] - 1)[:, None])[:, 0]
    return Outcome(outcome.accepted.minimum(others), torch.where(longer, next_draft, outcome.token))


def truncate_and_resample(outcome: Outcome, others: Tensor, p: Tensor, draft_tokens: Tensor, final: Tensor) -> Outcome:
    """All rows keep as many drafts as the one that accepted fewest; longer rows then draw a token from p.

    Not exact: at that place a row that rejects keeps its correction, and one that accepts loses its draft, so
    accepted tokens are thrown away more often than corrections.
    """
    probs = p.gather(-2, others.clamp_max(draft_tokens.shape[-1])[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]
    longer = outcome.accepted > others
    return Outcome(outcome.accepted.minimum(others), torch.where(longer, sample(probs, final), outcome.token))


def truncate_as_printed(outcome: Outcome, others: Tensor, p: Tensor, draft_tokens: Tensor, final: Tensor) -> Outcome:
    """n_max - n of the gamma drafts are dropped and no more, as the walk-through's section 6.3 has it word for word.

    Not exact: gamma - n_max rejected drafts stay in every row.
    """
    most = outcome.accepted.maximum(others)
    return Outcome(draft_tokens.shape[-1] - (most - outcome.accepted), outcome.token)


def with_neighbour(cut: Truncation, others: int, rule: Rule = token_verification) -> Rule:
    """`rule` and then `cut`, for a row beside one that accepted `others` drafts."""

    def truncated_rule(
        p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
    ) -> Outcome:
        outcome = rule(p, q, draft_tokens, accept_uniforms, final_uniform)
        return cut(outcome, torch.full_like(outcome.accepted, others), p, draft_tokens, final_uniform)

    return truncated_rule


def distribution_with_neighbour(
    cut: Truncation, p: Conditional, q: Conditional, gamma: int, others: Tensor
) -> Emissions:
    """What a row emits in one step beside a row that emits 1 .. gamma + 1 tokens with probabilities `others`.

    The distribution of each such sequence (`specnb.sampling.enumeration.completed` says whether the step is exact). Of several neighbours,
    `others` is the distribution of the shortest.
    """
    emitted: Emissions = {}
    for accepted, chance in enumerate(others.tolist()):
        for tokens, share in step_distribution(with_neighbour(cut, accepted), p, q, gamma).items():
            emitted[tokens] = emitted.get(tokens, 0.0) + chance * share
    return emitted


def emitted_count_distribution(p: Conditional, q: Conditional, gamma: int) -> Tensor:
    """The distribution `(gamma + 1,)` of how many tokens a row emits that nobody cuts."""
    return count_distribution(step_distribution(token_verification, p, q, gamma), gamma)


def shortest_count_distribution(counts: Tensor, rows: int) -> Tensor:
    """The distribution of the fewest tokens that any of `rows` independent rows emits, each 1 .. gamma + 1 by `counts`."""
    at_least = counts.flip(0).cumsum(0).flip(0) ** rows
    return -at_least.diff(append=at_least.new_zeros(1))
