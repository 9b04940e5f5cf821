"""The table of the T5: a draft that equals the target, and one that does not, on random models."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from studies import corpus
from studies.speed import encoder_decoder_speeds
from studies.training import encoder_decoder
from studies.training.encoder_decoder import TARGET, build


@pytest.mark.parametrize("item", ["summary-0", "whole-1"])
def test_the_table_of_a_draft_that_equals_the_target(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is always accepted, and both predictions are those of alpha = 1."""
    read = corpus.read
    target, other = (build((8, 8, 2, 1, layers), end=0).eval() for layers in (2, 1))
    models = {TARGET: target, "same": copy.deepcopy(target), "other": other}
    monkeypatch.setattr(corpus, "read", lambda split, limit: read(split, 12))
    monkeypatch.setattr(encoder_decoder_speeds, "load", models.__getitem__)
    monkeypatch.setattr(encoder_decoder, "SHAPES", dict.fromkeys(models))
    settings = encoder_decoder_speeds.STUDY.small
    table = encoder_decoder_speeds.measure(item, **settings).set_index("drafter")
    same, other = table.loc["same"], table.loc["other"]
    assert same.alpha == pytest.approx(1)
    assert other.alpha < 0.999
    assert same.expected == pytest.approx((same.gamma + 1) / (same.gamma * same.c + 1))
    assert same.predicted == pytest.approx((same.gamma + 1) / (same.gamma * same.c + same.v))
    steps = np.ceil(settings["most"] / (same.gamma + 1))
    assert same.tokens_per_step == pytest.approx(settings["most"] / steps)
    assert (table.orders == np.log10(target.num_parameters() / table.parameters)).all()
