"""Alternative hypotheses: the distributions that known bugs of a sampler give to the next token.

Each is a distribution r computed from p, q and the tokens before, so that r(x)/p(x) at the emitted
x is a fair bet against p: its expectation under p is 1, or less where p is zero. Under a sampler
with that bug the bet gains. There is none for a recovered token from the following position's
distribution, which depends on a rejected draft token that no file has.

Bets are computed on a few cells: one per likely token and two pooled ones for all others. Any
partition chosen before the token is seen keeps the expectation at 1, so a position costs a few
hundred numbers, whatever the vocabulary.

`Frequencies` are for tokens that are biased everywhere, as by a logit bias; the rows before show
which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.distributions import normalise, one_hot, residual

ALTERNATIVES = {
    "argmax": "the most probable token comes too often: the temperature is ignored somewhere",
    "sharper": "as if the temperature were lower than claimed",
    "flatter": "as if the temperature were higher than claimed, or the target had another context (prompt, cache, "
    "positions)",
    "near-uniform": "some tokens are almost uniform: a temperature that is uninitialised or huge at some positions, or "
    "another context there (cache, positions)",
    "tail-cut": "unlikely tokens are missing: a top-k, top-p or min-p that was not claimed",
    "shifted": "tokens fit the target's distribution at the position before: logits are read one position off, or a "
    "token is missing in the cache",
    "repeats": "tokens that occurred before come too often",
    "avoids": "tokens that occurred before come too rarely: a penalty that was not claimed",
    "draft-leak": "tokens follow the draft's distribution: draft tokens are accepted too often, the residual is "
    "inverted, or rejected tokens stay in the cache or move positions",
    "no-residual": "after a rejection a token is sampled from p instead of the residual",
    "not-clamped": "after a rejection p - q is summed up without setting its negative entries to zero, until the sum "
    "exceeds a uniform",
    "redraw": "draft tokens are accepted when they match a sample from p, and a mismatch samples from p again",
    "residual-only": "tokens come from the residual although a draft token should have been accepted",
    "greedy-draft": "draft tokens are the argmax of q, and are verified as if they had been sampled from q",
    "wrong-q": "draft tokens are sampled from one q (temperature, top-k, top-p) and verified with another",
    "blind-acceptance": "draft tokens are accepted by q alone: acceptance does not depend on p of the token",
    "lenience": "draft tokens are accepted with a probability above p/q: a lenience below 1",
    "constant-uniform": "all acceptance tests use one uniform, or a generator is seeded again",
    "one-uniform": "the uniform that rejected a draft token also samples the recovered token",
    "shared-noise": "the uniform that sampled a rejected draft token also samples the recovered token",
    "noise-of-steps": "the uniform of one token, or of one step, is used again later in the same sequence",
    "noise-of-texts": "the uniforms of one sequence are used again for a later one",
    "never-occurs": "something never occurs that is possible: a banned token, or an end token that is suppressed in "
    "the first positions",
    "last-token": "the token just emitted comes again too often or too rarely: in a step a penalty misses it, or "
    "counts it twice",
    "same-tokens": "a sequence repeats the tokens of an earlier one",
    "first-token": "only the first new token deviates: is a token missing between prompt and tokens?",
    "whole-sequences": "some sequences deviate from their beginning on and others do not: requests with other settings",
    "rounded-logits": "tokens fit the target's own logits, rounded to 8 bits (fp8, int8) or to bfloat16",
    "suspected-model": "tokens follow the distribution of the suspected model given as alternative",
    "along-p": "the probability p of the tokens deviates, in no way that is listed here",
    "along-q/p": "the ratio q/p of the tokens deviates, in no way that is listed here",
    "along-ids": "low or high token ids come too often: sampling itself, or its uniforms, are wrong",
    "token-bias": "single tokens come too often or too rarely wherever they are possible: a logit bias, a banned or "
    "suppressed token",
}
"""The alternatives that the audit bets on, and what each means when its e-value is large."""

DEPENDENCE = ("noise-of-texts", "same-tokens")
"""The alternatives where each sequence may have the right distribution, and sequences are not
independent."""

LEARNED = ("token-bias", "never-occurs", "first-token", "whole-sequences")
"""The alternatives that are learnt from earlier sequences; how large a deviation they would detect
is not known."""

GENERAL = {"first-token": 1.5, "whole-sequences": 1.5}
"""Mixtures of all other bets, which lead a diagnosis only where they have so many times the
decimals of the others."""

POWERS = {
    "sharper": (1.03, 1.1, 1.25, 1.5, 2.0, 3.0),
    "flatter": (0.97, 0.9, 0.8, 0.67, 0.5),
    "near-uniform": (0.25, 0.05),
}
TOP_K = (2, 5, 10, 20, 50, 100)
TOP_P = (0.9, 0.95, 0.98, 0.99, 0.999)
MIN_P = (0.1, 0.03, 0.01)
FACTORS = {"repeats": (1.25, 2.0, 5.0), "avoids": (0.8, 0.5, 0.2)}
LAST_FACTORS = (0.2, 0.5, 0.8, 1.25, 2.0)
DRAFT_POWERS = (0.5, 0.7, 1.4, 2.0)
LENIENCES = (0.9, 0.7, 0.5, 0.3)
UNIFORMS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
DEVIATING = (2.0, 3.0)
"""A token is bet on if its frequency deviates by more than this many standard deviations; one bet
for each."""
LIKELY = 128
"""Tokens with a cell of their own: the likeliest under any of the distributions at a position."""

Array = NDArray[np.float64]
Named = Iterator[tuple[str, Tensor]]


def alternative_distributions(condensed: CondensedDistributions, occurred: Tensor) -> Named:
    """Pairs of a name in `ALTERNATIVES` and distributions `(m, n, C)` on the cells, always in one
    order.

    `occurred` `(n, C)` marks the cells whose token occurred before.
    """
    p, cells, sizes = condensed.p, condensed.p.shape[-1], condensed.sizes.clamp_min(1).to(condensed.p.dtype)
    yield "argmax", _argmax(p)[None]
    for name, powers in POWERS.items():
        yield name, _tempered(p, sizes, powers)
    yield "tail-cut", _top(p)
    yield "tail-cut", _top_p(p)
    yield "tail-cut", _min_p(p)
    yield "shifted", condensed.previous_p[None]
    yield "repeats", one_hot(condensed.previous_cell, cells, p.dtype)[None]
    for name, factors in FACTORS.items():
        yield name, normalise(p * (1 + (_column(factors, p) - 1) * occurred.to(p.dtype)))
    last = one_hot(condensed.previous_cell, cells, p.dtype)
    last[:, -2:] = 0  # a pooled cell has other tokens, too
    yield "last-token", normalise(p * (1 + (_column(LAST_FACTORS, p) - 1) * last))
    if condensed.q is not None:
        yield from _with_draft(p, condensed.q, sizes)
    if condensed.q is not None and condensed.raw is not None:
        yield "wrong-q", Verification(p, q=condensed.raw).emitted(sampled=condensed.q)[None]
        yield "wrong-q", Verification(p, q=condensed.q).emitted(sampled=condensed.raw)[None]


def _with_draft(p: Tensor, q: Tensor, sizes: Tensor) -> Named:
    correct, overlap = Verification(p, q), torch.minimum(p, q)
    yield "draft-leak", q[None]
    yield "no-residual", _completed(overlap, p)[None]
    yield "redraw", _completed(p * q / sizes, p)[None]  # in a pooled cell, of one token of it
    yield "residual-only", correct.residual[None]
    yield "greedy-draft", correct.emitted(sampled=_argmax(q))[None]
    yield "wrong-q", correct.emitted(sampled=_top(q))
    others = _tempered(q, sizes, DRAFT_POWERS)
    yield "wrong-q", correct.emitted(sampled=others)
    yield "wrong-q", Verification(p, q=others).emitted(sampled=q)
    yield "blind-acceptance", _completed(q * _blind_acceptance(p, q, sizes), p)[None]
    yield "lenience", _completed(torch.minimum(p / _column(LENIENCES, p), q), correct.residual)
    yield "constant-uniform", _completed(q * greater_mask(p, _column(UNIFORMS, p) * q), correct.residual)


class Verification:
    """Algorithm 1 as if the draft token came from q."""

    def __init__(self, p: Tensor, q: Tensor) -> None:
        # 0 / 0: what p makes impossible is never accepted.
        self.accept_prob = (p / q).nan_to_num(0.0).clamp_max(1)
        self.residual = residual(p, q)

    def emitted(self, sampled: Tensor) -> Tensor:
        """The distribution `(..., n, C)` of the emitted token if the draft token is from `sampled`."""
        return _completed(sampled * self.accept_prob, self.residual)


def _blind_acceptance(p: Tensor, q: Tensor, sizes: Tensor) -> Tensor:
    """The probability `(n, C)` that u <= q(x)/p(y) for y sampled from p: sum over y of min(p,
    q(x)).

    Pooled cells count as tokens of equal probability. The y are sorted by p, so those with p(y)
    below q(x) are a prefix.
    """
    each, per_token = p / sizes, q / sizes
    ordered, index = each.sort(dim=-1)
    count = sizes.expand_as(p).gather(-1, index)
    mass_below = torch.nn.functional.pad((ordered * count).cumsum(dim=-1), (1, 0))
    tokens_below = torch.nn.functional.pad(count.cumsum(dim=-1), (1, 0))
    below = torch.searchsorted(ordered, per_token.contiguous())
    above = tokens_below[:, -1:] - tokens_below.gather(-1, below)
    return (mass_below.gather(-1, below) + per_token * above).clamp(0, 1)


def _completed(accepted: Tensor, rest: Tensor) -> Tensor:
    """The accepted mass `(..., n, C)`, and the missing mass distributed as `rest`."""
    return accepted + (1 - accepted.sum(dim=-1, keepdim=True)).clamp_min(0) * rest


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return like.new_tensor(values)[:, None, None]


def _argmax(probs: Tensor) -> Tensor:
    return one_hot(probs[:, :-2].argmax(dim=-1), probs.shape[-1], probs.dtype)


def _tempered(probs: Tensor, sizes: Tensor, powers: Sequence[float]) -> Tensor:
    """norm(probs^power) `(m, n, C)`; the tokens of a pooled cell count as equally likely."""
    return torch.softmax(_column(powers, probs) * (probs / sizes).log() + sizes.log(), dim=-1)


def _top(probs: Tensor) -> Tensor:
    """Top-k of `probs` for each of `TOP_K`; pooled cells hold unlikely tokens, and are cut."""
    rising = _rising(probs)
    return _kept(probs, rising[:, [-min(k, rising.shape[-1]) for k in TOP_K]].T)


def _top_p(probs: Tensor) -> Tensor:
    """Top-p of `probs` for each of `TOP_P`; `probs` itself where single tokens have less."""
    rising = _rising(probs)
    reached = rising.flip(-1).cumsum(dim=-1)
    limits = probs.new_tensor(TOP_P)
    # Likelier tokens below the limit.
    count = torch.searchsorted(reached, limits.expand(len(probs), -1).contiguous())
    is_reached = count < rising.shape[-1]
    weakest = rising.flip(-1).gather(-1, count.clamp_max(rising.shape[-1] - 1))
    return torch.where(is_reached.T[..., None], _kept(probs, weakest.T), probs)


def _min_p(probs: Tensor) -> Tensor:
    """Min-p of `probs` for each of `MIN_P`; pooled cells are cut."""
    return _kept(probs, probs.new_tensor(MIN_P)[:, None] * probs[:, :-2].amax(dim=-1))


def _rising(probs: Tensor) -> Tensor:
    """The probabilities of the single tokens, the smallest first."""
    return torch.from_numpy(np.sort(probs[:, :-2].numpy(), axis=-1))  # many times faster than torch


def _kept(probs: Tensor, weakest: Tensor) -> Tensor:
    """The single tokens of `probs` `(n, C)` at least as likely as `weakest` `(m, n)`, normalised;
    `probs` itself where pooled cells have all the mass."""
    single = probs[:, :-2]
    kept = torch.nn.functional.pad(single * (single >= weakest[..., None]), (0, 2))
    return normalise(kept.where(kept.sum(dim=-1, keepdim=True) > 0, probs))


class CondensedDistributions(NamedTuple):
    """The distributions at n positions on C cells, `(n, C)` each, on the CPU.

    raw            the draft's before standardisation, or None
    previous_p     p of the position before
    sizes          number of tokens in each cell
    ids            (n, C - 2) the token of each single-token cell; the last two cells pool the
    tokens that q (or `previous_p`, without q) makes likelier than p does, and all others
    cell           (n,) the cell of the emitted token, and `previous_cell` of the token before
    """

    p: Tensor
    q: Tensor | None
    raw: Tensor | None
    previous_p: Tensor
    sizes: Tensor
    ids: Tensor
    cell: Tensor
    previous_cell: Tensor

    def at_token(self, probs: Tensor) -> Tensor:
        return probs.gather(-1, self.cell[:, None].expand(*probs.shape[:-1], 1))[..., 0]


def condense_distributions(
    tokens: Tensor,
    p: Tensor,
    previous_p: Tensor,
    q: Tensor | None = None,
    raw: Tensor | None = None,
    previous_token: int = 0,
    likely: int = LIKELY,
) -> CondensedDistributions:
    """Distributions `(n, vocab)` and the `tokens` `(n,)` emitted there, on `likely` + 2 cells.

    Which tokens get a cell depends on the distributions alone.
    """
    score = torch.maximum(p, previous_p)
    for probs in (q, raw):
        score = score if probs is None else torch.maximum(score, probs)
    ids = top_tokens(score, min(likely, p.shape[-1]))
    larger = greater_mask(previous_p if q is None else q, p)
    # Both pools are summed and neither is a difference, so that a pool with a possible token in it
    # has mass.
    pools = (larger.scatter(-1, ids, 0.0), (1 - larger).scatter(-1, ids, 0.0))

    def on_cells(probs: Tensor) -> Tensor:
        pooled = torch.stack([torch.linalg.vecdot(probs, pool) for pool in pools], dim=-1)
        cells = torch.cat([probs.gather(-1, ids), pooled], dim=-1)
        return (cells / cells.sum(dim=-1, keepdim=True)).cpu()

    pool_sizes = [pool.sum(dim=-1).to(ids.dtype) for pool in pools]
    before = torch.cat([tokens.new_tensor([previous_token]), tokens[:-1]])
    return CondensedDistributions(
        p=on_cells(p),
        q=None if q is None else on_cells(q),
        raw=None if raw is None else on_cells(raw),
        previous_p=on_cells(previous_p),
        sizes=torch.cat([torch.ones_like(ids), torch.stack(pool_sizes, dim=-1)], dim=-1).cpu(),
        ids=ids.cpu(),
        cell=_cell(ids, larger, tokens).cpu(),
        previous_cell=_cell(ids, larger, before).cpu(),
    )


def top_tokens(score: Tensor, count: int) -> Tensor:
    """The `count` tokens with the largest `score` `(n, vocab)`, in the order of their ids."""
    if score.device.type != "cpu":
        return score.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    # Torch takes five times as long.
    found = np.argpartition(score.numpy(force=True), -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(found, axis=-1))


def greater_mask(a: Tensor, b: Tensor) -> Tensor:
    """1 where a > b and 0 elsewhere, in the dtype of a: faster to multiply by than `torch.where`."""
    return torch.gt(a, b, out=a.new_empty(torch.broadcast_shapes(a.shape, b.shape)))


def _cell(ids: Tensor, larger: Tensor, tokens: Tensor) -> Tensor:
    match = ids == tokens[:, None]
    pool = ids.shape[-1] + (larger.gather(-1, tokens[:, None])[:, 0] == 0).long()
    return torch.where(match.any(dim=-1), match.to(torch.uint8).argmax(dim=-1), pool)


class Frequencies:
    """How often each token came and should have come, over all sequences so far."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None  # (2, vocab): seen and expected
        self.factors: Tensor | None = None  # (vocab, bets)

    def begin(self) -> None:
        if self.counts is not None:
            self.factors = self._factors(*self.counts)

    def bets(self, p: Tensor, tokens: Tensor) -> tuple[Array, Array]:
        """r(x)/p(x) `(bets, n)` at `tokens` `(n,)`, and the deviations of r > p `(bets, n)`; both
        depend on earlier sequences alone."""
        vocab = p.shape[-1]
        if self.counts is None:
            self.counts = torch.zeros(2, vocab, dtype=torch.float64, device=p.device)
        self.counts += torch.stack([torch.bincount(tokens, minlength=vocab), p.sum(dim=0, dtype=torch.float64)])
        if self.factors is None:
            return np.ones((len(DEVIATING), len(tokens))), np.zeros((len(DEVIATING), len(tokens)))
        factors = self.factors.to(p.dtype)
        likelier = (factors > 1).to(p.dtype)
        ratios, deviations = factors[tokens] / (p @ factors), likelier[tokens] - p @ likelier
        return ratios.T.double().numpy(force=True), deviations.T.double().numpy(force=True)

    @staticmethod
    def _factors(seen: Tensor, expected: Tensor) -> Tensor:
        """Seen over expected `(vocab, bets)` for the tokens that deviate, 1 for the others; one is
        added to both counts, so that no token is taken to be impossible."""
        deviation = (seen - expected).abs() / (expected + 1).sqrt()
        factor = (seen + 1) / (expected + 1)
        return torch.stack([factor.where(deviation > limit, 1.0) for limit in DEVIATING], dim=-1)
