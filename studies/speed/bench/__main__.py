"""Run the bench: `python -m studies.speed.bench [STAGES]` on a CPU, with `--device cuda` on a GPU."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

import torch

from specnb.measure.timing import machine
from specnb.notebook.findings import ROOT, out, stamp, write
from specnb.notebook.source_digest import module_digest
from studies.speed.bench.generators import PAIRS
from studies.speed.bench.plan import plan, small_plan
from studies.speed.bench.published_sizes import GpuBench
from studies.speed.bench.stages import STAGES
from studies.speed.bench.tables import NEW_TOKENS, recorded


def run_stages(stages: Sequence[str], repetitions: int, names: Sequence[str] = PAIRS) -> None:
    """Measures the stages and records in `data/results/bench.json`, by machine, what they were measured with."""
    path = out() / "data" / "results" / "bench.json"
    stamps = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for stage in stages:
        STAGES[stage](repetitions, names)
        under = {"repetitions": repetitions, "machine": machine(), "new_tokens": NEW_TOKENS}
        made = stamp(under) | {"code": module_digest(ROOT, "studies.speed.bench.stages")}
        made["parameters"]["pairs"] = list(names)
        stamps.setdefault(machine(), {})[stage] = made
        write(path, json.dumps(stamps, indent=1) + "\n")


def run_on_gpu(device: torch.device, dtype: str, minutes: float, anew: bool, small: bool) -> None:
    """Runs the tasks that are not done yet. Raises `SystemExit` where there is no GPU."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "bench: torch finds no CUDA device. `make bench` measures the CPU; `python -m studies.speed.bench "
            "--small` runs the bench of a GPU on tiny shapes."
        )
    left = GpuBench(device, getattr(torch, dtype), small).run(small_plan() if small else plan(), minutes, anew)
    print(f"{len(left)} tasks left; tables in {out() / 'data' / 'results' / 'gpu'}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures everything, or the stages that are named, writes the tables, and prints the goals."""
    parser = argparse.ArgumentParser("python -m studies.speed.bench", description="Measures speeds and costs.")
    parser.add_argument("stages", nargs="*", choices=[*STAGES, []], help="on a CPU: what to measure (default: all)")
    parser.add_argument("--repetitions", type=int, default=11, help="on a CPU: prompts for each figure (default 11)")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS, help="on a CPU: which pairs (default both)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default cpu)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="on a GPU (default bfloat16)")
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="on a GPU: start no task after so many (default 25)"
    )
    parser.add_argument("--anew", action="store_true", help="on a GPU: measure again what is done")
    parser.add_argument("--small", action="store_true", help="the bench of a GPU on tiny shapes, under build/small")
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    if asked.small:
        os.environ["SPECNB_OUT"] = str(out() / "build" / "small")
    if asked.small or device.type != "cpu":
        dtype = asked.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        run_on_gpu(device, dtype, asked.minutes, asked.anew, asked.small)
        goals = recorded("gpu/goals")
    else:
        run_stages(asked.stages or list(STAGES), asked.repetitions, asked.pairs)
        goals = recorded("bench")
    mine = goals[goals.machine == machine(device)] if len(goals) else goals
    print(mine.drop(columns="machine", errors="ignore").round(3).to_string(index=False))


if __name__ == "__main__":
    main()
