"""Samplers of single tokens on a chain: the next token's distribution depends on the last token alone."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb_audit.auditor import Auditor
from specnb_audit.bets import Row
from specnb_audit.report import Report

Array = NDArray[np.float64]


def zipf_tables(vocab: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """p and q `(vocab, vocab)`, a row for each last token: few likely tokens and a long tail, as language has."""
    generator = np.random.default_rng(seed)
    logits = -1.2 * np.log(1 + np.arange(vocab)) + 0.8 * generator.standard_normal((vocab, vocab))
    logits = np.take_along_axis(logits, np.argsort(generator.random((vocab, vocab)), axis=1), axis=1)
    other = logits + generator.standard_normal((vocab, vocab))
    p, q = (torch.softmax(torch.from_numpy(one), dim=-1) for one in (logits, other))
    return p, q


def sampled_rows(actual: Tensor, p: Tensor, q: Tensor | None, rows: int, n: int, seed: int) -> list[Row]:
    """`rows` sequences of `n` tokens from `actual` `(vocab, vocab)`, with the distributions claimed."""
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
