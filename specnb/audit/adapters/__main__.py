"""Collects tokens from an engine; run with the Python of the engine's environment, and the package on PYTHONPATH.

    python -m specnb.audit.adapters openvino --target TARGET --draft DRAFT --prompts prompts.jsonl --out tokens.jsonl
    python -m specnb.audit.adapters openvino ... --speculation draft --temperature 0.7 --top-k 40

Started again with the same arguments it continues the file. Exit status 2, with one line on stderr, for what cannot be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from specnb.audit.adapters.settings import DTYPES, SPECULATIONS, Adapter, Models, Settings, requests
from specnb.audit.adapters.tokens_out import complete_lines, read_prompts, to_stderr, write_tokens

ENGINES = ("llama_cpp", "mlx_lm", "onnxruntime", "openvino", "transformers", "vllm", "vllm_mended")


def adapter(engine: str) -> Adapter:
    """The module of an engine's adapter.

    >>> adapter("openvino").PACKAGE
    'openvino-genai'
    """
    return cast(Adapter, import_module(f"specnb.audit.adapters.{engine}"))


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the options name."""
    return Settings(
        options.temperature, options.top_k, options.top_p, options.speculation, options.gamma, options.seed,
        options.max_new_tokens, options.dtype,
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Appends to the file of tokens what it lacks. Raises `ValueError` for what the engine has no adapter for."""
    settings, engine = settings_of(options), adapter(options.engine)
    if settings.speculation not in engine.SUPPORTED:
        kinds = ", ".join(engine.SUPPORTED)
        raise ValueError(f"{options.engine} has no speculation of kind {settings.speculation!r}; it has {kinds}")
    asked = requests(read_prompts(options.prompts), settings, options.count)
    done = complete_lines(options.out, [one.prompt for one in asked])
    if done == len(asked):
        return
    rest, models = asked[done:], Models(options.target, options.draft, options.cache)
    completions = engine.generate(models, rest, settings)
    write_tokens(options.out, [one.prompt for one in rest], completions, to_stderr)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    options = argparse.ArgumentParser("python -m specnb.audit.adapters", description=__doc__)
    add = options.add_argument
    add("engine", choices=ENGINES)
    add("--target", type=Path, required=True, help="folder of the target")
    add("--draft", type=Path, help="folder of the draft model")
    add("--cache", type=Path, default=Models.cache, help="folder of converted models (default: %(default)s)")
    add("--prompts", type=Path, required=True, help="a list of token ids a line")
    add("--count", type=int, default=0, help="completions; prompts are repeated (default: one for each prompt)")
    add("--out", type=Path, required=True, help="file of tokens for `specnb audit`")
    add_settings(add)
    return options


def add_settings(add: Callable[..., Any]) -> None:
    """Adds the arguments of `Settings`."""
    add("--speculation", choices=SPECULATIONS, default=Settings.speculation)
    add("--gamma", type=int, default=Settings.gamma, help="draft tokens per step (default: %(default)s)")
    add("--temperature", type=float, default=Settings.temperature)
    add("--top-k", type=int, default=Settings.top_k, help="0: none")
    add("--top-p", type=float, default=Settings.top_p, help="1: none")
    add("--max-new-tokens", type=int, default=Settings.max_new_tokens)
    add("--seed", type=int, default=Settings.seed)
    add("--dtype", choices=DTYPES, default=Settings.dtype)


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
