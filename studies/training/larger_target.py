"""Trains a target of twice the layers from the shipped one: `make larger`. Run again after an interruption, it goes on.

Each layer is followed by a copy of itself whose two output projections are zero, so the larger model begins with the
distribution of the shipped one (block expansion, Wu et al. 2024, "LLaMA Pro"). Unlike there, all layers are then
trained, on the text of the first training in another order, at a lower learning rate. The model is by then fitted too
closely to that text, so what is saved, as `data/pair/target-larger`, is the mean of the weights before and after
(Wortsman et al. 2022, "Robust fine-tuning of zero-shot models").
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specnb.models.checkpoints import write_checksums
from specnb.models.loading import TRAINED_PAIR, load_pair
from specnb.notebook import corpus
from studies.training.training import encode, fit, save, windows
from studies.training.training_loop import CHECKPOINT, Model, checkpoint_folder

LARGER = TRAINED_PAIR / "target-larger"
OUTPUTS = ("o_proj.weight", "down_proj.weight")  # what a layer adds to the hidden state is linear in these


@dataclass(frozen=True)
class Plan:
    """`steps` updates on `rows` sequences of `length` tokens, the last `long` of them on half as many twice as long.

    `factor` is the learning rate over that of the first training. `compiled` needs a C++ compiler.
    """

    steps: int = 1100
    long: int = 110
    rows: int = 32
    length: int = 256
    factor: float = 0.5
    seed: int = 1
    compiled: bool = True
    threads: int = 2


def grown(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """`target` with twice the layers and the same logits: every second layer adds nothing until it is trained."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 2 * target.config.num_hidden_layers
    larger = LlamaForCausalLM(config)
    weights = {name: weight for name, weight in target.state_dict().items() if ".layers." not in name}
    for number, layer in enumerate(target.model.layers):
        for name, weight in layer.state_dict().items():
            weights[f"model.layers.{2 * number}.{name}"] = weight
            weights[f"model.layers.{2 * number + 1}.{name}"] = 0 * weight if name.endswith(OUTPUTS) else weight
    larger.load_state_dict(weights)
    return larger


def batches(text: np.ndarray, plan: Plan) -> Iterator[Tensor]:
    """The batches of `plan`, the long sequences last."""
    yield from islice(windows(text, plan.rows, plan.length, plan.seed), plan.steps - plan.long)
    yield from islice(windows(text, plan.rows // 2, 2 * plan.length, plan.seed + 1), plan.long)


def train(plan: Plan, folder: Path) -> LlamaForCausalLM:
    """The larger target, with the mean of its weights before and after the training, in evaluation mode.

    What is in `folder` is not done again.
    """
    torch.set_num_threads(plan.threads)
    pair = load_pair(packed=False)
    larger = grown(pair.target)  # type: ignore[arg-type]  # the shipped target is a Llama model
    # Attention as two matrix products is faster to train at this length; the saved model does not depend on it.
    larger.set_attn_implementation("eager")
    text = encode(pair.tokenizer, corpus.read("train"))
    fit(
        larger, batches(text, plan), plan.steps,
        name=LARGER.name, factor=plan.factor, compiled=plan.compiled, checkpoint=folder / CHECKPOINT,
    )  # fmt: skip
    return mean(grown(pair.target), larger)  # type: ignore[arg-type]


def mean(before: nn.Module, after: Model) -> Model:
    """`after` with the mean of its weights and those of `before`."""
    with torch.no_grad():
        for weight, first in zip(after.parameters(), before.parameters(), strict=True):
            weight.lerp_(first, 0.5)
    return after


def ship(larger: nn.Module, plan: Plan, folder: Path = LARGER) -> Path:
    """Saves the model with a note of its training and its checksums; returns `folder`."""
    save(larger, load_pair(packed=False).tokenizer, folder)  # type: ignore[arg-type]
    first = json.loads((TRAINED_PAIR / "target" / "training.json").read_text(encoding="utf-8"))
    note = {
        "from": "data/pair/target", "weights": "mean of before and after", "plan": asdict(plan),
        "tokens_in_corpus": first["tokens_in_corpus"],
        "tokens_seen": plan.steps * plan.rows * plan.length,
        "parameters": sum(weight.numel() for weight in larger.parameters()),
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    write_checksums(folder)
    return folder


def main() -> None:
    """Trains the larger target and saves it."""
    plan = Plan()
    checkpoints = checkpoint_folder("studies.training.larger_target", plan, TRAINED_PAIR / "target")
    print("saved:", ship(train(plan, checkpoints), plan))


if __name__ == "__main__":
    main()
