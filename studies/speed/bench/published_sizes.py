"""The bench on a GPU: pairs of published sizes, and Table 2 at the paper's own sizes.

Each task of `studies.speed.bench.plan` writes its rows to `data/results/gpu/<table>.csv` when it is done. Rows
state machine, code and versions; a later run measures what has no rows under its own conditions. A task that
does not fit into the device's memory gets a row that says so.
"""

from __future__ import annotations

import subprocess
import time
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specnb.distributions import Sampling
from specnb.measure.statistics import Estimate
from specnb.measure.timing import machine
from specnb.models.loading import Pair, load_pair
from specnb.notebook.findings import ROOT
from specnb.notebook.source_digest import module_digest
from studies.speed.bench.against_transformers import compare_gammas
from studies.speed.bench.generators import prompts_for
from studies.speed.bench.plan import LARGE, LLAMA, SIZES, TINY, Task
from studies.speed.bench.setting import Row, Workload, free_memory, measure_setting, workload
from studies.speed.bench.tables import goal_row, keep, recorded
from studies.speed.memory_bandwidth import bandwidth
from studies.speed.synthetic import synthetic_pair

SEQUENCES = 32  # of the target alone, for alpha
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
TABLES = ("peers", "batch", "table2")


class GpuBench:
    """Runs tasks on one device, and keeps the pair of the last task."""

    def __init__(self, device: torch.device, dtype: torch.dtype, small: bool) -> None:
        self.device, self.dtype, self.small = device, dtype, small
        self.loaded: tuple[Any, Workload] | None = None
        self.bandwidth = bandwidth(device, size=2**20 if small else None).value
        self.conditions: Row = {
            "machine": machine(device),
            "dtype": str(dtype).removeprefix("torch."),
            "code": module_digest(ROOT, "studies.speed.bench.published_sizes"),
            "torch": torch.__version__,
            "driver": driver(device),
        }

    def run(self, tasks: list[Task], minutes: float, anew: bool = False) -> list[str]:
        """Runs the tasks that have no rows under these conditions, and starts none after so many minutes.

        Writes their rows and the goals; returns the keys of the tasks that remain.
        """
        until = time.monotonic() + 60 * minutes
        done = set() if anew else {key for name in TABLES for key in self.table(name).get("key", [])}
        waiting = [task for task in tasks if task.key not in done]
        for task in tqdm(list(waiting), desc="tasks"):
            if time.monotonic() > until:
                break
            rows = [{"key": task.key} | task.printed | row | self.conditions for row in self.rows(task)]
            keep(f"gpu/{task.table}", pd.DataFrame(rows), ("machine", "key"))
            waiting.remove(task)
            reached = goals(self.table("batch"), self.table("peers"))
            if reached:
                keep("gpu/goals", pd.DataFrame(reached))
        return [task.key for task in waiting]

    def table(self, name: str) -> pd.DataFrame:
        """The rows of a table that were measured under these conditions."""
        table = recorded(f"gpu/{name}")
        for column, value in self.conditions.items():
            table = table[table[column].astype(str) == str(value)] if len(table) else table
        return table

    def rows(self, task: Task) -> list[Row]:
        """The rows of a task; a single one with a note where the device's memory was not enough."""
        try:
            load = self.workload(task)
            if task.table == "peers":
                return compare_gammas(load, task.setting)
            return [measure_setting(load, task.setting, self.bandwidth)]
        except OUT_OF_MEMORY as error:
            note = f"out of memory: {error}".splitlines()[0]
        free_memory()
        labels = {"pair": task.pair, "gamma": task.setting.gamma, "temperature": task.temperature}
        return [labels | {"rows": task.setting.rows, "compiled": task.setting.compile, "note": note}]

    def workload(self, task: Task) -> Workload:
        """The pair of a task with its alpha measured. It stays loaded for the next task."""
        which = (task.pair, task.alpha, task.temperature, task.prompt)
        if self.loaded is None or self.loaded[0] != which:
            self.loaded = None
            free_memory()
            pair = self.pair(task)
            prompts = prompts_for(pair, "trained" if task.pair == "trained" else "synthetic", SEQUENCES, task.prompt)
            new_tokens = task.setting.new_tokens // 2
            self.loaded = (which, workload(task.pair, pair, prompts, Sampling(task.temperature), new_tokens))
        return self.loaded[1]

    def pair(self, task: Task) -> Pair:
        """The pair of a task, made on the device."""
        if task.pair == "trained":
            return load_pair(device=str(self.device), dtype=self.dtype, packed=False)
        target, draft, vocab = TINY if self.small else SIZES[task.pair]
        return synthetic_pair(
            task.alpha, target, draft, temperature=task.temperature, vocab=vocab, device=str(self.device),
            dtype=self.dtype, packed=False,
        )  # fmt: skip


def goals(batch: pd.DataFrame, compared: pd.DataFrame) -> list[Row]:
    """The goals that have been measured, one row each as in `bench.csv`."""
    rows: list[Row] = []

    def add(row: Row, name: str, least: float, value: float, low: float = np.nan, high: float = np.nan) -> None:
        under = {name: row[name] for name in ("machine", "threads", "dtype", "compiled")}
        rows.append(goal_row(name, Estimate(value, low, high, 0), least, under))

    for row in batch.to_dict("records"):
        if row["rows"] > 1 or "predicted" not in row or np.isnan(row["predicted"]):
            continue
        if row["pair"] == LARGE:
            name = f"{LARGE}: measured over predicted, gamma {row['gamma']}"
            for kind, column in (("", "measured"), (", whole calls", "calls")):
                add(row, name + kind, 0.85, *(row[column + end] / row["predicted"] for end in ("", "_low", "_high")))
            add(row, f"{name}, tokens as counted", 0.85, row["measured"] / row["counted"])
        if row["pair"] == LLAMA:
            times = (row["bound_plain_ms"] / row["plain_ms" + end] for end in ("", "_high", "_low"))
            add(row, f"{LLAMA}: memory bound over a step of the target only", 1 / 1.3, *times)
    speculative = [
        row for row in compared.to_dict("records") if (row["pair"], row.get("sampler")) == ("trained", "speculative")
    ]
    for compile in dict.fromkeys(row["compiled"] for row in speculative):
        best = max((row for row in speculative if row["compiled"] == compile), key=lambda row: row["over_assisted"])
        ratio = (best["over_assisted" + end] for end in ("", "_low", "_high"))
        add(best, "trained: over transformers assisted, each at its best gamma", 5.0, *ratio)
    return rows


def driver(device: torch.device) -> str:
    """The version of the device's driver, as nvidia-smi reports it."""
    if device.type != "cuda":
        return "none"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer[0] if answer else "unknown"
