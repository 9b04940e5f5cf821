"""Training for acceptance: the objectives, and acceptance at temperature 0."""

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from tiny import llama, near_copy
from torch import Tensor

from studies.training import distillation
from studies.training.distillation import OBJECTIVES, acceptance

VOCAB = 7
SAMPLES = torch.from_numpy(np.random.default_rng(1).integers(VOCAB, size=(6, 9)))


@pytest.fixture
def logits() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 2, 5, VOCAB, generator=generator, dtype=torch.float64)
    return q, p.log_softmax(dim=-1), torch.randint(VOCAB, (2, 5), generator=generator)


def test_objectives_are_the_divergences_that_they_are_named_after(logits: tuple[Tensor, Tensor, Tensor]) -> None:
    q, log_p, tokens = logits
    p, own = log_p.exp().reshape(-1, VOCAB).numpy(), q.softmax(-1).reshape(-1, VOCAB).numpy()
    expected = {
        "cross-entropy": -np.log(own[np.arange(10), tokens.ravel().numpy()]).mean(),
        "forward KL": entropy(p, own, axis=1).mean(),
        "reverse KL": entropy(own, p, axis=1).mean(),
        "total variation": 1 - np.minimum(p, own).sum(1).mean(),
    }
    found = {name: float(objective(q, log_p, tokens)) for name, objective in OBJECTIVES.items()}
    assert found == pytest.approx(expected)
    q.requires_grad_(True)
    for objective in OBJECTIVES.values():
        assert torch.autograd.gradcheck(lambda x, of=objective: of(x, log_p, tokens), q)


def test_acceptance_at_temperature_0_counts_equal_argmaxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "PROMPT", 3)
    target, draft = llama(VOCAB), near_copy(llama(VOCAB), 0.2)
    with torch.no_grad():
        same = target(SAMPLES[:, :-1]).logits.argmax(-1) == draft(SAMPLES[:, :-1]).logits.argmax(-1)
    found = acceptance(target, {"draft": draft, "target": target}, SAMPLES, 0.0)
    assert torch.equal(found["draft"], same[:, 2:].float())
    assert 0 < found["draft"].mean() < 1
    assert torch.equal(found["target"], torch.ones_like(found["draft"]))
