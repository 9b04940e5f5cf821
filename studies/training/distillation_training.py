"""Continues the training of the shipped draft, once for each objective, all on the same batches and in one process.

The target's forward pass costs more than a draft's training step, so it is made once for each batch and serves all
students. A student is a copy of the shipped draft with an objective of its own; all see equally many tokens in equally
many steps. The rate of each objective is chosen by the acceptance probability on training files that are set aside
for that; held-out files are not read here. An interrupted training continues from its last checkpoint.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decoding.generate import Study, generate
from specnb.distributions import Sampling, overlap, standardise
from specnb.models.loading import Pair
from specnb.notebook import corpus
from studies.training.objectives import OBJECTIVES, Objective
from studies.training.training import encode, windows
from studies.training.training_loop import CHECKPOINT, Learner, run

SET_ASIDE_ONE_IN = 40  # training files on which rates and the shipped student are chosen
PROMPT = 32  # tokens of text before positions at which acceptance is measured, and before sampled tokens
SAMPLED_AT_ONCE = 64


@dataclass(frozen=True)
class Recipe:
    """How a student is trained: its objective, and whether half of its sequences are samples of the target."""

    objective: str
    samples: bool = False


RECIPES = {name: Recipe(name) for name in OBJECTIVES} | {
    "total variation, half on samples": Recipe("total variation", samples=True)
}
CONTROL = "cross-entropy"


@dataclass(frozen=True)
class Plan:
    """`steps` updates on `rows` sequences of `length` tokens, at rates that fall to zero over `horizon` updates.

    The rates that are tried are `factors` times those of the first training, for `search_steps` updates each.
    `sampled_rows` sequences are sampled from the target; without any, no student learns from samples. `compiled` needs
    a C++ compiler.
    """

    steps: int
    horizon: int
    search_steps: int
    sampled_rows: int
    validation_windows: int
    rows: int = 16
    length: int = 256
    factors: tuple[float, ...] = (0.1, 0.3, 1.0)
    warm_up: float = 0.03
    save_every: int = 20
    seed: int = 16
    compiled: bool = True
    threads: int = 2


def rate(step: int, horizon: int, warm_up: float) -> float:
    """Learning-rate factor: a linear warm-up over the fraction `warm_up`, then half a cosine to zero at `horizon`.

    >>> [round(rate(step, 100, 0.03), 2) for step in (0, 2, 3, 51, 99)]
    [0.33, 1.0, 1.0, 0.51, 0.0]
    """
    warm = max(1, round(warm_up * horizon))
    if step < warm:
        return (step + 1) / warm
    return (1 + math.cos(math.pi * (step - warm) / (horizon - warm))) / 2


def draft_loss(model: nn.Module, window: Tensor, log_p: Tensor, objective: Objective) -> Tensor:
    """`objective` at all tokens of each row of `window` after its first, which are at the positions of `log_p`."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return objective(logits.float(), log_p, window[:, 1:])


