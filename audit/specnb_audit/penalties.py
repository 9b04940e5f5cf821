"""Penalties for repetition and a logit bias, on the target's logits before temperature and filters.

As in vLLM: the bias is added; the repetition penalty divides positive logits and multiplies the
others, of tokens in prompt or output; frequency and presence penalties are subtracted for tokens of
the output, the first once for each time. In transformers `repetition_penalty` is the same, and a
`sequence_bias` of single tokens is a logit bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LARGEST_BIAS = 100


@dataclass(frozen=True)
class Penalties:
    """Penalties and a logit bias, by the names of vLLM; the defaults change nothing.

    Parameters
    ----------
    repetition_penalty : float
        Above 1 discourages tokens of the prompt and the output.
    presence_penalty, frequency_penalty : float
        From -2 to 2; above 0 discourage tokens of the output, the second by how often they occur.
    logit_bias : mapping
        From a token to what is added to its logit, from -100 to 100.

    Examples
    --------
    >>> Penalties(logit_bias={5: -1})
    Penalties(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=((5, -1.0),))
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not (_is_number(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf):
            given = f"repetition_penalty is {self.repetition_penalty!r}"
            raise ValueError(f"{given}; it must be above 0 and finite, where 1 is none")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (_is_number(value) and -2 <= value <= 2):
                raise ValueError(f"{name} is {value!r}; it must lie in [-2, 2], where 0 is none")
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))


def _pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """The entries of a bias, by token; JSON has the tokens as words."""
    given = dict(bias or ())
    for token, value in given.items():
        if not str(token).isdecimal():
            raise ValueError(f"logit_bias names the token {token!r}; give its id, a whole number from 0")
        if not (_is_number(value) and abs(value) <= LARGEST_BIAS):
            allowed = f"it must lie in [-{LARGEST_BIAS}, {LARGEST_BIAS}], to which servers cut larger ones"
            raise ValueError(f"logit_bias of the token {token} is {value!r}; {allowed}")
    return tuple(sorted((int(token), float(value)) for token, value in given.items()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


NO_PENALTIES = Penalties()


def twice(penalties: Penalties, name: str) -> Penalties | None:
    """`penalties` with that of `name` applied twice; None where that is more than can be claimed.

    >>> twice(Penalties(repetition_penalty=1.5), "repetition_penalty").repetition_penalty
    2.25
    """
    value = getattr(penalties, name)
    if name == "logit_bias":
        more: Any = {token: 2 * bias for token, bias in value}
    else:
        more = value**2 if name == "repetition_penalty" else 2 * value
    try:
        return replace(penalties, **{name: more})
    except ValueError:
        return None


def penalised(
    logits: Tensor, penalties: Penalties, prompt: Sequence[int], tokens: Sequence[int], start: int = 0
) -> Tensor:
    """`logits` `(n, vocab)` of the `tokens` from `start` on with `penalties`; in float32 or better.

    >>> penalised(torch.zeros(2, 2), Penalties(presence_penalty=0.5), prompt=[1], tokens=[0, 1])
    tensor([[ 0.0000,  0.0000],
            [-0.5000,  0.0000]])
    """
    if penalties == NO_PENALTIES:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for token, bias in dict(penalties.logit_bias).items():
        logits[:, token] += bias
    counts = _counts(tokens, start, logits)
    seen = counts > 0
    seen[:, list(prompt)] = True
    factor = penalties.repetition_penalty
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - penalties.frequency_penalty * counts - penalties.presence_penalty * (counts > 0)


def _counts(tokens: Sequence[int], start: int, logits: Tensor) -> Tensor:
    """How often each token occurs before each of the `tokens` from `start` on, `(n, vocab)`."""
    n, vocab = logits.shape
    given = torch.tensor(tokens[: start + n - 1], dtype=torch.long, device=logits.device)
    counts = torch.zeros_like(logits)
    counts[0] = torch.bincount(given[:start], minlength=vocab)
    counts[1:].scatter_(1, given[start:, None], 1.0)
    return counts.cumsum(dim=0)


def require_penalties(penalties: Penalties, vocab: int, has_logits: bool) -> None:
    """Raises `ValueError` for penalties that the target cannot be given; `has_logits`: it is a
    model."""
    outside = [token for token in dict(penalties.logit_bias) if token >= vocab]
    if outside:
        raise ValueError(f"logit_bias names the token {outside[0]}; the vocabulary has the tokens 0 to {vocab - 1}")
    if penalties.repetition_penalty != 1 and not has_logits:
        raise ValueError(
            "a repetition penalty multiplies logits, which probabilities do not determine; give a model as the target, "
            "or a function that returns probabilities with the penalty applied, and claim none"
        )
