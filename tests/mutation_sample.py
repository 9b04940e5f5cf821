"""Tries a random sample of all mutants of some packages: those of `tests/mutation.py`, each with its module's tests.

    python -m tests.mutation_sample specnb/sampling specnb/decoding specnb/audit --sample 150 --log mutants.jsonl

The mutants of all modules are shuffled together (`--seed`), so whatever the program has tried is a uniform sample of
them. Each result is a line of the log; run again with the same log, the program goes on. `--score` prints the score
of a log and tries nothing. Run it from the project's root.

A mutant is given the test files of `test_files` and the examples in its module's docstrings, the fastest first, until
one fails. All tests are collected once; a mutant of a function then lives in a fork that replaces the function's code,
so that it costs little more than its tests. Other mutants, such as those of constants, are imported in a fork that has
imported only the heavy libraries. Tests that start another process test the module as it is.

All times are seconds of the processor, so that a busy machine changes no result. After `--budget` seconds no further
test is begun: such a mutant is unfinished, and the tests left are run when the program is run again. A test that takes
five times as long as before, and 10 seconds more, has failed; so has one that takes 20 times as long as that by the
clock, because it waits. In the end all tests that failed are run without a mutant, since one that fails then proves
nothing.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import inspect
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.mutation import HEAVY, WAITING, Mutant, Mutated, mutants

Result = dict[str, Any]

# The tests of specnb_audit/pit.py are in tests/audit/test_pit.py; where that is not all, the files in order.
OTHER_FILES = {
    "sampling/batch_truncation": ["sampling/test_batch_truncation", "decoding/test_batch_layouts"],
    "sampling/beam_enumeration": ["sampling/test_beam_rules", "measure/test_beam_cost"],
    "sampling/beam_rules": ["sampling/test_beam_rules", "decoding/test_beam"],
    "sampling/block_verification": ["sampling/test_block_verification", "sampling/test_optimal_acceptance"],
    "sampling/distributions": ["sampling/test_distributions", "audit/test_claimed", "decoding/test_request"],
    "sampling/draft_schemes": ["sampling/test_draft_schemes", "sampling/test_multi_draft"],
    "sampling/enumeration": ["sampling/test_enumeration", "sampling/test_verification"],
    "sampling/hierarchical_file": ["sampling/test_block_verification"],
    "sampling/multi_draft": ["sampling/test_multi_draft", "sampling/test_best_draft"],
    "sampling/optimal_acceptance": ["sampling/test_optimal_acceptance", "sampling/test_multi_draft"],
    "sampling/randomness": ["sampling/test_randomness", "decoding/test_step"],
    "sampling/threshold_enumeration": ["sampling/test_block_verification", "sampling/test_multi_draft"],
    "sampling/traversal": ["sampling/test_tree_rules", "sampling/test_best_draft"],
    "sampling/tree_schemes": ["sampling/test_tree_rules", "drafting/test_tree"],
    "sampling/tree_selection": ["sampling/test_tree_rules", "drafting/test_tree"],
    "sampling/tree_shape": ["sampling/test_tree_shape", "sampling/test_tree_verification"],
    "sampling/tree_verification": ["sampling/test_tree_verification", "sampling/test_tree_rules"],
    "sampling/verification": ["sampling/test_verification", "sampling/test_lenience"],
    "decoding/batch_layouts": ["decoding/test_batch_layouts", "report/test_cache_view"],
    "decoding/loop": ["decoding/test_loop", "decoding/test_request", "models/test_memory"],
    "decoding/record": ["decoding/test_record", "report/test_step_view"],
    "decoding/request": ["decoding/test_request", "decoding/test_loop"],
    "decoding/scheduler": ["decoding/test_request", "decoding/test_loop"],
    "decoding/step": ["decoding/test_step", "decoding/test_loop", "decoding/test_drafter_kinds"],
    "decoding/timing": ["decoding/test_record", "decoding/test_loop"],
    "decoding/tree_step": ["decoding/test_drafter_kinds", "decoding/test_request"],
    "audit/alternatives": ["audit/test_alternatives", "audit/test_frequencies"],
    "audit/bets": ["audit/test_auditor", "audit/test_detectable"],
    "audit/compare_command": ["audit/test_two_samples", "test_cli"],
    "audit/condensed": ["audit/test_condensed", "audit/test_alternatives"],
    "audit/control": ["audit/test_control", "audit/test_report"],
    "audit/engine": ["audit/test_impossible", "audit/test_api"],
    "audit/evidence": ["audit/test_evidence", "audit/test_auditor"],
    "audit/impossible": ["audit/test_impossible", "audit/test_report"],
    "audit/known_bugs": ["audit/test_known_bugs", "audit/test_known_bugs_in_the_loop"],
    "audit/numerics": ["audit/test_numerics", "audit/test_auditor"],
    "audit/progress": ["audit/test_api", "test_cli"],
    "audit/report": ["audit/test_report", "audit/test_control", "test_cli"],
    "audit/run": ["audit/test_api", "audit/test_token_stream", "test_cli"],
    "audit/teacher_forcing": ["audit/test_teacher_forcing", "audit/test_api"],
    "audit/token_file": ["audit/test_token_file", "test_cli_malformed"],
    "audit/token_stream": ["audit/test_token_stream", "test_cli"],
}


def test_files(module: Path) -> list[str]:
    """The test files for a module, the nearest first."""
    name = module.relative_to("specnb").with_suffix("").as_posix()
    folder, _, last = name.partition("/")
    return [f"tests/{file}.py" for file in OTHER_FILES.get(name, [f"{folder}/test_{last}"])]


class Tests:
    """A pytest plugin: the fastest tests first, until one fails or the budget is spent; the result goes to a file.

    With `mutant`, the module is imported from there. With `serve`, no test is run; `serve` is called after collection.
    """

    def __init__(
        self,
        file: Path,
        seconds: dict[str, float],
        budget: float,
        mutant: Mutated | None = None,
        serve: Callable[[Tests, list[Any]], None] | None = None,
    ) -> None:
        self.file, self.seconds, self.budget, self.mutant, self.serve = file, seconds, budget, mutant, serve
        self.measured: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_sessionstart(self) -> None:
        if self.mutant is not None:
            sys.meta_path.insert(0, self.mutant)  # before pytest's own finder, which takes files that it was given

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(result="killed", by=f"import of {report.nodeid}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtestloop(self, session: Any) -> bool:
        if session.testsfailed:  # not collected
            return True
        if self.serve is not None:
            self.serve(self, session.items)
        else:
            self.write(**self.run(session.items))
        return True

    def run(self, items: list[Any], all_of_them: bool = False) -> Result:
        """Runs `items`, up to the first failure unless `all_of_them`."""
        items = sorted(items, key=lambda item: self.seconds.get(item.nodeid, 0.2))
        for at, item in enumerate(items):
            unfinished: Result = {"result": "unfinished", "left": [one.nodeid for one in items[at:]]}
            if time.process_time() > self.budget and not all_of_them:
                return unfinished
            known = self.seconds.get(item.nodeid)
            slow = unfinished if known is None else {"result": "killed"}
            self.write(**slow, by=f"time: {item.nodeid}")  # stands if the process is ended by a timer
            limit, start = 10 + 5 * (known or 0.0), time.process_time()
            signal.setitimer(signal.ITIMER_PROF, limit)
            signal.setitimer(signal.ITIMER_REAL, WAITING * limit)  # for a pipe that is never written, say
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=items[at + 1] if at + 1 < len(items) else None)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if self.failed and not all_of_them:
                return {"result": "killed", "by": self.failed[0]}
            self.measured[item.nodeid] = round(time.process_time() - start, 3)
        return {"result": "survived", "failed": sorted(set(self.failed))}

    def write(self, **result: Any) -> None:
        self.file.write_text(json.dumps({**result, "seconds": self.measured}), encoding="utf-8")


def forked(action: Callable[[], None]) -> None:
    """Runs `action` in a fork that prints nothing, and waits for its end."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        action()
    finally:
        os._exit(0)