@torch.no_grad()
def target_log_probs(target: nn.Module, window: Tensor) -> Tensor:
    """log p of every token of each row of `window` after its first, `(batch, length, vocab)` in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = target(input_ids=window[:, :-1], use_cache=False).logits
    return torch.log_softmax(logits.float(), dim=-1)


class Student(Learner[PreTrainedModel]):
    """A copy of `draft` in training for the objective of `recipe`, at `factor` times the usual learning rates."""

    def __init__(self, recipe: Recipe, draft: PreTrainedModel, factor: float) -> None:
        super().__init__(copy.deepcopy(draft), factor)
        self.recipe = recipe


def fit(
    target: nn.Module,
    students: Mapping[str, Student],
    text: NDArray[Any],
    samples: Tensor | None,
    plan: Plan,
    steps: int,
    horizon: int,
    checkpoint: Path | None = None,
) -> None:
    """Trains all `students` for `steps` updates on the same windows of `text`, from `checkpoint` on if there is one.

    `samples` `(n, length + 1)` are sequences of the target. A student that learns from them gets half of its rows from
    there, and the other half from the batch of the others.
    """
    loss = torch.compile(draft_loss, dynamic=False) if plan.compiled else draft_loss
    log_probs = torch.compile(target_log_probs, dynamic=False) if plan.compiled else target_log_probs

    def update(step: int, window: Tensor) -> dict[str, float]:
        batch = window if samples is None else torch.cat([window, _chosen(samples, step, plan)])
        log_p = log_probs(target, batch)
        losses = {}
        for name, student in students.items():
            first = len(batch) - plan.rows if student.recipe.samples else 0
            rows = slice(first, first + plan.rows)
            value = loss(student.model, batch[rows], log_p[rows], OBJECTIVES[student.recipe.objective])
            losses[name] = student.learn(value, rate(step, horizon, plan.warm_up))
        return losses

    batches = windows(text, plan.rows, plan.length, plan.seed)
    run(students, batches, steps, update, checkpoint=checkpoint, save_every=plan.save_every)


def _chosen(samples: Tensor, step: int, plan: Plan) -> Tensor:
    rows = np.random.default_rng([plan.seed, step]).choice(len(samples), plan.rows // 2, replace=False)
    return samples[torch.from_numpy(rows)]


@torch.inference_mode()
def acceptance(
    target: PreTrainedModel, drafts: Mapping[str, PreTrainedModel], sequences: Tensor, temperature: float
) -> dict[str, Tensor]:
    """beta of each draft at all tokens of `sequences` `(n, length)` but the first `PROMPT`, `(n, length - PROMPT)`."""
    found: dict[str, list[Tensor]] = {name: [] for name in drafts}
    for rows in sequences.split(8):
        p = _distributions(target, rows, temperature)
        for name, draft in drafts.items():
            found[name].append(overlap(p, _distributions(draft, rows, temperature)))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _distributions(model: PreTrainedModel, rows: Tensor, temperature: float) -> Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
    return standardise(logits.float(), Sampling(temperature))


def sampled(target: PreTrainedModel, prompts: Tensor, length: int, temperature: float, seed: int) -> Tensor:
    """`prompts` `(n, PROMPT)` continued by the target to `length` tokens, `(n, length)`."""
    parts = []
    for at in tqdm(range(0, len(prompts), SAMPLED_AT_ONCE), desc="samples of the target", delay=3):
        some = prompts[at : at + SAMPLED_AT_ONCE]
        made = generate(
            target, some.tolist(), max_new_tokens=length - PROMPT, sampling=Sampling(temperature), seed=seed,
            progress=False, study=Study(range(at, at + len(some))),
        )  # fmt: skip
        parts.append(torch.cat([some, torch.tensor([list(tokens) for tokens in made.tokens])], dim=1))
    return torch.cat(parts)


def _texts(pair: Pair) -> tuple[NDArray[Any], NDArray[Any]]:
    """Tokens to learn from, and tokens of the files that are set aside."""
    files = corpus.read("train")
    aside = files[::SET_ASIDE_ONE_IN]
    return encode(pair.tokenizer, [text for text in files if text not in aside]), encode(pair.tokenizer, aside)


def chosen_rates(pair: Pair, text: NDArray[Any], validation: Tensor, plan: Plan) -> dict[str, dict[str, float]]:
    """For each objective the acceptance probability on `validation` that each factor led to, by the factor's digits."""
    students = {
        f"{name} {factor:g}": Student(Recipe(name), pair.draft, factor)
        for name in OBJECTIVES
        for factor in plan.factors
    }
    fit(pair.target, students, text, None, plan, plan.search_steps, plan.search_steps)
    betas = acceptance(pair.target, {name: student.model for name, student in students.items()}, validation, 1.0)
    return {
        name: {f"{factor:g}": float(betas[f"{name} {factor:g}"].mean()) for factor in plan.factors}
        for name in OBJECTIVES
    }


@dataclass(frozen=True)
class Trained:
    """The students, the rate factor of each, and its acceptance probability on the files set aside, by name."""

    students: dict[str, PreTrainedModel]
    factors: dict[str, float]
    validation: dict[str, float]


def train(pair: Pair, plan: Plan, folder: Path) -> Trained:
    """Chooses the rates, samples from the target and trains all students; what is in `folder` is not done again."""
    torch.set_num_threads(plan.threads)
    folder.mkdir(parents=True, exist_ok=True)
    text, aside = _texts(pair)
    validation = next(windows(aside, plan.validation_windows, plan.length, plan.seed))
    tried_at, samples_at = folder / "rates.json", folder / "samples.npy"
    if not tried_at.exists():
        tried_at.write_text(json.dumps(chosen_rates(pair, text, validation, plan), indent=1) + "\n")
    if plan.sampled_rows and not samples_at.exists():
        prompts = next(windows(text, plan.sampled_rows, plan.length, plan.seed + 1))[:, :PROMPT]
        np.save(samples_at, sampled(pair.target, prompts, plan.length + 1, 1.0, plan.seed).numpy())
    tried = json.loads(tried_at.read_text())
    factors = {
        name: float(max(tried[recipe.objective], key=tried[recipe.objective].__getitem__))
        for name, recipe in RECIPES.items()
        if plan.sampled_rows or not recipe.samples
    }
    students = {name: Student(RECIPES[name], pair.draft, factor) for name, factor in factors.items()}
    samples = torch.from_numpy(np.load(samples_at)) if plan.sampled_rows else None
    fit(pair.target, students, text, samples, plan, plan.steps, plan.horizon, folder / CHECKPOINT)
    models = {name: student.model for name, student in students.items()}
    betas = acceptance(pair.target, models, validation, 1.0)
    return Trained(models, factors, {name: float(beta.mean()) for name, beta in betas.items()})
