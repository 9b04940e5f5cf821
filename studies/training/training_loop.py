"""One training loop for models from random weights, larger copies, distilled drafts and heads.

A training has one or several learners, which all see the same batches. It shows its losses on a progress bar, and with
a checkpoint an interrupted training goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from specnb.models.checkpoints import CHECKSUMS
from specnb.notebook import corpus
from specnb.notebook.findings import ROOT, out
from specnb.notebook.source_digest import digest, module_digest

MUON_RATE, ADAM_RATE = 0.02, 0.003
CHECKPOINT = "learners.pt"
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

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def rate(step: int, steps: int) -> float:
    """Learning-rate factor: a short warm-up, a plateau, and a linear fall to zero over the last 60%.

    >>> [round(rate(step, 100), 2) for step in (0, 1, 2, 40, 70, 99)]
    [0.33, 0.67, 1.0, 1.0, 0.5, 0.02]
    """
    return min(1.0, (step + 1) / (0.02 * steps + 1), (steps - step) / (0.6 * steps))


def checkpoint_folder(module: str, plan: object, *models: Path) -> Path:
    """Where the training of `plan` by the present code of `module` keeps what it has done.

    It depends on the corpus, and on the weights of `models`, which the training begins with or learns from.
    """
    files = [corpus.MANIFEST, *(folder / CHECKSUMS for folder in models)]
    read = b"".join(digest(file.read_bytes()).encode() for file in files)
    key = digest(f"{module_digest(ROOT, module)} {plan} ".encode() + read)
    return out() / "build" / module.rpartition(".")[2] / key


def run(
    learners: Mapping[str, Learner[Any]],
    batches: Iterable[Tensor],
    steps: int,
    update: Callable[[int, Tensor], Mapping[str, float]],
    *,
    name: str = "training",
    checkpoint: Path | None = None,
    save_every: int = 50,
) -> None:
    """Calls `update(step, batch)` for the first `steps` batches, which updates all learners and returns their losses.

    Begins after the last step that is in `checkpoint`, and saves there every `save_every` steps and after the last. The
    models are in evaluation mode afterwards.
    """
    begin = _restored(checkpoint, learners)
    left = islice(enumerate(islice(batches, steps)), begin, None)
    with tqdm(left, desc=name, initial=begin, total=steps, unit="step", mininterval=5) as bar:
        for step, batch in bar:
            losses = update(step, batch)
            bar.set_postfix({of: f"{value:.3f}" for of, value in losses.items()}, refresh=False)
            if checkpoint is not None and ((step + 1) % save_every == 0 or step + 1 == steps):
                _save(checkpoint, step + 1, learners)
    for learner in learners.values():
        learner.model.eval()


def _save(checkpoint: Path, step: int, learners: Mapping[str, Learner[Any]]) -> None:
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    partial = checkpoint.with_suffix(".partial")
    torch.save({"step": step} | {name: learner.state() for name, learner in learners.items()}, partial)
    partial.replace(checkpoint)


def _restored(checkpoint: Path | None, learners: Mapping[str, Learner[Any]]) -> int:
    if checkpoint is None or not checkpoint.exists():
        return 0
    saved = torch.load(checkpoint, weights_only=True)
    for name, learner in learners.items():
        learner.restore(saved[name])
    return int(saved["step"])
