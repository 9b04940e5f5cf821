"""Results looked up by name: what is missing is named, and numbers print the same way everywhere."""

import json
from pathlib import Path

import pandas as pd
import pytest

from paper import reading


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(reading.Missing, match=r"data/results/01_joint\.csv is missing"):
        reading.Results(tmp_path).table("01_joint")


def test_numbers_of_verdicts_are_read_by_name(tmp_path: Path) -> None:
    stored = {"walltime": {"off": 0.011, "alpha": {"value": 0.5, "low": 0.4, "high": 0.6}}}
    (tmp_path / "03.numbers.json").write_text(json.dumps(stored))
    (tmp_path / "04.numbers.json").write_text(json.dumps({"table-3-shape": {"n": 3, "rises": True}}))
    results = reading.Results(tmp_path)
    assert (results.number("walltime", "off"), results.number("table-3-shape", "n")) == (0.011, 3)
    assert results.number("table-3-shape", "rises") == 1
    assert reading.interval(results.estimate("walltime", "alpha"), digits=1) == "0.5 [0.4, 0.6]"
    with pytest.raises(reading.Missing, match=r"walltime stores no number 'lost', only \['alpha', 'off'\]"):
        results.number("walltime", "lost")
    with pytest.raises(reading.Missing, match="oracle-gamma stores no number"):
        results.number("oracle-gamma", "gain")
    with pytest.raises(reading.Missing, match="not an estimate"):
        results.estimate("walltime", "off")


def test_numbers_as_printed() -> None:
    row = pd.Series({"value": -0.5, "low": -1.0, "high": 0.25})
    assert reading.with_minus(reading.interval(row)) == "\N{MINUS SIGN}0.50 [\N{MINUS SIGN}1.00, 0.25]"
    assert reading.with_minus("3e-16 and top-1") == "3e-16 and top-1"
    assert (reading.count(10418.4), reading.share(0.123, 1)) == ("10,418", "12.3%")


def test_one_machine_is_the_first() -> None:
    table = pd.DataFrame({"machine": ["b", "a", "b"], "ms": [1, 2, 3]})
    assert list(reading.one_machine(table).ms) == [1, 3]
