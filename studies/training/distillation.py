"""Is a draft better if it is trained for acceptance? `python -m studies.training.distillation`, or `make distilled`.

Copies of the shipped draft go on learning, each with its own objective, on the same batches in equally many steps
(`studies.training.distillation_training`); the control goes on learning from the text alone. One line of
`data/results/distillation.csv` for each draft, kind of sequence and temperature, on held-out files:

- `alpha`: mean acceptance probability of a draft token at every position after the first `PROMPT` tokens, along
  held-out text, and along sequences that the target itself sampled at that temperature after held-out prompts
- `over_shipped`, `over_control`: differences of alpha to the shipped draft and to the control, at the same positions
- `bits_per_byte` of the same tokens, teacher-forced

All with 95% intervals over files. `minutes` of training are not in the table: they depend on the machine. Training
for acceptance costs the target's forward passes in addition to what the control costs.

The command also saves the student that was best on the files set aside for that as `data/pair/draft-distilled`, if its
alpha at temperature 1 is above that of the shipped draft on the held-out files, the interval of the difference above 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from specnb.measure.statistics import Estimate, ratio_of_sums
from specnb.models.checkpoints import write_checksums
from specnb.models.loading import TRAINED_PAIR, Pair, load_pair
from specnb.notebook import corpus
from studies import run
from studies.speed.bench.tables import columns
from studies.training.distillation_training import CONTROL, PROMPT, RECIPES, Plan, Trained, acceptance, sampled, train
from studies.training.training import encode, save
from studies.training.training_loop import checkpoint_folder

TABLE = "distillation"
PLAN: dict[str, Any] = {
    "steps": 500, "horizon": 500, "search_steps": 25, "sampled_rows": 512, "validation_windows": 32, "rows": 16,
    "factors": (0.1, 0.3), "save_every": 25, "compiled": False,
}  # fmt: skip
SETTINGS: dict[str, Any] = {"plan": PLAN, "per_file": 4, "sampled_per_file": 2}
SMOKE_PLAN: dict[str, Any] = {
    "steps": 2, "horizon": 2, "search_steps": 1, "sampled_rows": 4, "validation_windows": 2, "rows": 2, "length": 40,
    "factors": (0.3,), "compiled": False,
}  # fmt: skip
SMOKE: dict[str, Any] = {"plan": SMOKE_PLAN, "per_file": 1, "sampled_per_file": 1, "files": 9}
SHIPPED = "shipped"
TEXT, OWN = "held-out text", "samples of the target"
TEMPERATURES = (1.0, 0.0)
DISTILLED = TRAINED_PAIR / "draft-distilled"


def items(**_: Any) -> list[str]:
    """One item: all students are trained together."""
    return ["all"]


def trained(plan: Plan) -> Trained:
    """The students of `plan`, from its checkpoint where that is complete."""
    return train(
        load_pair(packed=False),
        plan,
        checkpoint_folder(
            "studies.training.distillation_training", plan, TRAINED_PAIR / "target", TRAINED_PAIR / "draft"
        ),
    )


def held_out_windows(pair: Pair, length: int, per_file: int, files: int | None = None) -> tuple[Tensor, NDArray[Any]]:
    """Passages of `length` tokens, `(n, length)`, evenly spaced over each held-out file, and the file of each, `(n,)`.

    Files that are shorter have none.
    """
    rows, numbers = [], []
    for number, text in enumerate(corpus.read("held-out", limit=files)):
        tokens = encode(pair.tokenizer, [text]).astype(np.int64)
        if len(tokens) >= length:
            starts = np.unique(np.linspace(0, len(tokens) - length, per_file).astype(int))
            rows += [tokens[start : start + length] for start in starts]
            numbers += [number] * len(starts)
    return torch.from_numpy(np.stack(rows)), np.array(numbers)


def sums_per_file(values: Tensor, numbers: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and count of `values` `(n, positions)` in each file, `(files,)`."""
    files = np.unique(numbers)
    sums = np.array([float(values[torch.from_numpy(numbers == file)].double().sum()) for file in files])
    return sums, np.array([values.shape[1] * int((numbers == file).sum()) for file in files], dtype=np.float64)


