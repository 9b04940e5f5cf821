"""A stand-alone sampler for the tests of the audit, exact or with the rule of a bug: on tables, without models."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specnb.distributions import normalise, sample
from specnb.rules import Rule, token_verification
from specnb_audit.bets import Row
from specnb_audit.bugs.bug import Change

VOCAB, GAMMA = 24, 3


def tables(seed: int = 0, closeness: float = 0.5, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """p and q after every token, `(vocab, vocab)`: a chain, so that distributions depend on what was emitted."""
    generator = np.random.default_rng(seed)
    p, other = (torch.from_numpy(generator.dirichlet(np.ones(vocab), size=vocab)) for _ in range(2))
    q = normalise(closeness * p + (1 - closeness) * other)
    return p, q


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
