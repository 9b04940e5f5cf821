"""How far a target is from itself: one run over many tokens against many runs over one.

A sampler runs its target over one token, or gamma + 1; the audit over a whole text. Kernels sum in other
orders then. This is no fault of the algorithm, and is measured apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from specnb.audit.teacher_forcing import Completion, _at_once
from specnb.sampling.distributions import Sampling, standardise, total_variation

TEXTS = 4


class Numerics(NamedTuple):
    """Differences between the two kinds of run at `positions` positions.

    logit  the largest difference of a logit
    tv     the largest total variation between the two distributions, and tv_mean its mean
    nats   the mean Kullback-Leibler divergence of the distributions of the runs over one token from those of the run
           over many: what the difference can bring in evidence per token on average, however one bets
    """

    positions: int
    logit: float
    tv: float
    tv_mean: float
    nats: float

    def __str__(self) -> str:
        return (
            f"the target differs from itself (one run over the text, runs over one token; {self.positions} positions) "
            f"by {self.logit:.2g} in a logit and {self.tv:.2g} in total variation"
        )


@torch.inference_mode()
def measure_numerics(
    model: PreTrainedModel, completions: Sequence[Completion], sampling: Sampling = Sampling(), positions: int = 16
) -> Numerics:
    """Compares the two kinds of run on the first positions of up to four of `texts`."""
    chosen = [text for text in completions if text.tokens][:TEXTS]
    each = -(-positions // len(chosen))
    pairs = [_both(model, Completion(text.prompt, text.tokens[:each])) for text in chosen]
    many, one = (torch.cat(logits).double() for logits in zip(*pairs, strict=True))
    p, r = standardise(many, sampling), standardise(one, sampling)
    apart = total_variation(p, r)
    both = (p > 0) & (r > 0)
    nats = torch.where(both, r * (r.where(both, 1.0) / p.where(both, 1.0)).log(), 0.0).sum(dim=-1)
    return Numerics(
        len(many),
        float((many - one).abs().max()),
        float(apart.max()),
        float(apart.mean()),
        max(0.0, float(nats.mean())),
    )


def _both(model: PreTrainedModel, text: Completion) -> tuple[Tensor, Tensor]:
    ((_, _, many),) = _at_once(model, [text])
    output = model(input_ids=torch.tensor([text.prompt], device=model.device), use_cache=True)
    logits = [output.logits[:, -1]]
    for token in text.tokens[:-1]:
        output = model(
            input_ids=torch.tensor([[token]], device=model.device),
            past_key_values=output.past_key_values,
            use_cache=True,
        )
        logits.append(output.logits[:, -1])
    return many, torch.cat(logits)


def crossing(log_e: NDArray[np.float64], delta: float, nats: float, before: int = 0) -> int | None:
    """The number of tokens at which the natural logarithms `log_e` `(n,)` of the evidence first pass 1/delta by
    more than numerics of `nats` per token account for; None if they do not. `before` tokens went before.

    Were each token drawn from r instead of p, Hoelder's inequality bounds the mean of e^a, a < 1, by
    E_p[(r/p)^(1/(1-a))]^(1-a) per token, and so the chance that log e passes ln(1/delta)/a + n nats/(1-a)
    by delta, up to terms of third order in log r/p. The best a gives (sqrt(ln 1/delta) + sqrt(n nats))^2.
    """
    n = before + np.arange(1, len(log_e) + 1)
    passed = log_e >= (np.sqrt(-np.log(delta)) + np.sqrt(n * nats)) ** 2
    return int(n[passed.argmax()]) if passed.any() else None
