"""The rule of the notebook against a loop over tokens, as the engine's source has it."""

import math

import pytest
import torch

from specnb.distributions import Sampling, standardise
from studies.engines.onnxruntime_rule import kept_probs


def kept_by_the_loop(logits: list[float], temperature: float, top_p: float) -> int:
    """How many tokens are kept: groups of 16, 64, 256 tokens, in none of which the search stops at the last token."""
    vocab, largest = len(logits), max(logits)
    weights = sorted((math.exp((logit - largest) / temperature) for logit in logits), reverse=True)
    done, group, so_far = 0, min(16, vocab), 0.0
    while True:
        cutoff = group
        for place in range(done, group):
            so_far += weights[place]
            if so_far >= top_p * (so_far + (vocab - place - 1) * weights[place]):
                cutoff = place + 1
                break
        if cutoff < group or group == vocab:
            return cutoff
        done, group = group, min(4 * group, vocab)


@pytest.mark.parametrize("vocab", [5, 16, 17, 70, 300])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_as_many_tokens_are_kept_as_by_the_loop_and_never_fewer_than_top_p_keeps(vocab: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for scale in (1.0, 4.0, 12.0):
        logits = scale * torch.randn(vocab, generator=generator, dtype=torch.float64)
        p = kept_probs(logits, 0.7, top_p)
        assert int((p > 0).sum()) == kept_by_the_loop(logits.tolist(), 0.7, top_p)
        assert ((p > 0) | (standardise(logits, Sampling(0.7, top_p=top_p)) == 0)).all()
        assert p.sum() == pytest.approx(1)


def test_the_search_does_not_stop_at_the_last_token_of_a_group() -> None:
    """With 16 equal tokens and a far less probable rest it could stop after the 16th, and stops after the 17th."""
    logits = torch.cat([torch.zeros(16), torch.full((84,), -50.0)]).double()
    assert int((kept_probs(logits, 1.0, 0.9) > 0).sum()) == 17


def test_several_positions_are_filtered_each_by_itself() -> None:
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = kept_probs(logits, 0.7, 0.8)
    alone = torch.stack([torch.stack([kept_probs(one, 0.7, 0.8) for one in row]) for row in logits])
    assert torch.equal(together, alone)
