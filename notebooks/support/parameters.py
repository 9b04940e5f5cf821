"""The parameters of a notebook: the lines of its cell tagged `parameters`, each a name, a type, a
value and a comment.

    gamma: int = 4  # draft tokens per step, from 1 to 64

The comment is the meaning with its unit, then the values that are allowed. A number has one of
these ends:

    from 1, from 1 to 64, above 0, above 0 and below 1, one of 1, 2, 4

and a text `one of cpu, cuda`, or none if it is free. A bound may name other parameters:
`from 1 to new_tokens / 2`. No line has a second `=`: papermill would not know its parameter.
papermill only warns of a name that it does not know, and takes every value, so the notebook itself
says what is wrong. Only the standard library is imported: the Snakefile reads parameters, too.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

KINDS = {"int": int, "float": float, "str": str, "bool": bool}
FORM = "name: int = 4  # meaning, from 1"
ENDS = "from A, from A to B, above A, above A and below B, one of A, B"
ALLOWED = re.compile(
    r".*, (?:from (?P<least>.+?)(?: to (?P<most>.+))?|above (?P<above>.+?)(?: and below (?P<below>.+))?"
    r"|one of (?P<choices>.+))"
)
COMPARED = {"least": operator.ge, "most": operator.le, "above": operator.gt, "below": operator.lt}


class Parameter(NamedTuple):
    """The type of a parameter, its value in the notebook, and its comment: the meaning, and what is
    allowed."""

    kind: str
    value: Any
    comment: str

    def is_kind(self, value: Any) -> bool:
        """Whether `value` has the type. An int is a float, too; a float is finite."""
        if self.kind == "float":
            return type(value) in (int, float) and math.isfinite(value)
        return type(value) is KINDS[self.kind]

    def allows(self, value: Any, given: Mapping[str, Any]) -> bool:
        """Whether a `value` of the type is allowed where the parameters, by name, are `given`."""
        end = ALLOWED.fullmatch(self.comment)
        if end and end["choices"]:
            return str(value) in end["choices"].split(", ")
        bounds = end.groupdict() if end and self.kind in ("int", "float") else {}
        limits = {name: eval(words, {}, {**given}) for name, words in bounds.items() if words}
        return all(COMPARED[name](value, limit) for name, limit in limits.items())


def of_notebook(path: Path) -> dict[str, Parameter]:
    """The parameters of the notebook in the file `path`, by name. Raises as `read`."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    return read(source)


def read(source: str) -> dict[str, Parameter]:
    """The parameters in the source of a cell, by name. Raises `ValueError` for a line of another
    form.

    >>> read("gamma: int = 4  # draft tokens per step, from 1")
    {'gamma': Parameter(kind='int', value=4, comment='draft tokens per step, from 1')}
    """
    lines = source.splitlines()
    return dict(_parameter(part, lines[(part.end_lineno or 0) - 1]) for part in ast.parse(source).body)


def _parameter(part: ast.stmt, last_line: str) -> tuple[str, Parameter]:
    _, found, comment = last_line.rpartition("  # ")
    match part:
        case ast.AnnAssign(ast.Name(name), ast.Name(kind), ast.expr() as value) if found and kind in KINDS:
            if kind in ("str", "bool") or ALLOWED.fullmatch(comment):
                return name, Parameter(kind, ast.literal_eval(value), comment)
    raise ValueError(
        f"`{last_line}` is no parameter, which is a line such as `{FORM}`, "
        f"with a type of {', '.join(KINDS)}; a number ends with one of: {ENDS}"
    )


def names_given(run: Sequence[str], known: Iterable[str]) -> list[str]:
    """The names in the last cell of parameters, papermill's or the notebook's, among the sources of
    the cells `run`."""
    first = next(iter(known))
    cells = [cell for cell in run if cell.startswith(("# Parameters\n", f"{first}: ", f"{first} = "))]
    nodes = ast.walk(ast.parse(cells[-1] if cells else ""))
    return [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def unknown(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """What is wrong with those `names` that are not `known`.

    >>> unknown(["gamm"], ["seed", "gamma"])
    ['there is no parameter gamm (did you mean gamma?), only seed, gamma']
    """
    known = list(known)
    close = {name: " or ".join(get_close_matches(name, known)) for name in names if name not in known}
    return [
        f"there is no parameter {name}{near and f' (did you mean {near}?)'}, only {', '.join(known)}"
        for name, near in close.items()
    ]


def mistakes(known: Mapping[str, Parameter], given: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values `given` to the `known` parameters: types first, as bounds
    compare values.

    >>> mistakes(read("gamma: int = 4  # draft tokens per step, from 1"), {"gamma": 0})
    ['gamma = 0 is not allowed: int, draft tokens per step, from 1']
    """
    wrong = [name for name, parameter in known.items() if not parameter.is_kind(given[name])]
    wrong = wrong or [name for name, parameter in known.items() if not parameter.allows(given[name], given)]
    return [f"{name} = {given[name]!r} is not allowed: {known[name].kind}, {known[name].comment}" for name in wrong]


def ends(known: Mapping[str, Parameter], which: str) -> dict[str, Any]:
    """The values of all parameters with the numbers at their `least` or their `most`; those without
    such an end, and texts, stay as they are.

    >>> ends(read("gamma: int = 4  # draft tokens per step, from 1 to 64"), "least")
    {'gamma': 1}
    """
    given = {name: parameter.value for name, parameter in known.items()}
    for name, parameter in known.items():
        end = ALLOWED.fullmatch(parameter.comment)
        if parameter.kind in ("int", "float") and end and end[which]:
            bound = eval(end[which], {}, {**given})  # a bound may name the parameters above it
            given[name] = int(bound) if parameter.kind == "int" else bound
    return given
