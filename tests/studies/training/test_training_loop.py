"""The training loop: every weight is trained, at rates that rise and fall, and an interruption changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from studies.training import training
from studies.training.training_loop import ADAM_RATE, MUON_RATE, Learner, checkpoint_folder, rate, run

STEPS = 5


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(8, 4, generator=generator)


def train(steps: list[int], checkpoint: Path | None = None) -> dict[str, Learner[nn.Module]]:
    """Two learners that are trained until a step that is in `steps`, if there is one."""
    learners = {"first": Learner(network(0)), "second": Learner(network(1), 0.5)}

    def update(step: int, batch: Tensor) -> dict[str, float]:
        if step in steps:
            raise InterruptedError
        return {
            name: one.learn((one.model(batch) - batch).square().mean(), rate(step, STEPS))
            for name, one in learners.items()
        }

    run(learners, batches(), STEPS, update, checkpoint=checkpoint, save_every=2)
    return learners


def test_an_interrupted_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, checkpoint = train([]), tmp_path / "folder" / "learners.pt"
    with pytest.raises(InterruptedError):
        train([3], checkpoint)
    assert torch.load(checkpoint, weights_only=True)["step"] == 2
    parts = train([0, 1], checkpoint)
    for name, learner in whole.items():
        assert not learner.model.training
        for weight, again in zip(learner.model.parameters(), parts[name].model.parameters(), strict=True):
            assert torch.equal(weight, again), name
    assert torch.load(checkpoint, weights_only=True)["step"] == STEPS
    train(list(range(STEPS)), checkpoint)  # nothing is done again


def test_the_rate_rises_and_falls_to_nothing() -> None:
    rates = [rate(step, 100) for step in range(100)]
    assert max(rates) == 1
    assert rates[0] < 1
    assert 0 < rates[-1] < 0.05


@pytest.mark.parametrize("role", training.SHAPES)
def test_every_weight_has_one_optimizer_and_matrices_of_layers_have_muon(role: str) -> None:
    model = training.build(role, end=0)
    muon, adam = (one.param_groups[0]["params"] for one in Learner(model).optimizers)
    assert sorted(map(id, [*muon, *adam])) == sorted(map(id, model.parameters()))
    assert id(model.get_input_embeddings().weight) in map(id, adam)


def test_the_factor_scales_both_rates() -> None:
    assert Learner(network(0), 0.5).rates == [0.5 * MUON_RATE, 0.5 * ADAM_RATE]


def test_another_plan_has_another_folder() -> None:
    module = "studies.training.training"
    assert checkpoint_folder(module, 1) == checkpoint_folder(module, 1)
    assert checkpoint_folder(module, 1) != checkpoint_folder(module, 2)


def test_other_weights_to_begin_with_have_another_folder(tmp_path: Path) -> None:
    sums, module = tmp_path / "SHA256SUMS", "studies.training.training"
    found = set()
    for text in ("1", "2"):
        sums.write_text(text)
        found.add(checkpoint_folder(module, 1, tmp_path))
    assert len(found | {checkpoint_folder(module, 1)}) == 3
