"""A small report, made by hand."""

from __future__ import annotations

import numpy as np

from specnb.measure.statistics import Estimate
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
