"""Are impossible tokens more than numerics explain? A bet on their number, where their size alone is explained.

Rounding errors decide near ties, and those are rare. So the engine's logits are taken to be the target's plus normal
noise, larger than measured, and `DRAWS` imagined engines with such noise emit a token at each position. If the engine
is one of their kind, its token is as likely to be impossible as each of theirs: where k of the DRAWS + 1 tokens are,
the engine's is with probability k / (DRAWS + 1). So odds^[it is] divided by its mean given k has expectation 1, and the
product over tokens is an e-value (`specnb_audit.evidence`). A prefix counts once: there the engine errs alike again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specnb.distributions import Sampling
from specnb_audit.claimed import claimed_probs
from specnb_audit.evidence import log_mean
from specnb_audit.teacher_forcing import Completion, Source, teacher_forced_logits

DRAWS = 4
ODDS = (3.0, 10.0, 30.0)
"""The engine's tokens are bet to be impossible with odds so many times those of the imagined ones."""
ENTRIES = 2**27
"""Logits that noise is added to, at most: a long audit with a large vocabulary is judged by its beginning."""


class Rate(NamedTuple):
    """The impossible tokens among the first `tokens`.

    impossible   how many there are
    expected     how many the imagined engines emit, on average
    log10_e      decimal logarithm of the largest e-value
    found_after  number of tokens after which it passed 1/delta, or None
    """

    tokens: int
    impossible: int
    expected: float
    log10_e: float
    found_after: int | None

    def __str__(self) -> str:
        return (
            f"numerics would explain the size of each, and not their number: {self.impossible:,} in {self.tokens:,} "
            f"tokens, where noise larger than theirs gives {self.expected:.2g} (e-value 10^{self.log10_e:.1f})"
        )


@torch.inference_mode()
def impossible_rate(
    target: Source, sampling: Sampling, completions: Sequence[Completion], noise: float, delta: float, seed: int = 0
) -> Rate:
    """The bet on the impossible tokens of `completions`, up to where it passes 1/delta.

    `noise` is the standard deviation of each logit of the imagined engines.

    >>> near = lambda prefix: [0.505, 0.495]
    >>> given = [Completion([seed], [seed % 2]) for seed in range(200)]
    >>> [impossible_rate(near, Sampling(0), given, noise, 1e-6).found_after is None for noise in (1e-3, 0.1)]
    [False, True]
    """
    random = np.random.default_rng([seed, DRAWS])
    log_e, peak, found_after = np.zeros(len(ODDS)), 0.0, None
    tokens, count, imagined, seen = 0, 0, 0, set[int]()
    for completion, start, logits in teacher_forced_logits(target, completions):
        emitted = completion.tokens[start : start + len(logits)]
        own, others, entries = *_impossible(logits, emitted, sampling, noise, random), logits.shape[-1]
        for at in np.flatnonzero(own).tolist():
            context = hash((tuple(completion.prompt), tuple(completion.tokens[: start + at])))
            own[at], others[at] = (0, 0) if context in seen else (1, others[at])
            seen.add(context)
        odds = np.array(ODDS)
        share = (own + others)[:, None] / (DRAWS + 1)
        running = log_e + np.cumsum(own[:, None] * np.log(odds) - np.log1p((odds - 1) * share), axis=0)
        passed = log_mean(running) >= -np.log(delta)
        n = int(passed.argmax()) + 1 if passed.any() else len(own)
        log_e, peak = running[n - 1], max(peak, float(log_mean(running[:n]).max()))
        tokens, count, imagined = tokens + n, count + int(own[:n].sum()), imagined + int(others[:n].sum())
        found_after = tokens if passed.any() else None
        if found_after is not None or tokens * entries > ENTRIES:
            break
    return Rate(tokens, count, imagined / DRAWS, peak / np.log(10), found_after)


def _impossible(
    logits: torch.Tensor, tokens: Sequence[int], sampling: Sampling, noise: float, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Whether each of `tokens` `(n,)` is impossible under `logits` `(n, vocab)`, and for how many imagined engines."""
    zero = claimed_probs(logits, sampling) == 0
    own = zero.gather(-1, torch.tensor(tokens, device=zero.device)[:, None])[:, 0].numpy(force=True).astype(np.int64)
    others = np.zeros_like(own)
    for _ in range(DRAWS):
        drawn = torch.from_numpy(random.standard_normal(tuple(logits.shape), dtype=np.float32)).to(logits)
        mass = claimed_probs(logits + noise * drawn, sampling).where(zero, 0.0).sum(dim=-1)
        others += random.random(len(own)) < mass.numpy(force=True)
    return own, others
