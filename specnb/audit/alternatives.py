"""Suspects: the distributions that known ways of breaking a sampler give to the next token.

Each is a distribution r made of p, q and what came before, so r(x)/p(x) at the emitted x is a fair bet against
p: its expectation under p is 1 (or less, where p is zero). A sampler with that bug makes it grow.
Where the bugs were seen is told in `specnb.audit.known_bugs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from specnb.audit.condensed import CondensedView, greater_mask
from specnb.sampling.distributions import normalise, one_hot, residual

ALTERNATIVES = {
    "argmax": "tokens are most probable ones more often than p allows: the temperature is ignored somewhere",
    "sharper": "as if the temperature were lower than claimed",
    "flatter": "as if the temperature were higher than claimed, or the target had seen another context",
    "tail-cut": "unlikely tokens are missing: a top-k or top-p that was not claimed",
    "shifted": "tokens fit the target's distribution one position before: logits are read one position off, or a token is "
    "missing in the cache",
    "repeats": "tokens that the text already has come more often than p allows",
    "avoids": "tokens that the text already has come less often than p allows: a penalty that was not claimed",
    "draft-leak": "the draft's distribution shows through: drafts are accepted too often, or the residual is inverted",
    "no-residual": "after a rejection p itself is drawn from instead of the residual",
    "redraw": "drafts are accepted when they match a draw from p, and on a mismatch p is drawn from again",
    "residual-only": "tokens come from the residual although a draft should have been accepted",
    "greedy-draft": "drafts are the draft's most probable tokens, and are tested as if they had been drawn",
    "wrong-q": "drafts are drawn from one q (temperature, top-k, top-p) and tested with another",
    "lenience": "drafts are accepted with more than p/q: a lenience below 1",
    "constant-uniform": "acceptance tests share one uniform, or a generator is seeded anew",
    "one-uniform": "the uniform that rejected a draft also draws its replacement",
    "shared-noise": "the noise that drew a rejected draft also draws its replacement",
    "noise-of-steps": "the noise of one token is used again for a later one of the same text",
    "noise-of-texts": "the noise of one text is used again for the next one",
    "same-tokens": "texts repeat the tokens of the text before them",
    "along-p": "how probable tokens are under p deviates, in no way that has a name here",
    "along-q/p": "how much likelier tokens are under q than under p deviates, in no way that has a name here",
    "along-ids": "low or high token ids come too often: the draw itself, or its noise, is broken",
}
"""Everything the audit bets on, and what it means when that bet wins."""

POWERS = {"sharper": (1.1, 1.25, 1.5, 2.0, 3.0), "flatter": (0.9, 0.8, 0.67, 0.5)}
TOP_K = (2, 5, 10, 20, 50, 100)
TILTS = {"repeats": (1.25, 2.0, 5.0), "avoids": (0.8, 0.5, 0.2)}
DRAFT_POWERS = (0.5, 0.7, 1.4, 2.0)
LENIENCES = (0.9, 0.7, 0.5, 0.3)
UNIFORMS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)

Alternatives = Iterator[tuple[str, Tensor]]


def alternative_distributions(condensed: CondensedView, seen: Tensor) -> Alternatives:
    """Pairs of a kind (of `KINDS`) and distributions `(m, n, C)` on the cells of `view`, always the same ones in the
    same order.

    `seen` `(n, C)` marks the cells whose token the text already has.
    """
    p, cells, sizes = condensed.p, condensed.p.shape[-1], condensed.sizes.clamp_min(1).to(condensed.p.dtype)
    yield "argmax", _argmax(p)[None]
    for kind, powers in POWERS.items():
        yield kind, _tempered(p, sizes, powers)
    yield "tail-cut", _top(p)
    yield "shifted", condensed.before[None]
    yield "repeats", one_hot(condensed.previous, cells, p.dtype)[None]
    for kind, tilts in TILTS.items():
        yield kind, normalise(p * (1 + (_each(tilts, p) - 1) * seen.to(p.dtype)))
    if condensed.q is not None:
        yield from _with_draft(p, condensed.q, sizes)
    if condensed.q is not None and condensed.raw is not None:
        yield "wrong-q", Test(p, q=condensed.raw).probs(sampled=condensed.q)[None]
        yield "wrong-q", Test(p, q=condensed.q).probs(sampled=condensed.raw)[None]


def _with_draft(p: Tensor, q: Tensor, sizes: Tensor) -> Alternatives:
    test, both = Test(p, q), torch.minimum(p, q)
    yield "draft-leak", q[None]
    yield "no-residual", _completed(both, p)[None]
    yield "redraw", _completed(p * q, p)[None]
    yield "residual-only", test.left[None]
    yield "greedy-draft", test.probs(sampled=_argmax(q))[None]
    yield "wrong-q", test.probs(sampled=_top(q))
    others = _tempered(q, sizes, DRAFT_POWERS)
    yield "wrong-q", test.probs(sampled=others)
    yield "wrong-q", Test(p, q=others).probs(sampled=q)
    yield "lenience", _completed(torch.minimum(p / _each(LENIENCES, p), q), test.left)
    yield "constant-uniform", _completed(q * greater_mask(p, _each(UNIFORMS, p) * q), test.left)


class Test:
    """One test of Algorithm 1 as if the draft came from q: the chance of each draft, and the distribution `left` of the
    token that replaces a rejected one, `(..., n, C)`."""

    __test__ = False  # pytest shall not take it for one of its own

    def __init__(self, p: Tensor, q: Tensor) -> None:
        self.chance = (p / q).nan_to_num(0.0).clamp_max(1)  # 0 / 0: what p makes impossible is never accepted
        self.left = residual(p, q)

    def probs(self, sampled: Tensor) -> Tensor:
        """The distribution `(..., n, C)` of what is emitted when the draft comes from `drawn`."""
        return _completed(sampled * self.chance, self.left)


def _completed(accepted: Tensor, left: Tensor) -> Tensor:
    """What is accepted `(..., n, C)`, and the missing mass spread as the distribution `left` is."""
    return accepted + (1 - accepted.sum(dim=-1, keepdim=True)).clamp_min(0) * left


def _each(values: Sequence[float], like: Tensor) -> Tensor:
    return like.new_tensor(values)[:, None, None]


def _argmax(probs: Tensor) -> Tensor:
    return one_hot(probs[:, :-2].argmax(dim=-1), probs.shape[-1], probs.dtype)


def _tempered(probs: Tensor, sizes: Tensor, powers: Sequence[float]) -> Tensor:
    """norm(distribution^power) `(m, n, C)` for each of `powers`, as if the tokens of a lump were equally likely."""
    return torch.softmax(_each(powers, probs) * (probs / sizes).log() + sizes.log(), dim=-1)


def _top(probs: Tensor) -> Tensor:
    """Top-k of `distribution` `(n, C)` for each of `TOP_K`, `(m, n, C)`; lumps hold many tokens, and go first."""
    head = probs[:, :-2]
    rising = torch.from_numpy(np.sort(head.numpy(), axis=-1))  # many times faster than torch
    weakest = rising[:, [-min(k, head.shape[-1]) for k in TOP_K]].T[..., None]
    return normalise(torch.nn.functional.pad(head * (head >= weakest), (0, 2)))
