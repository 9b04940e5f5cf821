"""Draft lengths that adapt: EGAG's by its formula, the stop at c lambda by what its calibration
says."""

from __future__ import annotations

import math

import pytest
import torch
from drafter_kinds import HALVES, VOCAB, chain, table

from specnb.distributions import Sampling
from specnb.drafters import Context
from studies.drafters.egag import EntropyGuidedDrafter
from studies.drafters.length import StopDrafter, calibrate


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("beta", [0.0, 0.6])
def test_egag_follows_the_entropy_of_the_logits_at_any_temperature(temperature: float, beta: float) -> None:
    """Along three steps of a row; the last two are those of a text of six new tokens."""
    sampling = Sampling(temperature)
    drafter = EntropyGuidedDrafter(chain(), sampling, gamma_max=5, egag_ema_beta=beta, max_new_tokens=6)
    tokens, uniforms = torch.tensor([[3, 1, 0, 2, 1, 3, 0, 0]]), torch.full((1, 5), 0.4)
    drafter.start(Context(tokens, torch.tensor([2])))
    smoothed = None
    for length, left in ((2, 5), (5, 2), (7, 0)):
        found = drafter.propose(Context(tokens, torch.tensor([length])), uniforms)
        q = table()[tokens[0, length - 1]].double()
        entropy = float(-(q * q.log()).sum()) / math.log(VOCAB)
        smoothed = entropy if smoothed is None else beta * smoothed + (1 - beta) * entropy
        gamma = min(round(5 - 4 * smoothed), left)
        assert (found.draft_tokens >= 0).sum() == gamma
        recorded = drafter.history[-1]
        assert float(recorded[0]) == pytest.approx(smoothed, abs=1e-6)
        assert int(recorded[1]) == gamma
    assert len(drafter.history) == 3


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_stopping_is_what_the_calibration_says_of_the_tokens_drafted(temperature: float) -> None:
    """Of 64 rows; the probabilities are those of the logits, whatever tokens are sampled with."""
    drafter, gamma = StopDrafter(chain(), HALVES, 0.3, Sampling(temperature)), 6
    context = Context(torch.arange(64).remainder(VOCAB)[:, None], torch.ones(64, dtype=torch.int64))
    drafter.start(context)
    uniforms = torch.rand(64, gamma, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drafted = drafter.propose(context, uniforms).draft_tokens
    before = torch.cat([context.tokens, drafted[:, :-1]], dim=1)
    probs = table()[before, drafted.clamp_min(0)].double()
    assert torch.equal(HALVES.worth(probs, 0.3).clamp_max(drafted.shape[1]), (drafted >= 0).sum(dim=1))
    assert temperature == 0 or len((drafted >= 0).sum(dim=1).unique()) > 1


def test_a_calibration_counts_the_tested_tokens_alone() -> None:
    probs = torch.tensor([[0.1, 0.9, 0.9], [0.1, 0.1, 0.9], [0.9, 0.9, 0.9]], dtype=torch.float64)
    found = calibrate(probs, torch.tensor([0, 1, 3]), bins=2)
    assert found.mean == pytest.approx(4 / 6)
    assert found.of(torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist() == pytest.approx([1 / 3, 1])
