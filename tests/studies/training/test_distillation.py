"""Training for acceptance: the objectives, what the students learn from, and the table, on tiny
models."""

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from studies.training import distillation
from studies.training.distillation import OBJECTIVES, Plan, acceptance

VOCAB = 7
PLAN = Plan(steps=4, search_steps=1, sampled_rows=4, validation_windows=2, rows=4, length=8)
TEXT = np.random.default_rng(0).integers(VOCAB, size=600).astype(np.uint16)
SAMPLES = torch.from_numpy(np.random.default_rng(1).integers(VOCAB, size=(6, PLAN.length + 1)))


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


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
    target, draft = tiny(0), tiny(1)
    with torch.no_grad():
        same = target(SAMPLES[:, :-1]).logits.argmax(-1) == draft(SAMPLES[:, :-1]).logits.argmax(-1)
    found = acceptance(target, {"draft": draft, "target": target}, SAMPLES, 0.0)
    assert torch.equal(found["draft"], same[:, 2:].float())
    assert torch.equal(found["target"], torch.ones_like(found["draft"]))
