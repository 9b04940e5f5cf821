"""Continues the training of the shipped draft, once for each objective, all on the same batches and in one process.

The target's forward pass costs more than a draft's training step, so it is made once for each batch and serves all
students. A student is a copy of the shipped draft with an objective of its own; all see equally many tokens in equally
many steps. The rate of each objective is chosen by the acceptance probability on training files that are set aside
for that; held-out files are not read here. An interrupted training continues from its last checkpoint.

An objective is a mean over positions, from the draft's logits, the target's log-probabilities `log_p`, both
`(batch, length, vocab)`, and the tokens `(batch, length)`. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from specnb.distributions import Sampling, overlap, standardise
from specnb.models.loading import Pair
from studies import corpus
from studies.training.evaluation import PROMPT, sampled
from studies.training.training import encode, windows
from studies.training.training_loop import Learner
from studies.training.training_loop import train as run

SET_ASIDE_ONE_IN = 40  # training files on which rates and the shipped student are chosen
WARM_UP = 0.03  # of the steps
Distributions = Float[Tensor, "batch length vocab"]
Tokens = Int[Tensor, "batch length"]
Students = Mapping[str, Learner[PreTrainedModel]]


def cross_entropy(logits: Distributions, log_p: Distributions, tokens: Tokens) -> Tensor:
    """-log q(token): learning from the sequences alone, without the target."""
    return -log_softmax(logits, dim=-1).gather(-1, tokens[..., None]).mean()


def forward_kl(logits: Distributions, log_p: Distributions, tokens: Tokens) -> Tensor:
    """KL(p || q) = sum p log(p / q): knowledge distillation."""
    return (log_p.exp() * (log_p - log_softmax(logits, dim=-1))).sum(dim=-1).mean()


def reverse_kl(logits: Distributions, log_p: Distributions, tokens: Tokens) -> Tensor:
    """KL(q || p) = sum q log(q / p)."""
    log_q = log_softmax(logits, dim=-1)
    return (log_q.exp() * (log_q - log_p)).sum(dim=-1).mean()


def total_variation(logits: Distributions, log_p: Distributions, tokens: Tokens) -> Tensor:
    """1 - sum min(p, q), which is one minus the acceptance probability at temperature 1."""
    return 1 - torch.minimum(log_softmax(logits, dim=-1), log_p).exp().sum(dim=-1).mean()


OBJECTIVES: dict[str, Callable[[Distributions, Distributions, Tokens], Tensor]] = {
    "cross-entropy": cross_entropy,
    "forward KL": forward_kl,
    "reverse KL": reverse_kl,
    "total variation": total_variation,
}
CONTROL, SAMPLES = "cross-entropy", ", half on samples"
RECIPES = (*OBJECTIVES, f"total variation{SAMPLES}")
"""The students: an objective, and whether half of the sequences are samples of the target."""


@dataclass(frozen=True)
class Plan:
    """`steps` updates on `rows` sequences of `length` tokens, at rates that fall to zero.

    The rates that are tried are `factors` times those of the first training, for `search_steps` updates each.
    `sampled_rows` sequences are sampled from the target.
    """

    steps: int
    search_steps: int
    sampled_rows: int
    validation_windows: int
    rows: int = 16
    length: int = 256
    factors: tuple[float, ...] = (0.1, 0.3)
    save_every: int = 25
    seed: int = 16
    threads: int = 2


def objective_of(recipe: str) -> str:
    """The name of a student's objective."""
    return recipe.removesuffix(SAMPLES)


def rate(step: int, steps: int) -> float:
    """Learning-rate factor: a linear warm-up over the fraction `WARM_UP`, then half a cosine to zero.

    >>> [round(rate(step, 100), 2) for step in (0, 2, 3, 51, 99)]
    [0.33, 1.0, 1.0, 0.51, 0.0]
    """
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2