@torch.inference_mode()
def bits_per_byte(pair: Pair, draft: PreTrainedModel, sequences: Tensor, numbers: NDArray[Any]) -> Estimate:
    """Bits that `draft` needs for the tokens after the first `PROMPT`, over their bytes; the interval is over files."""
    nats = []
    for rows in sequences.split(8):
        logits = draft(input_ids=rows[:, :-1], use_cache=False).logits[:, PROMPT - 1 :].float()
        nats.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, PROMPT:], reduction="none"))
    bits, _ = sums_per_file(torch.cat(nats) / math.log(2), numbers)
    lengths = torch.tensor([[len(str(pair.tokenizer.decode(row[PROMPT:])).encode())] for row in sequences.tolist()])
    return ratio_of_sums(bits, sums_per_file(lengths, numbers)[0])


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


def lines(betas: Mapping[str, Tensor], numbers: NDArray[Any]) -> pd.DataFrame:
    """A line for each draft: alpha, and the differences to the shipped draft and to the control."""
    found = []
    for name, beta in betas.items():
        line: dict[str, Any] = {"draft": name}
        differences = {"alpha": beta, "over_shipped": beta - betas[SHIPPED], "over_control": beta - betas[CONTROL]}
        for quantity, values in differences.items():
            line |= columns(quantity, ratio_of_sums(*sums_per_file(values, numbers)))
        found.append(line | {"files": len(np.unique(numbers)), "positions": beta.numel()})
    return pd.DataFrame(found)


def _label(name: str, found: Trained, plan: Plan) -> dict[str, Any]:
    if name == SHIPPED:
        return {"draft": name, "objective": CONTROL, "samples": False, "steps": 0, "tokens": 0}
    return {
        "draft": name,
        "objective": RECIPES[name].objective,
        "samples": RECIPES[name].samples,
        "steps": plan.steps,
        "tokens": plan.steps * plan.rows * plan.length,
        "rate": found.factors[name],
        "set_aside_alpha": found.validation[name],
    }


def gather(parts: pd.DataFrame) -> pd.DataFrame:
    """The table."""
    return parts


def is_better(table: pd.DataFrame, name: str) -> bool:
    """Whether a student's alpha at temperature 1 is above the shipped draft's, along text and along samples."""
    rows = table[(table.draft == name) & (table.temperature == 1)]
    return len(rows) > 0 and bool((rows.over_shipped_low > 0).all())


def ship(table: pd.DataFrame, folder: Path = DISTILLED) -> Path | None:
    """Saves the student that was best on the files set aside, if `is_better` says so; returns the folder."""
    name = str(table.draft[table.set_aside_alpha.idxmax()])
    if not is_better(table, name):
        return None
    plan, pair = Plan(**SETTINGS["plan"]), load_pair(packed=False)
    found = trained(plan)
    model = found.students[name]
    save(model, pair.tokenizer, folder)
    note = _label(name, found, plan) | {
        "continued": "data/pair/draft", "seed": plan.seed, "parameters": sum(w.numel() for w in model.parameters()),
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(note, indent=1) + "\n")
    write_checksums(folder)
    return folder


def main() -> None:
    """Trains, measures, writes the table with its record, and saves the best student."""
    (part,) = run.parts(TABLE)
    if not part.exists():
        run.run_item(TABLE, "all", part)
    table = pd.read_csv(run.gather(TABLE))
    shown = ["draft", "along", "temperature", "alpha", "over_shipped", "over_control", "bits_per_byte"]
    print(table[shown].round(4).to_string(index=False))
    print(f"saved: {ship(table)}")


if __name__ == "__main__":
    main()
