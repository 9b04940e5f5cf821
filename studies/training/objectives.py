"""What a draft model can be trained to minimise, given the target's distribution at every position.

Every objective maps the draft's logits and the target's log-probabilities, both `(batch, length, vocab)`, and the
tokens of the sequences, `(batch, length)`, to the mean over all positions, a scalar that can be differentiated. It is
in nats; the total variation is the probability that a draft token is rejected (Leviathan et al., Theorem 3.5 and
Corollary 3.6).

>>> p = torch.tensor([[[0.5, 0.25, 0.25]]])
>>> float(total_variation(torch.zeros(1, 1, 3), p.log(), torch.tensor([[0]])))
0.1666...
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import log_softmax

Distributions = Float[Tensor, "batch length vocab"]
Tokens = Int[Tensor, "batch length"]
Objective = Callable[[Distributions, Distributions, Tokens], Tensor]


def cross_entropy(logits: Distributions, log_p: Distributions, tokens: Tokens) -> Tensor:
    """-log q(token): learning from the sequences alone, without the target."""
    return -log_softmax(logits, dim=-1).gather(-1, tokens[..., None]).mean()


def forward_kl(logits: Distributions, log_p: Distributions, tokens: Tokens) -> Tensor:
    """KL(p || q) = sum p log(p / q): knowledge distillation."""
    return (log_p.exp() * (log_p - log_softmax(logits, dim=-1))).sum(dim=-1).mean()


def reverse_kl(logits: Distributions, log_p: Distributions, tokens: Tokens) -> Tensor:
    """KL(q || p) = sum q log(q / p)."""
    log_q = log_softmax(logits, dim=-1)
    return (log_q.exp() * (log_q - log_p)).sum(dim=-1).mean()


def total_variation(logits: Distributions, log_p: Distributions, tokens: Tokens) -> Tensor:
    """1 - sum min(p, q), which is one minus the acceptance probability at temperature 1."""
    return 1 - torch.minimum(log_softmax(logits, dim=-1), log_p).exp().sum(dim=-1).mean()


OBJECTIVES: dict[str, Objective] = {
    "cross-entropy": cross_entropy,
    "forward KL": forward_kl,
    "reverse KL": reverse_kl,
    "total variation": total_variation,
}
"""Every objective by the name that it has in the table."""
