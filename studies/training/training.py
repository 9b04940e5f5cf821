"""Trains the pair that ships in `data/pair`: `python -m studies.training.training --preset cpu`.

One script for laptop and GPU: a preset changes the budget and nothing else. Target and draft learn
from the same tokens, the draft from the text and not from the target, as an off-the-shelf draft would.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from specnb.models.checkpoints import write_checksums
from specnb.notebook.findings import ROOT
from studies import corpus
from studies.corpus import DATA
from studies.training.training_loop import Learner, folder_of, rate, train

END = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 512
SEED = 0
SHAPES: dict[str, dict[str, Any]] = {
    "target": {"num_hidden_layers": 16, "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3},
    "draft": {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 2},
}


@dataclass(frozen=True)
class Budget:
    """How long a model is trained: `steps` updates of `batch * CONTEXT` tokens each.

    Attention is what a CPU spends its time on, so all but the last steps see windows of `CONTEXT / 2`.
    """

    steps: int
    batch: int
    short_share: float = 0.8


PRESETS = {
    "cpu": {"target": Budget(steps=1_700, batch=16), "draft": Budget(steps=3_000, batch=16)},
    "gpu": {"target": Budget(steps=6_000, batch=64), "draft": Budget(steps=6_000, batch=64)},
    "small": {"target": Budget(steps=2, batch=2), "draft": Budget(steps=2, batch=2)},
}


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` tokens whose only special token ends a file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, clean_up_tokenization_spaces=False
    )


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> np.ndarray:
    """All texts as one row of token ids, each file between two end-of-text tokens."""
    end = [tokenizer.eos_token_id]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array(end + [token for ids in encoded for token in ids + end], dtype=np.uint16)


def build(role: str, end: int) -> LlamaForCausalLM:
    """A freshly initialised model of the shape that `role` has."""
    config = LlamaConfig(
        **SHAPES[role],
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    return LlamaForCausalLM(config)


def windows(tokens: np.ndarray, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless batches `(batch, length + 1)`: every epoch cuts the text elsewhere, in a new order."""
    generator = np.random.default_rng(seed)
    while True:
        offset = int(generator.integers(length))
        starts = np.arange(offset, len(tokens) - length - 1, length)
        generator.shuffle(starts)
        for at in range(0, len(starts) - batch + 1, batch):
            rows = starts[at : at + batch, None] + np.arange(length + 1)
            yield torch.from_numpy(tokens[rows].astype(np.int64))


def curriculum(tokens: np.ndarray, budget: Budget, seed: int) -> Iterator[Tensor]:
    """The batches of a whole training: short windows first, then full ones, equally many tokens each."""
    short = round(budget.steps * budget.short_share)
    yield from islice(windows(tokens, 2 * budget.batch, CONTEXT // 2, seed), short)
    yield from islice(windows(tokens, budget.batch, CONTEXT, seed + 1), budget.steps - short)


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per token, of the tokens of each row of `window` after its first."""
    with torch.autocast(window.device.type, torch.bfloat16):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def fit(
    model: LlamaForCausalLM,
    batches: Iterator[Tensor],
    steps: int,
    *,
    compiled: bool = True,
    folder: Path | None = None,
) -> None:
    """Trains `model` on the first `steps` of `batches`, from what `folder` has; `compiled` needs a C++ compiler.

    It is in evaluation mode afterwards.
    """
    learner, loss = Learner(model), torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def update(step: int, window: Tensor) -> dict[str, float]:
        nats = learner.learn(loss(model, window.to(model.device)), rate(step, steps))
        return {"bits per token": nats / math.log(2)}

    train({"model": learner}, batches, steps, update, folder=folder)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, note: dict[str, Any]) -> None:
    """Writes weights in bfloat16 (half the size, read back into any dtype), config, tokenizer, and a note."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add_note(folder, note)


def add_note(folder: Path, note: dict[str, Any]) -> None:
    """Writes how a model was trained, `training.json`, and the checksums of all files of `folder`."""
    (folder / "training.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    write_checksums(folder)


def main() -> None:
    """Trains tokenizer, target and draft, and writes them with a note of the budget and their checksums."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    preset = parser.parse_args().preset
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = corpus.read("train")
    tokenizer = train_tokenizer(texts)
    tokens = encode(tokenizer, texts)
    for role, budget in PRESETS[preset].items():
        torch.manual_seed(SEED)
        model = build(role, tokenizer.eos_token_id)
        model.to(torch.device(device))  # type: ignore[arg-type]  # the stub of `to` lacks its argument
        fit(model, curriculum(tokens, budget, SEED), budget.steps, folder=folder_of(role, preset))
        note = {
            "preset": preset,
            "device": device,
            "seed": SEED,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "tokens_in_corpus": len(tokens),
            "tokens_seen": budget.steps * budget.batch * CONTEXT,
            "budget": asdict(budget),
        }
        save(model.cpu(), tokenizer, (ROOT / "build" if preset == "small" else DATA) / "pair" / role, note)


if __name__ == "__main__":
    main()
