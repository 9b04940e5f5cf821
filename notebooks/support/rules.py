"""The rule of a claim: an expression over named numbers that is true, false, or undecided.

    worst_error < 1e-12 and smallest_p > 1e-6

A number with an interval is compared by its interval: `speed_up > 1` is true if all of the interval
lies above 1, false if all of it lies below, and undecided (`None`) if it contains 1. `and`, `or`
and `not` are Kleene's: an undecided part decides nothing unless another part does.

Conditions now stand in the notebooks (`Notebook.claim`). This module judges the claims whose rule
is still in the registry, and goes with the last of them.
"""

from __future__ import annotations

import ast
import math
import operator
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from notebooks.support.findings import ELSEWHERE, Number, shown

Answer = bool | None  # None: undecided

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def names(rule: str) -> list[str]:
    """The numbers that a rule is about, in order.

    >>> names("worst < 1e-12 and cases == right")
    ['worst', 'cases', 'right']
    """
    found = (node.id for node in ast.walk(_parsed(rule)) if isinstance(node, ast.Name))
    return list(dict.fromkeys(found))


def parts(rule: str) -> list[str]:
    """What a rule asks for, one condition each: the operands of its outermost `and`.

    >>> parts("worst < 1e-12 and (p > 1e-6 or n == 0)")
    ['worst < 1e-12', 'p > 1e-06 or n == 0']
    """
    tree = _parsed(rule)
    every = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return [ast.unparse(one) for one in every]


def decide(rule: str, numbers: Mapping[str, Number]) -> Answer:
    """Whether `rule` is true of `numbers`; `None` where intervals leave it undecided.

    Raises `KeyError` for a number that is missing, and `ValueError` for anything but comparisons of
    arithmetic joined by `and`, `or` and `not`.

    >>> decide("speed > 1", {"speed": {"value": 1.1, "low": 1.05, "high": 1.2}}), decide("n == 3", {"n": 4})
    (True, False)
    >>> decide("speed > 1 or n == 3", {"speed": {"value": 1.1, "low": 0.9, "high": 1.2}, "n": 4}) is None
    True
    """
    return _decided(_parsed(rule), numbers)


def rounding(rule: str, numbers: Mapping[str, Number]) -> list[str]:
    """The numbers that are only rounding errors: below the 1e-9, or less, that the rule allows.

    >>> rounding("error < 1e-12 and p < 1e-6 and worst < 1e-12", {"error": 2e-16, "p": 1e-40, "worst": 0.1})
    ['error']
    """
    found = []
    for node in ast.walk(_parsed(rule)):
        match node:
            case ast.Compare(ast.Name(name), [ast.Lt()], [ast.Constant(float() as bound)]) if bound <= 1e-9:
                value = numbers[name]
                found += [name] if isinstance(value, int | float) and abs(value) < bound else []
    return found


