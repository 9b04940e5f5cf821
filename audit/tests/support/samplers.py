"""Samplers for the tests of the audit, on tables and without models: of single tokens, and of steps
of a rule.

The next token's distribution depends on the last token alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit_studies.bugs.bug import Change
from specnb.distributions import normalise, sample
from specnb.rules import Rule, token_verification
from specnb_audit.auditor import Auditor
from specnb_audit.bets import Row
from specnb_audit.report import Report

Array = NDArray[np.float64]
VOCAB, GAMMA = 24, 3


def tables(seed: int = 0, closeness: float = 0.5, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """p and q after every token, `(vocab, vocab)`: a chain, so that distributions depend on what
    was emitted."""
    generator = np.random.default_rng(seed)
    p, other = (torch.from_numpy(generator.dirichlet(np.ones(vocab), size=vocab)) for _ in range(2))
    q = normalise(closeness * p + (1 - closeness) * other)
    return p, q


def sample_row(
    p: Tensor, q: Tensor, n: int, seed: int, rule: Rule = token_verification, sampled: Change | None = None
) -> Row:
    """A sequence of `n` tokens by steps of `rule`, draft tokens from `sampled(q)`, with its
    distributions and steps."""
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


def depending(prefix: Sequence[int], vocab: int = 60) -> Array:
    """A distribution `(vocab,)` that depends on the whole prefix: two sequences never have the same
    one again."""
    logits = -1.2 * np.log(1 + np.arange(vocab)) + 0.8 * np.random.default_rng([5, *prefix]).standard_normal(vocab)
    weights = np.exp(logits)
    return np.asarray(weights / weights.sum())


def raced(start: int, n: int, seed: Sequence[int], anew: bool) -> list[int]:
    """`n` tokens after `start`, sampled as `torch.multinomial` does, by a race of noises divided by
    `depending`.

    The generator has this `seed`, and is made `anew` for each token.
    """
    random, text = np.random.default_rng(seed), [start]
    for _ in range(n):
        p = depending(text)
        text.append(int((p / (np.random.default_rng(seed) if anew else random).exponential(size=len(p))).argmax()))
    return text[1:]


def zipf_tables(vocab: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """p and q `(vocab, vocab)`, a row for each last token: few likely tokens and a long tail, as
    language has."""
    generator = np.random.default_rng(seed)
    logits = -1.2 * np.log(1 + np.arange(vocab)) + 0.8 * generator.standard_normal((vocab, vocab))
    logits = np.take_along_axis(logits, np.argsort(generator.random((vocab, vocab)), axis=1), axis=1)
    other = logits + generator.standard_normal((vocab, vocab))
    p, q = (torch.softmax(torch.from_numpy(one), dim=-1) for one in (logits, other))
    return p, q


def sampled_rows(actual: Tensor, p: Tensor, q: Tensor | None, rows: int, n: int, seed: int) -> list[Row]:
    """`rows` sequences of `n` tokens from `actual` `(vocab, vocab)`, with the distributions
    claimed."""
    random = np.random.default_rng(seed)
    cumulated = actual.double().cumsum(dim=-1).numpy()
    tokens = np.zeros((rows, n + 1), dtype=np.int64)
    for at in range(n):
        u = random.random(rows) * cumulated[tokens[:, at], -1]
        tokens[:, at + 1] = (cumulated[tokens[:, at]] <= u[:, None]).sum(axis=1)
    before = torch.from_numpy(tokens[:, :-1])
    return [
        Row(line[1:].tolist(), p[had], None if q is None else q[had], prompt=[0])
        for line, had in zip(tokens, before, strict=True)
    ]


def audit_of(rows: list[Row], **settings: object) -> Report:
    """The report of an `Auditor` with `settings` on `rows`."""
    auditor = Auditor(**settings)  # type: ignore[arg-type]
    for row in rows:
        auditor.add(row)
    return auditor.report()
