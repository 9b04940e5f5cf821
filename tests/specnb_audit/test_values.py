"""Settings, rules, records and reports are values: what one part of a program has got, no other part changes."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest
import specnb.sampling

import specnb.decoding
import specnb_audit


@pytest.mark.parametrize("package", [specnb.sampling, specnb.decoding, specnb_audit], ids=lambda one: one.__name__)
def test_dataclasses_cannot_be_changed(package: object) -> None:
    names = [one.name for one in pkgutil.iter_modules(package.__path__, f"{package.__name__}.") if not one.ispkg]  # type: ignore[attr-defined]
    classes = [one for name in names for one in vars(importlib.import_module(name)).values() if isinstance(one, type)]
    found = [one for one in classes if dataclasses.is_dataclass(one)]
    assert found
    for one in found:
        assert one.__dataclass_params__.frozen, one  # type: ignore[attr-defined]
