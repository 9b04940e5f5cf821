"""`specnb collect`: token ids from an OpenAI-compatible server, for `specnb audit`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specnb_audit.cli.openai_server import PARALLEL, RETRIES, collect
from specnb_audit.cli.settings import add_settings, settings_of

EXAMPLES = """\
examples:
  specnb collect --url http://localhost:8000 --prompts prompts.jsonl --out tokens.jsonl --temperature 0.7 --top-p 0.9
      one completion for each line of prompts.jsonl, which is a list of token ids; run again, it continues
  specnb collect --url http://localhost:8000 --prompts prompts.jsonl --out tokens.jsonl --extra '{"ignore_eos": true}'
      completions of full length, where the server can ignore end tokens without changing the distribution
"""


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers `commands`; its options have a function `run`."""
    words = "collect token ids from an OpenAI-compatible server"
    parser = commands.add_parser("collect", help=words, description=__doc__)
    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add = parser.add_argument
    add("--url", required=True, help="of the server, such as http://localhost:8000")
    add("--prompts", type=Path, required=True, help="a list of token ids a line, begin-of-text included")
    add("--out", type=Path, required=True, help="file of tokens; an existing one is continued")
    add("--model", help="the name that the server knows its model by (default: the first that it lists)")
    add("--count", type=int, default=0, help="completions; prompts are repeated (default: one for each prompt)")
    add("--parallel", type=int, default=PARALLEL, help="requests at the same time (default: %(default)s)")
    add("--retries", type=int, default=RETRIES, help="further attempts for a request (default: %(default)s)")
    add("--extra", type=_object, default={}, metavar="JSON", help="more entries of each request")
    add_settings(add)


def _object(words: str) -> dict[str, Any]:
    try:
        found = json.loads(words)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("give a JSON object, such as '{\"ignore_eos\": true}'")
    return found


def run(options: argparse.Namespace) -> int:
    """Collects what the options ask for; returns the exit status 0. Raises what `collect` raises."""
    more: dict[str, Any] = {"model": options.model, "extra": options.extra, "count": options.count}
    more |= {"parallel": options.parallel, "retries": options.retries}
    if sys.stderr is not None and sys.stderr.isatty():
        more |= {"say": None, "bar": _bar}
    collect(options.url, options.prompts, options.out, settings_of(options), **more)
    return 0


def _bar(completions: Iterator[list[int]], total: int) -> Iterator[list[int]]:
    yield from tqdm(completions, total=total, desc="collect", unit="completion")
