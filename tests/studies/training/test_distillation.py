"""Training for acceptance: the objectives, a training that goes on where it stopped, and the table, on tiny models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import entropy
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from studies.training import distillation, distillation_training
from studies.training.distillation_training import RECIPES, Plan, Recipe, Student, acceptance, draft_loss, fit, rate
from studies.training.objectives import OBJECTIVES, Objective, forward_kl, reverse_kl, total_variation

VOCAB = 7
PLAN = Plan(
    steps=4,
    horizon=4,
    search_steps=1,
    sampled_rows=4,
    validation_windows=2,
    rows=4,
    length=8,
    save_every=2,
    compiled=False,
)
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
def logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 2, 5, VOCAB, generator=generator, dtype=torch.float64)
    return q, p.log_softmax(dim=-1), torch.randint(VOCAB, (2, 5), generator=generator)


def test_total_variation_is_one_minus_the_acceptance_by_enumeration(logits: tuple[Tensor, Tensor, Tensor]) -> None:
    q, log_p, tokens = logits
    accepted = [
        sum(min(float(a), float(b)) for a, b in zip(p, own, strict=True))
        for p, own in zip(log_p.exp().reshape(-1, VOCAB), q.softmax(-1).reshape(-1, VOCAB), strict=True)
    ]
    assert float(total_variation(q, log_p, tokens)) == pytest.approx(1 - np.mean(accepted), abs=1e-14)


def test_divergences_are_those_of_scipy_and_vanish_only_where_the_distributions_are_equal(
    logits: tuple[Tensor, Tensor, Tensor],
) -> None:
    q, log_p, tokens = logits
    p, own = log_p.exp().reshape(-1, VOCAB).numpy(), q.softmax(-1).reshape(-1, VOCAB).numpy()
    assert float(forward_kl(q, log_p, tokens)) == pytest.approx(entropy(p, own, axis=1).mean())
    assert float(reverse_kl(q, log_p, tokens)) == pytest.approx(entropy(own, p, axis=1).mean())
    for objective in (forward_kl, reverse_kl, total_variation):
        assert float(objective(log_p + 3, log_p, tokens)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_those_of_finite_differences(name: str, logits: tuple[Tensor, Tensor, Tensor]) -> None:
    q, log_p, tokens = logits
    q.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: OBJECTIVES[name](x, log_p, tokens), q)


@pytest.mark.parametrize("name", RECIPES)
def test_every_student_lowers_its_own_loss_and_leaves_the_draft_alone(name: str) -> None:
    target, draft = tiny(0), tiny(1)
    before = [weight.clone() for weight in draft.parameters()]
    student, plan = Student(RECIPES[name], draft, 1.0), replace(PLAN, rows=8)
    window = torch.from_numpy(np.random.default_rng(2).integers(VOCAB, size=(8, PLAN.length + 1)))
    log_p = target(window[:, :-1]).logits.detach().log_softmax(-1)

    def loss() -> Tensor:
        return OBJECTIVES[student.recipe.objective](student.model(window[:, :-1]).logits, log_p, window[:, 1:])

    values = [student.learn(loss(), rate(step, 30, plan.warm_up)) for step in range(30)]
    assert values[-1] < 0.9 * values[0]
    assert all(torch.equal(old, new) for old, new in zip(before, draft.parameters(), strict=True))


def test_the_rate_falls_to_zero_at_the_horizon() -> None:
    assert [round(rate(step, 100, 0.03), 2) for step in (0, 2, 51, 99)] == [0.33, 1, 0.51, 0]


def students() -> dict[str, Student]:
    return {name: Student(recipe, tiny(1), 1.0) for name, recipe in RECIPES.items()}


def test_an_interrupted_training_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, whole, first, second = tiny(0), students(), students(), students()
    fit(target, whole, TEXT, SAMPLES, PLAN, PLAN.steps, PLAN.horizon)
    checkpoint = tmp_path / "students.pt"

    def interrupted(step: int, *plan: Any) -> float:
        if step == 3:
            raise InterruptedError
        return rate(step, *plan)

    monkeypatch.setattr(distillation_training, "rate", interrupted)
    with pytest.raises(InterruptedError):
        fit(target, first, TEXT, SAMPLES, PLAN, PLAN.steps, PLAN.horizon, checkpoint)
    monkeypatch.undo()
    assert torch.load(checkpoint, weights_only=True)["step"] == 2
    fit(target, second, TEXT, SAMPLES, PLAN, PLAN.steps, PLAN.horizon, checkpoint)
    for name, student in whole.items():
        for weight, again in zip(student.model.parameters(), second[name].model.parameters(), strict=True):
            assert torch.equal(weight, again), name


def test_students_of_one_objective_differ_only_by_their_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def loss(model: PreTrainedModel, window: Tensor, log_p: Tensor, objective: Objective) -> Tensor:
        seen.append((window, log_p))
        return draft_loss(model, window, log_p, objective)

    monkeypatch.setattr(distillation_training, "draft_loss", loss)
    chosen = {"text": Student(Recipe("total variation"), tiny(1), 1.0),
              "half": Student(Recipe("total variation", samples=True), tiny(1), 1.0)}  # fmt: skip
    fit(tiny(0), chosen, TEXT, SAMPLES, PLAN, 1, 1)
    (text, p_text), (half, p_half) = seen
    assert text.shape == half.shape == (PLAN.rows, PLAN.length + 1)
    assert torch.equal(half[:2], text[2:])
    assert torch.equal(p_half[:2], p_text[2:])
    assert all((row == SAMPLES).all(dim=1).any() for row in half[2:])


def test_acceptance_at_temperature_0_counts_equal_argmaxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation_training, "PROMPT", 3)
    target, draft = tiny(0), tiny(1)
    with torch.no_grad():
        same = target(SAMPLES[:, :-1]).logits.argmax(-1) == draft(SAMPLES[:, :-1]).logits.argmax(-1)
    found = acceptance(target, {"draft": draft, "target": target}, SAMPLES, 0.0)
    assert torch.equal(found["draft"], same[:, 2:].float())
    assert torch.equal(found["target"], torch.ones_like(found["draft"]))


def test_a_line_has_the_differences_of_the_same_positions() -> None:
    numbers = np.repeat(np.arange(8), 2)
    base = torch.rand(16, 5, generator=torch.Generator().manual_seed(0)).double()
    betas = {"shipped": base, "cross-entropy": base + 0.1, "total variation": base + 0.3}
    table = distillation.lines(betas, numbers).set_index("draft")
    assert table.over_shipped.round(12).tolist() == [0, 0.1, 0.3]
    assert table.over_control.round(12).tolist() == [-0.1, 0, 0.2]
    assert table.alpha["shipped"] == pytest.approx(float(base.mean()))
    assert (table.files == 8).all()


def test_a_student_is_shipped_only_where_both_intervals_lie_above_zero() -> None:
    lines = [{"draft": name, "temperature": t, "over_shipped_low": low} for name, t, low in
             (("a", 1, 0.01), ("a", 1, 0.02), ("a", 0, -0.1), ("b", 1, 0.01), ("b", 1, -0.01))]  # fmt: skip
    table = pd.DataFrame(lines)
    assert [distillation.is_better(table, name) for name in ("a", "b", "c")] == [True, False, False]
