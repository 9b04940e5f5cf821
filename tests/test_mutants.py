"""Every planted bug fails the check that the correct step passes: a test that has never failed proves nothing."""

from __future__ import annotations

import pytest
import torch
from laws import law_pair, laws_along
from mutants import MUTANTS, NOT_ENUMERABLE, Mutant, Step, mended, reseeded

from specnb.exact import Emissions, completed, joint_law, step_law
from specnb.law import total_variation

VOCAB, GAMMA, POINTS = 4, 2, 2**13
P, Q = law_pair("dense", VOCAB)

every_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)


def deviation(step: Step) -> float:
    """The check: total variation of the enumerated joint law from the intended one."""
    return _distance(step, step_law(step.rule, step.p, step.q, GAMMA, step.drawn))


def deviation_on_points(step: Step) -> float:
    """The same for any rule at all: not on cells but on many evenly spread points in place of the uniforms."""
    return _distance(step, emitted_on_points(step))


def emitted_on_points(step: Step) -> Emissions:
    points = torch.quasirandom.SobolEngine(GAMMA + 1).draw(POINTS + 1, dtype=torch.float64)[1:]
    drafted = joint_law(step.drawn, GAMMA)
    emitted: Emissions = {}
    for drafts in drafted.nonzero().tolist():
        p, q = laws_along(step.p, tuple(drafts), GAMMA + 1), laws_along(step.q, tuple(drafts), GAMMA)
        batch = (tensor.expand(POINTS, *tensor.shape) for tensor in (p, q, torch.tensor(drafts)))
        accepted, token = step.rule(*batch, points[:, :-1], points[:, -1])
        each = drafted[tuple(drafts)].expand(POINTS) / POINTS
        chances = torch.zeros(GAMMA + 1, VOCAB, dtype=torch.float64).index_put((accepted, token), each, accumulate=True)
        for n, x in chances.nonzero().tolist():
            tokens = (*drafts[:n], x)
            emitted[tokens] = emitted.get(tokens, 0.0) + float(chances[n, x])
    return emitted


def _distance(step: Step, emitted: Emissions) -> float:
    have, want = completed(emitted, step.intended, GAMMA + 1), joint_law(step.intended, GAMMA + 1)
    return float(total_variation(have.flatten(), want.flatten()))


@every_mutant
def test_every_mutant_is_caught(mutant: Mutant, record_property) -> None:
    step = mutant(P, Q)
    if mutant in NOT_ENUMERABLE:
        with pytest.raises(ValueError, match="changes its answer inside a cell"):
            deviation(step)
        found, unavoidable = deviation_on_points(step), deviation_on_points(mended(step))
        assert found > 3 * unavoidable
    else:
        found = deviation(step)
    record_property("total_variation", found)
    print(f"{mutant.__name__}: total variation {found:.4f}")
    assert found > 1e-6


@every_mutant
def test_the_step_without_its_bug_passes(mutant: Mutant) -> None:
    assert deviation(mended(mutant(P, Q))) < 1e-12


@every_mutant
def test_points_and_cells_agree(mutant: Mutant) -> None:
    step = mended(mutant(P, Q)) if mutant in NOT_ENUMERABLE else mutant(P, Q)
    assert deviation_on_points(step) == pytest.approx(deviation(step), abs=0.01)


def test_the_first_token_alone_would_not_show_the_same_uniform_in_every_test() -> None:
    step = reseeded(P, Q)
    emitted = completed(emitted_on_points(step), P, GAMMA + 1)
    first = float(total_variation(emitted.sum((1, 2)), P(())))
    assert first < 0.1 * deviation_on_points(step)
