"""The public interface: every name has a docstring with an example."""

from __future__ import annotations

import inspect

import pytest

import specnb


def test_names_are_listed_for_completion() -> None:
    assert set(dir(specnb)) == set(specnb.__all__)


@pytest.mark.parametrize("name", [name for name in specnb.__all__ if name != "theory"])
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    """The example may stand at one of the methods of a class."""
    value = getattr(specnb, name)
    parts = [value] if inspect.isfunction(value) else [value, *vars(value).values()]
    assert inspect.getdoc(value)
    assert any(">>>" in (inspect.getdoc(part) or "") for part in parts)
