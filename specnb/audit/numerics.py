"""How far a target's distributions depend on the way they are computed: one pass over many tokens, or one per token.

A sampler runs its target over 1 or gamma + 1 tokens; the audit runs it over a whole sequence. Kernels then sum in
different orders. This is not a fault of the sampling algorithm, so it is measured separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from specnb.audit.teacher_forcing import Completion, batch_logits
from specnb.sampling.distributions import Sampling, standardise, total_variation

SEQUENCES = 4


class Numerics(NamedTuple):
    """Differences between the two ways to compute the target's distributions, at `positions` positions.

    logit    largest difference of a logit
    tv       largest total variation between the two distributions
    tv_mean  mean total variation
    nats     mean Kullback-Leibler divergence of the one-token distributions from the many-token ones: the most
             evidence per token, on average, that any bet can gain from the difference
    """

    positions: int
    logit: float
    tv: float
    tv_mean: float
    nats: float

    def __str__(self) -> str:
        return (
            "the target's forward passes over one token differ from its pass over the whole sequence "
            f"by up to {self.logit:.2g} in a logit and {self.tv:.2g} in total variation ({self.positions} positions)"
        )


@torch.inference_mode()
def measure_numerics(
    model: PreTrainedModel, completions: Sequence[Completion], sampling: Sampling = Sampling(), positions: int = 16
) -> Numerics:
    """The differences at the first positions of up to four of `completions`.

    About `positions` positions in all; 0 < `positions`, and at least one completion must have tokens.
    """
    chosen = [completion for completion in completions if completion.tokens][:SEQUENCES]
    each = -(-positions // len(chosen))
    pairs = [_many_and_one(model, Completion(one.prompt, one.tokens[:each])) for one in chosen]
    many, one = (torch.cat(logits).double() for logits in zip(*pairs, strict=True))
    p, r = standardise(many, sampling), standardise(one, sampling)
    distance = total_variation(p, r)
    both = (p > 0) & (r > 0)
    nats = torch.where(both, r * (r.where(both, 1.0) / p.where(both, 1.0)).log(), 0.0).sum(dim=-1)
    return Numerics(
        len(many),
        float((many - one).abs().max()),
        float(distance.max()),
        float(distance.mean()),
        max(0.0, float(nats.mean())),
    )


def _many_and_one(model: PreTrainedModel, completion: Completion) -> tuple[Tensor, Tensor]:
    """Logits `(n, vocab)` from one pass over the sequence, and from one pass per token."""
    ((_, _, many),) = batch_logits(model, [completion])
    output = model(input_ids=torch.tensor([completion.prompt], device=model.device), use_cache=True)
    logits = [output.logits[:, -1]]
    for token in completion.tokens[:-1]:
        output = model(
            input_ids=torch.tensor([[token]], device=model.device),
            past_key_values=output.past_key_values,
            use_cache=True,
        )
        logits.append(output.logits[:, -1])
    return many, torch.cat(logits)


def crossing(log_e: NDArray[np.float64], delta: float, nats: float, before: int = 0) -> int | None:
    """The number of tokens at which the e-value first passes 1/delta by more than the numerics explain, or None.

    `log_e` `(n,)` are natural logarithms of the e-value, `before` tokens preceded them, and the target differs from
    itself by `nats` per token.

    If each token were sampled from r instead of p, Hoelder's inequality would bound the mean of e^a, a < 1, by
    E_p[(r/p)^(1/(1-a))]^(1-a) per token, and so the probability that log e passes ln(1/delta)/a + n nats/(1-a)
    by delta, up to terms of third order in log r/p. The best a gives (sqrt(ln 1/delta) + sqrt(n nats))^2.

    >>> crossing(np.array([1.0, 3.0]), delta=0.1, nats=0.0)
    2
    """
    n = before + np.arange(1, len(log_e) + 1)
    passed = log_e >= (np.sqrt(-np.log(delta)) + np.sqrt(n * nats)) ** 2
    return int(n[passed.argmax()]) if passed.any() else None
