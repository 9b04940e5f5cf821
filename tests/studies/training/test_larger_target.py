"""The larger target begins with the distribution of the shipped one, and all of it is trained."""

from pathlib import Path

import pytest
import torch

from specnb.models.loading import load_model, load_pair
from specnb.notebook import corpus
from studies.training.larger_target import Plan, grown, mean, ship, train

PLAN = Plan(steps=2, long=1, rows=2, length=16, compiled=False)


@pytest.fixture(autouse=True)
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """To encode the whole corpus would take most of the time."""
    read = corpus.read
    monkeypatch.setattr(corpus, "read", lambda split: read(split, limit=10))


@torch.no_grad()
def test_it_begins_with_the_logits_of_the_shipped_target() -> None:
    target = load_pair(packed=False).target
    tokens = torch.randint(4096, (2, 20), generator=torch.Generator().manual_seed(0))
    larger = grown(target)  # type: ignore[arg-type]
    assert larger.config.num_hidden_layers == 2 * target.config.num_hidden_layers
    assert torch.allclose(larger(tokens).logits, target(tokens).logits, atol=1e-5)


def test_two_steps_train_every_weight_and_the_saved_model_is_read_back(tmp_path: Path) -> None:
    begin = grown(load_pair(packed=False).target)  # type: ignore[arg-type]
    larger = train(PLAN, tmp_path / "checkpoints")
    for (name, weight), before in zip(larger.named_parameters(), begin.parameters(), strict=True):
        # The first step gives the copies' output projections a value; only then have their other weights a gradient.
        assert not torch.equal(weight, before), name
    folder = ship(larger, PLAN, tmp_path / "larger")
    again = load_model(folder, packed=False)
    assert all(torch.equal(a, b.float()) for a, b in zip(again.parameters(), larger.parameters(), strict=True))
    assert (folder / "SHA256SUMS").exists()


def test_the_mean_of_the_weights_before_and_after() -> None:
    before, after = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    expected = [(a + b) / 2 for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    found = mean(before, after)
    assert all(torch.allclose(a, b) for a, b in zip(found.parameters(), expected, strict=True))
