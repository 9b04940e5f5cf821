"""Runs the notebooks that judge claims with ten seeds each, at their default and their smallest sizes, and counts the
verdicts:

    python workflow/seeds.py              # all of them: hours
    python workflow/seeds.py 02 audit/03  # these; other rows of the table stay
    python workflow/seeds.py --size smallest

The table is `data/results/verdicts_by_seed.csv`. In the column `code` is a digest of the code cells that were run, and
in `failed` how many runs ended in an error. Runs are kept under `build/seeds`, by notebook and digest; started again,
it does what is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from notebooks.support.findings import VERDICTS, all_claims  # noqa: E402
from notebooks.support.parameters import ends, of_notebook  # noqa: E402
from studies.files import located, notebooks, write  # noqa: E402

TABLE = ROOT / "data" / "results" / "verdicts_by_seed.csv"
SEEDS = range(10)
SIZES = ("default", "smallest")


def digest(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:12]


def run(path: Path, given: dict[str, Any], folder: Path) -> None:
    """Runs a notebook into `folder`, whose `log.ipynb` is there as soon as it has ended, with an error or without."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "papermill", path, folder / "running.ipynb", "--cwd", path.parent, "-k", "python3"]
    command += ["--no-progress-bar", "--log-level", "ERROR"]
    for name, value in given.items():  # one by one: as YAML 1e-06 would be a text
        command += ["-p", name, str(value)]
    subprocess.run(command, env=os.environ | {"SPECNB_OUT": str(folder)}, check=False)
    (folder / "running.ipynb").rename(folder / "log.ipynb")


def counted(name: str, path: Path, size: str) -> pd.DataFrame:
    """A row for each claim of a notebook: how often each verdict came out."""
    number, known, found = name.split("_")[0], of_notebook(path), []
    sizes = ends(known, "least") if size == "smallest" else {}
    for seed in SEEDS:
        folder = ROOT / "build" / "seeds" / name / digest(path) / f"{size}-{seed}"
        if not (folder / "log.ipynb").exists():
            run(path, sizes | {"seed": seed}, folder)
        verdicts = folder / located("data/results", f"{number}.claims.csv")
        found += [pd.read_csv(verdicts)] if verdicts.exists() else []
    every = pd.concat([pd.DataFrame(columns=["id", "verdict"]), *found])
    lines = []
    for claim in (key for key, one in all_claims().items() if one["notebook"] == number):
        counts = every.verdict[every.id == claim].value_counts()
        line = {"notebook": name, "size": size, "claim": claim}
        line |= {verdict: int(counts.get(verdict, 0)) for verdict in VERDICTS}
        lines.append(line | {"failed": len(SEEDS) - len(found), "code": digest(path)})
    return pd.DataFrame(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("numbers", nargs="*", help="of notebooks, such as 02 or audit/03 (default: all)")
    parser.add_argument("--size", choices=SIZES, help="default: both")
    asked = parser.parse_args()
    judging = {claim["notebook"] for claim in all_claims().values()}
    for (name, path), size in product(notebooks().items(), [asked.size] if asked.size else SIZES):
        number = name.split("_")[0]
        if number in judging and "seed" in of_notebook(path) and number in (asked.numbers or [number]):
            known = pd.read_csv(TABLE) if TABLE.exists() else pd.DataFrame(columns=["notebook", "size"])
            others = known[(known.notebook != name) | (known["size"] != size)]
            table = pd.concat([others, counted(name, path, size)]).sort_values(["notebook", "size"], kind="stable")
            table = table.astype(dict.fromkeys([*VERDICTS, "failed"], int))
            write(TABLE, table.to_csv(index=False, lineterminator="\n"))


if __name__ == "__main__":
    main()
