"""The values that the parameters of a notebook may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def require_at_least(parameters: Mapping[str, Any], **least: int) -> None:
    """Raises `ValueError` naming every one of `parameters` that is below its smallest allowed value in `least`.

    >>> require_at_least({"rows": 8, "gamma": 0}, rows=2, gamma=1)
    Traceback (most recent call last):
    ValueError: parameters too small: gamma = 0 (at least 1); change the cell tagged `parameters`
    """
    small = [f"{name} = {parameters[name]} (at least {low})" for name, low in least.items() if parameters[name] < low]
    if small:
        raise ValueError(f"parameters too small: {', '.join(small)}; change the cell tagged `parameters`")
