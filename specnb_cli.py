"""The command `specnb`: `specnb demo`, and the commands of specnb-audit where that is installed.

It stands beside the package because `import specnb` takes seconds. A command of the audit is handed
over before that: it says in no time what is wrong with its options, and sets how threads wait,
which torch reads when it is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

AUDIT = {
    "audit": "test generated tokens against the target's distribution",
    "collect": "collect token ids from a server",
    "kernels": "enumerate the acceptance functions of engines",
    "predict": "a speed-up from reported figures",
    "explain": "what a step costs, and the best gamma, from a log",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 2 for what cannot be, 130 if interrupted, or
    the audit's.

    >>> main(["audit", "missing.jsonl", "--target", "."])  # prints one line to stderr
    2
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in AUDIT:
        return _audit(words)
    options = _parser().parse_args(words)
    try:
        options.run(options)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"specnb: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2
    return 0


def _audit(words: list[str]) -> int:
    if find_spec("specnb_audit") is None:
        print(f"specnb: {words[0]} is a command of the audit: pip install specnb-audit", file=sys.stderr)
        return 2
    status: int = import_module("specnb_audit.cli").main(words)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specnb", description="Speculative decoding: a demonstration.")
    parser.add_argument("--version", action="version", version=f"specnb {version('specnb')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="a real model writes, faster than by plain decoding or not (fetches 93 MB)")
    demo.set_defaults(run=lambda options: import_module("specnb.demo").run())
    for name, words in AUDIT.items():
        commands.add_parser(name, help=f"{words} (specnb-audit)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
