"""The training loop, and the training of the pair that ships in `data/pair`:
`python -m studies.training.training`.

Target and draft learn from the same tokens, the draft from the text and not from the target, as an
off-the-shelf draft would. Every training uses the loop, those of heads and embeddings, too: one or
several learners see the same batches, and an interrupted training goes on from its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from studies import corpus
from studies.corpus import DATA
from studies.files import ROOT

END = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 512
SEED = 0
CHECKSUMS = "SHA256SUMS"
Batch = TypeVar("Batch")
MUON_RATE, ADAM_RATE = 0.02, 0.003
SHAPES: dict[str, dict[str, Any]] = {
    "target": {"num_hidden_layers": 16, "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3},
    "draft": {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 2},
}


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` (Nesterov's momentum 0.95, decay 0.01) in float32 in place of bfloat16,
    whose products take eight times as long on processors without instructions for it."""

    def __init__(self, matrices: list[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves every matrix by its orthogonalised momentum, times the root of rows over columns if
        that is above 1."""
        for weight in self.param_groups[0]["params"]:
            momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            momentum.lerp_(weight.grad, 0.05)
            rate, (rows, columns) = self.param_groups[0]["lr"], weight.shape
            weight *= 1 - 0.01 * rate
            weight.sub_(orthogonal(weight.grad.lerp(momentum, 0.95)), alpha=rate * max(1, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """`matrix` with all singular values near 1: five Newton-Schulz iterations, as in
    `torch.optim.Muon`."""
    rows, columns = matrix.shape
    found: Tensor = (matrix if rows <= columns else matrix.T) / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.T
        found = 3.4445 * found + (2.0315 * gram @ gram - 4.7750 * gram) @ found
    return found if rows <= columns else found.T


class Learner:
    """A model in training and its optimizers. Gradients longer than `longest` are shortened to
    that.

    Without `optimizers`, Muon has the matrices inside the layers, and AdamW embeddings, output heads
    and norms; `factor` scales both learning rates, `MUON_RATE` and `ADAM_RATE`.
    """

    def __init__(
        self, model: nn.Module, factor: float = 1.0, *optimizers: torch.optim.Optimizer, longest: float = 1.0
    ) -> None:
        self.model: Any = model.train()
        self.optimizers, self.longest = optimizers or muon_and_adam(model, factor), longest
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.saved: list[Any] = [self.model, *self.optimizers]

    def learn(self, loss: Tensor, part: float) -> float:
        """One update at `part` of the learning rates; returns `loss`."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.longest)
        for optimizer, full in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = part * full
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def muon_and_adam(model: nn.Module, factor: float) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of `Learner`."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    assert all(weight.ndim < 3 for weight in weights)
    ends = [
        module for name, module in model.named_modules() if isinstance(module, nn.Embedding) or name.endswith("lm_head")
    ]
    embedded = {id(module.weight) for module in ends}
    matrices = [weight for weight in weights if weight.ndim == 2 and id(weight) not in embedded]
    others = [weight for weight in weights if weight.ndim < 2 or id(weight) in embedded]
    return Muon(matrices, factor * MUON_RATE), adam(others, factor * ADAM_RATE)


def adam(weights: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW as the pair and the heads are trained with."""
    return torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def rate(step: int, steps: int) -> float:
    """Learning-rate factor: a short warm-up, a plateau, and a linear fall to zero over the last
    60%.

    >>> [round(rate(step, 100), 2) for step in (0, 1, 2, 40, 70, 99)]
    [0.33, 0.67, 1.0, 1.0, 0.5, 0.02]
    """
    return min(1.0, (step + 1) / (0.02 * steps + 1), (steps - step) / (0.6 * steps))


def taken_over(step: int, steps: int, begin: float) -> float:
    """The share of an objective that begins after the fraction `begin` of the steps, and is alone
    after as many more.

    >>> [taken_over(step, 100, 0.1) for step in (0, 10, 15, 20, 99)]
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    return min(1.0, max(0.0, step / (begin * steps) - 1))


def folder_of(name: str, plan: object) -> Path:
    """Where a training keeps what it has done; another plan has another folder. Delete it when the
    code has changed."""
    return ROOT / "build" / "training" / f"{name}-{hashlib.sha256(repr(plan).encode()).hexdigest()[:12]}"


def train(
    learners: Mapping[str, Learner],
    batches: Iterable[Batch],
    steps: int,
    losses: Callable[[int, Batch], Iterable[tuple[str, Tensor]]],
    folder: Path | None = None,
    save_every: int = 50,
) -> None:
    """The first `steps` of `batches`: of each, `losses(step, batch)` yields names and losses, and
    each learner named learns from its loss before the next is asked for, at `rate(step, steps)` of
    its learning rates.

    Begins after the last step that is saved in `folder`, and saves there every `save_every` steps
    and after the last. The bar shows means of about the last 50 steps. The models are in evaluation
    mode afterwards.
    """
    checkpoint, begin, shown = folder and folder / "learners.pt", 0, dict[str, float]()
    if checkpoint and checkpoint.exists():
        begin, states = torch.load(checkpoint, weights_only=True)
        for name, learner in learners.items():
            for part, state in zip(learner.saved, states[name], strict=True):
                part.load_state_dict(state)
    left = islice(enumerate(islice(batches, steps)), begin, None)
    with tqdm(left, desc="training", initial=begin, total=steps, unit="step", mininterval=5) as bar:
        for step, batch in bar:
            for name, loss in losses(step, batch):
                value = learners[name].learn(loss, rate(step, steps))
                shown[name] = shown.get(name, value) + (value - shown.get(name, value)) / 50
            bar.set_postfix({of: f"{value:.3f}" for of, value in shown.items()}, refresh=False)
            if checkpoint and ((step + 1) % save_every == 0 or step + 1 == steps):
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
                states = {name: [part.state_dict() for part in learner.saved] for name, learner in learners.items()}
                partial = checkpoint.with_suffix(".partial")
                torch.save((step + 1, states), partial)
                partial.replace(checkpoint)
    for learner in learners.values():
        learner.model.eval()


@dataclass(frozen=True)
class Budget:
    """How long a model is trained: `steps` updates of `batch * CONTEXT` tokens each.

    Attention is what a CPU spends its time on, so all but the last steps see windows of
    `CONTEXT / 2`.
    """

    steps: int
    batch: int
    short_share: float = 0.8


BUDGETS = {"target": Budget(steps=1_700, batch=16), "draft": Budget(steps=3_000, batch=16)}


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` tokens; its only special token ends a file, and begins every
    text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = [(END, tokenizer.token_to_id(END))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=begin)
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
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**SHAPES[role] | sizes | ends))


def windows(tokens: np.ndarray, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless batches `(batch, length + 1)`: every epoch cuts the text elsewhere, in a new
    order."""
    generator = np.random.default_rng(seed)
    while True:
        offset = int(generator.integers(length))
        starts = np.arange(offset, len(tokens) - length - 1, length)
        generator.shuffle(starts)
        for at in range(0, len(starts) - batch + 1, batch):
            rows = starts[at : at + batch, None] + np.arange(length + 1)
            yield torch.from_numpy(tokens[rows].astype(np.int64))


def curriculum(tokens: np.ndarray, budget: Budget, seed: int) -> Iterator[Tensor]:
    """The batches of a whole training: short windows first, then full ones, equally many tokens
    each."""
    short = round(budget.steps * budget.short_share)
    yield from islice(windows(tokens, 2 * budget.batch, CONTEXT // 2, seed), short)
    yield from islice(windows(tokens, budget.batch, CONTEXT, seed + 1), budget.steps - short)


def logits_of(model: nn.Module, window: Tensor) -> Tensor:
    """Logits for all tokens of each row of `window` after its first, `(batch, length, vocab)` in
    float32."""
    with torch.autocast(window.device.type, torch.bfloat16):
        logits: Tensor = model(input_ids=window[:, :-1], use_cache=False).logits
    return logits.float()


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per token, of the tokens of each row of `window` after its
    first."""
    return nn.functional.cross_entropy(logits_of(model, window).flatten(0, 1), window[:, 1:].flatten())


def fit(
    model: LlamaForCausalLM, batches: Iterator[Tensor], steps: int, *, compiled: bool = True, folder: Path | None = None
) -> None:
    """Trains `model` on the first `steps` of `batches`, from what `folder` has; `compiled` needs a
    C++ compiler."""
    loss = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    train({"model": Learner(model)}, batches, steps, lambda _, window: [("model", loss(model, window))], folder)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, note: dict[str, Any]) -> None:
    """Writes weights in bfloat16 (half the size, read back into any dtype), config, tokenizer, and
    a note."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add_note(folder, note)


def add_note(folder: Path, note: dict[str, Any]) -> None:
    """Writes how a model was trained, `training.json`, and the SHA-256 of all files of `folder`, as
    `sha256sum -c` reads them."""
    (folder / "training.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != CHECKSUMS)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def size_of(model: nn.Module) -> int:
    """The number of weights."""
    return sum(weight.numel() for weight in model.parameters())


def main() -> None:
    """Trains tokenizer, target and draft, and writes them with a note of the budget and their
    checksums."""
    texts = corpus.read("train")
    tokenizer = train_tokenizer(texts)
    tokens = encode(tokenizer, texts)
    for role, budget in BUDGETS.items():
        torch.manual_seed(SEED)
        model = build(role, tokenizer.eos_token_id)
        fit(model, curriculum(tokens, budget, SEED), budget.steps, folder=folder_of(role, budget))
        note = {"device": "cpu", "seed": SEED, "parameters": size_of(model), "tokens_in_corpus": len(tokens)}
        note |= {"tokens_seen": budget.steps * budget.batch * CONTEXT, "budget": asdict(budget)}
        save(model, tokenizer, DATA / "pair" / role, note)


if __name__ == "__main__":
    main()
