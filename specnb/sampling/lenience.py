"""Closed forms for the lenient rule of appendix A.5, `specnb.sampling.verification.lenient_verification`.

With target p, draft q and lenience l in (0, 1], a draft token x is sampled and accepted with probability
min(q(x), p(x)/l); the remaining mass is filled from Algorithm 1's residual. Every function of p and q works on the
last axis and any leading batch shape.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specnb.sampling.distributions import overlap, residual


def lenient_overlap(
    p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"], lenience: float
) -> Float[Tensor, "*#batch"]:
    """alpha(l) = sum min(p/l, q), `(...,)`: the probability that a token sampled from q is accepted (A.5).

    >>> lenient_overlap(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]), lenience=0.8)
    tensor(0.8750)
    """
    return overlap(p / lenience, q)


def lenient_distribution(
    p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"], lenience: float
) -> Float[Tensor, "*#batch vocab"]:
    """The distribution `(..., vocab)` of the token emitted where a draft token was tested.

    min(q, p/l) + (1 - alpha(l)) residual. It is at most max(p, q), at most p/l, and at least
    p (1 - alpha(l)) / (1 - alpha(1)), which can be 0. Equal to p at l = 1.

    >>> lenient_distribution(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]), lenience=0.8)
    tensor([0.3750, 0.6250])
    """
    accepted = torch.minimum(p / lenience, q)
    rejected = (1 - accepted.sum(dim=-1, keepdim=True)).clamp_min(0)
    return accepted + rejected * residual(p, q)


def lenient_total_variation(
    p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"], lenience: float
) -> Float[Tensor, "*#batch"]:
    """D_LK(lenient distribution, p) = alpha(l) - alpha(1), `(...,)`: the gain in acceptance equals the distance.

    Tokens with q <= p get at most p, so the excess over p is min(q, p/l) - min(q, p), summed.

    >>> lenient_total_variation(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]), lenience=0.8)
    tensor(0.1250)
    """
    return lenient_overlap(p, q, lenience) - overlap(p, q)


def max_acceptance(
    p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"], budget: float
) -> Float[Tensor, "*#batch"]:
    """The largest acceptance `(...,)` of any rule whose emitted token is within `budget` of p: alpha + budget, or 1.

    `budget` is a total variation. A rule that emits s accepts with at most sum min(q, s) = 1 - D_LK(q, s), and
    D_LK(q, s) >= D_LK(q, p) - budget (Yin et al., arXiv:2411.00841, Theorem 5). `lenient_verification` attains this
    maximum for every l.

    Raises `ValueError` unless 0 <= budget <= 1.

    >>> max_acceptance(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]), budget=0.125)
    tensor(0.8750)
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"budget is {budget}; a total variation lies in [0, 1]")
    return (overlap(p, q) + budget).clamp_max(1)


def sequence_log_probability(
    p: Float[Tensor, "batch n vocab"],
    q: Float[Tensor, "batch n vocab"],
    tokens: Int[Tensor, "batch n"],
    gamma: int,
    lenience: float,
) -> Float[Tensor, "batch n"]:
    """ln of the probability `(batch, n)` that lenient decoding emits each prefix of `tokens` `(batch, n)`.

    p and q `(batch, n, vocab)` are both distributions before each token; `gamma` draft tokens are proposed per step.
    The probability of a token depends on its place within its step, which the sequence does not show, so the places
    are summed over, from left to right. -inf for a sequence that cannot occur.

    >>> p, q = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[0.25, 0.75]]])
    >>> sequence_log_probability(p, q, torch.tensor([[1]]), gamma=1, lenience=0.8).exp()
    tensor([[0.6250]])
    """

    def of_tokens(probs: Tensor) -> Tensor:
        return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    accepted = of_tokens(torch.minimum(p / lenience, q))
    recovered = (of_tokens(lenient_distribution(p, q, lenience)) - accepted).clamp_min(0)
    bonus = of_tokens(p)
    # place[:, i]: the probability, given the prefix, that the next token is draft token i of its step, or its bonus.
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
