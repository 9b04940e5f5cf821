"""A parameter that is too small is named with the smallest value that is allowed."""

import pytest

from specnb.notebook.findings import require_at_least


def test_every_small_parameter_is_named() -> None:
    given = {"rows": 1, "gamma": 0, "device": "cpu"}
    with pytest.raises(ValueError, match=r"rows = 1 \(at least 2\), gamma = 0 \(at least 1\)"):
        require_at_least(given, rows=2, gamma=1)
    require_at_least(given, rows=1, gamma=0)
