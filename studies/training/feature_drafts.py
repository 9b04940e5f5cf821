"""Does drafting from the target's features accept more than drafting from tokens?

Four drafts are trained on the same batches for the same objective (`studies.training.feature_training`): an attention
head, a recurrent head and parallel heads, which read the target's hidden states, and as their control a model of tokens
of the shape of the shipped draft. One line of the table for each draft, depth and kind of sequence, on held-out files
at temperature 1:

- `alpha`: mean acceptance probability of draft token number `depth` of a step, at every position after the first
  `PROMPT` tokens, given the tokens before it; depth "all" is the mean over depths. The control's is the same at every
  depth
- `over_control`: difference to the control at the same positions

Both with 95% intervals over files. `python -m studies.training.feature_drafts` saves the heads as
`data/pair/draft-attention`, `draft-recurrent` and `draft-parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.distributions import overlap
from specnb.drafting.heads import save_head
from specnb.models.loading import TRAINED_PAIR, load_pair
from studies import study
from studies.study import columns
from studies.training.evaluation import OWN, PROMPT, TEXT, Files, held_out_windows, mean_over_files, sampled
from studies.training.feature_training import DEPTHS, Plan, Student, states_of, train
from studies.training.training import add_note
from studies.training.training_loop import folder_of

CONTROL = "of tokens"
ALL = "all"


def trained(plan: Plan) -> dict[str, Student]:
    """The students of `plan`, from its checkpoint where that is complete."""
    return train(load_pair(packed=False), plan, folder_of("features", plan))


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


def lines(found: Mapping[str, Tensor], numbers: Files) -> pd.DataFrame:
    """A line for each draft and depth; `numbers` `(n,)` are the files of the sequences."""
    made = []
    depths = {ALL: slice(None)} | {str(k + 1): slice(k, k + 1) for k in range(DEPTHS)}
    for name, beta in found.items():
        for depth, at in depths.items():
            line: dict[str, Any] = {"draft": name, "depth": depth}
            for quantity, values in {"alpha": beta, "over_control": beta - found[CONTROL]}.items():
                line |= columns(quantity, mean_over_files(values[at].mean(dim=0), numbers))
            made.append(line | {"files": len(np.unique(numbers)), "positions": beta[0].numel()})
    return pd.DataFrame(made)


def measure(
    item: str, plan: Mapping[str, Any], per_file: int, sampled_per_file: int, files: int | None = None
) -> pd.DataFrame:
    """Trains the students and measures them."""
    chosen, pair = Plan(**plan), load_pair(packed=False)
    students = trained(chosen)
    torch.set_num_threads(chosen.threads)
    text, numbers = held_out_windows(pair, chosen.length + 1, per_file, files)
    prompts, prompt_numbers = held_out_windows(pair, chosen.length + 1, sampled_per_file, files)
    own = sampled(pair.target, prompts[:, :PROMPT], chosen.length + 1, 1.0, chosen.seed)
    parts = [
        lines(betas(pair.target, students, sequences, chosen.layers), of).assign(along=along)
        for along, sequences, of in ((TEXT, text, numbers), (OWN, own, prompt_numbers))
    ]
    table = pd.concat(parts, ignore_index=True)
    sizes = {name: sum(weight.numel() for weight in student.parameters()) for name, student in students.items()}
    tokens = chosen.steps * chosen.rows * chosen.length
    return table.assign(target="shipped", parameters=table.draft.map(sizes), steps=chosen.steps, tokens=tokens)


STUDY = study.Study(
    measure,
    settings={"plan": {"steps": 3200, "compiled": True}, "per_file": 4, "sampled_per_file": 2},
    small={
        "plan": {"steps": 2, "rows": 2, "length": 40, "hidden": 8, "wide": 8, "compiled": False},
        "per_file": 1, "sampled_per_file": 1, "files": 9,
    },
)  # fmt: skip


def ship(plan: Plan, folder: Path = TRAINED_PAIR) -> list[Path]:
    """Saves the heads beside the pair; returns their folders."""
    made = []
    for name, student in trained(plan).items():
        if name != CONTROL:
            made.append(folder / f"draft-{name}")
            save_head(student.head, made[-1])
            note = {"of": "data/pair/target", "from": "random weights", "objective": "total variation"}
            sizes = {"steps": plan.steps, "tokens": plan.steps * plan.rows * plan.length, "seed": plan.seed}
            add_note(made[-1], note | sizes | {"parameters": sum(weight.numel() for weight in student.parameters())})
    return made


if __name__ == "__main__":
    print("saved:", *ship(Plan(**STUDY.settings["plan"])))
