"""One training loop for models from random weights, distilled drafts and heads.

A training has one or several learners, which all see the same batches. It shows its losses on a progress bar, and with
a checkpoint an interrupted training goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from specnb.notebook.findings import ROOT

MUON_RATE, ADAM_RATE = 0.02, 0.003
Model = TypeVar("Model", bound=nn.Module)


class Learner(Generic[Model]):
    """A model in training and its optimizers: Muon for the matrices inside the layers, AdamW for embeddings and norms.

    `factor` scales both learning rates, `MUON_RATE` and `ADAM_RATE`.
    """

    def __init__(self, model: Model, factor: float = 1.0) -> None:
        self.model = model.train()
        weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        assert all(weight.ndim < 3 for _, weight in weights)
        matrices = [weight for name, weight in weights if weight.ndim == 2 and "embed" not in name]
        others = [weight for name, weight in weights if weight.ndim < 2 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=factor * MUON_RATE, weight_decay=0.01, adjust_lr_fn="original"),
            torch.optim.AdamW(others, lr=factor * ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]

    def learn(self, loss: Tensor, part: float) -> float:
        """One update at `part` of the learning rates; returns `loss`."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, full in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = part * full
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def state(self) -> list[Any]:
        """What a checkpoint keeps."""
        return [part.state_dict() for part in self._parts()]

    def _parts(self) -> list[Any]:
        return [self.model, *self.optimizers]

    def restore(self, state: list[Any]) -> None:
        """Continues from a checkpoint."""
        for part, saved in zip(self._parts(), state, strict=True):
            part.load_state_dict(saved)


def rate(step: int, steps: int) -> float:
    """Learning-rate factor: a short warm-up, a plateau, and a linear fall to zero over the last 60%.

    >>> [round(rate(step, 100), 2) for step in (0, 1, 2, 40, 70, 99)]
    [0.33, 0.67, 1.0, 1.0, 0.5, 0.02]
    """
    return min(1.0, (step + 1) / (0.02 * steps + 1), (steps - step) / (0.6 * steps))


def folder_of(name: str, plan: object) -> Path:
    """Where a training keeps what it has done; another plan has another folder. Delete it when the code has changed."""
    return ROOT / "build" / "training" / f"{name}-{hashlib.sha256(repr(plan).encode()).hexdigest()[:12]}"


def train(
    learners: Mapping[str, Learner[Any]],
    batches: Iterable[Tensor],
    steps: int,
    update: Callable[[int, Tensor], Mapping[str, float]],
    *,
    folder: Path | None = None,
    save_every: int = 50,
) -> None:
    """Calls `update(step, batch)` for the first `steps` batches, which updates all learners and returns their losses.

    Begins after the last step that is saved in `folder`, and saves there every `save_every` steps and after the last.
    The models are in evaluation mode afterwards.
    """
    checkpoint, begin = folder and folder / "learners.pt", 0
    if checkpoint and checkpoint.exists():
        begin, states = torch.load(checkpoint, weights_only=True)
        for name, learner in learners.items():
            learner.restore(states[name])
    left = islice(enumerate(islice(batches, steps)), begin, None)
    with tqdm(left, desc="training", initial=begin, total=steps, unit="step", mininterval=5) as bar:
        for step, batch in bar:
            losses = update(step, batch)
            bar.set_postfix({of: f"{value:.3f}" for of, value in losses.items()}, refresh=False)
            if checkpoint and ((step + 1) % save_every == 0 or step + 1 == steps):
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
                partial = checkpoint.with_suffix(".partial")
                torch.save((step + 1, {name: learner.state() for name, learner in learners.items()}), partial)
                partial.replace(checkpoint)
    for learner in learners.values():
        learner.model.eval()
