"""A mutation tester: changes one thing in a module, runs its tests, and lists the changes that no test noticed.

    python tests/mutation.py specnb_audit/auditor.py tests/audit/test_auditor.py --minutes 5

Prints one line per surviving mutant and the score. Run it from the project's root, with the package on the path.
Mutants are tried in random order (`--seed`), so those tried within `--minutes` are a uniform sample. A first run on the
module as it is measures the tests; mutants are then given the fastest tests first, which kill most of them.

`--replace OLD NEW` tries one mutant of your own instead: the only place where the module has the text OLD has NEW. It
may be given several times, each for a mutant of its own; the test that fails first is printed.

A mutant exists only in memory: no file of the project is changed, whenever the program ends. Tests that start another
process test the module as it is. What tests write goes to a temporary folder. Each mutant is tested in a fork of a
process that has imported the heavy libraries, so it needs a system with fork.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

HEAVY = (
    "numpy",
    "torch",
    "scipy.stats",
    "transformers",
    "pandas",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "tqdm",
    "pytest",
    "hypothesis",
    "nbval.plugin",
)
REWRITTEN = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins that the heavy libraries have imported
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
WAITING = 20
"""A run that takes so many times longer than it may use the processor waits for something that does not come."""
Edit = Callable[[Any], None]
Mutant = tuple[str, Callable[[], ast.Module]]  # a description, line first, and what makes the tree


def edits(node: ast.AST) -> Iterator[tuple[str, Edit]]:
    """What can be changed at `node`: a description, and a function that changes a copy of it in place."""
    if isinstance(node, ast.Compare):
        swapped = [COMPARISONS[type(op)]() for op in node.ops]
        yield "comparison", lambda copied: setattr(copied, "ops", swapped)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        operator = ARITHMETIC[type(node.op)]()
        yield "arithmetic", lambda copied: setattr(copied, "op", operator)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", lambda copied: setattr(copied, "op", other)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", lambda copied: setattr(copied, "value", not copied.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant + 1", lambda copied: setattr(copied, "value", copied.value + 1)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition", lambda copied: setattr(copied, "test", ast.UnaryOp(ast.Not(), copied.test))
    elif isinstance(node, ast.Call):
        for at, keyword in enumerate(node.keywords):
            yield f"without {keyword.arg}=", lambda copied, at=at: copied.keywords.pop(at)  # type: ignore[misc]
    for name in ("body", "orelse", "finalbody"):
        for at, statement in enumerate(_statements(node, name)):
            if _removable(statement):
                yield (
                    f"without line {statement.lineno}",
                    lambda copied, name=name, at=at: _drop(getattr(copied, name), at),  # type: ignore[misc]
                )


def _statements(node: ast.AST, name: str) -> list[ast.stmt]:
    found = getattr(node, name, [])
    return found if isinstance(found, list) and not isinstance(node, ast.Module | ast.ClassDef) else []


def _removable(statement: ast.stmt) -> bool:
    docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    kinds = ast.Expr | ast.Assign | ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Return
    return isinstance(statement, kinds) and not docstring


def _drop(body: list[ast.stmt], at: int) -> None:
    body[at] = ast.copy_location(ast.Pass(), body[at])


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of `tree` but annotations and the words of messages, always in the same order."""
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or isinstance(tree, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes(child)


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module's `source`, always in the same order."""
    tree = ast.parse(source)
    lines = source.splitlines()
    found: list[Mutant] = []
    for number, node in enumerate(nodes(tree)):
        for at, (what, _) in enumerate(edits(node)):
            line = int(what.rpartition(" ")[2]) if what.startswith("without line") else getattr(node, "lineno", 1)
            found.append((f"{line}: {what}: {lines[line - 1].strip()}", partial(_changed, source, number, at)))
    return found


def _changed(source: str, number: int, at: int) -> ast.Module:
    """The tree of `source` with the edit `at` of the node `number`."""
    tree = ast.parse(source)
    node = next(islice(nodes(tree), number, None))
    next(islice(edits(node), at, None))[1](node)
    return ast.fix_missing_locations(tree)


def by_hand(source: str, edits: list[tuple[str, str]]) -> list[Mutant]:
    """A mutant for each of `edits`, a text that occurs once in `source` and the one that takes its place."""
    found: list[Mutant] = []
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"the module has {old!r} {source.count(old)} times; give a text that it has once")
        line = source[: source.index(old)].count("\n") + 1
        found.append((f"{line}: {old!r} -> {new!r}", partial(ast.parse, source.replace(old, new))))
    return found


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):  # type: ignore[misc]
    """Imports the module `name` from a tree in place of its file."""

    def __init__(self, name: str, file: Path, tree: ast.Module) -> None:
        self.name, self.file, self.tree = name, file, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.file, loader=self) if name == self.name else None

    def get_filename(self, fullname: str) -> str:
        return str(self.file)

    def get_data(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def get_code(self, fullname: str) -> Any:
        return compile(self.tree, str(self.file), "exec")


class Observer:
    """A pytest plugin: runs the fastest tests first, by the seconds in `folder`, or measures them where there are none.

    The name of the last test that failed is written to the file `failed`.
    """

    def __init__(self, folder: Path) -> None:
        self.file, self.failed = folder / "durations.json", folder / "failed"
        self.known: dict[str, float] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.measured: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.known.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.measured[report.nodeid] = self.measured.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.write_text(f"{report.nodeid} (not imported)")

    def pytest_sessionfinish(self) -> None:
        if not self.known:
            self.file.write_text(json.dumps(self.measured))


def survives(module: Path, tree: ast.Module, tests: list[str], seconds: float, folder: Path) -> bool:
    """Whether all `tests` pass with `tree` in place of `module`; more than `seconds` of the processor is a failure."""
    (folder / "failed").write_text(f"none within {seconds:g} seconds of the processor")
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process; the clock of a busy machine says little
        _run(module, tree, tests, folder)
    end = time.monotonic() + WAITING * seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _run(module: Path, tree: ast.Module, tests: list[str], folder: Path) -> None:
    """In the child: runs the tests and ends the process with their status."""
    import pytest

    status = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.meta_path.insert(0, Mutated(".".join(module.with_suffix("").parts), module, tree))
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--basetemp", str(folder / "tests"), *REWRITTEN]
        status = int(pytest.main([*options, *tests], plugins=[Observer(folder)]))
    finally:
        os._exit(status)


def main() -> int:
    """Runs the tester; returns 1 if a mutant survived."""
    options = _options()
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        os.environ["SPECNB_OUT"] = str(Path(folder) / "results")
        return _try(options, Path(folder))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", type=Path, help="the module to change, relative to the project's root")
    parser.add_argument("tests", nargs="+", help="what pytest shall run")
    parser.add_argument("--sample", type=int, help="so many mutants, chosen at random (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", help="only mutants of the lines FIRST-LAST")
    parser.add_argument("--replace", nargs=2, action="append", metavar=("OLD", "NEW"), help="a mutant of your own")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further mutant after this time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of the processor for one mutant")
    return parser.parse_args()


def _chosen(source: str, options: argparse.Namespace) -> tuple[list[Mutant], int]:
    """The mutants to try, and how many the module, or its `--lines`, has."""
    if options.replace:
        return by_hand(source, options.replace), len(options.replace)
    found = mutants(source)
    if options.lines:
        first, last = map(int, options.lines.split("-"))
        found = [one for one in found if first <= int(one[0].split(":")[0]) <= last]
    return random.Random(options.seed).sample(found, min(options.sample or len(found), len(found))), len(found)


def _try(options: argparse.Namespace, folder: Path) -> int:
    module, source = options.module, options.module.read_text(encoding="utf-8")
    chosen, total = _chosen(source, options)
    if not survives(module, ast.parse(source), options.tests, 10 * options.timeout, folder):
        raise SystemExit(f"the tests fail on {module} as it is: {(folder / 'failed').read_text()}")
    alive, tried, end = 0, 0, time.monotonic() + 60 * options.minutes
    for what, tree in chosen:
        if time.monotonic() > end:
            break
        tried += 1
        if survives(module, tree(), options.tests, options.timeout, folder):
            alive += 1
            print(f"survived  {module}:{what}", flush=True)
        elif options.replace:
            print(f"killed    {module}:{what}\n          by {(folder / 'failed').read_text()}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{tried}/{len(chosen)}", end="", file=sys.stderr, flush=True)
    print(f"{module}: {tried - alive} of {tried} mutants killed; {total} in all", flush=True)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
