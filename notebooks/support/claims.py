"""A notebook and its claims: the registry has the rule, and the notebook supplies the numbers.

    nb = notebook("03")
    nb.claim("capped-geometric", worst_error=worst, smallest_p=fits.p.min(), wrong_p=wrong.p)

judges the claim by its rule in `data/claims.yml`, prints the verdict with the numbers, and stores
both. A claim is judged as its source states it:

- `holds`: its rule is true;
- `refuted`: its rule is false;
- `conditional`: so, but true under a condition that the source does not state, and false without it
  (`only_if`);
- `open`: the numbers leave the rule undecided, a check that should have failed did not (`control`),
  or the claim is about accelerators or large models, and none was measured.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import pandas as pd

from notebooks.support.findings import ELSEWHERE, UNCHECKED, Number, all_claims, as_number, written
from notebooks.support.parameters import mistakes, names_given, of_notebook, unknown
from notebooks.support.rules import Answer, decide, filled, names, parts, rounding
from studies.files import ROOT, located, notebooks, out, write


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
        self.judged: dict[str, Verdict] = {}

    def claim(self, name: str, **numbers: object) -> None:
        """Judges the claim `name` by its rule and prints the verdict; numbers that no rule names
        are stored only.

        Raises `KeyError` for a claim of another notebook and a missing number, otherwise as
        `as_number`.
        """
        if name not in self.claims:
            raise KeyError(f"{name!r} is not a claim of notebook {self.number}; those are {list(self.claims)}")
        kept = {key: as_number(value, f"{name}: {key}") for key, value in numbers.items()}
        self.judged[name] = Verdict(name, self.claims[name], kept)
        print(self.judged[name])

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


class Verdict:
    """One claim, judged: `verdict`, the `numbers`, and `evidence`, its rule with the numbers filled
    in."""

    def __init__(self, name: str, claim: Mapping[str, Any], numbers: dict[str, Number]):
        self.name, self.registered = name, claim
        asked = dict.fromkeys(word for rule in self._rules() for word in names(rule))
        if missing := [word for word in asked if word not in numbers]:
            raise KeyError(f"the rule of {name!r} needs {', '.join(missing)}; {', '.join(numbers)} were given")
        nothing = {word for rule in self._rules() for word in rounding(rule, numbers)}
        # Rounding errors differ between processors.
        self.numbers = numbers | dict.fromkeys(nothing, 0.0)

    def _rules(self) -> list[str]:
        claim, condition = self.registered, self.registered.get("only_if", {})
        rules = (claim["rule"], claim.get("control"), condition.get("inside"), condition.get("outside"))
        return [rule for rule in rules if rule]

    def _is(self, rule: str) -> Answer:
        return decide(rule, self.numbers)

    @property
    def verdict(self) -> str:
        """`holds`, `refuted`, `conditional` or `open`."""
        registered, condition = self.registered, self.registered.get("only_if")
        answer, control = self._is(registered["rule"]), registered.get("control")
        if registered["about"] in ELSEWHERE and "measured" not in registered:
            return "open"
        if answer is None or (control and not self._is(control)):
            return "open"
        if answer:
            return "holds"
        limited = condition and self._is(condition["inside"]) is True and self._is(condition["outside"]) is False
        return "conditional" if limited else "refuted"

    @property
    def checks(self) -> list[tuple[str, str]]:
        """Each part of the rule with its numbers, behind the answer; then the control, and what
        limits the claim."""
        answers = {True: "yes", False: "no", None: "undecided"}
        told = [(answers[self._is(part)], filled(part, self.numbers)) for part in parts(self.registered["rule"])]
        if control := self.registered.get("control"):
            told.append(("control" if self._is(control) else "cannot fail", filled(control, self.numbers)))
        if self.verdict == "conditional":
            told.append(("only if", self.registered["only_if"]["words"]))
        if self.registered["about"] in ELSEWHERE and "measured" not in self.registered:
            told.append(("about", f"{self.registered['about']}, and none was measured"))
        return told

    @property
    def evidence(self) -> str:
        """All checks in one line."""
        return "; ".join(words if label in ("yes", "no") else f"{label}: {words}" for label, words in self.checks)

    def __str__(self) -> str:
        """The verdict, the statement and its place, each check below, and what the names mean."""
        claim, meanings = self.registered, self.registered.get("numbers", {})
        told = [(self.verdict.upper(), f"{self.name}: {claim['statement']} ({claim['source']}, {claim['place']})")]
        told += self.checks
        told += [("", f"{name}: {meaning}") for name, meaning in meanings.items()]
        return "\n".join(
            textwrap.fill(f"{label:>11}  {words}", 118, subsequent_indent=" " * 13) for label, words in told
        )
