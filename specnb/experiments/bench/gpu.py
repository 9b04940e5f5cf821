"""What this project promises about time on a GPU, and Table 2 at the paper's own sizes: `make bench-gpu`.

Each task of `specnb.experiments.bench.plan` writes its rows as soon as it has them to `data/results/gpu/<device>_<table>.csv`,
beside a stamp of what was measured with and which tasks are done: run again, it goes on where it stopped, or
anew where code, versions or device are others. What does not fit into the device's memory is recorded as that.
`--device cpu --small` runs a little of it on tiny shapes, to see that it works, and writes to `build/gpu`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specnb.experiments.bench.plan import LARGE, LLAMA, SIZES, TINY, Task, plan, small_plan
from specnb.experiments.bench.setting import Row, Setting, Subject, empty, measure_cell, subject
from specnb.experiments.bench.tables import columns, goal_row, machine, settings
from specnb.experiments.side_by_side import (
    GenerateFunction,
    prompts_for,
    specnb_generate,
    time_side_by_side,
    transformers_generate,
)
from specnb.measure.memory_bandwidth import bandwidth
from specnb.measure.statistics import Estimate, ratio_of_medians
from specnb.models.loading import Pair, load_pair
from specnb.models.synthetic import synthetic_pair
from specnb.report.results import ROOT, out, stamp, write
from specnb.report.source_digest import module_digest
from specnb.sampling.distributions import Sampling

TEXTS = 32  # of the target alone, for alpha
ASSISTED_GAMMAS = (
    2,
    4,
    7,
)  # tried for transformers' assisted generation and for our loop alike; the best of each counts
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


class Bench:
    """A run on one device: the pair it holds, the tables it writes, and which of its tasks are done."""

    def __init__(self, device: torch.device, dtype: torch.dtype, small: bool) -> None:
        self.device, self.dtype, self.small = device, dtype, small
        self.folder = out() / ("build/gpu" if small else "data/results/gpu")
        self.stem = re.sub(r"[^a-z0-9]+", "-", machine(device).lower()).strip("-")
        self.held: tuple[Any, Subject] | None = None
        self.rate = bandwidth(device, size=2**20 if small else None)
        about = stamp({"machine": machine(device), "dtype": str(dtype), "small": small})
        about["code"] = module_digest(ROOT, "specnb.experiments.bench.gpu")
        self.about: dict[str, Any] = about | {"cuda": torch.version.cuda, "driver": driver(device)}
        self.done: list[str] = []

    def begin(self, anew: bool) -> None:
        """Takes up what an earlier run left if it was the same; otherwise its rows on this device go."""
        before = json.loads(self._path("json").read_text()) if self._path("json").exists() else {}
        same = all(before.get(name) == self.about[name] for name in self.about)
        if same and not anew:
            self.done = before["done"]
            return
        for path in (self._path("json"), *self.folder.glob(f"{self.stem}_*.csv")):
            path.unlink(missing_ok=True)

    def run(self, tasks: list[Task], minutes: float) -> list[str]:
        """Does what is not done yet, until the time is up; returns the keys of what is left."""
        until = time.monotonic() + 60 * minutes
        waiting = [task for task in tasks if task.key not in self.done]
        for task in tqdm(waiting, desc="tasks"):
            if time.monotonic() > until:
                break
            self.keep(task, self.rows(task))
            self.done.append(task.key)
            self.save([other.key for other in tasks if other.key not in self.done])
        return [task.key for task in tasks if task.key not in self.done]

    def rows(self, task: Task) -> list[Row]:
        """What a task finds; a single row that says so where the device's memory was not enough."""
        about = {"key": task.key} | task.printed
        try:
            who = self.subject(task)
            if task.table == "peers":
                return [about | row for row in against_transformers(who, task.how)]
            return [about | measure_cell(who, task.how, self.rate.value)]
        except OUT_OF_MEMORY as error:
            note = f"out of memory: {error}".splitlines()[0]
        empty()
        labels = {"pair": task.pair, "gamma": task.how.gamma, "temperature": task.temperature, "rows": task.how.rows}
        under = {"machine": machine(self.device), "compiled": task.how.compile, "note": note}
        return [about | labels | under]

    def subject(self, task: Task) -> Subject:
        """The pair of a task with its alpha measured; kept for the next task, and let go of before another is made."""
        which = (task.pair, task.alpha, task.temperature, task.prompt)
        if self.held is None or self.held[0] != which:
            self.held = None
            empty()
            pair = self.pair(task)
            prompts = prompts_for(pair, "trained" if task.pair == "trained" else "synthetic", TEXTS, task.prompt)
            who = subject(task.pair, pair, prompts, Sampling(task.temperature), task.how.new_tokens // 2)
            self.held = (which, who)
        return self.held[1]

    def pair(self, task: Task) -> Pair:
        """The pair of a task, made where and as it stays."""
        if task.pair == "trained":
            return load_pair(device=str(self.device), dtype=self.dtype, packed=False)
        target, draft, vocab = TINY if self.small else SIZES[task.pair]
        return synthetic_pair(
            task.alpha, target, draft, temperature=task.temperature, vocab=vocab, device=str(self.device),
            dtype=self.dtype, packed=False,
        )  # fmt: skip

    def keep(self, task: Task, rows: list[Row]) -> None:
        """Writes `rows` to the table of `task`, in place of those it had."""
        before = self.table(task.table)
        table = pd.DataFrame(rows)
        if len(before):
            table = pd.concat([before[before.key != task.key], table], ignore_index=True)
        self._write(task.table, table)

    def table(self, name: str) -> pd.DataFrame:
        """A table as it was written; empty if it was not."""
        path = self._path(f"{name}.csv")
        return pd.read_csv(path) if path.exists() else pd.DataFrame()

    def save(self, left: list[str]) -> None:
        """Writes the goals as far as they are measured, and the stamp."""
        reached = goals(self.table("batch"), self.table("peers"))
        if reached:
            self._write("goals", pd.DataFrame(reached))
        write(self._path("json"), json.dumps(self.about | {"done": self.done, "left": left}, indent=1) + "\n")

    def _write(self, name: str, table: pd.DataFrame) -> None:
        write(self._path(f"{name}.csv"), table.to_csv(index=False, lineterminator="\n", float_format="%.5g"))

    def _path(self, end: str) -> Path:
        return self.folder / (f"{self.stem}.json" if end == "json" else f"{self.stem}_{end}")


def against_transformers(who: Subject, how: Setting) -> list[Row]:
    """Milliseconds per token of transformers' loops and of ours on the same prompts, whole calls, one row at a time.

    `over_assisted` is how many times faster than transformers' assisted generation at its fastest setting.
    """
    target, draft, tokens = who.pair.target, who.pair.draft, how.new_tokens
    samplers: dict[tuple[str, int, bool | str], GenerateFunction] = {
        ("transformers", 0, False): transformers_generate(target, None, None, tokens),
        ("transformers assisted, defaults", -1, False): transformers_generate(target, draft, None, tokens),
    }
    for gamma in ASSISTED_GAMMAS:
        samplers["transformers assisted", gamma, False] = transformers_generate(target, draft, gamma, tokens)
    for compile in {how.compile: None, False: None}:
        for gamma in (0, *ASSISTED_GAMMAS):
            name = "speculative" if gamma else "target only"
            samplers[name, gamma, compile] = specnb_generate(who.pair, gamma, tokens, compile)
    names = {", ".join(map(str, key)): key for key in samplers}
    seconds = time_side_by_side({name: samplers[key] for name, key in names.items()}, who.prompts[: how.repetitions])
    assisted = [name for name in names if name.startswith("transformers assisted")]
    best = seconds[assisted].median().idxmin()
    rows: list[Row] = []
    for name, (sampler, gamma, compile) in names.items():
        times = seconds[name]
        rows.append(
            {"pair": who.name, "sampler": sampler, "gamma": gamma} | settings(who.pair, compile)
            | {"ms_per_token": 1e3 * float(times.median()) / tokens, "runs": len(times)}
            | columns("over_assisted", ratio_of_medians(seconds[best], times))
        )  # fmt: skip
    return rows


def goals(batch: pd.DataFrame, against_transformers: pd.DataFrame) -> list[Row]:
    """The goals that have been measured, laid out as those of `specnb.experiments.bench`: a ratio, and the least it should be."""
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
            times = (row["floor_plain_ms"] / row["plain_ms" + end] for end in ("", "_high", "_low"))
            add(row, f"{LLAMA}: floor over a step of the target only", 1 / 1.3, *times)
    mine = [
        row
        for row in against_transformers.to_dict("records")
        if (row["pair"], row.get("sampler")) == ("trained", "speculative")
    ]
    for compile in dict.fromkeys(row["compiled"] for row in mine):
        best = max((row for row in mine if row["compiled"] == compile), key=lambda row: row["over_assisted"])
        ratio = (best["over_assisted" + end] for end in ("", "_low", "_high"))
        add(best, "trained: over transformers assisted, each at its best gamma", 5.0, *ratio)
    return rows


def driver(device: torch.device) -> str:
    """The version of the device's driver, as its own tool says it."""
    if device.type != "cuda":
        return "none"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer[0] if answer else "unknown"


def main(arguments: list[str] | None = None) -> None:
    """Does what is left of the plan and prints the goals; a `SystemExit` with a message where there is no GPU."""
    parser = argparse.ArgumentParser(description="Measures speculation on a GPU; about twenty minutes on a large one.")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; cpu only with --small (default cuda)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None, help="default bfloat16")
    parser.add_argument("--minutes", type=float, default=25.0, help="begin no task after so many (default 25)")
    parser.add_argument("--anew", action="store_true", help="measure again what is done")
    parser.add_argument("--small", action="store_true", help="tiny shapes, in seconds, to see that it works")
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "bench-gpu: torch finds no CUDA device here. `make bench` measures the processor; "
            "`python -m specnb.experiments.bench.gpu --device cpu --small` runs this on tiny shapes, to see that it works."
        )
    if device.type != "cuda" and not asked.small:
        raise SystemExit(f"bench-gpu: shapes of billions of weights are for a GPU; on {device} add --small")
    dtype = asked.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    bench = Bench(device, getattr(torch, dtype), asked.small)
    bench.begin(asked.anew)
    left = bench.run(small_plan() if asked.small else plan(), asked.minutes)
    print(bench.table("goals").drop(columns="machine", errors="ignore").round(3).to_string(index=False))
    print(f"{len(bench.done)} tasks done, {len(left)} left; tables in {bench.folder}/{bench.stem}_*.csv")


if __name__ == "__main__":
    main()
