"""The command `specnb`: `specnb audit TOKENS.jsonl --target FOLDER_OR_NAME` and its options.

Exit status 0: no deviation was found. 1: exactness is rejected. 2: the input is bad, and stderr says how.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specnb.audit import audit
from specnb.audit.report import Report
from specnb.law import Sampling
from specnb.models import load_model, load_pair

LINE = '{"prompt": [ids], "tokens": [ids]}'
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        report = _audited(options)
        if options.html is not None:
            options.html.write_text(report.to_html(), encoding="utf-8")
    except (ValueError, TypeError, OSError) as error:
        print(f"specnb: {_words(error)}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=1, allow_nan=False) if options.json else report)
    return 1 if report.rejected else 0


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _audited(options: argparse.Namespace) -> Report:
    texts = read_tokens(options.tokens)
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    for name in (options.target, options.draft):
        _require_there(name)
    settings = {"device": options.device, "dtype": DTYPES[options.dtype]}
    if options.draft is None:
        target, draft = load_model(options.target, **settings), None
    else:
        pair = load_pair(options.target, options.draft, **settings)
        target, draft = pair.target, pair.draft
    return audit(
        target,
        [text["tokens"] for text in texts],
        prompts=[text["prompt"] for text in texts],
        steps=[text["steps"] for text in texts] if "steps" in texts[0] else None,
        sampling=sampling,
        draft=draft,
        eos=options.eos,
        max_new_tokens=options.max_new_tokens,
        delta=options.delta,
        seed=options.seed,
        stop=options.stop,
        progress=sys.stderr.isatty(),
    )


def _require_there(name: str | None) -> None:
    """Raises `ValueError` for what can only be a folder, and is none; a name has one slash at most."""
    if name is not None and (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise ValueError(f"there is no folder {name}; give one with a model in it, or a model's name")


def read_tokens(file: Path) -> list[dict[str, list[int]]]:
    """The texts in a file of JSON lines, each with a `prompt` and `tokens`, and all or none with `steps`.

    Raises `ValueError`, with the number of the line, for anything else, and `OSError` for no such file.
    """
    texts: list[dict[str, list[int]]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            texts.append(_read_line(line, f"{file.name}, line {number}"))
            if texts[-1].keys() != texts[0].keys():
                raise ValueError(f"{file.name}, line {number}: give steps in all lines or in none")
    if not texts:
        raise ValueError(f"{file.name} is empty; each line is {LINE}")
    return texts


def _read_line(line: str, where: str) -> dict[str, list[int]]:
    try:
        text: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON ({error}); each line is {LINE}") from None
    if not isinstance(text, dict):
        raise ValueError(f"{where} is {line.strip()[:60]}; each line is {LINE}")
    read = {}
    for key in ("prompt", "tokens", "steps"):
        if key not in text and key != "steps":
            raise ValueError(f"{where} has no {key!r}; each line is {LINE}")
        if key in text:
            entries = text[key]
            if not isinstance(entries, list) or not all(type(entry) is int for entry in entries):
                raise ValueError(f"{where}: {key!r} is no list of whole numbers; each line is {LINE}")
            read[key] = entries
    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specnb", description="Is your sampler lossless?")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser(
        "audit",
        help="test generated tokens against the target's law",
        description="Were these tokens drawn from the target's law, under the settings claimed?",
        epilog="exit status: 0, no deviation was found; 1, exactness is rejected; 2, the input is bad",
    ).add_argument
    add("tokens", type=Path, metavar="TOKENS.jsonl", help=f"one text a line: {LINE}, and steps if known")
    add("--target", required=True, metavar="FOLDER_OR_NAME", help="the model whose law the tokens should have")
    add("--draft", metavar="FOLDER_OR_NAME", help="the draft model, which aims the test")
    add("--temperature", type=float, metavar="T", default=1.0, help="temperature claimed (default 1; 0 is argmax)")
    add("--top-k", type=int, metavar="K", help="top-k claimed (default: none)")
    add("--top-p", type=float, metavar="P", default=1.0, help="top-p claimed (default 1: none)")
    add("--eos", type=int, action="append", metavar="ID", help="tokens behind this one are a finding; may be repeated")
    add("--max-new-tokens", type=int, metavar="N", help="texts of another length without an end are a finding")
    add("--delta", type=float, metavar="D", default=1e-6, help="rate of false alarms (default 1e-6)")
    add("--seed", type=int, metavar="S", default=0, help="of the test's own uniforms (default 0)")
    add("--stop", action="store_true", help="stop as soon as exactness is rejected")
    add("--json", action="store_true", help="print the report as JSON")
    add("--html", type=Path, metavar="FILE", help="write the report as a page, too")
    add("--device", default="cpu", help="where the models run (default cpu)")
    add("--dtype", choices=DTYPES, default="float32", help="of the models (default float32)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
