"""Samples that the tests of `studies.audit_power.audit_comparison` are compared on, and what the tests read of them.

All arrays are `(completions, LENGTH)`, one entry for each token. Completion i continues prompt i modulo `PROMPTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specnb.decoding.generate import Study
from specnb.decoding.generate import generate as plain_generate
from specnb.distributions import Sampling, overlap
from specnb.models.loading import Pair
from specnb_audit.bets import Row
from specnb_audit.bugs.bug import Bug
from specnb_audit.known_bugs import EXACT, generate
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows
from specnb_audit.uniforms import transform
from studies.audit_power.engine_checks import at_temperature_0
from studies.audit_power.random_pair import VOCAB

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

LENGTH, GAMMA = 50, 4
PROMPTS = 10
BATCH = 200  # completions that are generated together
ENDS = range(8)  # the end tokens of bugs that need some
ENDING = ("eos-inside", "after-the-end")


class Sampled(NamedTuple):
    """Completions of one sampler.

    tokens   (m, LENGTH) token ids, -1 after the last
    decided  (m, LENGTH) 1 where the draft token was accepted, 0 where it was rejected, -1 where none was tested
    """

    tokens: Integers
    decided: Integers


class Judged(NamedTuple):
    """What the tests read of completions, `(m, LENGTH)` each, but p `(m, LENGTH, vocab)`.

    judged    whether the token has a distribution: not after the end of its completion
    zero      whether the token is impossible: its probability is 0, or it comes after the end
    variance  that of log p under p
    u         the transform of the token in the order of falling p
    overlap   of p and q
    """

    judged: NDArray[np.bool_]
    zero: NDArray[np.bool_]
    log_p: Array
    entropy: Array
    variance: Array
    u: Array
    overlap: Array
    p: Array


@cache
def prompts() -> list[list[int]]:
    """Random prompts of different lengths."""
    random = np.random.default_rng(0)
    return [random.integers(VOCAB, size=4 + number).tolist() for number in range(PROMPTS)]


def ends_of(bug: Bug) -> list[int] | None:
    """The end tokens that `bug` needs; None for most."""
    return list(ENDS) if bug.name in ENDING else None


@lru_cache(maxsize=32)  # the same exact samples are compared with most bugs
def sampled(bug: Bug, pair: Pair, seed: int, completions: int) -> Sampled:
    """`completions` of the loop with `bug`; the same seed and prompts have the same uniforms, whatever the bug."""
    parts = []
    for start in range(0, completions, BATCH):
        rows = range(start, min(start + BATCH, completions))
        made = generate(
            bug, pair.target, [prompts()[row % PROMPTS] for row in rows], pair.draft, gamma=GAMMA,
            max_new_tokens=LENGTH, eos=ends_of(bug), seed=seed, progress=False, study=Study(rows),
        )  # fmt: skip
        decided = np.full((len(rows), LENGTH + 2 * GAMMA), -1)
        position = (made.record.emitted.cumsum(axis=1) - made.record.emitted)[..., None] + np.arange(GAMMA)
        row, *at = made.record.tested.nonzero()
        decided[row, position[row, *at]] = made.record.accepted_nodes[row, *at]
        parts.append(Sampled(_padded(made.tokens), decided[:, :LENGTH]))
    return Sampled(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def exact_like(bug: Bug) -> Bug:
    """The correct sampler with the settings that the one with `bug` claims."""
    return replace(EXACT, name=bug.name, claimed=bug.claimed)


def greedy_mismatch(bug: Bug, pair: Pair, seed: int, completions: int) -> NDArray[np.bool_]:
    """Where the loop with `bug` at temperature 0 differs from plain greedy decoding, each from a prompt of its own."""
    greedy, random = at_temperature_0(bug), np.random.default_rng([1, seed])
    starts = [random.integers(VOCAB, size=4 + row % PROMPTS).tolist() for row in range(completions)]
    plain = plain_generate(
        pair.target, starts, max_new_tokens=LENGTH, sampling=greedy.claimed, eos=ends_of(bug), progress=False
    )
    made = generate(
        greedy, pair.target, starts, pair.draft, gamma=GAMMA, max_new_tokens=LENGTH, eos=ends_of(bug), progress=False
    )
    return _padded(made.tokens) != _padded(plain.tokens)  # type: ignore[no-any-return]  # numpy returns Any


@torch.inference_mode()
def rows_of(made: Sampled, pair: Pair, claimed: Sampling) -> list[Row]:
    """The distributions of target and draft along the completions, one row for each."""
    completions = [
        Completion(prompts()[number % PROMPTS], tokens[tokens >= 0].tolist())
        for number, tokens in enumerate(made.tokens)
    ]
    return list(teacher_forced_rows(Models(pair.target, claimed, pair.draft, claimed), completions))


@torch.inference_mode()
def judge(rows: Sequence[Row], ends: Sequence[int] | None, seed: int) -> Judged:
    """What the tests read of `rows`; `seed` is that of the transform's own uniforms."""
    shape = (len(rows), LENGTH)
    tokens, judged, zero = np.zeros(shape, np.int64), np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    p, shared = torch.full((*shape, VOCAB), 1 / VOCAB, dtype=torch.float64), np.zeros(shape)
    for number, row in enumerate(rows):
        n = len(row.tokens)
        last = next((at for at, token in enumerate(row.tokens) if token in (ends or ())), n)
        tokens[number, :n], p[number, :n] = row.tokens, row.p
        judged[number, : min(n, last + 1)] = True
        zero[number, last + 1 : n] = True
        if row.q is not None:
            shared[number, :n] = overlap(row.p, row.q).numpy()
    flat, at = p.flatten(0, 1), torch.from_numpy(tokens.ravel())
    own, log = flat.gather(-1, at[:, None])[:, 0], flat.clamp_min(1e-300).log()
    entropy = -(flat * log).sum(dim=-1)
    variance = ((flat * log**2).sum(dim=-1) - entropy**2).clamp_min(0)
    u = transform(flat, flat, at, np.random.default_rng([2, seed]).random(len(flat)))
    zero |= judged & (own.numpy() == 0).reshape(shape)
    log_p, entropies, variances = (x.numpy().reshape(shape) for x in (own.clamp_min(1e-300).log(), entropy, variance))
    return Judged(judged, zero, log_p, entropies, variances, u.reshape(shape), shared, p.numpy())


def _padded(completions: Sequence[Sequence[int]]) -> Integers:
    """Completions as an array `(m, LENGTH)`, -1 after the last token of each."""
    return np.array([[*own, *[-1] * (LENGTH - len(own))] for own in completions])
