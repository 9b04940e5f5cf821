"""`specnb-audit kernels`: what the acceptance functions of released engines emit."""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from pathlib import Path
from typing import Any

EXAMPLES = """\
The files with acceptance functions are executed, in Triton's interpreter (pip install triton), with stand-ins. All
random numbers are scripted, so the distribution of the emitted tokens is computed and not sampled. What this shows is
in audit/docs/kernels.md of the repository.

example:
  specnb-audit kernels vllm-0.33.0-*.whl

exit status:
  0    all functions are exact to the resolution stated
  1    one deviates
  2    no verdict; one line on stderr says why
  3    undecided: with random noise a function emitted something else than its thresholds say
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser("kernels", help="enumerate the acceptance functions of engines", epilog=EXAMPLES)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL", help="of an engine with an adapter")
    parser.add_argument("--quick", action="store_true", help="a vocabulary of 3 tokens, not also 4 and 5")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write what was found to a CSV file, too")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch may do
    return int(import_module("specnb_audit.kernels.engines").report(options.wheels, options.quick, options.table))
