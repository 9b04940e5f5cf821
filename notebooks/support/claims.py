"""A notebook and its claims: a cell judges each of them by a condition that the reader sees.

    nb = notebook("03")
    nb.claim("capped-geometric", worst < 1e-12 and smallest_p > 1e-6 / 45, control=wrong_p < 1e-6,
             worst=worst, smallest_p=smallest_p, wrong_p=wrong_p)

prints `holds: capped-geometric (Leviathan 3.1)`. The numbers and the conditions as the cell has
them go to the ledger, `data/results/claims.csv`. A claim is judged as its source states it:

- `holds`: its condition is true;
- `refuted`: its condition is false;
- `conditional`: so, but true under a condition that the source does not state, and false without it
  (`only_if`);
- `open`: the numbers do not decide (`undecided`), the check could not have failed (`control`), or
  the claim is about accelerators or large models, unless the registry says what was measured.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import sys
from types import FrameType
from typing import NamedTuple

import pandas as pd

from notebooks.support.findings import ELSEWHERE, UNCHECKED, Number, all_claims, as_number, shown, written
from notebooks.support.parameters import mistakes, names_given, of_notebook, unknown
from studies.files import ROOT, located, notebooks, out, write

SMALLEST = 1e-12  # of a number in the ledger; what is smaller is rounding, differs between processors, and is 0 there


class Finding(NamedTuple):
    """What a notebook found of one claim: the verdict, its numbers, and the conditions with them in
    one line."""

    verdict: str
    numbers: dict[str, Number]
    evidence: str


def notebook(number: str) -> Notebook:
    """The notebook called `number`, for its first cell after the parameters: checks them, sets
    threads and style.

    A notebook of the audit is called `audit/01`; its tables and verdicts go to the folders of
    `audit` (`located`).

    Raises `ValueError` that names everything wrong, and for a notebook that does not exist.
    """
    import torch  # slow to import, and not needed to collect verdicts
    from transformers.utils import logging

    from notebooks.support.figures import use_style

    found, around = Notebook(number), sys._getframe(1).f_globals
    (path,) = ROOT.glob(located("notebooks", f"{number}_*.ipynb"))
    known = of_notebook(path)
    given = {name: around.get(name, parameter.value) for name, parameter in known.items()}
    wrong = unknown(names_given(around.get("In", ()), known), known) + mistakes(known, given)
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}. Change the cell tagged `parameters`, or what papermill was given")
    torch.set_num_threads(given.get("threads", 1))
    logging.disable_progress_bar()
    use_style()
    return found


class Notebook:
    """The claims and tables of one notebook; `close` at the end writes the verdicts."""

    def __init__(self, number: str):
        known = {name.split("_")[0] for name in notebooks()}
        if number not in known:
            raise ValueError(f"there is no notebook {number!r}; there are {', '.join(sorted(known))}")
        self.number = number
        self.claims = {name: claim for name, claim in all_claims().items() if claim["notebook"] == number}
        self.judged: dict[str, Finding] = {}

    def claim(
        self,
        name: str,
        holds: object,
        *,
        control: object = True,
        only_if: tuple[object, object] | None = None,
        undecided: object = False,
        **numbers: object,
    ) -> None:
        """Judges the claim `name`, prints the verdict, and keeps `numbers` and conditions for the
        ledger.

        Parameters
        ----------
        name
            The name in `data/claims.yml`, literally.
        holds
            Whether it is as the source states.
        control
            Whether the same check comes out the other way where it should.
        only_if
            The check under the condition that the registry names, and the check without it.
        undecided
            Whether the numbers decide nothing, such as an interval that contains the border.
        **numbers
            Scalars, and estimates with an interval.

        Raises
        ------
        KeyError
            For a claim of another notebook.
        TypeError
            For a condition that is neither true nor false, and a number that is none.

        """
        if name not in self.claims:
            raise KeyError(f"{name!r} is not a claim of notebook {self.number}; those are {list(self.claims)}")
        claim = self.claims[name]
        kept = {key: as_number(value, f"{name}: {key}") for key, value in numbers.items()}
        small = [key for key, value in kept.items() if isinstance(value, float) and abs(value) < SMALLEST]
        kept |= dict.fromkeys(small, 0.0)
        inside, outside = (_answer(one, name) for one in only_if or (False, True))
        elsewhere = claim["about"] in ELSEWHERE and "measured" not in claim
        verdict = "holds" if _answer(holds, name) else "conditional" if inside and not outside else "refuted"
        if elsewhere or _answer(undecided, name) or not _answer(control, name):
            verdict = "open"
        told = _as_written(name, sys._getframe(1))
        if verdict == "conditional":
            told.append(f"only if {claim['only_if']}")
        told += [f"{key} = {shown(value)}" for key, value in kept.items()]
        self.judged[name] = Finding(verdict, kept, "; ".join(told))
        limit = f", only if {claim['only_if']}" if verdict == "conditional" else ""
        source = "ours" if claim["source"] == "beyond" else f"{claim['source'].capitalize()} {claim['place']}"
        print(f"{verdict}: {name} ({source}){limit}")

    def table(self, name: str, frame: pd.DataFrame) -> pd.DataFrame:
        """Writes `frame` to `data/results/<number>_<name>.csv`, floats with six digits, and returns
        it unchanged.

        Raises `ValueError` for a name that is no Python name.
        """
        if not name.isidentifier():
            raise ValueError(f"a table is called {name!r}; its name may have letters, digits and _")
        content = frame.to_csv(index=False, lineterminator="\n", float_format=written)
        write(out() / located("data/results", f"{self.number}_{name}.csv"), content)
        return frame

    def quotes(self, *parts: str) -> None:
        """Prints those `parts` that the first cell does not have: with other parameters its numbers
        are others."""
        (path,) = ROOT.glob(located("notebooks", f"{self.number}_*.ipynb"))
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        if other := [part for part in parts if part not in " ".join(first.split())]:
            print(f"With these parameters the first cell would say: {', '.join(other)}")

    def close(self) -> None:
        """Writes verdicts and numbers; a claim that this run did not judge is open. Prints where
        results are, unless `SPECNB_OUT` says so."""
        rows = [
            (name, claim.verdict, claim.evidence, self.number)
            if (claim := self.judged.get(name))
            else (name, "open", UNCHECKED, self.number)
            for name in self.claims
        ]
        verdicts = pd.DataFrame(rows, columns=["id", "verdict", "evidence", "notebook"])
        numbers = {name: self.judged[name].numbers if name in self.judged else {} for name in self.claims}
        results = out() / located("data/results", self.number)
        write(results.with_name(f"{results.name}.claims.csv"), verdicts.to_csv(index=False, lineterminator="\n"))
        write(results.with_name(f"{results.name}.numbers.json"), json.dumps(numbers, indent=1, allow_nan=False) + "\n")
        if not os.environ.get("SPECNB_OUT"):
            print(f"Results are in {out()}; SPECNB_OUT names another folder.")


def _answer(condition: object, name: str) -> bool:
    answer = as_number(condition, name)
    if not isinstance(answer, bool):
        raise TypeError(f"a condition of {name} is {condition!r}; it must be true or false")
    return answer


def _as_written(name: str, cell: FrameType) -> list[str]:
    """The conditions of the call that `cell` is at, as its source has them, the first without a
    word."""
    source = "".join(linecache.getlines(cell.f_code.co_filename))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(ast.Attribute(attr="claim"), [ast.Constant(first), condition], keywords) if first == name:
                if node.lineno <= cell.f_lineno <= (node.end_lineno or 0):
                    named = [("", condition)] + [(f"{one.arg}: ", one.value) for one in keywords]
                    texts = {word: ast.get_source_segment(source, part) or "" for word, part in named}
                    words = ("", "control: ", "only_if: ", "undecided: ")
                    return [word + " ".join(texts[word].split()) for word in words if word in texts]
    return []
