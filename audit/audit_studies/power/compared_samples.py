"""Samples that the tests of `audit_studies.power.audit_comparison` are compared on, and what the
tests read of them.

All arrays are `(completions, LENGTH)`, one entry for each token. Completion i continues prompt i
modulo `PROMPTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit_studies.bugs.bug import Bug
from audit_studies.bugs.known_bugs import EXACT, generate
from audit_studies.power.engine_checks import at_temperature_0
from audit_studies.power.random_pair import VOCAB
from specnb.distributions import Sampling, overlap
from specnb.loading import Pair
from specnb.sampler import generate as plain_generate
from specnb_audit.bets import Row
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows
from specnb_audit.uniforms import transform

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

LENGTH, GAMMA = 50, 4
PROMPTS = 10
BATCH = 200  # completions that are generated together
ENDS = range(8)  # the end tokens of bugs that need some
ENDING = ("eos-inside", "after-the-end")
FIRST_IS_ARGMAX = Bug("first-token-argmax", "the first new token is the most probable one", "-")
"""A bug before the loop: `sampled` chooses the token and gives it to the loop as a part of the
prompt."""


class Sampled(NamedTuple):
    """Completions of one sampler.

    tokens   (m, LENGTH) token ids, -1 after the last
    decided  (m, LENGTH) 1 where the draft token was accepted, 0 where it was rejected, -1 where
             none was tested
    """

    tokens: Integers
    decided: Integers


class View(NamedTuple):
    """What tests read of completions if they look along p, or along q/p; `(m, LENGTH)` each, probs
    one axis more.

    u         the transform of the token in this order
    score     log p of the token, or the log of (p + q) / 2p; less its mean under p
    variance  that of the score under p
    place     the token's id, or its place in the order of falling q/p
    probs     p of each place
    """

    u: Array
    score: Array
    variance: Array
    place: Integers
    probs: Array


class Judged(NamedTuple):
    """Completions with their distributions; `(m, LENGTH)` each.

    judged   whether the token has a distribution: not after the end of its completion
    zero     whether the token is impossible: its probability is 0, or it comes after the end
    overlap  of p and q
    plain    what tests without the draft model read
    aimed    what they read with it
    """

    judged: NDArray[np.bool_]
    zero: NDArray[np.bool_]
    overlap: Array
    plain: View
    aimed: View


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
    """`completions` of the loop with `bug`; the same seed and prompts have the same uniforms,
    whatever the bug."""
    parts = []
    chosen: list[list[int]] = [[] for _ in prompts()]
    if bug == FIRST_IS_ARGMAX:
        chosen = [pair.target(torch.tensor([prompt])).logits[0, -1:].argmax(dim=-1).tolist() for prompt in prompts()]
    for start in range(0, completions, BATCH):
        rows = range(start, min(start + BATCH, completions))
        firsts = [chosen[row % PROMPTS] for row in rows]
        made = generate(
            bug, pair.target, [prompts()[row % PROMPTS] + chosen[row % PROMPTS] for row in rows], pair.draft,
            gamma=GAMMA, max_new_tokens=LENGTH - len(chosen[0]), eos=ends_of(bug), seed=seed, progress=False,
            numbers=rows,
        )  # fmt: skip
        decided = np.full((len(rows), LENGTH + 2 * GAMMA), -1)
        begun = made.record.emitted.cumsum(axis=1) - made.record.emitted + len(chosen[0])
        row, *at = made.record.tested.nonzero()
        decided[row, (begun[..., None] + np.arange(GAMMA))[row, *at]] = made.record.accepted_nodes[row, *at]
        tokens = [first + rest for first, rest in zip(firsts, made.tokens, strict=True)]
        parts.append(Sampled(_padded(tokens), decided[:, :LENGTH]))
    return Sampled(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def exact_like(bug: Bug) -> Bug:
    """The correct sampler with the settings that the one with `bug` claims; equal for most bugs."""
    return replace(EXACT, name=bug.name if bug.name in ENDING else EXACT.name, claimed=bug.claimed)


def greedy_mismatch(bug: Bug, pair: Pair, seed: int, completions: int) -> NDArray[np.bool_]:
    """Where the loop with `bug` at temperature 0 differs from plain greedy decoding, each from a
    prompt of its own."""
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
    p, q = torch.full((2, *shape, VOCAB), 1 / VOCAB, dtype=torch.float64)
    for number, row in enumerate(rows):
        assert row.q is not None
        n = len(row.tokens)
        last = next((at for at, token in enumerate(row.tokens) if token in (ends or ())), n)
        tokens[number, :n], p[number, :n], q[number, :n] = row.tokens, row.p, row.q
        judged[number, : min(n, last + 1)] = True
        zero[number, last + 1 : n] = True
    emitted, positive = torch.from_numpy(tokens)[..., None], p.clamp_min(1e-300)
    ratio, noise = q / positive, np.random.default_rng([2, seed]).random(tokens.size)
    falling = ratio.argsort(dim=-1, descending=True, stable=True)
    place = falling.argsort(dim=-1).gather(-1, emitted)[..., 0].numpy()
    plain = _view(p, emitted, p, positive.log(), noise, tokens, p)
    aimed = _view(p, emitted, ratio, ((1 + ratio) / 2).log(), noise, place, p.gather(-1, falling))
    zero |= judged & (p.gather(-1, emitted)[..., 0] == 0).numpy()
    return Judged(judged, zero, overlap(p, q).numpy(), plain, aimed)


def _view(
    p: Tensor, emitted: Tensor, order: Tensor, score: Tensor, noise: Array, place: Integers, probs: Tensor
) -> View:
    """The view in which tokens are ordered by falling `order` and have a `score`,
    `(m, LENGTH, vocab)` each."""
    u = transform(p.flatten(0, 1), order.flatten(0, 1), emitted.flatten(), noise).reshape(place.shape)
    deviation = score - (p * score).sum(dim=-1, keepdim=True)
    own, variance = deviation.gather(-1, emitted)[..., 0], (p * deviation**2).sum(dim=-1)
    return View(u, own.numpy(), variance.numpy(), place, probs.numpy())


def _padded(completions: Sequence[Sequence[int]]) -> Integers:
    """Completions as an array `(m, LENGTH)`, -1 after the last token of each."""
    return np.array([[*own, *[-1] * (LENGTH - len(own))] for own in completions])
