"""Collect tokens from other engines: the steps of `make engines` (`audit/engines.smk`).

    python -m audit_studies.engines.engines_collect prompts
    python -m audit_studies.engines.engines_collect openvino-none-t1
    build/engines/openvino/bin/python

Prompts are pieces of the held-out files; those of random targets are the first
tokens of these, modulo their vocabulary. Given a row of `audit/data/engines/rows.csv`, the engine
runs in its environment with the adapter of `audit_studies.engines.adapters`. The tokens go to
`audit/data/engines/tokens/<row>.jsonl.gz`, compressed to the same bytes each time, and what they
came from to `<row>.json`: version, settings, the dtype that the engine computes in, rows of a
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

from audit_studies.engines import random_targets
from audit_studies.engines.adapters.__main__ import adapter
from audit_studies.engines.engines import HEADS, NEW_TOKENS, SHIPPED, Row, digest, rows
from specnb.loading import TRAINED_PAIR, Pair, load_pair
from specnb.statistics import machine
from specnb_audit.cli.settings import Settings
from specnb_audit.cli.tokens_out import read_prompts
from studies import corpus
from studies.files import ROOT, data_file, write

PROMPTS = data_file("audit/engines/prompts.jsonl")
COUNT, LENGTHS = 256, (12, 44)  # prompts, and their tokens, the first of which begins the text
GAMMA = 4
# The packages, for the engine's own Python.
CODE = os.pathsep.join((str(ROOT), str(ROOT / "audit")))
RAW = ROOT / "build" / "engines" / "tokens"
MODELS = ROOT / "build" / "engines" / "models"


def prompts(pair: Pair, count: int = COUNT) -> list[list[int]]:
    """`count` prompts of 12 to 44 tokens; each starts at a line of a held-out file, all files in
    turn."""
    generator, texts, made = random.Random(0), corpus.read("held-out"), []
    for number in range(count):
        lines = texts[number % len(texts)].splitlines(keepends=True)
        start = generator.randrange(max(1, len(lines) - 40))
        made.append(pair.encode("".join(lines[start : start + 40]))[: generator.randint(*LENGTHS)])
    return made


def answer(python: str, code: str) -> str:
    """The last line that `code` prints with an engine's Python; engines print lines of their own
    before it."""
    paths = os.environ | {"PYTHONPATH": CODE}
    said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, env=paths).stdout
    return said.splitlines()[-1]


def version(engine: str, python: str) -> str:
    """The version of the engine's package in its environment."""
    return answer(python, f"from importlib.metadata import version; print(version({adapter(engine).PACKAGE!r}))")


def precision(row: Row, python: str) -> str:
    """The name of the dtype that the engine computes in: the row's, or the engine's own choice on
    this processor."""
    if row.dtype != "default":
        return row.dtype
    asked = f"default_dtype({str(TRAINED_PAIR / 'target')!r})"
    return answer(python, f"from audit_studies.engines.adapters.{row.released} import default_dtype; print({asked})")


def models(row: Row, python: str) -> tuple[Path, Path]:
    """The folders of the target and of the drafter. Random ones are written in the environment of
    the engine, whose release has their architecture."""
    if row.target == SHIPPED:
        return TRAINED_PAIR / "target", TRAINED_PAIR / HEADS.get(row.speculation, "draft")
    folder = MODELS / row.target
    if not folder.exists():
        code = "from pathlib import Path; from audit_studies.engines.random_targets import save"
        answer(python, f"{code}; print(save({row.target!r}, Path({str(folder)!r})))")
    return folder / "target", folder / row.speculation


def prompts_of(row: Row) -> Path:
    """The file of a row's prompts."""
    if row.target == SHIPPED:
        return PROMPTS
    made = RAW / f"prompts-{random_targets.VOCAB}.jsonl"
    ids = [[token % random_targets.VOCAB for token in prompt[: LENGTHS[0]]] for prompt in read_prompts(PROMPTS)]
    write(made, "".join(json.dumps(prompt) + "\n" for prompt in ids))
    return made


def command(row: Row, python: str, out: Path) -> list[str]:
    """The command that collects a row's tokens with the Python of the engine's environment."""
    target, drafter = models(row, python)
    options = {
        "target": target, "draft": drafter, "cache": MODELS, "prompts": prompts_of(row),
        "count": row.completions, "out": out, "speculation": row.speculation, "gamma": GAMMA,
        "temperature": row.temperature, "top-k": row.top_k, "top-p": row.top_p, "max-new-tokens": NEW_TOKENS,
        "seed": row.number, "dtype": row.dtype,
    }  # fmt: skip
    named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [python, "-m", "audit_studies.engines.adapters", row.engine, *named]


def batch(row: Row) -> int:
    """How many completions the adapter generates together."""
    engine = adapter(row.engine)
    one_length = row.target != SHIPPED and row.speculation == "none"
    return int(getattr(engine, "TOGETHER" if one_length else "BATCH", 1))


def collect(row: Row, python: str) -> Path:
    """Collects a row's tokens and returns their file. Raises `CalledProcessError` if the engine
    fails."""
    RAW.mkdir(parents=True, exist_ok=True)
    raw = RAW / f"{row.name}.jsonl"
    start, continued = time.perf_counter(), raw.exists() and raw.stat().st_size > 0
    paths = os.environ | {"PYTHONPATH": CODE, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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
        "batch": batch(row),
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
    """Writes the prompts, or collects a row."""
    parser = argparse.ArgumentParser("python -m audit_studies.engines.engines_collect", description=__doc__)
    parser.add_argument("what", choices=["prompts", *rows()], metavar="WHAT", help="prompts, row")
    parser.add_argument("python", nargs="?", default="", help="the Python of the engine's environment")
    asked = parser.parse_args(arguments)
    if asked.what == "prompts":
        write(PROMPTS, "".join(json.dumps(prompt) + "\n" for prompt in prompts(load_pair())))
    else:
        print(collect(rows()[asked.what], asked.python))


if __name__ == "__main__":
    main()
