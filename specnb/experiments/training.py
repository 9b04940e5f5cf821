"""Trains the pair that ships in `data/pair`: `python -m specnb.experiments.training --preset cpu`.

One script for laptop and GPU: a preset changes the budget and nothing else. Target and draft learn
from the same tokens, the draft from the text and not from the target, as an off-the-shelf draft would.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from specnb.experiments import corpus
from specnb.models.checkpoints import write_checksums

END = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 512
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
    muon_rate: float = 0.02
    adam_rate: float = 0.003


PRESETS = {
    "cpu": {"target": Budget(steps=1_700, batch=16), "draft": Budget(steps=3_000, batch=16)},
    "gpu": {"target": Budget(steps=6_000, batch=64), "draft": Budget(steps=6_000, batch=64)},
    "smoke": {"target": Budget(steps=2, batch=2), "draft": Budget(steps=2, batch=2)},
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


def optimizers(model: nn.Module, budget: Budget) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and "embed" not in name]
    others = [w for name, w in model.named_parameters() if w.ndim < 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=budget.muon_rate, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=budget.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(step: int, steps: int) -> float:
    """Learning-rate factor: a short warm-up, a plateau, and a linear fall to zero over the last 60%."""
    return min(1.0, (step + 1) / (0.02 * steps + 1), (steps - step) / (0.6 * steps))


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per token, of the tokens of each row of `window` after its first."""
    with torch.autocast(window.device.type, torch.bfloat16):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def fit(role: str, tokens: np.ndarray, budget: Budget, device: str, seed: int, end: int) -> LlamaForCausalLM:
    """Trains a new model for `role`; shows its loss in bits per token on a progress bar."""
    torch.manual_seed(seed)
    model = build(role, end)
    model.to(torch.device(device)).train()  # type: ignore[arg-type]  # the stub of `to` lacks its argument
    step_loss = torch.compile(loss_of, dynamic=False)
    chosen = optimizers(model, budget)
    bases = [optimizer.param_groups[0]["lr"] for optimizer in chosen]
    smooth = None
    with tqdm(curriculum(tokens, budget, seed), total=budget.steps, desc=role, unit="step") as bar:
        for step, window in enumerate(bar):
            loss = step_loss(model, window.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, base in zip(chosen, bases, strict=True):
                optimizer.param_groups[0]["lr"] = base * rate(step, budget.steps)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if step % 10 == 0:
                bits = loss.item() / math.log(2)
                smooth = bits if smooth is None else 0.9 * smooth + 0.1 * bits
                bar.set_postfix(bits_per_token=f"{smooth:.3f}")
    model.cpu().eval()
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes weights in bfloat16 (half the size, read back into any dtype), config and tokenizer."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Trains tokenizer, target and draft, and writes them with a note of the budget and their checksums."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--out", type=Path, default=corpus.DATA / "pair")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--roles", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    texts = corpus.read("train")
    tokenizer = train_tokenizer(texts)
    tokens = encode(tokenizer, texts)
    for role in arguments.roles:
        began = time.perf_counter()
        budget = PRESETS[arguments.preset][role]
        model = fit(role, tokens, budget, device, arguments.seed, tokenizer.eos_token_id)
        folder = arguments.out / role
        save(model, tokenizer, folder)
        seen = budget.steps * budget.batch * CONTEXT
        note = {
            "preset": arguments.preset,
            "device": device,
            "seed": arguments.seed,
            "minutes": round((time.perf_counter() - began) / 60, 1),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "tokens_in_corpus": len(tokens),
            "tokens_seen": seen,
            "budget": asdict(budget),
        }
        (folder / "training.json").write_text(json.dumps(note, indent=1) + "\n")
        write_checksums(folder)


if __name__ == "__main__":
    main()
