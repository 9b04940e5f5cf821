"""Training of the T5: what the tasks ask, what padding does, and what target and drafts learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from studies import corpus
from studies.training.encoder_decoder import (
    HOLE,
    TARGET,
    build,
    examples,
    functions,
    logits_of,
    padded,
    shared_tokenizer,
    trained,
    with_hole,
)

SHAPES = {TARGET: (64, 32, 2, 1, 1), "draft": (48, 16, 2, 1, 1)}
GIVEN = [([5, 6, 7], [1, 2, 3, 4, 0]), ([7, 6], [3, 0]), ([9], [8, 8, 0])]


def test_tasks_are_made_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'class A:\n    def f(self):\n        """Returns 1.\n\n        More.\n        """\n        x = 1\n'
    text += "        return x\n"
    monkeypatch.setattr(corpus, "read", lambda split, limit: [text])
    ((code, _),) = functions(text)
    assert code == "def f(self):\n    x = 1\n    return x\n"
    tokenizer = shared_tokenizer()
    (summary,), (whole,) = (examples(tokenizer, "train", task) for task in ("summary", "whole"))
    assert list(map(tokenizer.decode, summary)) == [f"summary {code}", "Returns 1.<|endoftext|>"]
    assert tokenizer.decode(whole[1]) == f"{code}<|endoftext|>"
    for seed in range(20):
        before, after = with_hole(code, np.random.default_rng(seed)).split(HOLE)
        assert before
        assert code.startswith(before)
        assert code.endswith(after)
        assert len(before + after) < len(code)


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
