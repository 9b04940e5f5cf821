"""The options of `specnb-audit audit`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from specnb_audit.setting_names import ENGINE_ORDERS, NOT_AUDITED
from specnb_audit.token_file import LINE

DTYPES = ("float32", "float64", "bfloat16", "float16")

EXAMPLES = """\
The file has one sequence per line: {line}.
Optional: "steps": [number of tokens emitted by each step]; "batch": a whole number or a name of the sequences that
were generated together, which are compared with each other; "seed": a whole number. Of sequences with one seed and not
one batch only the first is audited. Of single tokens: "forced": [places whose token the engine chose itself];
"min_tokens": a number; "allowed_token_ids": [ids], or one such list or null for each place. "logprobs": [numbers], the
engine's own, are compared with the target's. A file may be compressed (.gz). "-" reads lines from a pipe and audits
them while they arrive.

examples:
  specnb-audit audit tokens.jsonl --target gpt2
      tokens sampled from gpt2 at temperature 1
  specnb-audit audit tokens.jsonl --target ./llama --draft ./llama-small --temperature 0.7 --top-p 0.9
      speculative decoding with a draft model; --draft adds bets on its typical bugs
  specnb-audit audit tokens.jsonl --target ./llama --temperature 0 --engine-dtype bfloat16
      greedy decoding by an engine that computes in bfloat16: near ties are no deviation
  specnb-audit audit tokens.jsonl --control plain.jsonl --target ./llama
      plain.jsonl is of the same engine without speculation: whose are the deviations?
  specnb-audit audit tokens.jsonl --target ./llama --temperature 0.7 --top-k 40 --filter-order llama.cpp
      the temperature is applied after top-k, as in llama.cpp
  specnb-audit audit tokens.jsonl --target ./llama --presence-penalty 0.5 --logit-bias 2:-100
      penalties and a bias as vLLM defines them: on the target's logits, before temperature and filters
  specnb-audit audit tokens.jsonl --target ./llama --alternative ./llama-4bit
      were quantised weights used? Adds the likelihood ratio against them
  generate-tokens | specnb-audit audit - --target ./llama --stop --limit 500
      from a pipe, until exactness is rejected or 500 sequences were read
  specnb-audit audit tokens.jsonl --target ./llama --eos 2 --max-new-tokens 256 --json > report.json
      also checks where sequences end; the report as JSON
  specnb-audit audit tokens.jsonl --target ./llama --draft ./llama-small --require draft-leak:0.03
      in a pipeline: passes only if a leak of the draft of that size would have been found

settings that cannot be audited, and are refused: {refused};
for those give specnb_audit.audit a function as target, or declare "allowed_token_ids"

exit status:
  0    no deviation was found, and at least half of the kinds (or those required) would have been
  1    exactness is rejected
  2    no verdict; one line on stderr says why
  3    undecided: numerics explain what deviates, or more tokens are needed; the report's first line says which
  130  interrupted (Ctrl-C); the report so far is printed
  143  terminated (SIGTERM); the report so far is printed
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        usage="specnb-audit audit TOKENS.jsonl --target MODEL [--draft MODEL] [options]",
        help="test generated tokens against the target's distribution",
        description="Tests whether tokens were sampled from a model's distribution under the settings claimed.",
        epilog=EXAMPLES.format(line=LINE, refused=", ".join(NOT_AUDITED)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tokens", type=Path, metavar="TOKENS.jsonl", help="the generated sequences; - for a pipe")
    _add_models(parser.add_argument_group("models").add_argument)
    _add_claims(parser.add_argument_group("settings claimed").add_argument)
    _add_engine(parser.add_argument_group("the engine").add_argument)
    _add_test(parser.add_argument_group("the test and its report").add_argument)
    # Imported when it runs: torch and transformers take seconds.
    parser.set_defaults(run=lambda options: import_module("specnb_audit.cli.audit").run(options))


Add = Callable[..., Any]


def _add_models(add: Add) -> None:
    add("--target", required=True, metavar="MODEL", help="folder or name of the model that the tokens should come from")
    add("--draft", metavar="MODEL", help="folder or name of the draft model")
    add("--alternative", metavar="MODEL", help="a model that may have been used instead of the target")
    add("--device", default="cpu", help="device of the models (default: cpu)")
    add("--dtype", choices=DTYPES, default="float32", help="dtype of the models (default: float32)")


def _add_claims(add: Add) -> None:
    add("--temperature", type=float, metavar="T", default=1.0, help="temperature; 0 is argmax (default: 1)")
    add("--top-k", type=int, metavar="K", help="top-k; 0: none (default)")
    add("--top-p", type=float, metavar="P", default=1.0, help="top-p (default: 1, none)")
    add("--min-p", type=float, metavar="P", default=0.0, help="min-p (default: 0, none)")
    add("--repetition-penalty", type=float, metavar="R", default=1.0, help="over prompt and output (default: 1, none)")
    for name in ("presence", "frequency"):
        add(f"--{name}-penalty", type=float, metavar="X", default=0.0, help="over the output (default: 0, none)")
    add("--logit-bias", action="append", default=[], metavar="ID:BIAS", help="added to a logit; may be repeated")
    orders = ", ".join(ENGINE_ORDERS)
    add("--filter-order", metavar="ORDER", default="transformers", help=f"{orders}, or names such as top-p,temperature")
    for name in ("temperature", "top-p", "min-p"):
        add(f"--draft-{name}", type=float, metavar="X", help=f"{name} of the draft (default: as claimed)")
    add("--draft-top-k", type=int, metavar="K", help="top-k of the draft; 0: none (default: as claimed)")
    for name in NOT_AUDITED:
        add(f"--{name.replace('_', '-')}", type=_number_or_words, help=argparse.SUPPRESS)
    add("--eos", type=int, action="append", metavar="ID", help="token that ends a sequence; may be repeated")
    add("--max-new-tokens", "--max-tokens", type=int, metavar="N", help="length of a sequence that no --eos token ends")
    add("--min-tokens", type=int, metavar="N", default=0, help="no --eos token comes before so many (default: 0, none)")


def _number_or_words(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _add_engine(add: Add) -> None:
    add("--control", type=Path, metavar="FILE", help="sequences of the same engine without speculation")
    add("--engine-dtype", choices=DTYPES, help="dtype that the engine computes in (default: unknown)")
    add("--logit-tolerance", type=float, metavar="GAP", help="gap of two logits below which either token may be kept")
    add("--numerics-positions", type=int, metavar="N", default=16, help="positions of measured rounding (default: 16)")


def _add_test(add: Add) -> None:
    add("--delta", type=float, metavar="D", default=1e-6, help="false-alarm rate (default: 1e-6)")
    add("--seed", type=int, metavar="S", default=0, help="seed of the test's own uniforms (default: 0)")
    add("--ignore", action="append", default=[], metavar="KIND", help="leave out a kind of deviation; may be repeated")
    add("--limit", type=int, metavar="N", help="read at most so many sequences")
    add("--stop", action="store_true", help="stop as soon as exactness is rejected")
    add("--json", action="store_true", help="print the report as JSON")
    add("--require", action="append", default=[], metavar="KIND:TV", help="status 3 unless it would have been found")
