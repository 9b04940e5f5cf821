"""Collect tokens from other engines: the steps of `make engines` (`engines.smk`).

    python -m studies.engines.engines_collect prompts
    python -m studies.engines.engines_collect openvino build/engines/openvino/bin/python
    python -m studies.engines.engines_collect openvino-none-t1 build/engines/openvino/bin/python

Prompts are pieces of the held-out files. Given an engine, the step compares its converted models with the checkpoints:
`data/engines/converted.csv` has a line for each engine and model with the largest difference of a log-probability over
all tokens, and of a next-token distribution in total variation. No row is collected from a model whose distributions
are further off than `LIMIT`.

Given a row of `data/engines/rows.csv`, the engine runs in its own environment, with the adapter of
`studies.engines.adapters`. The tokens go to `data/engines/tokens/<row>.jsonl.gz`, compressed to the same bytes each
time, and what they came from to `<row>.json`: version, settings, the dtype that the engine computes in, rows of a
batch, and the seeds of the first and the last completion (those between are consecutive).
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specnb.distributions import total_variation
from specnb.measure.timing import machine
from specnb.models.loading import TRAINED_PAIR, Pair, load_pair
from specnb.notebook.findings import ROOT, write
from specnb_audit.cli.settings import Settings
from specnb_audit.cli.tokens_out import read_prompts
from studies import corpus
from studies.corpus import DATA
from studies.engines.adapters.__main__ import adapter
from studies.engines.engines import NEW_TOKENS, Row, digest, rows

PROMPTS = DATA / "engines" / "prompts.jsonl"
COUNT, LENGTHS = 256, (12, 44)  # prompts, and their tokens, the first of which begins the text
GAMMA = 4
RAW = ROOT / "build" / "engines" / "tokens"
MODELS = ROOT / "build" / "engines" / "models"
CONVERTED = DATA / "engines" / "converted.csv"
CONVERTING = ("llama_cpp", "mlx_lm", "onnxruntime", "openvino")
COMPARED = 8  # prompts that converted models are compared after
LIMIT = 1e-3
"""In total variation: a tenth of what an audit of 20,000 tokens can find."""


def prompts(pair: Pair, count: int = COUNT) -> list[list[int]]:
    """`count` prompts of 12 to 44 tokens; each starts at a line of a held-out file, all files in turn."""
    generator, texts, made = random.Random(0), corpus.read("held-out"), []
    for number in range(count):
        lines = texts[number % len(texts)].splitlines(keepends=True)
        start = generator.randrange(max(1, len(lines) - 40))
        made.append(pair.encode("".join(lines[start : start + 40]))[: generator.randint(*LENGTHS)])
    return made


def answer(python: str, code: str) -> str:
    """The last line that `code` prints with an engine's Python; engines print lines of their own before it."""
    paths = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, env=paths).stdout
    return said.splitlines()[-1]


def version(engine: str, python: str) -> str:
    """The version of the engine's package in its environment."""
    return answer(python, f"from importlib.metadata import version; print(version({adapter(engine).PACKAGE!r}))")


def precision(row: Row, python: str) -> str:
    """The name of the dtype that the engine computes in: the row's, or the engine's own choice on this processor."""
    if row.dtype != "default":
        return row.dtype
    asked = f"default_dtype({str(TRAINED_PAIR / 'target')!r})"
    return answer(python, f"from studies.engines.adapters.{row.environment} import default_dtype; print({asked})")


def converted_logits(engine: str, python: str, name: str, given: Sequence[Sequence[int]]) -> Tensor:
    """What the engine computes after each prompt with its conversion of the model `name`, `(prompts, vocab)`."""
    folders = ", ".join(f"Path({str(path)!r})" for path in (TRAINED_PAIR / "target", TRAINED_PAIR / "draft", MODELS))
    code = (
        f"import json; from pathlib import Path; from studies.engines.adapters.{engine} import Models, logits; "
        f"print(json.dumps(logits(Models({folders}), {name!r}, {[list(prompt) for prompt in given]!r})))"
    )
    return torch.tensor(json.loads(answer(python, code)), dtype=torch.float64)


@torch.inference_mode()
def original_logits(name: str, given: Sequence[Sequence[int]]) -> Tensor:
    """The same of the checkpoint in float64."""
    model = AutoModelForCausalLM.from_pretrained(TRAINED_PAIR / name, dtype=torch.float64)
    return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in given])


