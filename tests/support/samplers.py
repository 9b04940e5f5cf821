"""Stand-alone samplers for the tests of the audit, exact and with known bugs: on tables, without models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specnb.distributions import normalise, one_hot, residual, sample
from specnb.rules import Outcome, Rule, token_verification
from specnb_audit.bets import Row
from specnb_audit.bugs.bug import KnownBug

VOCAB, GAMMA = 24, 3


def tables(seed: int = 0, closeness: float = 0.5, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """p and q after every token, `(vocab, vocab)`: a chain, so that distributions depend on what was emitted."""
    generator = np.random.default_rng(seed)
    p, other = (torch.from_numpy(generator.dirichlet(np.ones(vocab), size=vocab)) for _ in range(2))
    q = normalise(closeness * p + (1 - closeness) * other)
    return p, q


Change = Callable[[Tensor], Tensor]


def sample_row(
    p: Tensor, q: Tensor, n: int, seed: int, rule: Rule = token_verification, sampled: Change | None = None
) -> Row:
    """A sequence of `n` tokens by steps of `rule`, draft tokens from `sampled(q)`, with its distributions and steps."""
    generator = torch.Generator().manual_seed(seed)
    text, steps = [0], []
    while len(text) <= n:
        draft_tokens, distributions, at = [], [], text[-1]
        for u in torch.rand(GAMMA, generator=generator, dtype=torch.float64):
            distributions.append(q[at])
            at = int(sample(q[at] if sampled is None else sampled(q[at]), u))
            draft_tokens.append(at)
        ahead = p[[text[-1], *draft_tokens]]
        accept = torch.rand(GAMMA, generator=generator, dtype=torch.float64)
        final = torch.rand((), generator=generator, dtype=torch.float64)
        accepted, token, _ = rule(ahead, torch.stack(distributions), torch.tensor(draft_tokens), accept, final)
        text += [*draft_tokens[: int(accepted)], int(token)]
        steps.append(int(accepted) + 1)
    steps[-1] -= len(text) - 1 - n
    before = torch.tensor(text[:n])
    return Row(text[1 : n + 1], p[before], q[before], prompt=[0], steps=[size for size in steps if size > 0])


def _rejecting(replace: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Algorithm 1 that samples from `replace(p, q)` after a rejection."""

    def rule(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
        if int(accepted) == len(draft_tokens):
            return Outcome(accepted, token)
        return Outcome(accepted, sample(replace(p[accepted], q[accepted]), final))

    return rule


def _reusing(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    again = torch.cat([accept, final[None]])[accepted]
    return token_verification(p, q, draft_tokens, accept, again)


def _constant_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, torch.full_like(accept, 0.3), final)


def _lenient(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, accept / 2, final)


@dataclass(frozen=True)
class SamplerBug(KnownBug):
    """A bug of a stand-alone sampler: `settings` for `sample_row`, and the `alternatives` that may explain it."""

    settings: dict[str, Any]
    alternatives: frozenset[str]


_BUGS: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("no residual", "after a rejection p itself is sampled", {"rule": _rejecting(lambda p, q: p)}, {"no-residual"}),
    (
        "inverted residual",
        "after a rejection max(0, q - p) is sampled",
        {"rule": _rejecting(lambda p, q: residual(q, p))},
        {"draft-leak"},
    ),
    (
        "greedy draft",
        "draft tokens are the argmax of q",
        {"sampled": lambda q: one_hot(q.argmax(), VOCAB, q.dtype)},
        {"greedy-draft"},
    ),
    (
        "colder draft",
        "draft tokens are sampled at half the temperature",
        {"sampled": lambda q: normalise(q**2)},
        {"wrong-q"},
    ),
    (
        "one uniform",
        "the uniform that rejected a draft token also samples the recovered token",
        {"rule": _reusing},
        {"one-uniform"},
    ),
    (
        "constant uniform",
        "all acceptance tests use one constant",
        {"rule": _constant_uniform},
        {"constant-uniform", "lenience"},
    ),
    ("lenience 0.5", "draft tokens are accepted with min(1, 2 p/q)", {"rule": _lenient}, {"lenience"}),
]

SAMPLER_BUGS = {
    name: SamplerBug(name, description, "-", "sampler", settings, frozenset(alternatives))
    for name, description, settings, alternatives in _BUGS
}
"""The bugs of stand-alone samplers by name."""
