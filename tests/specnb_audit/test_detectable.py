"""What the report says would have been found is found, with at least the probability stated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chains import audit_of, mean_distance, sampled_rows, zipf_tables
from scipy.optimize import brentq
from torch import Tensor

from specnb_audit.auditor import Auditor
from specnb_audit.bets import Row

P, Q = zipf_tables()
ROWS, LENGTH, RUNS = 8, 125, 6
LEAST = 4
"""Of 6 audits that each find the deviation with probability 0.9, three or fewer do with probability 1.6%."""
Family = Callable[[float], Tensor]
"""The sampler's distributions `(vocab, vocab)`, given how strong the deviation is: 0 is none."""


def tempered(towards: float) -> Family:
    """The inverse temperature goes from 1 to `towards`."""
    return lambda strength: torch.softmax(P.log() * (1 + strength * (towards - 1)), dim=-1)


def mixed(other: Tensor) -> Family:
    return lambda strength: (1 - strength) * P + strength * other


FAMILIES: dict[str, tuple[str, Family]] = {
    "temperature below 1": ("sharper", tempered(3.0)),
    "temperature above 1": ("flatter", tempered(0.3)),
    "mixed with the draft": ("draft-leak", mixed(Q)),
    "mixed with argmax": ("argmax", mixed(torch.nn.functional.one_hot(P.argmax(dim=-1), len(P)).to(P.dtype))),
}


@pytest.fixture(scope="module")
def detectable() -> dict[str, float]:
    return audit_of(sampled_rows(P, P, Q, ROWS, LENGTH, seed=100)).detectable


def is_found(rows: list[Row]) -> bool:
    auditor = Auditor()
    for row in rows:
        auditor.add(row)
        if auditor.found_after is not None:
            return True
    return False


@pytest.mark.parametrize("name", FAMILIES)
def test_what_would_have_been_found_is_found(
    name: str, detectable: dict[str, float], record_property: Callable[[str, object], None]
) -> None:
    """At the total variation printed."""
    kind, family = FAMILIES[name]
    printed = detectable[kind]
    actual = family(brentq(lambda strength: mean_distance(family(strength), P) - printed, 0.0, 1.0))
    found = sum(is_found(sampled_rows(actual, P, Q, ROWS, LENGTH, seed)) for seed in range(RUNS))
    record_property("found", found)
    print(f"{name}: {found} of {RUNS} at a total variation of {printed:.4f}")
    assert found >= LEAST