def pytest_main(paths: list[str], plugin: Tests, folder: Path) -> None:
    import pytest

    options = ["-n", "0", "-p", "no:cacheprovider", "--assert=plain", "--basetemp", str(folder / "tests")]
    pytest.main([*options, "--doctest-modules", *paths], plugins=[plugin])


def functions(module: CodeType) -> list[CodeType]:
    """The code of a module's functions and methods, in order; a function's own functions are part of it."""
    found = []
    for one in _inner(module):
        found += [one] if _is_function(one) else functions(one)
    return found


def rest(module: CodeType) -> Any:
    """What a module or class does besides its functions: to be compared with `repr`, since 1 == True."""
    values = [one for one in module.co_consts if not isinstance(one, CodeType)]
    return module.co_code, module.co_names, values, [rest(one) for one in _inner(module) if not _is_function(one)]


def _inner(code: CodeType) -> list[CodeType]:
    return [one for one in code.co_consts if isinstance(one, CodeType)]


def _is_function(code: CodeType) -> bool:
    """Not so: a class, or a comprehension outside functions."""
    return bool(code.co_flags & inspect.CO_NEWLOCALS) and (code.co_name == "<lambda>" or code.co_name[0] != "<")


def replacement(module: Path, tree: ast.Module) -> tuple[CodeType, CodeType] | None:
    """The code of the function that a mutant changes, before and after; None for any other change, or no code."""
    before = compile(module.read_text(encoding="utf-8"), str(module.resolve()), "exec")
    try:
        after = compile(tree, str(module.resolve()), "exec")
    except SyntaxError:  # such as a statement left out between `nonlocal` and its name; it cannot be imported either
        return None
    pairs = list(zip(functions(before), functions(after), strict=True))
    changed = [pair for pair in pairs if pair[0] != pair[1]]
    return changed[0] if len(changed) == 1 and repr(rest(before)) == repr(rest(after)) else None


