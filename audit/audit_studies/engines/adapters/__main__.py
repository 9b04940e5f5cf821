"""Collects tokens from an engine; run with the Python of the engine's environment, and the package
on PYTHONPATH.

    python -m audit_studies.engines.adapters openvino --target TARGET --draft DRAFT --prompts
    prompts.jsonl --out FILE python -m audit_studies.engines.adapters openvino ... --speculation
    draft --temperature 0.7 --top-k 40

Started again with the same arguments it continues the file. Exit status 2, with one line on stderr,
for what cannot be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import cast

from audit_studies.engines.adapters import Adapter, Models
from specnb_audit.cli.settings import add_settings, requests, settings_of
from specnb_audit.cli.tokens_out import complete_lines, read_prompts, to_stderr, write_tokens

ENGINES = ("llama_cpp", "mlx_lm", "onnxruntime", "openvino", "transformers", "transformers_mended", "vllm",
           "vllm_mended")  # fmt: skip


def adapter(engine: str) -> Adapter:
    """The module of an engine's adapter."""
    return cast(Adapter, import_module(f"audit_studies.engines.adapters.{engine}"))


def run(options: argparse.Namespace) -> None:
    """Appends to the file of tokens what it lacks. Raises `ValueError` for what the engine has no
    adapter for."""
    settings, engine = settings_of(options), adapter(options.engine)
    if settings.speculation not in engine.SUPPORTED:
        kinds = ", ".join(engine.SUPPORTED)
        raise ValueError(f"{options.engine} has no speculation of kind {settings.speculation!r}; it has {kinds}")
    asked = requests(read_prompts(options.prompts), settings, options.count)
    done = complete_lines(options.out, [one.prompt for one in asked], asdict(settings))
    if done == len(asked):
        return
    rest, models = asked[done:], Models(options.target, options.draft, options.cache)
    completions = engine.generate(models, rest, settings)
    write_tokens(options.out, [one.prompt for one in rest], completions, to_stderr, asdict(settings))


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    options = argparse.ArgumentParser("python -m audit_studies.engines.adapters", description=__doc__)
    add = options.add_argument
    add("engine", choices=ENGINES)
    add("--target", type=Path, required=True, help="folder of the target")
    add("--draft", type=Path, help="folder of the draft model")
    add("--cache", type=Path, default=Models.cache, help="folder of converted models (default: %(default)s)")
    add("--prompts", type=Path, required=True, help="a list of token ids a line")
    add("--count", type=int, default=0, help="completions; prompts are repeated (default: one for each prompt)")
    add("--out", type=Path, required=True, help="file of tokens for `specnb-audit audit`")
    add_settings(add)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = parser().parse_args(argv)
    try:
        run(options)
    except (ValueError, OSError, ImportError) as error:
        to_stderr(f"{options.engine}: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