def logits_of(model: nn.Module, window: Tensor) -> Tensor:
    """Logits for all tokens of each row of `window` after its first, `(batch, length, vocab)` in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = model(input_ids=window[:, :-1], use_cache=False).logits
    return logits.float()


def fit(
    target: nn.Module, students: Students, text: NDArray[Any], samples: Tensor, plan: Plan, steps: int,
    folder: Path | None = None,
) -> None:  # fmt: skip
    """Trains all `students` for `steps` updates on the same windows of `text`, from what `folder` has.

    The name of a student is its recipe, or begins with it. One that learns from `samples` `(n, length + 1)` of the
    target gets half of its rows from there, and the other half from the batch of the others.
    """

    def update(step: int, window: Tensor) -> dict[str, float]:
        chosen = np.random.default_rng([plan.seed, step]).choice(len(samples), plan.rows // 2, replace=False)
        batch = torch.cat([window, samples[torch.from_numpy(chosen)]])
        with torch.no_grad():
            log_p = log_softmax(logits_of(target, batch), dim=-1)
        losses = {}
        for name, student in students.items():
            first = len(batch) - plan.rows if SAMPLES in name else 0
            rows = slice(first, first + plan.rows)
            objective = OBJECTIVES[objective_of(name.split(" at ")[0])]
            loss = objective(logits_of(student.model, batch[rows]), log_p[rows], batch[rows, 1:])
            losses[name] = student.learn(loss, rate(step, steps))
        return losses

    batches = windows(text, plan.rows, plan.length, plan.seed)
    run(students, batches, steps, update, folder=folder, save_every=plan.save_every)


@torch.inference_mode()
def acceptance(
    target: PreTrainedModel, drafts: Mapping[str, PreTrainedModel], sequences: Tensor, temperature: float
) -> dict[str, Tensor]:
    """beta of each draft at all tokens of `sequences` `(n, length)` but the first `PROMPT`, `(n, length - PROMPT)`."""

    def distributions(model: PreTrainedModel, rows: Tensor) -> Tensor:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
        return standardise(logits.float(), Sampling(temperature))

    found: dict[str, list[Tensor]] = {name: [] for name in drafts}
    for rows in sequences.split(8):
        p = distributions(target, rows)
        for name, draft in drafts.items():
            found[name].append(overlap(p, distributions(draft, rows)))
    return {name: torch.cat(parts) for name, parts in found.items()}


def validated(pair: Pair, students: Students, validation: Tensor) -> dict[str, float]:
    """The mean acceptance probability of each student on `validation` at temperature 1."""
    models = {name: student.model for name, student in students.items()}
    return {name: float(beta.mean()) for name, beta in acceptance(pair.target, models, validation, 1.0).items()}


@dataclass(frozen=True)
class Trained:
    """The students, the rate factor of each, and its acceptance probability on the files set aside, by name."""

    students: dict[str, PreTrainedModel]
    factors: dict[str, float]
    validation: dict[str, float]


def train(pair: Pair, plan: Plan, folder: Path) -> Trained:
    """Samples from the target, chooses the rates and trains all students; what is in `folder` is not done again."""
    torch.set_num_threads(plan.threads)
    folder.mkdir(parents=True, exist_ok=True)
    files = corpus.read("train")
    aside = files[::SET_ASIDE_ONE_IN]
    text = encode(pair.tokenizer, [own for own in files if own not in aside])
    validation = next(windows(encode(pair.tokenizer, aside), plan.validation_windows, plan.length, plan.seed))
    tried_at, samples_at = folder / "rates.json", folder / "samples.npy"
    if not samples_at.exists():
        prompts = next(windows(text, plan.sampled_rows, plan.length, plan.seed + 1))[:, :PROMPT]
        np.save(samples_at, sampled(pair.target, prompts, plan.length + 1, 1.0, plan.seed).numpy())
    samples = torch.from_numpy(np.load(samples_at))

    def students_at(factors: Mapping[str, float]) -> dict[str, Learner[PreTrainedModel]]:
        return {name: Learner(copy.deepcopy(pair.draft), factor) for name, factor in factors.items()}

    if not tried_at.exists():
        tried = students_at({f"{name} at {factor:g}": factor for name in OBJECTIVES for factor in plan.factors})
        fit(pair.target, tried, text, samples, plan, plan.search_steps)
        tried_at.write_text(json.dumps(validated(pair, tried, validation), indent=1) + "\n")
    found = json.loads(tried_at.read_text())
    factors = {
        recipe: max(plan.factors, key=lambda factor: found[f"{objective_of(recipe)} at {factor:g}"])
        for recipe in RECIPES
    }
    students = students_at(factors)
    fit(pair.target, students, text, samples, plan, plan.steps, folder)
    models = {name: student.model for name, student in students.items()}
    return Trained(models, factors, validated(pair, students, validation))
