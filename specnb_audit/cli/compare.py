"""`specnb compare`: do two files of samples come from one distribution? No model is needed.

Exit status 0: no difference was found. 1: equality is rejected. 2: no verdict. 3: too few pairs to reject.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specnb_audit.token_file import LINE, TEXT_LINE, read_samples

EXAMPLES = f"""\
A line of either file is {LINE}
or {TEXT_LINE}. Sequences of the same prompt are paired; use many prompts, and the same number of sequences of each in
both files. All sequences must be sampled independently, and the seeds of the two files must differ; seeds that lines
declare are not read here.

examples:
  specnb compare speculative.jsonl plain.jsonl
      the engine with speculation, and the same engine with the same settings without it
  specnb compare today.jsonl recorded.jsonl --json
      a server whose model and settings may have changed since

exit status:
  0    no difference was found
  1    the two distributions differ
  2    no verdict; one line on stderr says why
  3    undecided: so few pairs cannot show a difference

Where the target's weights are at hand, "specnb audit" finds much smaller deviations in as many tokens.
"""


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers `commands`; its options have a function `run`."""
    words = "compare two files of samples, without a model"
    parser = commands.add_parser("compare", help=words, description=words.capitalize() + ".")
    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("samples", type=Path, metavar="SAMPLES.jsonl", help="sequences, or texts")
    add("reference", type=Path, metavar="REFERENCE.jsonl", help="those to compare them with")
    add("--delta", type=float, metavar="D", default=1e-6, help="false-alarm rate (default: 1e-6)")
    add("--stop", action="store_true", help="stop as soon as equality is rejected")
    add("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compares the two files; returns the exit status. Raises what `read_samples` and `compare_samples` raise."""
    samples, reference = read_samples(options.samples), read_samples(options.reference)
    from specnb_audit.cli import UNDECIDED
    from specnb_audit.two_samples import compare_samples  # needs scipy, which takes a second

    report = compare_samples(samples, reference, options.delta, options.stop)
    print(json.dumps(report.to_dict(), indent=1) if options.json else report)
    return 1 if report.rejected else UNDECIDED if report.too_few else 0
