"""Training of the T5: what the tasks ask, what padding does, and what target and drafts learn."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from studies.training.encoder_decoder import TARGET, build, logits_of, padded, trained

SHAPES = {TARGET: (64, 32, 2, 1, 1), "draft": (48, 16, 2, 1, 1)}
GIVEN = [([5, 6, 7], [1, 2, 3, 4, 0]), ([7, 6], [3, 0]), ([9], [8, 8, 0])]


@torch.no_grad()
def test_padding_changes_no_logits() -> None:
    model = build(SHAPES[TARGET], 0, vocab=10).eval()
    alone = torch.cat([logits_of(model, padded([one])) for one in GIVEN])
    torch.testing.assert_close(logits_of(model, padded(GIVEN)), alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_target_learns_the_answers_and_the_draft_the_target() -> None:
    with torch.enable_grad():
        models = trained(SHAPES, GIVEN, steps=200, size=3, vocab=10)
    batch = padded(GIVEN)
    labels = batch["labels"][batch["labels"] >= 0]
    p, q = (logits_of(models[name], batch) for name in SHAPES)
    assert cross_entropy(p, labels) < 1
    assert torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean() > 0.6
    assert all(torch.isfinite(weight).all() for model in models.values() for weight in model.parameters())
