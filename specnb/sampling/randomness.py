"""Uniforms for the decoding loop: one independent stream per row and purpose.

A stream is a Philox counter generator keyed by (seed, row), with the purpose in the counter. So a row's tokens do not
depend on the batch it is in. All uniforms are sampled before the loop, so no step waits for a generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

PURPOSES = ("draft", "accept", "final")


@dataclass(frozen=True)
class Uniforms:
    """Float64 uniforms in [0, 1) of a batch.

    draft   (batch, steps, gamma)  to sample the draft tokens
    accept  (batch, steps, gamma)  to accept or reject them
    final   (batch, steps)         to sample the recovered or bonus token
    """

    draft: Float64[Tensor, "batch steps gamma"]
    accept: Float64[Tensor, "batch steps gamma"]
    final: Float64[Tensor, "batch steps"]


def stream(seed: int, row: int, purpose: str) -> np.random.Generator:
    """The generator of one row for one of `PURPOSES`, independent of all others.

    `seed` and `row` are any whole numbers from 0. Raises `ValueError` if one is negative.

    >>> stream(seed=7, row=0, purpose="accept").random() == stream(seed=7, row=1, purpose="accept").random()
    False
    """
    if seed < 0 or row < 0:
        raise ValueError(f"seed is {seed} and row {row}; both must be whole numbers from 0")
    if max(seed, row) < 2**64:
        key, counter = np.array([seed, row], dtype=np.uint64), PURPOSES.index(purpose)
    else:
        # A key has 128 bits. Larger numbers are hashed, with counters that no smaller number uses.
        digest = hashlib.sha256(f"{seed:x} {row:x}".encode()).digest()
        key, counter = np.frombuffer(digest[:16], dtype="<u8"), PURPOSES.index(purpose) + len(PURPOSES)
    # The purpose is in the counter's highest word, so two streams of a key are 2^192 samples apart.
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, counter], dtype=np.uint64)))


def uniforms(seed: int, rows: Sequence[int], steps: int, gamma: int, device: torch.device | str = "cpu") -> Uniforms:
    """The `Uniforms` of `rows` for `steps` steps of `gamma` draft tokens, on `device`.

    >>> uniforms(seed=7, rows=[0, 1], steps=10, gamma=4).accept.shape
    torch.Size([2, 10, 4])
    """

    def sampled(purpose: str, *shape: int) -> Tensor:
        of_rows = [stream(int(seed), int(row), purpose).random(shape) for row in rows]
        return torch.from_numpy(np.stack(of_rows)).to(device)

    return Uniforms(sampled("draft", steps, gamma), sampled("accept", steps, gamma), sampled("final", steps))
