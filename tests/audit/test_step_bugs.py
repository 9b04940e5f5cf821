"""Every planted bug fails the check that the correct step passes: a test that has never failed proves nothing."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from laws import law_pair

from specnb.audit.mutants import deviation, deviation_on_points, mended, merged_law, mutants, step
from specnb.law import Sampling, residual

VOCAB, GAMMA = 4, 2
P, Q = law_pair("dense", VOCAB)
MUTANTS = mutants(Sampling(top_k=3, top_p=0.9))
NOT_ENUMERABLE = {"one-uniform", "reseeded", "inverted-residual", "lenience-left-on", "unverified", "merged-children"}
"""Those that use a uniform otherwise than any exact rule does: enumeration itself notices, and raises."""

every_mutant = pytest.mark.parametrize("name", MUTANTS)


@every_mutant
def test_every_mutant_is_caught(name: str, record_property) -> None:
    wrong = step(MUTANTS[name], P, Q)
    if name in NOT_ENUMERABLE:
        with pytest.raises(ValueError, match="changes its answer inside a cell"):
            deviation(wrong, GAMMA)
        found, unavoidable = deviation_on_points(wrong, GAMMA), deviation_on_points(mended(wrong), GAMMA)
        assert found > 3 * unavoidable
    else:
        found = deviation(wrong, GAMMA)
    record_property("total_variation", found)
    print(f"{name}: total variation {found:.4f}")
    assert found > 1e-6


@every_mutant
def test_the_step_without_its_bug_passes(name: str) -> None:
    assert deviation(mended(step(MUTANTS[name], P, Q)), GAMMA) < 1e-12


@every_mutant
def test_points_and_cells_agree(name: str) -> None:
    one = step(MUTANTS[name], P, Q)
    one = mended(one) if name in NOT_ENUMERABLE else one
    assert deviation_on_points(one, GAMMA) == pytest.approx(deviation(one, GAMMA), abs=0.01)


def test_the_first_token_alone_would_not_show_the_same_uniform_in_every_test() -> None:
    reseeded = step(MUTANTS["reseeded"], P, Q)
    assert deviation_on_points(reseeded, 1) < 0.1 * deviation_on_points(reseeded, GAMMA)


@pytest.mark.parametrize("kind", ["dense", "zeros in p", "zeros in q", "disjoint"])
def test_two_merged_drafts_have_the_law_that_the_tree_gives_them(kind: str) -> None:
    """Every pair of drafts and both orders, by hand."""
    p_laws, q_laws = law_pair(kind, VOCAB)
    p, q = p_laws(()), q_laws(())
    emitted = torch.zeros(VOCAB, dtype=torch.float64)
    for x, y in product(range(VOCAB), repeat=2):
        remaining, law = (q[x] * q[y]).item(), p
        for child in [x, y] if x != y else [x]:  # the order of two independent drafts is random already
            taken = remaining * min(1.0, (law[child] / q[child]).item() if q[child] > 0 else 0.0)
            emitted[child] += taken
            remaining, law = remaining - taken, residual(law, q)
        emitted += remaining * law
    assert torch.allclose(merged_law(p, q), emitted, atol=1e-12)
