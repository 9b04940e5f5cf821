"""A small report, made by hand, and the comparison of texts with files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from specnb.statistics import Estimate
from specnb_audit.numerics import Numerics
from specnb_audit.report import Report


def report(**changed: object) -> Report:
    settings = {
        "delta": 1e-6,
        "tokens": 4,
        "sequences": 1,
        "found_after": None,
        "numerics_only": False,
        "running": np.array([0.1, -0.2, 0.3, -0.1]),
        "running_by_alternative": {"argmax": np.zeros(4), "sharper": np.full(4, 0.5)},
        "tv": Estimate(0.01, 0.0, 0.05, 4),
        "detectable": {"argmax": 0.123, "sharper": float("nan")},
        "numerics": Numerics(3, 1e-5, 1e-6, 1e-7, 0.0),
    }
    return Report(**(settings | changed))  # type: ignore[arg-type]


def require_as_in(file: Path, text: str) -> None:
    """Compares `text` with `file`; with SPECNB_WRITE_REPORTS=1 writes it: then read the
    differences."""
    if os.environ.get("SPECNB_WRITE_REPORTS"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"differs from {file}"