def differences(one: Tensor, other: Tensor) -> dict[str, float]:
    """The columns of the table for logits `(prompts, vocab)` of a converted model and of the original."""
    logs = one.log_softmax(-1), other.log_softmax(-1)
    return {
        "log_probability": float((logs[0] - logs[1]).abs().max()),
        "total_variation": float(total_variation(logs[0].exp(), logs[1].exp()).max()),
    }


def check(engine: str, python: str, table: Path = CONVERTED) -> None:
    """Writes the lines of `engine` to `table`. Raises `ValueError` for a model further off than `LIMIT`."""
    given = read_prompts(PROMPTS)[:COMPARED]
    label = {"engine": engine, "version": version(engine, python)}
    lines = []
    for name in ("target", "draft"):
        apart = differences(converted_logits(engine, python, name, given), original_logits(name, given))
        if not apart["total_variation"] <= LIMIT:
            raise ValueError(
                f"the {name} as converted for {engine} has a total variation of {apart['total_variation']:.2g} to the "
                f"checkpoint; the limit is {LIMIT:g}, because an audit could take more for an error of the sampler"
            )
        lines.append(label | {"model": name, "prompts": len(given)} | apart)
    others = pd.read_csv(table).query("engine != @engine").to_dict("records") if table.exists() else []
    every = pd.DataFrame([*others, *lines]).sort_values("engine", kind="stable")
    write(table, every.to_csv(index=False, lineterminator="\n", float_format="%.2g"))


def command(row: Row, python: str, out: Path) -> list[str]:
    """The command that collects a row's tokens with the Python of the engine's environment."""
    options = {
        "target": TRAINED_PAIR / "target", "draft": TRAINED_PAIR / "draft", "cache": MODELS, "prompts": PROMPTS,
        "count": row.completions, "out": out, "speculation": row.speculation, "gamma": GAMMA,
        "temperature": row.temperature, "top-k": row.top_k, "top-p": row.top_p, "max-new-tokens": NEW_TOKENS,
        "seed": row.number, "dtype": row.dtype,
    }  # fmt: skip
    named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [python, "-m", "studies.engines.adapters", row.engine, *named]


def collect(row: Row, python: str) -> Path:
    """Collects a row's tokens and returns their file. Raises `CalledProcessError` if the engine fails."""
    RAW.mkdir(parents=True, exist_ok=True)
    raw = RAW / f"{row.name}.jsonl"
    start, continued = time.perf_counter(), raw.exists() and raw.stat().st_size > 0
    paths = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run(command(row, python, raw), check=True, env=paths)
    seconds = None if continued else round(time.perf_counter() - start, 1)
    compress(raw, row.file)
    record = {
        "engine": row.engine,
        "package": adapter(row.engine).PACKAGE,
        "version": version(row.engine, python),
        "settings": row._asdict(),
        "gamma": GAMMA,
        "computes_in": precision(row, python),
        "batch": getattr(adapter(row.engine), "BATCH", 1),
        "seeds": [Settings(seed=row.number).seed_of(number) for number in (0, row.completions - 1)],
        "completions": len(read_prompts(raw)),
        "seconds": seconds,
        "processor": machine(),
        "sha256": digest(row.file),
    }
    write(row.file.with_name(f"{row.name}.json"), json.dumps(record, indent=1) + "\n")
    raw.unlink()
    return row.file


def compress(file: Path, out: Path) -> None:
    """Writes `file` gzipped to `out`: the same bytes for the same content, without name or time."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0, compresslevel=9) as stream:
        stream.write(file.read_bytes())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(packed.getvalue())


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the prompts, checks the models of an engine, or collects a row."""
    parser = argparse.ArgumentParser("python -m studies.engines.engines_collect", description=__doc__)
    parser.add_argument("what", choices=["prompts", *CONVERTING, *rows()], metavar="WHAT", help="prompts, engine, row")
    parser.add_argument("python", nargs="?", default="", help="the Python of the engine's environment")
    asked = parser.parse_args(arguments)
    if asked.what == "prompts":
        write(PROMPTS, "".join(json.dumps(prompt) + "\n" for prompt in prompts(load_pair(packed=False))))
    elif asked.what in CONVERTING:
        check(asked.what, asked.python)
    else:
        print(collect(rows()[asked.what], asked.python))


if __name__ == "__main__":
    main()
