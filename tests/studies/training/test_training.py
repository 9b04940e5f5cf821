"""Training: what is learned from, that every weight is, an interruption that changes nothing, and
the pair's README."""

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from script_files import ROOT
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from studies.training import training
from studies.training.training import ADAM_RATE, MUON_RATE, Budget, Learner, train

TEXTS = ["def f(x):\n    return x + 1\n" * 40, "class A:\n    pass\n" * 40]
STEPS = 5


def test_files_are_joined_by_end_tokens_and_a_saved_model_is_read_back(tmp_path: Path) -> None:
    tokenizer = training.train_tokenizer(TEXTS)
    tokens = training.encode(tokenizer, TEXTS)
    ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
    assert (ends[0], len(ends)) == (0, len(TEXTS) + 1)
    assert tokenizer.decode(tokens[1 : ends[1]]) == TEXTS[0]
    model = training.build("draft", end=0)
    training.save(model, tokenizer, tmp_path, {"seed": 0})
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(again.state_dict()[name], weight.float()) for name, weight in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert {"training.json", "SHA256SUMS"} <= {file.name for file in tmp_path.iterdir()}


def test_windows_are_consecutive_text_and_every_epoch_differs() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    batches = list(islice(training.windows(tokens, batch=4, length=32, seed=0), 20))
    assert all(batch.shape == (4, 33) and (batch.diff(dim=1) == 1).all() for batch in batches)
    starts = torch.cat([batch[:, 0] for batch in batches])
    assert len(starts.unique()) > len(starts) * 0.9
    short_then_long = training.curriculum(np.zeros(40_000, dtype=np.uint16), Budget(steps=5, batch=2), seed=0)
    assert [tuple(batch.shape) for batch in short_then_long] == [(4, 257)] * 4 + [(2, 513)]


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(8, 4, generator=generator)


def trained(steps: list[int], folder: Path | None = None) -> dict[str, Learner]:
    """Two learners that are trained until a step that is in `steps`, if there is one."""
    learners: dict[str, Learner] = {}
    for seed, factor in enumerate((1.0, 0.5)):
        torch.manual_seed(seed)
        learners[str(seed)] = Learner(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), factor)

    def losses(step: int, batch: Tensor) -> Iterator[tuple[str, Tensor]]:
        if step in steps:
            raise InterruptedError
        for name, one in learners.items():
            yield name, (one.model(batch) - batch).square().mean()

    train(learners, batches(), STEPS, losses, folder=folder, save_every=2)
    return learners


def test_an_interrupted_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, folder = trained([]), tmp_path / "folder"
    with pytest.raises(InterruptedError):
        trained([3], folder)
    parts = trained([0, 1], folder)
    for name, learner in whole.items():
        assert not learner.model.training
        for weight, again in zip(learner.model.parameters(), parts[name].model.parameters(), strict=True):
            assert torch.equal(weight, again), name
    assert whole["1"].rates == [0.5 * MUON_RATE, 0.5 * ADAM_RATE]
    trained(list(range(STEPS)), folder)  # nothing is done again


@pytest.mark.parametrize("checksums", sorted(ROOT.glob("data/**/SHA256SUMS")), ids=lambda file: file.parent.name)
def test_committed_models_are_those_that_their_checksums_name(checksums: Path) -> None:
    listed = [line.split() for line in checksums.read_text().splitlines()]
    assert {"model.safetensors", "training.json"} <= {name for _, name in listed}
    for digest, name in listed:
        assert hashlib.sha256((checksums.parent / name).read_bytes()).hexdigest() == digest, name
