"""The tasks of the bench on a GPU, in order, and the sizes of the pairs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from specnb.models.shapes import Shape
from specnb.notebook.findings import ROOT
from studies.speed.bench.generators import PROMPT_TOKENS
from studies.speed.bench.setting import Setting
from studies.speed.shapes import HUNDREDTH, PUBLISHED, whole

GAMMA = 4
ALPHA = 0.75  # of the other synthetic pairs; Table 2's English to German with T5-small at temperature 0
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
EAGER = (1, 16, 256)
ARTICLE = {"ende": PROMPT_TOKENS, "cnndm": 512}  # tokens that T5's encoder reads in Table 2

LARGE = "T5-XXL 11B / T5-small 77M"  # with every weight read in every step, as a decoder does
LLAMA = "Llama 3.1 8B / a hundredth"
LLAMA2 = "Llama 2 13B / a hundredth"
GPT = "GPT-like 97M / 6M"
SIZES = {
    LARGE: (whole(PUBLISHED["t5-xxl"].shape), whole(PUBLISHED["t5-small"].shape), PUBLISHED["t5-xxl"].vocab),
    GPT: (PUBLISHED["gpt-like-97m"].shape, PUBLISHED["gpt-like-6m"].shape, PUBLISHED["gpt-like-97m"].vocab),
} | {
    pair: (PUBLISHED[target].shape, HUNDREDTH[target], PUBLISHED[target].vocab)
    for pair, target in ((LLAMA, "llama-3.1-8b"), (LLAMA2, "llama-2-13b"))
} | {
    f"T5-XXL step / {draft} step": (PUBLISHED["t5-xxl"].shape, PUBLISHED[draft].shape, PUBLISHED["t5-xxl"].vocab)
    for draft in ("t5-small", "t5-base", "t5-large")
}  # fmt: skip
TINY = (Shape(2, 64, 96, 4, gated=True, kv_heads=2), Shape(1, 32, 64, 2), 256)


@dataclass(frozen=True)
class Task:
    """One or more rows of a table: a pair (synthetic unless it is "trained") and its setting."""

    table: str
    pair: str
    setting: Setting
    alpha: float = ALPHA
    temperature: float = 1.0
    prompt: int = PROMPT_TOKENS
    printed: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        """Its name in the tables."""
        compiled = (
            self.setting.compile
            if isinstance(self.setting.compile, str)
            else "compiled"
            if self.setting.compile
            else "eager"
        )
        where = f", {self.printed['task']}" if self.printed else ""
        return (
            f"{self.table}: {self.pair}, rows {self.setting.rows}, {compiled}, temperature {self.temperature:g}{where}"
        )


def plan() -> list[Task]:
    """All tasks in order: the goals, Table 2, every batch size, then eager and compiled steps."""
    one, many = Setting(GAMMA, 1, "graph"), Setting(GAMMA, 1, "graph", new_tokens=64, repetitions=5)
    pairs = ("trained", LLAMA, GPT, LARGE, LLAMA2)
    tasks = [Task("peers", "trained", one), *(Task("batch", pair, one) for pair in ("trained", LARGE, LLAMA))]
    tasks += table2(one)
    tasks += [Task("batch", pair, replace(many if rows > 1 else one, rows=rows)) for pair in pairs for rows in BATCHES]
    tasks += [Task("peers", LARGE, one)]
    tasks += [Task("batch", pair, replace(many, rows=rows, compile=False)) for pair in pairs for rows in EAGER]
    tasks += [Task("batch", pair, replace(one, compile=True)) for pair in ("trained", GPT)]
    return list({task.key: task for task in tasks}.values())  # each once, where it comes first


def small_plan() -> list[Task]:
    """A few tasks of each kind with tiny pairs of the same names, which take seconds on a CPU."""
    tasks = [task for task in plan() if task.setting.rows <= 2 and task.setting.compile == "graph"]
    few = [task for task in tasks if task.pair in ("trained", LARGE, LLAMA)]
    some = [task for task in tasks if task.table == "table2"][::5]
    return [
        replace(task, setting=replace(task.setting, compile=False, new_tokens=8, repetitions=3)) for task in few + some
    ]


def table2(setting: Setting) -> list[Task]:
    """The rows of the paper's Table 2 as tasks: its sizes, alphas, gammas and temperatures, and what it printed."""
    printed = pd.read_csv(ROOT / "data" / "reference" / "table2_and_4_walltime.csv").to_dict("records")
    return [
        Task("table2", f"T5-XXL step / {row['draft']} step", replace(setting, gamma=row["gamma"]), row["alpha"],
             float(row["temperature"]), ARTICLE[row["task"]],
             {"task": row["task"], "paper_c": row["cost_ratio"], "paper_alpha": row["alpha"],
              "paper_predicted": row["expected"], "paper_measured": row["measured"]})
        for row in printed
    ]  # fmt: skip
