"""Bets that something never happens: fair by enumeration, and powerful where it never does."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from samplers import audit_of, sampled_rows, zipf_tables
from torch import Tensor

from specnb.distributions import normalise
from specnb_audit.absences import Absences
from specnb_audit.bets import Row

P = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.9, 0.0]], dtype=torch.float64)
LENGTHS = (2, 1, 2)


def products(tokens: tuple[int, ...], chunk: bool) -> tuple[np.ndarray, float]:
    """The products of the factors over all `tokens`, in sequences of `LENGTHS`, and how likely they
    are under P."""
    absences, chance, grown, rest = Absences([2]), 1.0, np.ones(2), list(tokens)
    for length in LENGTHS:
        own, rest = torch.tensor(rest[:length]), rest[length:]
        p = P[torch.tensor([0, *own.tolist()[:-1]])]
        chance *= float(p.gather(-1, own[:, None]).prod())
        pieces = [(p[at : at + 1], own[at : at + 1], at) for at in range(length)] if chunk else [(p, own, 0)]
        for piece in pieces:
            grown *= [float(np.prod(ratios)) for ratios in absences.bets(*piece)]
    return grown, chance


@pytest.mark.parametrize("chunk", [False, True])
def test_the_mean_of_each_product_is_one(chunk: bool) -> None:
    """Over all tokens of three sequences, whether they come in pieces or not."""
    total, mean = 0.0, np.zeros(2)
    for tokens in product(range(3), repeat=sum(LENGTHS)):
        grown, chance = products(tokens, chunk)
        if chance > 0:
            assert (grown >= 0).all()
            assert grown == pytest.approx(products(tokens, not chunk)[0])
            total, mean = total + chance, mean + chance * grown
    assert total == pytest.approx(1)
    assert mean == pytest.approx(np.ones(2), abs=1e-12)


def test_a_certain_token_and_one_that_came_leave_finite_factors() -> None:
    absences = Absences([0])
    certain = torch.tensor([[1.0, 0.0], [1.0 - 1e-9, 1e-9]])
    for tokens in ([0, 0], [0, 1], [1, 1]):
        for ratios in absences.bets(certain, torch.tensor(tokens), 0):
            assert np.isfinite(ratios).all()


def ended(row: Row, end: int) -> Row:
    """The row up to its first `end`."""
    tokens = list(row.tokens)
    n = tokens.index(end) + 1 if end in tokens else len(tokens)
    return Row(tokens[:n], row.p[:n], prompt=row.prompt)


TABLE, _ = zipf_tables()
END = int(TABLE.mean(dim=0).argsort()[-25])  # neither frequent nor rare


def without_end(first: int, rows: int, seed: int) -> list[Row]:
    """Sequences of 48 tokens, in the first of which no end token comes."""
    banned = TABLE.clone()
    banned[:, END] = 0
    random, made = np.random.default_rng(seed), list[Row]()
    for _ in range(rows):
        text = [0]
        for at in range(48):
            p: Tensor = normalise(banned[text[-1]]) if at < first else TABLE[text[-1]]
            text.append(int(random.choice(len(p), p=p.numpy())))
        made.append(ended(Row(text[1:], TABLE[text[:-1]], prompt=[0]), END))
    return made


def test_end_tokens_suppressed_in_the_first_positions_are_found() -> None:
    """And not where nothing is suppressed; what never occurs is named."""
    rows = without_end(12, 160, 0)
    expected = sum(float(row.p[:12, END].sum()) for row in rows)
    report = audit_of(rows, eos=END)
    print(expected, report.found_after, report.tokens)
    assert 30 < expected < 40
    assert (report.diagnosis, report.rejected) == ("never-occurs", True)
    # The product alone has exp(expected); the bets lose little of it.
    assert report.by_alternative["never-occurs"] > 0.6 * expected / np.log(10)
    assert not audit_of(without_end(0, 160, 1), eos=END).rejected
    absences = Absences([END])
    for row in rows:
        absences.bets(row.p, torch.tensor(row.tokens), 0)
    assert absences.words() == f"an end token ({END}) never occurs in the first 12 positions, as min_tokens gives it"


def test_a_banned_token_is_found_and_named() -> None:
    banned = TABLE.clone()
    banned[:, 3] = 0
    rows = sampled_rows(normalise(banned), TABLE, None, 12, 200, seed=2)
    report = audit_of(rows)
    assert report.diagnosis == "never-occurs"
    absences = Absences()
    for row in rows:
        absences.bets(row.p, torch.tensor(row.tokens), 0)
    assert absences.words() == "token 3 never occurs, as if it were banned"
