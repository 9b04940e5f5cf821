"""Functions that are compiled once for each shape, without running the compiler."""

from pathlib import Path

import pytest
import torch
from specnb.models import compilation

from specnb.fast import Compiled


def test_a_compiled_function_is_compiled_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    double = Compiled(lambda numbers: numbers * 2)
    for length in (3, 3, 5, 3, 5):
        assert double(torch.ones(length)).tolist() == [2.0] * length
    assert len(compiled) == 2


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("none")

    monkeypatch.setattr(compilation, "get_cpp_compiler", missing)
    with pytest.raises(RuntimeError, match=r"install g\+\+, or leave compile=False"):
        Compiled(lambda numbers: numbers)(torch.ones(1))


def test_a_space_in_a_path_that_the_compiler_gets_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilation, "get_cpp_compiler", lambda: "g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "of mine"))
    with pytest.raises(RuntimeError, match=r"because of the space in .*/of mine: .* set TORCHINDUCTOR_CACHE_DIR"):
        compilation.require_compiler()
