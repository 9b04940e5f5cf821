"""Samplers on laws, exact and broken, for the tests of the audit: no models, any number of texts at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specnb.audit.bets import Row
from specnb.law import draw, normalise, one_hot, residual
from specnb.verify import Outcome, Rule, token_verification

VOCAB, GAMMA = 24, 3


def tables(seed: int = 0, closeness: float = 0.5, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """p and q after every token, `(vocab, vocab)`: a chain, so that laws depend on what was emitted."""
    generator = np.random.default_rng(seed)
    p, other = (torch.from_numpy(generator.dirichlet(np.ones(vocab), size=vocab)) for _ in range(2))
    q = normalise(closeness * p + (1 - closeness) * other)
    return p, q


Drawn = Callable[[Tensor], Tensor]


def sample(p: Tensor, q: Tensor, n: int, seed: int, rule: Rule = token_verification, drawn: Drawn | None = None) -> Row:
    """One text of `n` tokens by steps of `rule`, drafts from `drawn(q)`, with its laws and steps."""
    generator = torch.Generator().manual_seed(seed)
    text, steps = [0], []
    while len(text) <= n:
        drafts, laws, at = [], [], text[-1]
        for u in torch.rand(GAMMA, generator=generator, dtype=torch.float64):
            laws.append(q[at])
            at = int(draw(q[at] if drawn is None else drawn(q[at]), u))
            drafts.append(at)
        ahead = p[[text[-1], *drafts]]
        accept = torch.rand(GAMMA, generator=generator, dtype=torch.float64)
        final = torch.rand((), generator=generator, dtype=torch.float64)
        accepted, token = rule(ahead, torch.stack(laws), torch.tensor(drafts), accept, final)
        text += [*drafts[: int(accepted)], int(token)]
        steps.append(int(accepted) + 1)
    steps[-1] -= len(text) - 1 - n
    before = torch.tensor(text[:n])
    return Row(text[1 : n + 1], p[before], q[before], prompt=[0], steps=[size for size in steps if size > 0])


def _rejecting(replace: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Algorithm 1 that draws from `replace(p, q)` after a rejection."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        accepted, token = token_verification(p, q, drafts, accept, final)
        if int(accepted) == len(drafts):
            return Outcome(accepted, token)
        return Outcome(accepted, draw(replace(p[accepted], q[accepted]), final))

    return rule


def _reusing(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    accepted = token_verification(p, q, drafts, accept, final).accepted
    again = torch.cat([accept, final[None]])[accepted]
    return token_verification(p, q, drafts, accept, again)


def _seeded_anew(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, drafts, torch.full_like(accept, 0.3), final)


BROKEN: dict[str, tuple[dict[str, object], set[str]]] = {
    "no residual": ({"rule": _rejecting(lambda p, q: p)}, {"no-residual"}),
    "inverted residual": ({"rule": _rejecting(lambda p, q: residual(q, p))}, {"draft-leak"}),
    "greedy draft": ({"drawn": lambda q: one_hot(q.argmax(), VOCAB, q.dtype)}, {"greedy-draft"}),
    "colder draft": ({"drawn": lambda q: normalise(q**2)}, {"wrong-q"}),
    "one uniform": ({"rule": _reusing}, {"one-uniform"}),
    "seeded anew": ({"rule": _seeded_anew}, {"constant-uniform", "lenience"}),
    "half as strict": (
        {"rule": lambda p, q, drafts, accept, final: token_verification(p, q, drafts, accept / 2, final)},
        {"lenience"},
    ),
}
"""Name -> (what `sample` is given, the kinds that the audit may call it)."""
