"""The bet that a sequence has the noise of one some lines before, as where seeds repeat with every
call or every file: a mixture over all distances up to `FARTHEST`, with equal weights.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb_audit.uniforms import CumulativeMass, Interval, Likely, same_race, same_race_ratio, same_uniform_ratio

FARTHEST = 128  # lines
BEGINNING = 64  # tokens of each sequence that are compared
RACING = 16  # likeliest tokens that are remembered, for samplers that race
STAKED = 0.95

Array = NDArray[np.float64]


def noise_within(p: Tensor, tokens: Tensor) -> Array:
    """The evidence `(2,)` that each of `tokens` `(n,)`, sampled from p `(n, vocab)`, has the noise of the one
    before it, for a sampler that inverts and for one that races."""
    if len(tokens) < 2:
        return np.zeros(2)
    low, high = CumulativeMass(p).interval(tokens)
    before, now = Interval(low[:-1], high[:-1]), Interval(low[1:], high[1:])
    probs, ids = p[:-1].topk(min(RACING, p.shape[1]), dim=-1, sorted=False)
    likely = Likely(ids.numpy(force=True), probs.double().numpy(force=True))
    raced = same_race(p[1:], tokens[1:], tokens[:-1].numpy(force=True), likely, before.width)
    each = np.stack([same_uniform_ratio(now, before, now), raced])
    found: Array = np.log(1 - STAKED + STAKED * each).sum(axis=-1)
    return found


class DistantNoise:
    """What is kept of the last sequences, `(FARTHEST + 1, BEGINNING)` places, and the evidence for
    each distance, for samplers that invert and for those that race."""

    def __init__(self) -> None:
        shape = (FARTHEST + 1, BEGINNING)
        self.low, self.high = np.zeros(shape), np.zeros(shape)
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.ids = np.zeros((*shape, 0), dtype=np.int64)  # as wide as the vocabulary allows
        self.probs = np.zeros((*shape, 0))
        self.log_weight = np.zeros((2, FARTHEST))
        self.sequences, self.now, self.offset = 0, 0, 0

    def begin(self) -> None:
        self.sequences += 1
        self.now, self.offset = self.sequences % (FARTHEST + 1), 0
        self.high[self.now] = 0.0  # an empty interval tells nothing

    def ratios(self, p: Tensor, tokens: Tensor, interval: Interval) -> Array:
        """r(x)/p(x) `(n,)` at `tokens` `(n,)` with these intervals, under p `(n, vocab)`."""
        ratios, n = np.ones(len(tokens)), min(len(tokens), BEGINNING - self.offset)
        if n <= 0:
            return ratios
        racing = min(RACING, p.shape[1])
        if self.ids.shape[-1] != racing:
            shape = (*self.low.shape, racing)
            self.ids, self.probs = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        at, own = slice(self.offset, self.offset + n), Interval(interval.low[:n], interval.high[:n])
        lines = (self.now - np.arange(1, min(FARTHEST, self.sequences - 1) + 1)) % (FARTHEST + 1)
        if len(lines):
            logs = np.log(1 - STAKED + STAKED * self._each(p[:n], tokens[:n], own, lines, at))  # (2, lines, n)
            logs = np.pad(logs, ((0, 0), (0, FARTHEST - len(lines)), (0, 0)))
            before = self.log_weight[..., None] + np.cumsum(logs, axis=-1) - logs
            self.log_weight = before[..., -1] + logs[..., -1]
            weight = np.exp(before - before.max(axis=(0, 1)))
            ratios[:n] = (weight * np.exp(logs)).sum(axis=(0, 1)) / weight.sum(axis=(0, 1))
        self.low[self.now, at], self.high[self.now, at] = own
        self.tokens[self.now, at] = tokens[:n].numpy(force=True)
        probs, ids = p[:n].topk(racing, dim=-1, sorted=False)
        self.ids[self.now, at], self.probs[self.now, at] = ids.numpy(force=True), probs.numpy(force=True)
        self.offset += n
        return ratios

    def lag(self, within: Array) -> tuple[int, float]:
        """How many lines apart sequences repeat their noise, 0 for from token to token, whose evidence is `within`
        `(2,)`; and the decimal logarithm of the likelihood ratio, less that of the number of ways tried."""
        logs = np.concatenate([within[:, None], self.log_weight], axis=1)
        return int(logs.max(axis=0).argmax()), float((logs.max() - np.log(logs.size)) / np.log(10))

    def _each(self, p: Tensor, tokens: Tensor, own: Interval, lines: NDArray[np.int64], at: slice) -> Array:
        """The ratios `(2, lines, n)` of the same uniform and of the same race as in each of `lines`."""
        earlier = Interval(self.low[lines, at], self.high[lines, at])
        wide = Interval(*(np.broadcast_to(ends, earlier.low.shape) for ends in own))
        before, ids, probs = self.tokens[lines, at], self.ids[lines, at], self.probs[lines, at]
        columns = torch.from_numpy(np.concatenate([before[..., None], ids], axis=-1).swapaxes(0, 1).reshape(len(p), -1))
        gathered = p.gather(-1, columns.to(p.device)).double().numpy(force=True).reshape(len(p), len(lines), -1)
        here = gathered.swapaxes(0, 1).reshape(before.size, -1)
        likely = Likely(ids.reshape(before.size, -1), probs.reshape(before.size, -1))
        again = (before == tokens.numpy(force=True)).reshape(-1)
        raced = same_race_ratio(here[:, 1:], here[:, 0], likely, earlier.width.reshape(-1), again)
        return np.stack([same_uniform_ratio(wide, earlier, wide), raced.reshape(before.shape)])
