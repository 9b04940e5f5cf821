"""What lenience costs: closed forms of appendix A.5 for `specnb.sampling.verification.lenient_verification`.

At one position, with target p, draft q and lenience l in (0, 1]: a draft is accepted with mass min(q, p/l), and
what is missing to 1 is filled from Algorithm 1's residual. Everything works on the last axis and on any
leading batch shape, like `specnb.sampling.distributions`, and knows of no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.sampling.distributions import overlap, residual


def lenient_overlap(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """alpha(l) = sum min(p/l, q), `(...,)`: the chance that a draft from q is accepted (A.5)."""
    return overlap(p / lenience, q)


def lenient_distribution(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """The distribution `(..., vocab)` of the token emitted where a draft was tested: min(q, p/l) + (1 - alpha(l)) residual.

    At most max(p, q) and at most p/l; at least p (1 - alpha(l)) / (1 - alpha(1)), which can be 0. Equal to p at l = 1.
    """
    accepted = torch.minimum(p / lenience, q)
    rejected = (1 - accepted.sum(dim=-1, keepdim=True)).clamp_min(0)
    return accepted + rejected * residual(p, q)


def lenient_total_variation(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """D_LK(lenient distribution, p) = alpha(l) - alpha(1), `(...,)`: distance is paid for acceptance, one to one.

    The tokens with q <= p are filled up to at most p, so all that p is exceeded by is min(q, p/l) - min(q, p).
    """
    return lenient_overlap(p, q, lenience) - overlap(p, q)


def max_acceptance(p: Tensor, q: Tensor, budget: float) -> Tensor:
    """The largest acceptance `(...,)` of any rule whose token is at most `budget` in D_LK from p: alpha + budget, or 1.

    A rule that emits s accepts with sum min(q, s) = 1 - D_LK(q, s) at most, and D_LK(q, s) >= D_LK(q, p) - budget
    (Yin et al., arXiv:2411.00841, Theorem 5: the front is a line). `lenient_verification` lies on it for every l.

    Raises `ValueError` unless 0 <= budget <= 1.
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"budget is {budget}; a total variation lies in [0, 1]")
    return (overlap(p, q) + budget).clamp_max(1)


def sequence_log_probability(p: Tensor, q: Tensor, tokens: Tensor, gamma: int, lenience: float) -> Tensor:
    """ln of the chance `(batch, n)` that lenient decoding with `gamma` drafts a step begins with each of n prefixes.

    p and q `(batch, n, vocab)` are both distributions before each of `tokens` `(batch, n)`. The chance of a token depends
    on how many drafts of its step came before it, which the text does not show; so all ways in which steps can
    have produced the text are summed, from left to right. -inf for a text that cannot occur.
    """

    def at_token(distributions: Tensor) -> Tensor:
        return distributions.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    kept = at_token(torch.minimum(p / lenience, q))
    replaced = (at_token(lenient_distribution(p, q, lenience)) - kept).clamp_min(0)
    bonus = at_token(p)
    # ways[:, i]: the share of the chance so far in which the next token is draft i of its step, or its bonus.
    ways = torch.zeros(len(tokens), gamma + 1, dtype=p.dtype, device=p.device)
    ways[:, 0] = 1.0
    log_chance, prefixes = torch.zeros_like(ways[:, 0]), []
    for at in range(tokens.shape[1]):
        ended = ways[:, :-1].sum(dim=1) * replaced[:, at] + ways[:, -1] * bonus[:, at]
        ways = torch.cat([ended[:, None], ways[:, :-1] * kept[:, at, None]], dim=1)
        chance = ways.sum(dim=1)
        log_chance = log_chance + chance.log()
        ways = ways / chance.where(chance > 0, 1.0)[:, None]
        prefixes.append(log_chance)
    return torch.stack(prefixes, dim=1)
