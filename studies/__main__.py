"""Makes committed tables: `python -m studies NAME [--small] [ITEM ...]`; `python -m studies all`
makes every one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from studies.study import find, names, run


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a study, some items of it, or all; without a name lists them."""
    parser = argparse.ArgumentParser(
        "python -m studies", description="Measure committed tables; run again, it goes on."
    )
    parser.add_argument("name", nargs="?", help="the name of a table, or all; without one, all are listed")
    parser.add_argument("items", nargs="*", help="items of the study (default: all of them)")
    parser.add_argument("--small", action="store_true", help="small settings, to try the code; writes to build/small")
    asked = parser.parse_args(arguments)
    if asked.name is None:
        for name in names():
            print(f"{name}: {' '.join(find(name).items)}")
        return
    for name in names() if asked.name == "all" else [asked.name]:
        try:
            made = run(name, asked.items, small=asked.small)
        except ValueError as error:
            if asked.name != "all":
                parser.error(str(error))
            print(f"{name}: {error}", file=sys.stderr)  # no GPU, for example; the others go on
        else:
            print(made or f"{name}: other items are missing")


if __name__ == "__main__":
    main()
