"""Bets that one uniform u decides all acceptance tests of a step.

After draft tokens with the acceptance probabilities a were accepted, u lies below the least of
them, c. So the next draft token x is accepted with probability min(1, a(x)/c), where a step with a
uniform for each test would accept it with a(x). Where a step begins is not known without `steps`:
then a filter goes through the places in steps of each length in `GAMMAS`, with the probability that
each has under this sampler, given the tokens before.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.distributions import residual

GAMMAS = (2, 3, 4, 5, 6, 7, 8)
"""Draft tokens of a step; with one there is one test."""
PLACES = max(GAMMAS) + 1

Array = NDArray[np.float64]


class SharedTests:
    """The bet on one sequence after the other; `begin` starts one."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.accepts = np.ones(PLACES - 1)  # acceptance probabilities of the last tokens, the newest last
        self.weight = np.zeros((len(GAMMAS), PLACES))  # of each place in a step of each length
        self.weight[:, 0] = 1 / len(GAMMAS)

    def ratios(self, p: Tensor, q: Tensor, cell: Tensor, positions: NDArray[np.int64], longest: int) -> Array:
        """r(x)/p(x) `(n,)` at the emitted `cell` `(n,)`, for p and q `(n, C)`; `positions` `(n,)` in
        the steps, of at most `longest` tokens, or -1."""
        accept, own = (p / q).nan_to_num(0.0).clamp_max(1), cell[:, None]
        accepts = accept.gather(-1, own)[:, 0].double().numpy(force=True)
        so_far = np.concatenate([self.accepts, accepts])
        self.accepts = so_far[len(accepts) :]
        # The least of the last k acceptance probabilities, for k = 0 to PLACES - 2.
        windows = np.lib.stride_tricks.sliding_window_view(so_far[:-1], PLACES - 1)[:, ::-1]
        least = np.minimum.accumulate(np.pad(windows, ((0, 0), (1, 0)), constant_values=1.0), axis=1)[:, : PLACES - 1]
        scale = torch.from_numpy(least).to(p).clamp_min(1e-30)[..., None]  # (n, PLACES - 1, 1)
        accepted = q[:, None] * (accept[:, None] / scale).clamp_max(1)
        rejected = (1 - accepted.sum(dim=-1)).clamp_min(0) * residual(p, q).gather(-1, own)
        here = p.gather(-1, own).double().numpy(force=True)
        known = here[:, 0] > 0
        stay = accepted.gather(-1, own[:, None].expand(-1, PLACES - 1, -1))[..., 0].double().numpy(force=True)
        stay, back = (
            np.where(known[:, None], one, 1.0) / np.where(here > 0, here, 1.0)
            for one in (stay, rejected.double().numpy(force=True))
        )
        if len(positions) and positions[0] >= 0:
            tested = (positions < min(longest, PLACES) - 1)[:, None]
            ratio = np.where(tested, stay + back, 1.0)
            return np.where(known, np.take_along_axis(ratio, positions.clip(0, PLACES - 2)[:, None], axis=1)[:, 0], 1.0)
        return np.array([self._filtered(*one) if own else 1.0 for *one, own in zip(stay, back, known, strict=True)])

    def _filtered(self, stay: Array, back: Array) -> float:
        """The ratio at one token, given `(PLACES - 1,)` those of an accepted and of a recovered token
        at each place; moves on by it."""
        is_draft = np.arange(PLACES - 1) < np.array(GAMMAS)[:, None]
        drafting = self.weight[:, :-1] * is_draft
        moved = np.pad(drafting * stay, ((0, 0), (1, 0)))
        bonus = self.weight.sum(axis=1) - drafting.sum(axis=1)
        moved[:, 0] = drafting @ back + bonus
        total = float(moved.sum())
        if total > 0:
            self.weight = moved / total
        return total
