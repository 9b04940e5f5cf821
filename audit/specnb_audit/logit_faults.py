"""Faults that take logits to compute: the target's own logits in fewer bits, and penalties that miss
the newest token or count it twice.

All are distributions r that are known before the token, so r(x)/p(x) is a bet like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specnb_audit.penalties import NO_PENALTIES, Penalties, penalised

Rounding = Callable[[Tensor], Tensor]


def _through(dtype: torch.dtype) -> Rounding:
    largest = torch.finfo(dtype).max
    return lambda logits: logits.clamp(-largest, largest).to(dtype).to(logits.dtype)


def _scaled(steps: float, rounded: Rounding) -> Rounding:
    """Each row is scaled so that its largest entry is `steps`, as quantisation by row does."""

    def of(logits: Tensor) -> Tensor:
        scale = logits.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / steps
        return rounded(logits / scale) * scale

    return of


ROUNDINGS: dict[str, Rounding] = {
    "fp8 (e4m3)": _through(torch.float8_e4m3fn),
    "fp8 (e4m3), scaled": _scaled(448.0, _through(torch.float8_e4m3fn)),
    "fp8 (e5m2)": _through(torch.float8_e5m2),
    "int8": _scaled(127.0, torch.round),
    "bfloat16": _through(torch.bfloat16),
}
TIMES = (0, 2)
"""How often a penalty counts the newest token, where it should be once."""


def newest_counted(
    logits: Tensor, penalties: Penalties, prompt: Sequence[int], tokens: Sequence[int], start: int, times: int
) -> Tensor:
    """`penalised` logits `(n, vocab)` with the newest token before each counted `times` times.

    >>> newest_counted(torch.zeros(2, 2), Penalties(presence_penalty=0.5), [1], [0, 1], 0, times=2)
    tensor([[ 0.,  0.],
            [-1.,  0.]])
    """
    right = penalised(logits, penalties, prompt, tokens, start)
    if penalties == NO_PENALTIES:
        return right
    before = [*prompt, *tokens]
    factor, biases = penalties.repetition_penalty, dict(penalties.logit_bias)
    right = right.clone()
    for at in range(len(logits)):
        end = len(prompt) + start + at  # tokens before
        if end == 0:
            continue
        newest, is_output = before[end - 1], start + at > 0
        count = before[len(prompt) : end].count(newest) + (times - 1) * is_output
        repeated = max(times, int(newest in before[: end - 1]))
        own = float(logits[at, newest]) + biases.get(newest, 0.0)
        own = own / factor**repeated if own > 0 else own * factor**repeated
        present = float(count > 0) * (max(times, 1) if is_output else 1)
        right[at, newest] = own - penalties.frequency_penalty * count - penalties.presence_penalty * present
    return right
