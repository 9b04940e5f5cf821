"""Acceptance functions of engines: the installed transformers, and wheels in the folder SPECNB_WHEELS if it is given.

Those need Triton, and TRITON_INTERPRET=1.
"""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import transformers

from specnb_audit.cli import main
from specnb_audit.kernels.source import Edit, Wheel, open_wheel
from studies.engines.kernels import ENGINES, Kernel, check

VERSION = metadata.version("transformers")
WHEELS = sorted(Path(os.environ.get("SPECNB_WHEELS", "/nowhere")).glob("*.whl"))
REVERSED: dict[type[ast.cmpop], ast.cmpop]
REVERSED = {ast.LtE: ast.Gt(), ast.GtE: ast.Lt(), ast.Lt: ast.GtE(), ast.NotEq: ast.Eq()}
UNIFORMS, GREEDY = {"uniform_prob", "coin", "r_i"}, {"draft_token_id", "target_argmax_id"}
ROWS = {"pos", "token_idx", "cur_prob_row", "n_matches"}


def names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


class Mutant(ast.NodeTransformer):
    """Changes each node that `change` returns something else for; counts them."""

    def __init__(self, change: Callable[[ast.AST], ast.AST | None]) -> None:
        self.change, self.count = change, 0

    def visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        changed = self.change(node)
        self.count += changed is not None
        return node if changed is None else ast.copy_location(changed, node)

    def __call__(self, tree: ast.Module) -> None:
        self.visit(tree)
        assert self.count, "no such place in this file"


def reversed_test(node: ast.AST) -> ast.AST | None:
    """A draft token is accepted where it should be rejected."""
    if not isinstance(node, ast.Compare) or not (names_in(node) & UNIFORMS or names_in(node) == GREEDY):
        return None
    node.ops[-1] = REVERSED[type(node.ops[-1])]
    return node


def recovered_from_p(node: ast.AST) -> ast.AST | None:
    """q is not subtracted from p."""
    is_difference = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
    subtracted = names_in(node.right) if is_difference else set()  # type: ignore[attr-defined]
    return node.left if subtracted & {"draft_prob", "q_val", "q_n_plus_1"} else None  # type: ignore[attr-defined]


def first_row(node: ast.AST) -> ast.AST | None:
    """p is read at the first position, whichever it should be."""
    if not isinstance(node, ast.Assign) or not names_in(node.targets[0]) & {"target_prob", "tp_base_ptr", "p_n_plus_1"}:
        return None
    for inner in ast.walk(node.value):
        for field, value in ast.iter_fields(inner):
            values = value if isinstance(value, list) else [value]
            new = [ast.Constant(0) if isinstance(one, ast.Name) and one.id in ROWS else one for one in values]
            setattr(inner, field, new if isinstance(value, list) else new[0])
    return node


MUTANTS = {"acceptance reversed": reversed_test, "recovered from p": recovered_from_p, "first row": first_row}


def mutants_of(kernel: Kernel) -> dict[str, Edit]:
    return {name: Mutant(change) for name, change in [*MUTANTS.items()][: 1 if kernel.greedy else 3]}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """A wheel with the file of the transformers that is installed."""
    path = tmp_path_factory.mktemp("wheels") / f"transformers-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        file = "transformers/generation/utils.py"
        archive.write(Path(transformers.__file__).parents[1] / file, file)
    return open_wheel(path, ENGINES)


def test_the_function_of_transformers_is_exact(installed: Wheel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--quick", str(installed.path)]) == 0
    printed = capsys.readouterr().out
    assert f"transformers {VERSION}, sha256 {installed.sha256}\n  token rule, 3 tokens: exact\n" in printed
    assert "1000 of 1000 steps with random noise as predicted" in printed
    assert "accept 0: 0; accept 1: 1; next: 0, 2\n" in printed


@pytest.mark.parametrize("name", MUTANTS)
def test_an_error_in_the_function_of_transformers_is_found(name: str, installed: Wheel) -> None:
    (kernel,) = ENGINES["transformers"]
    found, _ = check(installed, kernel, 3, mutants_of(kernel)[name])
    assert found.total_variation > 0.01


@pytest.mark.parametrize("file", WHEELS, ids=lambda file: file.name)
def test_releases_are_exact_and_their_mutants_are_not(file: Path) -> None:
    wheel = open_wheel(file, ENGINES)
    for kernel in ENGINES[wheel.name]:
        assert check(wheel, kernel, 3)[0].verdict == "exact", kernel.name
        for name, edit in mutants_of(kernel).items():
            assert check(wheel, kernel, 3, edit)[0].verdict != "exact", (kernel.name, name)
