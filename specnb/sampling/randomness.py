"""Uniforms for the loop: one independent stream per row and purpose, drawn ahead of time.

A stream is a Philox counter generator keyed by (seed, row), with the purpose in the counter. What a
row draws depends on nothing else, so its tokens do not depend on the batch it sits in; and since
all is drawn before the loop, no step waits for a generator. Seed and row may be any non-negative integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PURPOSES = ("draft", "accept", "final")


@dataclass(frozen=True)
class Uniforms:
    """Float64 uniforms in [0, 1): `draft` and `accept` `(batch, steps, gamma)`, `final` `(batch, steps)`."""

    draft: Tensor
    accept: Tensor
    final: Tensor


def stream(seed: int, row: int, purpose: str) -> np.random.Generator:
    """The generator of one row for one purpose, of `PURPOSES`; independent of all others.

    Raises `ValueError` for a negative `seed` or `row`.
    """
    if seed < 0 or row < 0:
        raise ValueError(f"seed is {seed} and row {row}; both must be whole numbers from 0")
    if max(seed, row) < 2**64:
        key, kind = np.array([seed, row], dtype=np.uint64), PURPOSES.index(purpose)
    else:
        # A key has 128 bits. What does not fit is hashed, and counted where no key that fits is counted.
        digest = hashlib.sha256(f"{seed:x} {row:x}".encode()).digest()
        key, kind = np.frombuffer(digest[:16], dtype="<u8"), PURPOSES.index(purpose) + len(PURPOSES)
    # The lowest words count; 2^192 draws until streams meet.
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, kind], dtype=np.uint64)))


def uniforms(seed: int, rows: Sequence[int], steps: int, gamma: int, device: torch.device | str = "cpu") -> Uniforms:
    """Everything that `rows` need for `steps` steps of `gamma` drafts."""

    def sampled(purpose: str, *shape: int) -> Tensor:
        drawn_rows = [stream(int(seed), int(row), purpose).random(shape) for row in rows]
        return torch.from_numpy(np.stack(drawn_rows)).to(device)

    return Uniforms(sampled("draft", steps, gamma), sampled("accept", steps, gamma), sampled("final", steps))
