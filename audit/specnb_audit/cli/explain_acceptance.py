"""`specnb-audit explain-acceptance`: which mistake in serving a draft explains the acceptance of a log."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

EXAMPLES = """\
The file has one sequence per line: {"prompt": [ids], "tokens": [ids], "steps": [numbers]}. "steps" are the numbers of
tokens that the steps emitted, with the recovered or bonus token of each; with --no-bonus, of accepted draft tokens.
Optional: "kind", a name of the kind of text. A log without steps gives averages in their place.

examples:
  specnb-audit explain-acceptance tokens.jsonl --target ./llama --draft ./llama-eagle3 --gamma 4
      an EAGLE-3 head, next-token layers, or a draft model
  specnb-audit explain-acceptance tokens.jsonl --target ./llama --draft ./llama-eagle3 --gamma 3 --draft-temperature 0
      an engine that drafts the most probable tokens, as vLLM does by default
  specnb-audit explain-acceptance tokens.jsonl --target ./llama --draft ./llama-eagle3 --gamma 3
      --per-position 0.61 0.34 0.18 --marginal --over steps --logged-steps 1000
      a log with averages alone, of text like that of the file
  specnb-audit explain-acceptance tokens.jsonl --target ./llama --draft ./llama-eagle3 --gamma 4 --other-target ./base
      was the head served with another checkpoint?

exit status:
  0    the log agrees with the draft as it is given
  1    known mistakes are named
  2    no answer; one line on stderr says why
  3    neither the draft as it is given nor a known mistake fits the log, or its text contradicts the settings
"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain-acceptance",
        usage="specnb-audit explain-acceptance TOKENS.jsonl --target MODEL --draft DRAFT --gamma N [options]",
        help="why acceptance is low: which mistake in serving a draft explains a log",
        description="Tries the known mistakes in serving a draft; names those that explain the acceptance in a log.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("tokens", type=Path, metavar="TOKENS.jsonl", help="the log; other text of the same kind for a log of averages")
    add("--target", required=True, metavar="MODEL", help="folder or name of the target")
    add("--draft", metavar="DRAFT", help="of a draft model or head (default: the target's own next-token layers)")
    add("--gamma", type=int, required=True, metavar="N", help="draft tokens of a step")
    for option, draft in (("", ""), ("draft-", " of the draft (default: as the target)")):
        add(f"--{option}temperature", type=float, metavar="T", help=f"temperature{draft or ' (default: 1)'}")
        add(f"--{option}top-k", type=int, metavar="K", help=f"top-k; 0: none{draft or ' (default)'}")
        add(f"--{option}top-p", type=float, metavar="P", help=f"top-p{draft or ' (default: 1, none)'}")
        add(f"--{option}min-p", type=float, metavar="P", help=f"min-p{draft or ' (default: 0, none)'}")
    add("--no-bonus", action="store_true", help="steps count accepted draft tokens alone")
    add("--undrafted", action="store_true", help="the first step of each sequence had no draft")
    add("--per-position", type=float, nargs="+", metavar="X", help="acceptance rates by depth, of a log without steps")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--conditional", action="store_true", default=None, help="of steps that accepted the tokens before"
    )
    kind.add_argument("--marginal", action="store_false", dest="conditional", help="of all steps")
    add("--over", choices=("steps", "requests"), help="what these rates are averaged over")
    add("--logged-steps", type=int, metavar="N", help="how many steps these rates are of")
    add("--other-target", metavar="MODEL", help="a checkpoint that may have been served in place of the target")
    add("--other-draft", metavar="DRAFT", help="a draft that may have been served in place of the draft")
    add(
        "--level", type=float, default=0.01, metavar="D", help="with no mistake, how often one is named (default: 0.01)"
    )
    add("--device", default="cpu", help="device of the models (default: cpu)")
    add("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32",
        help="dtype of the models (default: float32)")  # fmt: skip
    parser.set_defaults(run=run, conditional=None)


def run(options: argparse.Namespace) -> int:
    # Imported here: torch and transformers take seconds.
    from specnb.loading import load_model
    from specnb_audit.claimed import claimed_sampling
    from specnb_audit.cli import one_line
    from specnb_audit.token_file import read_tokens

    explain = import_module("specnb_audit").explain_acceptance
    lines = read_tokens(options.tokens, bonus=not options.no_bonus)
    if options.per_position is None and lines[0].steps is None:
        raise ValueError(
            f"{options.tokens} has no 'steps', the tokens that each step emitted; give them in each line, or averages "
            "with --per-position, --conditional or --marginal, --over and --logged-steps"
        )
    names = ("temperature", "top_k", "top_p", "min_p")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    own = {name: getattr(options, f"draft_{name}") for name in names if getattr(options, f"draft_{name}") is not None}
    sampling, drafting = claimed_sampling(given), claimed_sampling(given | own)
    others: dict[str, dict[str, Any]] = {}
    try:
        target = load_model(options.target, options.device, options.dtype)
        if options.other_target is not None:
            others[options.other_target] = {"target": load_model(options.other_target, options.device, options.dtype)}
        draft = _drafter(target, options.draft, drafting, options)
        if options.other_draft is not None:
            others[options.other_draft] = {"draft": _drafter(target, options.other_draft, drafting, options)}
    except Exception as error:
        raise ValueError(f"cannot load the models: {one_line(error)}") from error
    kinds = [one.kind or "" for one in lines] if any(one.kind for one in lines) else None
    rates = {name: getattr(options, name) for name in ("per_position", "conditional", "over", "logged_steps")}
    found = explain(
        target, draft, [one.tokens for one in lines], prompts=[one.prompt for one in lines], gamma=options.gamma,
        steps=None if options.per_position is not None else [one.steps for one in lines], bonus=not options.no_bonus,
        undrafted=options.undrafted, sampling=sampling, others=others, kinds=kinds, level=options.level,
        progress=sys.stderr is not None and sys.stderr.isatty(), **rates,
    )  # fmt: skip
    print(found)
    return 0 if found.fits else 1 if found.named else 3


def _drafter(target: Any, name: str | None, sampling: Any, options: argparse.Namespace) -> Any:
    """A draft model or a head, whichever `name` holds."""
    from specnb.drafters import ModelDrafter
    from specnb.formats import draft_in
    from specnb.loading import folder_of, load_model
    from specnb.released import load_drafter
    from specnb.support import vocabulary

    if name is None or draft_in(folder_of(name)) is not None:
        return load_drafter(target, name, sampling)
    return ModelDrafter(load_model(name, options.device, options.dtype), sampling, vocab=vocabulary(target))
