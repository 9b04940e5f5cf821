"""Top-p as ONNX Runtime GenAI 0.18.0 applies it on a CPU without top-k, for the notebook of
engines.

`FindNucleus` in its `src/sampling_distribution.h` goes through the tokens in the order of their
probability, and stops where the sum so far is at least top-p of itself plus a bound on the rest: as
many times the current token's probability as there are tokens after it. The bound is larger than
the rest, so more tokens are kept than top-p asks for. It looks at 16 tokens first, then at 64, 256
and so on, and does not stop at the last token of such a group. Vocabularies of up to 64 tokens have
an exact search, which is not made here.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, GROWTH = 16, 4


def kept_probs(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """The distribution `(..., vocab)` that is sampled from, for `logits` `(..., vocab)`.

    Top-p would keep two tokens here:

    >>> kept_probs(torch.tensor([0.8, 0.1, 0.06, 0.04]).log(), temperature=1.0, top_p=0.85)
    tensor([0.8333, 0.1042, 0.0625, 0.0000])
    """
    vocab = logits.shape[-1]
    p, order = (logits / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    so_far, after = p.cumsum(-1), torch.arange(vocab - 1, -1, -1, device=p.device)
    stops = so_far >= top_p * (so_far + after * p)
    group = FIRST
    while group < vocab:
        stops[..., group - 1] = False
        group *= GROWTH
    before = stops.cumsum(-1) - stops.long() == 0  # no stop at an earlier token
    kept = p.where(before, 0.0)
    return torch.zeros_like(p).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
