"""Does drafting from the target's features accept more than drafting from tokens? `make features`.

Four drafts are trained on the same batches for the same objective (`studies.training.feature_training`): an attention
head, a recurrent head and parallel heads, which read the target's hidden states, and as their control a model of tokens
of the shape of the shipped draft. For the larger target the attention head is trained further, without a control. One
line of `data/results/feature_drafts.csv` for each target, draft, depth and kind of sequence, on held-out files at
temperature 1:

- `alpha`: mean acceptance probability of draft token number `depth` of a step, at every position after the first
  `PROMPT` tokens, given the tokens before it; depth "all" is the mean over depths. The control's is the same at every
  depth
- `over_control`: difference to the control at the same positions

Both with 95% intervals over files. The command saves the heads as `data/pair/draft-attention`, `draft-recurrent`,
`draft-parallel` and `draft-attention-larger`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from specnb.distributions import overlap
from specnb.drafting.heads import save_head
from specnb.measure.statistics import ratio_of_sums
from specnb.models.checkpoints import write_checksums
from specnb.models.loading import TRAINED_PAIR, Pair, load_pair
from studies import run
from studies.speed.bench.tables import columns
from studies.training.distillation import OWN, TEXT, held_out_windows, sums_per_file
from studies.training.distillation_training import PROMPT, sampled
from studies.training.feature_training import (
    DEPTHS,
    Attention,
    Parallel,
    Plan,
    Recurrent,
    Student,
    states_of,
    train,
)
from studies.training.larger_target import LARGER
from studies.training.training_loop import checkpoint_folder

TABLE = "feature_drafts"
PLAN: dict[str, Any] = {"steps": 3200, "compiled": True}
LARGER_PLAN: dict[str, Any] = {
    "steps": 1600, "compiled": True, "target": LARGER.name, "students": ("attention",), "start": "draft-attention",
    "layers": (10, 20, -1),
}  # fmt: skip
SETTINGS: dict[str, Any] = {"plans": {"shipped": PLAN, "larger": LARGER_PLAN}, "per_file": 4, "sampled_per_file": 2}
SMOKE_PLAN: dict[str, Any] = {"steps": 2, "rows": 2, "length": 40, "hidden": 8, "wide": 8, "compiled": False}
SMOKE: dict[str, Any] = {"plans": {"shipped": SMOKE_PLAN}, "per_file": 1, "sampled_per_file": 1, "files": 9}
CONTROL = "of tokens"
ALL = "all"


def items(plans: Mapping[str, Any], **_: Any) -> list[str]:
    """The targets: all students of one are trained together."""
    return list(plans)


def pair_of(plan: Plan) -> Pair:
    """The pair with the target of `plan`, whose weights are as saved."""
    return load_pair(target=TRAINED_PAIR / plan.target, packed=False)


def trained(plan: Plan) -> dict[str, Student]:
    """The students of `plan`, from its checkpoint where that is complete."""
    models = [TRAINED_PAIR / name for name in (plan.target, plan.start) if name]
    return train(pair_of(plan), plan, checkpoint_folder("studies.training.feature_training", plan, *models))


@torch.inference_mode()
def betas(
    target: PreTrainedModel, students: Mapping[str, Student], sequences: Tensor, layers: tuple[int, ...]
) -> dict[str, Tensor]:
    """beta `(DEPTHS, n, length - PROMPT)` of each student's draft tokens along `sequences` `(n, length)`."""
    found: dict[str, list[Tensor]] = {name: [] for name in students}
    for rows in sequences.split(8):
        seen = target(input_ids=rows[:, :-1], use_cache=False, output_hidden_states=True)
        p = torch.softmax(seen.logits[:, PROMPT - 1 :], dim=-1)
        states = states_of(seen.hidden_states, layers)
        for name, student in students.items():
            parts = student(rows[:, :-1], states)
            of_depths = [
                overlap(p, torch.softmax(logits[:, PROMPT - 1 - (at.start or 0) :], dim=-1)) for logits, at in parts
            ]
            found[name].append(torch.stack(of_depths).expand(DEPTHS, -1, -1))
    return {name: torch.cat(parts, dim=1) for name, parts in found.items()}


def lines(found: Mapping[str, Tensor], numbers: NDArray[Any]) -> pd.DataFrame:
    """A line for each draft and depth; `numbers` `(n,)` are the files of the sequences."""
    made = []
    depths = {ALL: slice(None)} | {str(k + 1): slice(k, k + 1) for k in range(DEPTHS)}
    for name, beta in found.items():
        for depth, at in depths.items():
            line: dict[str, Any] = {"draft": name, "depth": depth}
            quantities = {"alpha": beta} | ({"over_control": beta - found[CONTROL]} if CONTROL in found else {})
            for quantity, values in quantities.items():
                line |= columns(quantity, ratio_of_sums(*sums_per_file(values[at].mean(dim=0), numbers)))
            made.append(line | {"files": len(np.unique(numbers)), "positions": beta[0].numel()})
    return pd.DataFrame(made)


def measure(
    item: str, plans: Mapping[str, Any], per_file: int, sampled_per_file: int, files: int | None = None
) -> pd.DataFrame:
    """Trains the students and measures them."""
    chosen = Plan(**plans[item])
    pair, students = pair_of(chosen), trained(chosen)
    torch.set_num_threads(chosen.threads)
    text, numbers = held_out_windows(pair, chosen.length + 1, per_file, files)
    prompts, prompt_numbers = held_out_windows(pair, chosen.length + 1, sampled_per_file, files)
    own = sampled(pair.target, prompts[:, :PROMPT], chosen.length + 1, 1.0, chosen.seed)
    parts = [
        lines(betas(pair.target, students, sequences, chosen.layers), of).assign(along=along)
        for along, sequences, of in ((TEXT, text, numbers), (OWN, own, prompt_numbers))
    ]
    sizes = {name: sum(weight.numel() for weight in student.parameters()) for name, student in students.items()}
    table = pd.concat(parts, ignore_index=True)
    return table.assign(
        target=item,
        parameters=table.draft.map(sizes),
        steps=chosen.steps,
        tokens=chosen.steps * chosen.rows * chosen.length,
    )


def gather(parts: pd.DataFrame) -> pd.DataFrame:
    """The table."""
    return parts


def ship(plan: Plan, folder: Path = TRAINED_PAIR) -> list[Path]:
    """Saves the heads beside the pair; returns their folders."""
    made = []
    for name, student in trained(plan).items():
        if isinstance(student, Attention | Recurrent | Parallel):
            made.append(folder / (f"draft-{name}" + plan.target.removeprefix("target")))
            save_head(student.head, made[-1])
            note = {
                "of": f"data/pair/{plan.target}",
                "from": plan.start or "random weights",
                "objective": "total variation",
                "steps": plan.steps,
                "tokens": plan.steps * plan.rows * plan.length,
                "seed": plan.seed,
                "parameters": sum(weight.numel() for weight in student.parameters()),
            }
            (made[-1] / "training.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
            write_checksums(made[-1])
    return made


def main() -> None:
    """Trains, measures, writes the table with its record, and saves the heads."""
    for item, part in zip(items(**SETTINGS), run.parts(TABLE), strict=True):
        if not part.exists():
            run.run_item(TABLE, item, part)
        print("saved:", *ship(Plan(**SETTINGS["plans"][item])))  # the next item may begin with these
    table = pd.read_csv(run.gather(TABLE))
    print(
        table[["target", "draft", "depth", "along", "alpha", "over_control", "parameters"]]
        .round(4)
        .to_string(index=False)
    )


if __name__ == "__main__":
    main()
