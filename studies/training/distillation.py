"""Is a draft better if it is trained for acceptance?

Copies of the shipped draft go on learning, each with its own objective, on the same batches in equally many steps
(`studies.training.distillation_training`); the control goes on learning from the text alone. One line of the table for
each draft, kind of sequence and temperature, on held-out files:

- `alpha`: mean acceptance probability of a draft token at every position after the first `PROMPT` tokens, along
  held-out text, and along sequences that the target itself sampled at that temperature after held-out prompts
- `over_shipped`, `over_control`: differences of alpha to the shipped draft and to the control, at the same positions
- `bits_per_byte` of the same tokens, teacher-forced

All with 95% intervals over files. Training for acceptance costs the target's forward passes in addition to what the
control costs. `python -m studies.training.distillation` saves the student that was best on the files set aside for that
as `data/pair/draft-distilled`, if its alpha at temperature 1 is above that of the shipped draft, the interval of the
difference above 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.measure.statistics import Estimate, ratio_of_sums
from specnb.models.loading import TRAINED_PAIR, Pair, load_pair
from studies.corpus import DATA
from studies.study import Study, columns
from studies.training.distillation_training import CONTROL, SAMPLES, Plan, Trained, acceptance, objective_of, train
from studies.training.evaluation import (
    OWN,
    PROMPT,
    TEXT,
    Files,
    held_out_windows,
    mean_over_files,
    sampled,
    sum_per_file,
)
from studies.training.training import save
from studies.training.training_loop import folder_of

SHIPPED = "shipped"
TEMPERATURES = (1.0, 0.0)


def trained(plan: Plan) -> Trained:
    """The students of `plan`, from its checkpoint where that is complete."""
    return train(load_pair(packed=False), plan, folder_of("distillation", plan))


@torch.inference_mode()
def bits_per_byte(pair: Pair, draft: PreTrainedModel, sequences: Tensor, numbers: Files) -> Estimate:
    """Bits that `draft` needs for the tokens after the first `PROMPT`, over their bytes; the interval is over files."""
    nats = []
    for rows in sequences.split(8):
        logits = draft(input_ids=rows[:, :-1], use_cache=False).logits[:, PROMPT - 1 :].float()
        nats.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, PROMPT:], reduction="none"))
    lengths = torch.tensor([[len(str(pair.tokenizer.decode(row[PROMPT:])).encode())] for row in sequences.tolist()])
    return ratio_of_sums(sum_per_file(torch.cat(nats) / math.log(2), numbers), sum_per_file(lengths, numbers))


def measure(
    item: str, plan: Mapping[str, Any], per_file: int, sampled_per_file: int, files: int | None = None
) -> pd.DataFrame:
    """Trains the students, and measures them and the shipped draft."""
    pair, chosen = load_pair(packed=False), Plan(**plan)
    found = trained(chosen)
    torch.set_num_threads(chosen.threads)
    drafts = {SHIPPED: pair.draft} | found.students
    text, numbers = held_out_windows(pair, chosen.length + 1, per_file, files)
    prompts, prompt_numbers = held_out_windows(pair, chosen.length + 1, sampled_per_file, files)
    bits = {name: bits_per_byte(pair, draft, text, numbers) for name, draft in drafts.items()}
    parts = []
    for temperature in TEMPERATURES:
        own = sampled(pair.target, prompts[:, :PROMPT], chosen.length + 1, temperature, chosen.seed)
        for along, sequences, of in ((TEXT, text, numbers), (OWN, own, prompt_numbers)):
            betas = acceptance(pair.target, drafts, sequences, temperature)
            parts.append(lines(betas, of).assign(along=along, temperature=temperature))
    label = pd.DataFrame([_label(name, found, chosen) | columns("bits_per_byte", bits[name]) for name in drafts])
    return label.merge(pd.concat(parts), on="draft")


def lines(betas: Mapping[str, Tensor], numbers: Files) -> pd.DataFrame:
    """A line for each draft: alpha, and the differences to the shipped draft and to the control."""
    found = []
    for name, beta in betas.items():
        line: dict[str, Any] = {"draft": name}
        differences = {"alpha": beta, "over_shipped": beta - betas[SHIPPED], "over_control": beta - betas[CONTROL]}
        for quantity, values in differences.items():
            line |= columns(quantity, mean_over_files(values, numbers))
        found.append(line | {"files": len(np.unique(numbers)), "positions": beta.numel()})
    return pd.DataFrame(found)


def _label(name: str, found: Trained, plan: Plan) -> dict[str, Any]:
    if name == SHIPPED:
        return {"draft": name, "objective": CONTROL, "samples": False, "steps": 0, "tokens": 0}
    return {
        "draft": name,
        "objective": objective_of(name),
        "samples": name.endswith(SAMPLES),
        "steps": plan.steps,
        "tokens": plan.steps * plan.rows * plan.length,
        "rate": found.factors[name],
        "set_aside_alpha": found.validation[name],
    }


STUDY = Study(
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


def is_better(table: pd.DataFrame, name: str) -> bool:
    """Whether a student's alpha at temperature 1 is above the shipped draft's, along text and along samples."""
    rows = table[(table.draft == name) & (table.temperature == 1)]
    return len(rows) > 0 and bool((rows.over_shipped_low > 0).all())


def ship(table: pd.DataFrame, folder: Path = TRAINED_PAIR / "draft-distilled") -> Path | None:
    """Saves the student that was best on the files set aside, if `is_better` says so; returns the folder."""
    name = str(table.draft[table.set_aside_alpha.idxmax()])
    if not is_better(table, name):
        return None
    plan, pair = Plan(**STUDY.settings["plan"]), load_pair(packed=False)
    found = trained(plan)
    model = found.students[name]
    size = sum(weight.numel() for weight in model.parameters())
    note = {"continued": "data/pair/draft", "seed": plan.seed, "parameters": size}
    save(model, pair.tokenizer, folder, _label(name, found, plan) | note)
    return folder


if __name__ == "__main__":
    print("saved:", ship(pd.read_csv(DATA / "results" / "distillation.csv")))
