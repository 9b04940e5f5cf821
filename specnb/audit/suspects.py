"""Suspects: the laws that known ways of breaking a sampler give to the next token.

Each is a law r made of p, q and what came before, so r(x)/p(x) at the emitted x is a fair bet against
p: its expectation under p is 1 (or less, where p is zero). A sampler with that bug makes it grow.
Where the bugs were seen is told in `specnb.audit.museum`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specnb.audit.cells import View
from specnb.law import normalise, one_hot, residual

KINDS = {
    "argmax": "tokens are most probable ones more often than p allows: the temperature is ignored somewhere",
    "sharper": "as if the temperature were lower than claimed",
    "flatter": "as if the temperature were higher than claimed, or the target had seen another context",
    "tail-cut": "unlikely tokens are missing: a top-k or top-p that was not claimed",
    "shifted": "tokens fit the target's law one position before: logits are read one position off, or a token is "
    "missing in the cache",
    "repeats": "tokens that the text already has come more often than p allows",
    "avoids": "tokens that the text already has come less often than p allows: a penalty that was not claimed",
    "draft-leak": "the draft's law shows through: drafts are accepted too often, or the residual is inverted",
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

Suspected = Iterator[tuple[str, Tensor]]


def suspect_laws(view: View, seen: Tensor) -> Suspected:
    """Pairs of a kind (of `KINDS`) and a law `(n, C)` on the cells of `view`, always the same ones in the
    same order.

    `seen` `(n, C)` marks the cells whose token the text already has.
    """
    p, cells, sizes = view.p, view.p.shape[-1], view.sizes.clamp_min(1).to(view.p.dtype)
    yield "argmax", _argmax(p)
    for kind, powers in POWERS.items():
        yield from ((kind, _tempered(p, sizes, power)) for power in powers)
    yield from (("tail-cut", law) for law in _top(p))
    yield "shifted", view.before
    yield "repeats", one_hot(view.previous, cells, p.dtype)
    for kind, tilts in TILTS.items():
        yield from ((kind, normalise(p * torch.where(seen, tilt, 1.0))) for tilt in tilts)
    if view.q is not None:
        yield from _with_draft(p, view.q, sizes)
    if view.q is not None and view.raw is not None:
        yield "wrong-q", tested(p, drawn=view.q, q=view.raw)
        yield "wrong-q", tested(p, drawn=view.raw, q=view.q)


def _with_draft(p: Tensor, q: Tensor, sizes: Tensor) -> Suspected:
    both, left = torch.minimum(p, q), residual(p, q)
    yield "draft-leak", q
    yield "no-residual", both + (1 - both.sum(dim=-1, keepdim=True)) * p
    yield "redraw", p * q + (1 - (p * q).sum(dim=-1, keepdim=True)) * p
    yield "residual-only", left
    yield "greedy-draft", tested(p, drawn=_argmax(q), q=q)
    for cut in _top(q):
        yield "wrong-q", tested(p, drawn=cut, q=q)
    for power in DRAFT_POWERS:
        other = _tempered(q, sizes, power)
        yield "wrong-q", tested(p, drawn=other, q=q)
        yield "wrong-q", tested(p, drawn=q, q=other)
    for lenience in LENIENCES:
        yield "lenience", _completed(torch.minimum(p / lenience, q), left)
    for uniform in UNIFORMS:
        yield "constant-uniform", _completed(q.where(uniform * q < p, 0.0), left)


def tested(p: Tensor, drawn: Tensor, q: Tensor) -> Tensor:
    """The law of one test of Algorithm 1 whose draft comes from `drawn` and is tested as if from q."""
    accepted = torch.where(q > 0, drawn * (p / q.where(q > 0, 1.0)).clamp_max(1), torch.where(p > 0, drawn, 0.0))
    return _completed(accepted, residual(p, q))


def _completed(accepted: Tensor, left: Tensor) -> Tensor:
    """What is accepted `(n, C)`, and the missing mass spread as the law `left` is."""
    return accepted + (1 - accepted.sum(dim=-1, keepdim=True)).clamp_min(0) * left


def _argmax(law: Tensor) -> Tensor:
    return one_hot(law[:, :-2].argmax(dim=-1), law.shape[-1], law.dtype)


def _tempered(law: Tensor, sizes: Tensor, power: float) -> Tensor:
    """norm(law^power), as if the tokens of a lump were equally likely."""
    return torch.softmax(power * (law / sizes).log() + sizes.log(), dim=-1)


def _top(law: Tensor) -> Iterator[Tensor]:
    """Top-k of `law` `(n, C)` for each of `TOP_K`; lumps hold many tokens, and go first."""
    head = law[:, :-2]
    largest = head.topk(min(max(TOP_K), head.shape[-1]), dim=-1).values
    for k in TOP_K:
        weakest = largest[:, min(k, largest.shape[-1]) - 1, None]
        yield normalise(torch.nn.functional.pad(head.where(head >= weakest, 0.0), (0, 2)))
