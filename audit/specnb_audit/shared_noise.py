"""Which sequences repeat each other's noise, whatever else deviates in them; asked after a
rejection.

A sampler whose generator is made anew with one seed has the same noise again: for each token, or so
many lines apart as a call has sequences. What this noise has by chance all have, and a bias of
tokens or a temperature seems wrong. The earlier token of two samples with one uniform, or one race,
says how likely each token is the second time (`specnb_audit.uniforms`); the product of these ratios
is large only where tokens repeat as often as one noise makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specnb_audit.bets import RACING
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows
from specnb_audit.uniforms import CumulativeMass, Interval, Likely, same_race_ratio, same_uniform_ratio

FARTHEST = 64  # lines between sequences that are compared
STAKED = 0.95
READ = 20_000  # tokens

Array = NDArray[np.float64]


def repeated_noise_lag(models: Models, completions: Sequence[Completion]) -> tuple[int, float]:
    """How many lines apart sequences repeat their noise, 0 for from token to token; and the decimal
    logarithm of the likelihood ratio, less that of the number of ways tried."""
    log = np.zeros((FARTHEST + 1, 2))
    earlier: list[_Seen] = []
    read = 0
    for row in teacher_forced_rows(models, completions):
        tokens = torch.as_tensor(row.tokens, device=row.p.device)
        if row.continues or not row.tokens:  # the beginning of a long sequence is enough
            continue
        one = _Seen(row.p, tokens)
        log[0] += one.log_ratios(row.p, one.before())
        for lag, other in enumerate(reversed(earlier), 1):
            log[lag] += one.log_ratios(row.p, other)
        earlier = [*earlier, one][-FARTHEST:]
        read += len(tokens)
        if read > READ:
            break
    lag = int(log.argmax()) // log.shape[1]
    return lag, float((log.max() - np.log(log.size)) / np.log(10))


class _Seen:
    def __init__(self, p: torch.Tensor, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.interval = CumulativeMass(p).interval(tokens)
        probs, ids = p.topk(min(RACING, p.shape[1]), dim=-1)
        self.likely = Likely(ids.numpy(force=True), probs.double().numpy(force=True))

    def before(self) -> _Seen:
        """The same, one place later."""
        moved = object.__new__(_Seen)
        moved.tokens = self.tokens.roll(1)
        low, high = (np.roll(ends, 1) for ends in self.interval)
        # Before the first token there was none.
        low[0], high[0] = 0.0, 0.0
        moved.interval = Interval(low, high)
        ids, probs = self.likely
        moved.likely = Likely(np.roll(ids, 1, axis=0), np.roll(probs, 1, axis=0))
        return moved

    def log_ratios(self, p: torch.Tensor, earlier: _Seen) -> Array:
        """Natural logarithms of the likelihood ratios of the same uniforms and of the same race."""
        n = min(len(self.tokens), len(earlier.tokens))
        own, then = (Interval(one.interval.low[:n], one.interval.high[:n]) for one in (self, earlier))
        token, ids = earlier.tokens[:n], torch.from_numpy(earlier.likely.ids[:n]).to(p.device)
        here = p[:n].gather(-1, torch.cat([token[:, None], ids], dim=1)).double().numpy(force=True)
        likely = Likely(earlier.likely.ids[:n], earlier.likely.probs[:n])
        again = (token == self.tokens[:n]).numpy(force=True)
        ratios = (
            same_uniform_ratio(own, then, own),
            same_race_ratio(here[:, 1:], here[:, 0], likely, then.width, again),
        )
        return np.array([np.log(1 - STAKED + STAKED * ratio).sum() for ratio in ratios])
