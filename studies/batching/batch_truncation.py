"""The distribution of a batch row when the number of tokens it keeps depends on the other rows.

Some implementations keep all rows of a batch equally long by giving a row fewer tokens than it
accepted. A `Truncation` changes the outcome of a rule for one row, given how many draft tokens the
other rows accepted. The result can be enumerated (`distribution_with_neighbour`), because the other
rows matter only through that number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specnb.distributions import Conditional, sample
from specnb.enumeration import Emissions, count_distribution, step_distribution
from specnb.rules import Outcome, token_verification

Truncation = Callable[[Outcome, Tensor, Tensor, Tensor, Tensor], Outcome]
"""`(outcome, others, p, draft_tokens, final_uniform) -> Outcome`, where `others` `(batch,)` is the
number of draft tokens that the other rows accepted; the rest as in `specnb.rules`, with one batch
axis."""


def keep_all(outcome: Outcome, others: Tensor, p: Tensor, draft_tokens: Tensor, final_uniform: Tensor) -> Outcome:
    """Every row keeps all it accepted and the token after it; `others` is not read. Exact."""
    return outcome


def truncate_to_shortest(
    outcome: Outcome, others: Tensor, p: Tensor, draft_tokens: Tensor, final_uniform: Tensor
) -> Outcome:
    """All rows keep as many tokens as the shortest; the last token of a truncated row is an
    accepted draft token.

    Exact: whether a row continues is known before its next token is, so the row ends at a stopping
    time.
    """
    longer = outcome.accepted > others
    next_draft = draft_tokens.gather(-1, others.clamp_max(draft_tokens.shape[-1] - 1)[:, None])[:, 0]
    return Outcome(outcome.accepted.minimum(others), torch.where(longer, next_draft, outcome.token))


def truncate_and_resample(
    outcome: Outcome, others: Tensor, p: Tensor, draft_tokens: Tensor, final_uniform: Tensor
) -> Outcome:
    """All rows keep as many draft tokens as the row that accepted fewest; a truncated row then
    samples from p.

    Not exact: where the batch is truncated, a row that rejected keeps its recovered token and a row
    that accepted loses its draft token. So recovered tokens are too frequent.
    """
    probs = p.gather(-2, others.clamp_max(draft_tokens.shape[-1])[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]
    longer = outcome.accepted > others
    return Outcome(outcome.accepted.minimum(others), torch.where(longer, sample(probs, final_uniform), outcome.token))


def truncate_as_printed(
    outcome: Outcome, others: Tensor, p: Tensor, draft_tokens: Tensor, final_uniform: Tensor
) -> Outcome:
    """Only n_max - n of the gamma draft tokens are removed, as section 6.3 of the walk-through
    states.

    Not exact: gamma - n_max rejected draft tokens stay in every row.
    """
    most = outcome.accepted.maximum(others)
    return Outcome(draft_tokens.shape[-1] - (most - outcome.accepted), outcome.token)


@dataclass(frozen=True)
class TruncatedRule:
    """Token verification followed by `truncation`, for a row beside one that accepted `others`
    tokens. A `Rule`."""

    truncation: Truncation
    others: int

    def __call__(self, p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        outcome = token_verification(p, q, draft_tokens, accept, final)
        others = torch.full_like(outcome.accepted, self.others)
        return self.truncation(outcome, others, p, draft_tokens, final)


def distribution_with_neighbour(
    truncation: Truncation, p: Conditional, q: Conditional, gamma: int, others: Tensor
) -> Emissions:
    """The probability of each sequence that a row emits in one step beside a row that emits 1 ..
    gamma + 1 tokens.

    `others` `(gamma + 1,)` are the probabilities of these numbers; of several neighbours, those of
    the shortest. `specnb.enumeration.completed` shows whether the step is exact.

    >>> p = lambda prefix: torch.tensor([0.5, 0.5]).double()
    >>> found = distribution_with_neighbour(truncate_to_shortest, p, p, 1, torch.tensor([0.5, 0.5]).double())
    >>> sorted(found.items())
    [((0,), 0.25), ((0, 0), 0.125), ((0, 1), 0.125), ((1,), 0.25), ((1, 0), 0.125), ((1, 1), 0.125)]
    """
    emitted: Emissions = {}
    for accepted, probability in enumerate(others.tolist()):
        for tokens, given in step_distribution(TruncatedRule(truncation, accepted), p, q, gamma).items():
            emitted[tokens] = emitted.get(tokens, 0.0) + probability * given
    return emitted


def emitted_count_distribution(p: Conditional, q: Conditional, gamma: int) -> Tensor:
    """The distribution `(gamma + 1,)` of how many tokens a row emits that is not truncated."""
    return count_distribution(step_distribution(token_verification, p, q, gamma), gamma)
