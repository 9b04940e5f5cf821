"""Is a draft better if it is trained for acceptance?

Copies of the shipped draft, the students, go on learning, each with its own objective, on the same
batches in equally many steps; the control goes on learning from the text alone. The target's
forward pass costs more than a draft's training step, so it is made once for each batch and serves
all. The rate of each objective is chosen by the acceptance probability on training files that are
set aside for that. One line of the table for each draft, kind of sequence and temperature, on
held-out files, which are not read before:

- `alpha`: mean acceptance probability of a draft token at every position after the first `PROMPT`
  tokens, along held-out text, and along sequences that the target itself sampled at that
  temperature after held-out prompts
- `over_shipped`, `over_control`: differences of alpha to the shipped draft and to the control, at
  the same positions
- `bits_per_byte` of the same tokens, teacher-forced

All with 95% intervals over files. Training for acceptance costs the target's forward passes in
addition to what the control costs. `python -m studies.training.distillation` saves the student that
was best on the files set aside for that as `data/pair/draft-distilled`, if its alpha at temperature
1 is above that of the shipped draft, the interval of the difference above 0.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from specnb.distributions import Sampling, overlap, standardise
from specnb.models.loading import TRAINED_PAIR, Pair, load_pair
from studies import corpus, study
from studies.corpus import DATA
from studies.study import columns
from studies.training import training
from studies.training.evaluation import PROMPT, Files, bits_per_byte, held_out_windows, means, sampled, text_and_samples
from studies.training.training import Learner, encode, folder_of, logits_of, save, size_of, windows

SET_ASIDE_ONE_IN = 40  # training files on which rates and the shipped student are chosen
SEED, THREADS = 16, 2
SHIPPED, CONTROL, SAMPLES = "shipped", "cross-entropy", ", half on samples"
TEMPERATURES = (1.0, 0.0)
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A mean over positions, from the draft's logits and the target's log-probabilities `log_p`, both
`(batch, length, vocab)`, and the tokens `(batch, length)`. p is the target's distribution, q the
draft's."""


def cross_entropy(logits: Tensor, log_p: Tensor, tokens: Tensor) -> Tensor:
    """-log q(token): learning from the sequences alone, without the target."""
    return -log_softmax(logits, dim=-1).gather(-1, tokens[..., None]).mean()


def forward_kl(logits: Tensor, log_p: Tensor, tokens: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p / q): knowledge distillation."""
    return (log_p.exp() * (log_p - log_softmax(logits, dim=-1))).sum(dim=-1).mean()


def reverse_kl(logits: Tensor, log_p: Tensor, tokens: Tensor) -> Tensor:
    """KL(q || p) = sum q log(q / p)."""
    log_q = log_softmax(logits, dim=-1)
    return (log_q.exp() * (log_q - log_p)).sum(dim=-1).mean()


def total_variation(logits: Tensor, log_p: Tensor, tokens: Tensor) -> Tensor:
    """1 - sum min(p, q), which is one minus the acceptance probability at temperature 1."""
    return 1 - torch.minimum(log_softmax(logits, dim=-1), log_p).exp().sum(dim=-1).mean()


def for_acceptance(logits: Tensor, log_p: Tensor, share: float | Tensor) -> Tensor:
    """`share` of total variation and the rest forward KL, whose gradient does not vanish far from
    the target."""
    unused = logits[..., 0]
    return share * total_variation(logits, log_p, unused) + (1 - share) * forward_kl(logits, log_p, unused)


OBJECTIVES: dict[str, Objective] = {
    CONTROL: cross_entropy,
    "forward KL": forward_kl,
    "reverse KL": reverse_kl,
    "total variation": total_variation,
}
RECIPES = (*OBJECTIVES, f"total variation{SAMPLES}")
"""The students: an objective, and whether half of the sequences are samples of the target."""


@dataclass(frozen=True)
class Plan:
    """`steps` updates on `rows` sequences of `length` tokens, at rates that fall to zero.

    The rates that are tried are `factors` times those of the first training, for `search_steps`
    updates each. `sampled_rows` sequences are sampled from the target.
    """

    steps: int
    search_steps: int
    sampled_rows: int
    validation_windows: int
    rows: int = 16
    length: int = 256
    factors: tuple[float, ...] = (0.1, 0.3)


def objective_of(recipe: str) -> str:
    """The name of a student's objective."""
    return recipe.removesuffix(SAMPLES)