class Server:
    """A process that has collected all tests and answers requests: a fork of it runs some of them."""

    def __init__(self, paths: list[str], folder: Path, budget: float) -> None:
        self.folder, self.budget = folder, budget
        ours, self.pipe = os.pipe(), os.pipe()
        self.requests, self.answers = os.fdopen(ours[1], "w"), os.fdopen(self.pipe[0])
        if os.fork() == 0:
            self.requests.close()
            self.incoming = os.fdopen(ours[0])
            plugin = Tests(folder / "result.json", {}, budget, serve=self.serve)
            try:
                pytest_main(paths, plugin, folder)
            finally:
                os._exit(0)
        os.close(ours[0])
        os.close(self.pipe[1])

    def ask(self, **request: Any) -> Result:
        """The result of a request for `answer`."""
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        if not self.answers.readline():
            raise SystemExit("the tests could not be collected; run pytest on them")
        return _result(self.folder)

    def serve(self, plugin: Tests, items: list[Any]) -> None:
        of_code: dict[CodeType, list[FunctionType]] = defaultdict(list)
        for one in gc.get_objects():
            if type(one) is FunctionType and "specnb" in one.__code__.co_filename:
                of_code[one.__code__].append(one)
        gc.freeze()
        for line in self.incoming:
            request = json.loads(line)
            forked(lambda request=request: self.answer(plugin, items, of_code, **request))  # type: ignore[misc]
            os.write(self.pipe[1], b"done\n")

    def answer(
        self, plugin: Tests, items: list[Any], of_code: Any, tests: list[str], seconds: dict[str, float],
        module: str = "", number: int = 0,
    ) -> None:  # fmt: skip
        """In a fork: runs `tests`, names of tests or files, with the mutant `number` of `module` or, all, without."""
        if module:
            source = Path(module).read_text(encoding="utf-8")
            changed = replacement(Path(module), mutants(source)[number][1]())
            if changed is None or not of_code[changed[0]]:
                return
            for function in of_code[changed[0]]:
                function.__code__ = changed[1]
        plugin.seconds = seconds
        wanted = [item for item in items if item.nodeid in tests or item.nodeid.split("::")[0] in tests]
        plugin.write(**plugin.run(wanted, all_of_them=not module))


