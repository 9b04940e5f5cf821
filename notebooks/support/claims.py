"""A notebook and its claims: the registry has the rule, and the notebook supplies the numbers.

    nb = notebook("03")
    nb.claim("capped-geometric", worst_error=worst, smallest_p=fits.p.min(), wrong_p=wrong.p)

judges the claim by its rule in `data/claims.yml`, prints the verdict with the numbers, and stores both. A claim is
judged as its source states it:

- `holds`: its rule is true;
- `refuted`: its rule is false;
- `conditional`: so, but true under a condition that the source does not state, and false without it (`only_if`);
- `open`: the numbers leave the rule undecided, a check that should have failed did not (`control`), or the claim is
  about accelerators or large models, and none was measured.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import pandas as pd

from notebooks.support.findings import ELSEWHERE, UNCHECKED, Number, all_claims, as_number, written
from notebooks.support.parameters import mistakes, names_given, of_notebook, unknown
from notebooks.support.rules import Answer, decide, filled, names, parts, rounding
from studies.files import ROOT, located, notebooks, out, write


def notebook(number: str) -> Notebook:
    """The notebook called `number`, for its first cell after the parameters: checks them, sets threads and style.

    A notebook of the audit is called `audit/01`; its tables and verdicts go to the folders of `audit` (`located`).

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


def above(low: float, high: float, bound: float = 0) -> Answer:
    """Whether a value with this interval is above `bound`; `None` if the interval contains `bound`.

    >>> above(0.1, 0.3), above(-0.3, -0.1), above(-0.1, 0.3)
    (True, False, None)
    """
    return True if low > bound else False if high < bound else None


def _decided(answer: object) -> Answer:
    """`answer`, a Boolean of any library, as Python's. Raises `TypeError` for a number, which may be NaN, or a list."""
    value = answer.item() if getattr(answer, "shape", None) == () and hasattr(answer, "item") else answer
    value = bool(value) if type(value).__name__ in ("BooleanTrue", "BooleanFalse") else value  # of sympy
    if value is None or isinstance(value, bool):
        return value
    raise TypeError(f"a claim is decided by {answer!r}; give True, False, or None where nothing decides it")


class Notebook:
    """The claims and tables of one notebook; `close` at the end writes the verdicts."""

    def __init__(self, number: str):
        known = {name.split("_")[0] for name in notebooks()}
        if number not in known:
            raise ValueError(f"there is no notebook {number!r}; there are {', '.join(sorted(known))}")
        self.number = number
        self.claims = {name: claim for name, claim in all_claims().items() if claim["notebook"] == number}
        self.judged: dict[str, Claim | Verdict] = {}

    def claim(self, name: str, **numbers: object) -> Any:
        """Judges the claim `name` by its rule and prints the verdict; numbers that no rule names are stored only.

        Raises `KeyError` for a claim of another notebook and a missing number, otherwise as `as_number`.
        """
        if name not in self.claims:
            raise KeyError(f"{name!r} is not a claim of notebook {self.number}; those are {list(self.claims)}")
        if "rule" not in self.claims[name]:
            self.judged[name] = Claim(name, self.claims[name]["statement"])
            return self.judged[name]
        kept = {key: as_number(value, f"{name}: {key}") for key, value in numbers.items()}
        self.judged[name] = Verdict(name, self.claims[name], kept)
        print(self.judged[name])
        return None

    def table(self, name: str, frame: pd.DataFrame) -> pd.DataFrame:
        """Writes `frame` to `data/results/<number>_<name>.csv`, floats with six digits, and returns it unchanged.

        Raises `ValueError` for a name that is no Python name.
        """
        if not name.isidentifier():
            raise ValueError(f"a table is called {name!r}; its name may have letters, digits and _")
        content = frame.to_csv(index=False, lineterminator="\n", float_format=written)
        write(out() / located("data/results", f"{self.number}_{name}.csv"), content)
        return frame

    def close(self) -> None:
        """Writes verdicts and numbers; a claim that this run did not judge is open. Prints where results are, unless
        `SPECNB_OUT` says so."""
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
    """One claim, judged: `verdict`, the `numbers`, and `evidence`, its rule with the numbers filled in."""

    def __init__(self, name: str, claim: Mapping[str, Any], numbers: dict[str, Number]):
        self.name, self.registered = name, claim
        asked = dict.fromkeys(word for rule in self._rules() for word in names(rule))
        if missing := [word for word in asked if word not in numbers]:
            raise KeyError(f"the rule of {name!r} needs {', '.join(missing)}; {', '.join(numbers)} were given")
        nothing = {word for rule in self._rules() for word in rounding(rule, numbers)}
        self.numbers = numbers | dict.fromkeys(nothing, 0.0)  # rounding errors differ between processors

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
        """Each part of the rule with its numbers, behind the answer; then the control, and what limits the claim."""
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


class Claim:
    """One claim: what it needs, whether the check could have failed, and the numbers behind it. Printed when judged."""

    def __init__(self, name: str, statement: str):
        self.name, self.statement = name, statement
        self.needed: list[tuple[Answer, str]] = []
        self.failing: list[tuple[bool, str]] = []
        self.condition: tuple[bool, str] | None = None
        self.numbers: dict[str, Number] = {}

    def needs(self, answer: Answer, words: str) -> None:
        """Something that the claim says: a Boolean, or `None` where nothing decides it; `TypeError` for all else."""
        self.needed.append((_decided(answer), " ".join(words.split())))

    def could_fail(self, noticed: bool, words: str) -> None:
        """Whether the same check noticed a case in which the claim is false; if not, it decides nothing."""
        self.failing.append((bool(_decided(noticed)), " ".join(words.split())))

    def only_if(self, inside: Answer, outside: Answer, words: str) -> None:
        """A condition that the source does not state: whether the claim is true under it, and without it."""
        self.condition = (_decided(inside) is True and _decided(outside) is False, words)

    def number(self, **values: object) -> None:
        """Numbers behind the verdict: scalars, or estimates with `value`, `low` and `high`. Raises as `as_number`."""
        self.numbers |= {name: as_number(value, f"{self.name}: {name}") for name, value in values.items()}

    @property
    def verdict(self) -> str:
        """`holds`, `refuted`, `conditional` or `open`."""
        answers = [answer for answer, _ in self.needed]
        if not all(noticed for noticed, _ in self.failing):
            return "open"
        if False in answers:
            return "conditional" if self.condition and self.condition[0] else "refuted"
        return "open" if None in answers else "holds"

    @property
    def evidence(self) -> str:
        """All that was stated, in one line."""
        words = [words for _, words in (*self.needed, *self.failing)]
        condition = f". Condition: {self.condition[1]}" if self.condition and self.verdict == "conditional" else ""
        return "; ".join(words) + condition

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.needs(None, "the check ended with an error")  # a part of it is no verdict, whatever runs afterwards
            return
        if not self.needed:
            raise ValueError(f"nothing was needed for {self.name!r}; a claim is judged by what it `needs`")
        told = [(self.verdict.upper(), f"{self.name}: {self.statement}")]
        told += [("undecided" if answer is None else "yes" if answer else "no", words) for answer, words in self.needed]
        told += [("could fail" if noticed else "cannot fail", words) for noticed, words in self.failing]
        told += [("only if", self.condition[1])] if self.condition and self.verdict == "conditional" else []
        for label, words in told:
            print(textwrap.fill(f"{label:>11}  {words}", 118, subsequent_indent=" " * 13))