def filled(rule: str, numbers: Mapping[str, Number]) -> str:
    """`rule` with the value of each number behind its name; rounding errors differ between machines
    and have none.

    >>> filled("error < 1e-12 and gain > 0", {"error": 2e-16, "gain": 0.25})
    'error (rounding) < 1e-12 and gain (0.25) > 0'
    """
    nothing = rounding(rule, numbers)

    class Values(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.Name:
            return ast.Name(f"{node.id} ({'rounding' if node.id in nothing else shown(numbers[node.id])})")

    return ast.unparse(Values().visit(_parsed(rule)))


def _parsed(rule: str) -> ast.expr:
    try:
        return ast.parse(rule, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"the rule {rule!r} is no expression: {error.msg}") from error


def _decided(node: ast.expr, numbers: Mapping[str, Number]) -> Answer:
    match node:
        case ast.BoolOp(op, values):
            answers = [_decided(value, numbers) for value in values]
            deciding = isinstance(op, ast.Or)
            return deciding if deciding in answers else None if None in answers else not deciding
        case ast.UnaryOp(ast.Not(), operand):
            answer = _decided(operand, numbers)
            return None if answer is None else not answer
        case ast.Compare(left, ops, comparators):
            sides = [_interval(side, numbers) for side in (left, *comparators)]
            pairs = zip(ops, sides, sides[1:], strict=False)
            answers = [_compared(_COMPARISONS[type(op)], *pair) for op, *pair in pairs]
            return False if False in answers else None if None in answers else True
        case ast.Name(name) if isinstance(numbers[name], bool):
            return bool(numbers[name])
    raise ValueError(f"{ast.unparse(node)!r} is neither true nor false; compare numbers")


def _compared(holds: Callable[[Any, Any], bool], left: tuple[Any, Any], right: tuple[Any, Any]) -> Answer:
    """Whether a comparison is true of all values of both intervals, or of none; ends decide, as it
    is monotone."""
    answers = {bool(holds(one, other)) for one in left for other in right}
    return answers.pop() if len(answers) == 1 else None


def _interval(node: ast.expr, numbers: Mapping[str, Number]) -> tuple[Any, Any]:
    match node:
        case ast.Constant(value):
            return value, value
        case ast.Name(name):
            number = numbers[name]
            return (number["low"], number["high"]) if isinstance(number, dict) else (number, number)
        case ast.UnaryOp(ast.USub(), operand):
            low, high = _interval(operand, numbers)
            return -high, -low
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            ends = (_interval(left, numbers), _interval(right, numbers))
            values = [_ARITHMETIC[type(op)](one, other) for one in ends[0] for other in ends[1]]
            return (min(values), max(values)) if all(map(math.isfinite, values)) else (values[0], values[0])
    raise ValueError(f"{ast.unparse(node)!r} is no number; a rule has names, numbers, + - * / and comparisons")


def by_rule(name: str, claim: Mapping[str, Any], given: dict[str, Number]) -> tuple[str, dict[str, Number], str]:
    """The verdict on a `claim` by the rule in the registry, its numbers, and the rule with them
    filled in; prints all of it.

    Raises `KeyError` for a number that the rule needs and that was not given.
    """
    condition, control = claim.get("only_if", {}), claim.get("control")
    rules = [rule for rule in (claim["rule"], control, condition.get("inside"), condition.get("outside")) if rule]
    asked = dict.fromkeys(word for rule in rules for word in names(rule))
    if missing := [word for word in asked if word not in given]:
        raise KeyError(f"the rule of {name!r} needs {', '.join(missing)}; {', '.join(given)} were given")
    # Rounding errors differ between processors.
    numbers = given | dict.fromkeys((word for rule in rules for word in rounding(rule, given)), 0.0)
    answer, elsewhere = decide(claim["rule"], numbers), claim["about"] in ELSEWHERE and "measured" not in claim
    verdict = "holds" if answer else "refuted"
    if elsewhere or answer is None or (control and not decide(control, numbers)):
        verdict = "open"
    elif not answer and condition and decide(condition["inside"], numbers) is True:
        verdict = "conditional" if decide(condition["outside"], numbers) is False else "refuted"
    answers = {True: "yes", False: "no", None: "undecided"}
    told = [(answers[decide(part, numbers)], filled(part, numbers)) for part in parts(claim["rule"])]
    if control:
        told.append(("control" if decide(control, numbers) else "cannot fail", filled(control, numbers)))
    if verdict == "conditional":
        told.append(("only if", condition["words"]))
    if elsewhere:
        told.append(("about", f"{claim['about']}, and none was measured"))
    meanings = [("", f"{word}: {meaning}") for word, meaning in claim.get("numbers", {}).items()]
    card = [(verdict.upper(), f"{name}: {claim['statement']} ({claim['source']}, {claim['place']})"), *told, *meanings]
    lines = [textwrap.fill(f"{label:>11}  {words}", 118, subsequent_indent=" " * 13) for label, words in card]
    print("\n".join(lines))
    evidence = "; ".join(words if label in ("yes", "no") else f"{label}: {words}" for label, words in told)
    return verdict, numbers, evidence
