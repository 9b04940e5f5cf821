"""`specnb-audit predict` and `specnb-audit explain`: speed-ups from reported figures and from logs."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

NUMBERS = {
    "gamma": "draft tokens in a row; of a tree its depth",
    "tokens-per-step": "bonus token included (mean acceptance length, accept length)",
    "acceptance-rate": "accepted over proposed draft tokens",
    "acceptance-rate-with-bonus": "(accepted + 1) / (proposed + 1): SGLang's before April 2026",
    "plain": "tokens per second of a row in plain decoding",
    "cost-ratio": "a draft forward pass over a target forward pass",
    "verify-cost": "a target forward pass over the tokens of a verification over one over a single token",
    "verified": "draft tokens in a verification, of a tree",
    "draft-passes": "draft forward passes per step, if not gamma",
    "overhead-ms": "milliseconds of a step outside the forward passes; needs --plain",
    "batch": "rows that are decoded together",
    "bytes-per-param": "of the target: 2 for 16 bits, about 0.6 for Q4_K_M",
    "draft-bytes-per-param": "of the draft, if not as of the target",
    "active": "fraction of the target's parameters that one token uses",
    "cache-ratio": "bytes of a row's cache over bytes of the target's weights",
}
PREDICT = """\
examples:
  specnb-audit predict --tokens-per-step 2.3 --gamma 4 --layers 32 1 --gpu "NVIDIA H100 80GB HBM3" --plain 150
  specnb-audit predict --alpha 0.7 --gamma 4 --step-cost 1.1 0.2
"""
EXPLAIN = """\
examples:
  specnb-audit explain --tokens-per-step 1.97 --gamma 1 --speed 128 --plain 342 --layers 24 1
  specnb-audit explain --line 1 1.8 140 --line 4 2.9 150 --plain 100    (the best gamma, and when to switch it off)
"""


def add_to(commands: Any) -> None:
    predict = _command(commands, "predict", "a speed-up from reported figures, before any run", PREDICT)
    predict.add_argument("--alpha", type=float, metavar="X", help="mean acceptance probability along sequences")
    predict.add_argument(
        "--step-cost", type=float, nargs=2, metavar=("A", "B"), help="a step costs A + B gamma plain steps"
    )
    explain = _command(commands, "explain", "what a step costs, and the best gamma, from a log", EXPLAIN)
    explain.add_argument("--speedup", type=float, metavar="X", help="over plain decoding of the same batch")
    explain.add_argument("--speed", type=float, metavar="X", help="tokens per second with speculation, beside --plain")
    explain.add_argument(
        "--line", type=float, nargs=3, action="append", dest="lines", metavar=("GAMMA", "TOKENS", "SPEED"),
        help="draft tokens, tokens per step and tokens per second; two lines or more, and no other option but --plain",
    )  # fmt: skip


def _command(commands: Any, name: str, words: str, examples: str) -> argparse.ArgumentParser:
    usage, about = f"specnb-audit {name} [options]", words[0].upper() + words[1:] + "."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, usage=usage, help=words, description=about, epilog=examples
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for option, meaning in NUMBERS.items():
        parser.add_argument(f"--{option}", type=float, metavar="X", help=meaning)
    parser.add_argument(
        "--per-position",
        type=float,
        nargs="+",
        metavar="X",
        help="fraction of steps that accepted draft token 1, 2, ...",
    )
    parser.add_argument(
        "--conditional", action="store_true", default=None, help="of those steps that accepted the tokens before"
    )
    for option in ("params", "layers"):
        parser.add_argument(f"--{option}", type=float, nargs=2, metavar=("TARGET", "DRAFT"), help="of both models")
    parser.add_argument("--gpu", metavar="NAME", help="of the device, also as nvidia-smi prints it")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if value is not None}
    del given["run"]
    command, lines = given.pop("command"), given.pop("lines", None)
    audit = import_module("specnb_audit")  # with numpy, which takes a moment
    if lines is None:
        print(getattr(audit, command)(**given))
        return 0
    if set(given) - {"plain"}:
        raise ValueError(f"--line and {', '.join(sorted(set(given) - {'plain'}))} exclude each other")
    print(audit.fit_steps(lines, plain=given.get("plain")))
    return 0