def fit(
    target: nn.Module, students: Mapping[str, Learner], text: NDArray[Any], samples: Tensor, plan: Plan, steps: int,
    folder: Path | None = None,
) -> None:  # fmt: skip
    """Trains all `students` for `steps` updates on the same windows of `text`, from what `folder`
    has.

    The name of a student is its recipe, or begins with it. One that learns from `samples`
    `(n, length + 1)` of the target gets half of its rows from there, and the other half from the
    batch of the others.
    """

    def losses(step: int, window: Tensor) -> Iterator[tuple[str, Tensor]]:
        chosen = np.random.default_rng([SEED, step]).choice(len(samples), plan.rows // 2, replace=False)
        batch = torch.cat([window, samples[torch.from_numpy(chosen)]])
        with torch.no_grad():
            log_p = log_softmax(logits_of(target, batch), dim=-1)
        for name, student in students.items():
            first = len(batch) - plan.rows if SAMPLES in name else 0
            rows = slice(first, first + plan.rows)
            objective = OBJECTIVES[objective_of(name.split(" at ")[0])]
            yield name, objective(logits_of(student.model, batch[rows]), log_p[rows], batch[rows, 1:])

    training.train(students, windows(text, plan.rows, plan.length, SEED), steps, losses, folder)


@torch.inference_mode()
def acceptance(
    target: PreTrainedModel, drafts: Mapping[str, PreTrainedModel], sequences: Tensor, temperature: float
) -> dict[str, Tensor]:
    """beta of each draft at all tokens of `sequences` `(n, length)` but the first `PROMPT`,
    `(n, length - PROMPT)`."""

    def distributions(model: PreTrainedModel, rows: Tensor) -> Tensor:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
        return standardise(logits.float(), Sampling(temperature))

    found: dict[str, list[Tensor]] = {name: [] for name in drafts}
    for rows in sequences.split(8):
        p = distributions(target, rows)
        for name, draft in drafts.items():
            found[name].append(overlap(p, distributions(draft, rows)))
    return {name: torch.cat(parts) for name, parts in found.items()}


class Trained(NamedTuple):
    """The students, the rate factor of each, and its acceptance probability on the files set aside,
    by name."""

    students: dict[str, PreTrainedModel]
    factors: dict[str, float]
    validation: dict[str, float]


def trained(pair: Pair, plan: Plan) -> Trained:
    """Samples from the target, chooses the rates and trains all students; what was done before is
    not done again."""
    torch.set_num_threads(THREADS)
    folder = folder_of("distillation", plan)
    folder.mkdir(parents=True, exist_ok=True)
    files = corpus.read("train")
    aside = files[::SET_ASIDE_ONE_IN]
    text = encode(pair.tokenizer, [own for own in files if own not in aside])
    validation = next(windows(encode(pair.tokenizer, aside), plan.validation_windows, plan.length, SEED))
    tried_at, samples_at = folder / "rates.json", folder / "samples.npy"
    if not samples_at.exists():
        prompts = next(windows(text, plan.sampled_rows, plan.length, SEED + 1))[:, :PROMPT]
        np.save(samples_at, sampled(pair.target, prompts, plan.length + 1, 1.0, SEED).numpy())
    samples = torch.from_numpy(np.load(samples_at))

    def students_at(factors: Mapping[str, float]) -> dict[str, Learner]:
        return {name: Learner(copy.deepcopy(pair.draft), factor) for name, factor in factors.items()}

    def validated(students: Mapping[str, Learner]) -> dict[str, float]:
        models = {name: student.model for name, student in students.items()}
        return {name: float(beta.mean()) for name, beta in acceptance(pair.target, models, validation, 1.0).items()}

    if not tried_at.exists():
        tried = students_at({f"{name} at {factor:g}": factor for name in OBJECTIVES for factor in plan.factors})
        fit(pair.target, tried, text, samples, plan, plan.search_steps)
        tried_at.write_text(json.dumps(validated(tried), indent=1) + "\n")
    found = json.loads(tried_at.read_text())
    factors = {
        recipe: max(plan.factors, key=lambda factor: found[f"{objective_of(recipe)} at {factor:g}"])
        for recipe in RECIPES
    }
    students = students_at(factors)
    fit(pair.target, students, text, samples, plan, plan.steps, folder)
    return Trained({name: student.model for name, student in students.items()}, factors, validated(students))


def measure(
    item: str, plan: Mapping[str, Any], per_file: int, sampled_per_file: int, files: int | None = None
) -> pd.DataFrame:
    """Trains the students, and measures them and the shipped draft."""
    pair, chosen = load_pair(), Plan(**plan)
    found = trained(pair, chosen)
    drafts = {SHIPPED: pair.draft} | found.students
    text = held_out_windows(pair, chosen.length + 1, per_file, files)
    prompts = held_out_windows(pair, chosen.length + 1, sampled_per_file, files)
    bits = {name: bits_per_byte(pair, draft, *text) for name, draft in drafts.items()}
    parts = [
        lines(acceptance(pair.target, drafts, sequences, temperature), of).assign(along=along, temperature=temperature)
        for temperature in TEMPERATURES
        for along, sequences, of in text_and_samples(pair.target, text, prompts, temperature, SEED)
    ]
    label = pd.DataFrame([_label(name, found, chosen) | columns("bits_per_byte", bits[name]) for name in drafts])
    return label.merge(pd.concat(parts), on="draft")


def lines(betas: Mapping[str, Tensor], numbers: Files) -> pd.DataFrame:
    """A line for each draft: alpha, and the differences to the shipped draft and to the control."""
    return pd.DataFrame(
        {"draft": name}
        | means({"alpha": own, "over_shipped": own - betas[SHIPPED], "over_control": own - betas[CONTROL]}, numbers)
        for name, own in betas.items()
    )


def _label(name: str, found: Trained, plan: Plan) -> dict[str, Any]:
    if name == SHIPPED:
        return {"draft": name, "objective": CONTROL, "samples": False, "steps": 0, "tokens": 0}
    label = {"draft": name, "objective": objective_of(name), "samples": name.endswith(SAMPLES), "steps": plan.steps}
    label |= {"tokens": plan.steps * plan.rows * plan.length}
    return label | {"rate": found.factors[name], "set_aside_alpha": found.validation[name]}


STUDY = study.Study(
    measure,
    settings={
        "plan": {
            "steps": 500, "search_steps": 25, "sampled_rows": 512, "validation_windows": 32, "rows": 16,
            "factors": (0.1, 0.3),
        },
        "per_file": 4, "sampled_per_file": 2,
    },
    small={
        "plan": {
            "steps": 2, "search_steps": 1, "sampled_rows": 4, "validation_windows": 2, "rows": 2, "length": 40,
            "factors": (0.3,),
        },
        "per_file": 1, "sampled_per_file": 1, "files": 9,
    },
)  # fmt: skip


def ship(table: pd.DataFrame, folder: Path = TRAINED_PAIR / "draft-distilled") -> Path | None:
    """Saves the student that was best on the files set aside, and returns the folder.

    None if its alpha at temperature 1 is not above the shipped draft's, along text and along
    samples.
    """
    name = str(table.draft[table.set_aside_alpha.idxmax()])
    if not (table.over_shipped_low[(table.draft == name) & (table.temperature == 1)] > 0).all():
        return None
    plan, pair = Plan(**STUDY.settings["plan"]), load_pair()
    found = trained(pair, plan)
    model = found.students[name]
    note = {"continued": "data/pair/draft", "seed": SEED, "parameters": size_of(model)}
    save(model, pair.tokenizer, folder, _label(name, found, plan) | note)
    return folder


if __name__ == "__main__":
    print("saved:", ship(pd.read_csv(DATA / "results" / "distillation.csv")))
