"""The probability that lenient decoding (appendix A.5) emits a given sequence."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specnb.theory import lenient_distribution


def sequence_log_probability(
    p: Float[Tensor, "batch n vocab"],
    q: Float[Tensor, "batch n vocab"],
    tokens: Int[Tensor, "batch n"],
    gamma: int,
    lenience: float,
) -> Float[Tensor, "batch n"]:
    """ln of the probability `(batch, n)` that lenient decoding emits each prefix of `tokens`
    `(batch, n)`.

    p and q `(batch, n, vocab)` are both distributions before each token; `gamma` draft tokens are
    proposed per step. The probability of a token depends on its place within its step, which the
    sequence does not show, so the places are summed over, from left to right. -inf for a sequence
    that cannot occur.

    >>> p, q = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[0.25, 0.75]]])
    >>> sequence_log_probability(p, q, torch.tensor([[1]]), gamma=1, lenience=0.8).exp()
    tensor([[0.6250]])
    """

    def of_tokens(probs: Tensor) -> Tensor:
        return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    accepted = of_tokens(torch.minimum(p / lenience, q))
    recovered = (of_tokens(lenient_distribution(p, q, lenience)) - accepted).clamp_min(0)
    bonus = of_tokens(p)
    # place[:, i]: the probability, given the prefix, that the next token is draft token i of its
    # step, or its bonus.
    place = torch.zeros(len(tokens), gamma + 1, dtype=p.dtype, device=p.device)
    place[:, 0] = 1.0
    log_probability, prefixes = torch.zeros_like(place[:, 0]), []
    for at in range(tokens.shape[1]):
        step_ended = place[:, :-1].sum(dim=1) * recovered[:, at] + place[:, -1] * bonus[:, at]
        place = torch.cat([step_ended[:, None], place[:, :-1] * accepted[:, at, None]], dim=1)
        probability = place.sum(dim=1)
        log_probability = log_probability + probability.log()
        place = place / probability.where(probability > 0, 1.0)[:, None]
        prefixes.append(log_probability)
    return torch.stack(prefixes, dim=1)