def _result(folder: Path) -> Result:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def imported_anew(module: Path, tree: ast.Module, tests: list[str], plugin: Tests, folder: Path) -> Result:
    """The result of `tests` for a mutant that is imported in place of the module."""
    plugin.mutant = Mutated(".".join(module.with_suffix("").parts), module, tree)
    forked(lambda: pytest_main(tests, plugin, folder))
    return _result(folder)


def every_mutant(packages: list[Path]) -> list[tuple[str, Path, Mutant]]:
    """All mutants of the modules in the folders `packages`, subfolders not included, each with a key of its own."""
    found = []
    for module in (file for package in packages for file in sorted(package.glob("*.py"))):
        for number, one in enumerate(mutants(module.read_text(encoding="utf-8"))):
            found.append((f"{module}:{number}:{one[0]}", module, one))
    return found


def read(log: Path) -> dict[str, dict[str, Any]]:
    """The results in a log, by the mutants' keys."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return {one["mutant"]: one for one in map(json.loads, lines)}


def score(results: list[Result], total: int, equivalent: int) -> str:
    """The share of mutants killed, `equivalent` ones left out, with the 95% interval of Clopper and Pearson."""
    from scipy.stats import binomtest

    counts = Counter(one["result"] for one in results)
    killed, n = counts["killed"], len(results) - equivalent
    interval = binomtest(killed, n).proportion_ci(0.95, method="exact")
    return (
        f"{len(results)} of {total} mutants: {dict(counts)}; {killed} of {n} that are not equivalent were killed: "
        f"{killed / n:.1%}, 95% interval {interval.low:.1%} to {interval.high:.1%}"
    )


def main() -> int:
    """Runs the sample; returns 1 if a test that killed a mutant fails on the package as it is."""
    options = _options()
    every = every_mutant(options.packages)
    sample = random.Random(options.seed).sample(every, len(every))[: options.sample]
    done, broken = read(options.log), []
    if not options.score:
        for name in HEAVY:
            importlib.import_module(name)
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            os.environ["SPECNB_OUT"] = str(Path(folder) / "results")
            broken = _go_on(sample, done, options, Path(folder))
    results = [done[key] for key, _, _ in sample if key in done]
    print(score(results, len(every), options.equivalent))
    print(f"fail without a mutant: {broken}" if broken else "")
    return 1 if broken else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="+", type=Path, help="folders of modules, relative to the project's root")
    parser.add_argument("--sample", type=int, help="try so many mutants (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True, help="file of results, one a line; read to go on")
    parser.add_argument("--budget", type=float, default=10, help="seconds of the processor for a mutant")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further mutant after this time")
    parser.add_argument("--equivalent", type=int, default=0, help="so many survivors change nothing; for the score")
    parser.add_argument("--score", action="store_true", help="only print the score of the log")
    return parser.parse_args()


def _go_on(sample: list[tuple[str, Path, Mutant]], done: dict[str, Result], options: Any, folder: Path) -> list[str]:
    """Adds the results that `done` lacks to it and to the log; which tests that killed fail without a mutant."""
    seconds = {test: took for one in done.values() for test, took in one["seconds"].items()}
    files = {str(module): [*test_files(module), str(module)] for _, module, _ in sample}
    server = Server(sorted({file for some in files.values() for file in some}), folder, options.budget)
    end = time.monotonic() + 60 * options.minutes
    for key, module, (_, tree) in sample:
        before = done.get(key, {"result": "unfinished", "left": files[str(module)]})
        if before["result"] != "unfinished" or time.monotonic() > end:
            continue
        result_file = folder / "result.json"
        result_file.write_text(json.dumps({**before, "seconds": {}}), encoding="utf-8")
        if replacement(module, tree()):
            number = int(key.split(":")[1])
            result = server.ask(tests=before["left"], seconds=seconds, module=str(module), number=number)
        else:
            result = imported_anew(module, tree(), before["left"], Tests(result_file, seconds, options.budget), folder)
        seconds |= result["seconds"]
        done[key] = {**result, "mutant": key}
        with options.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[key]) + "\n")
        print(f"{len(done)} {result['result']:10} {key} {result.get('by', '')}", flush=True)
    killers = {one["by"].removeprefix("time: ") for one in done.values() if one["result"] == "killed"}
    return server.ask(tests=sorted(killers), seconds=seconds)["failed"]  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
