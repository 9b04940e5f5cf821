"""Results as a text needs them: what is missing is named, and numbers print the same way everywhere."""

from pathlib import Path

import pandas as pd
import pytest

from paper import reading


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(reading.Missing, match=r"data/results/01_joint\.csv is missing"):
        reading.Results(tmp_path).table("01_joint")


def test_a_quotation_is_what_stands_there(tmp_path: Path) -> None:
    (tmp_path / "claims.csv").write_text("id,verdict,evidence,notebook\nwalltime,holds,1.1% off,03\n")
    results = reading.Results(tmp_path)
    assert results.quote("walltime", r"([\d.]+)% off") == "1.1"
    with pytest.raises(reading.Missing, match=r"the evidence for walltime says nothing like .* any more: 1\.1% off"):
        results.quote("walltime", r"([\d.]+)% above")


@pytest.mark.parametrize(
    ("words", "numbers"),
    [("-0.028 [-0.046, +0.011]", (-0.028, -0.046, 0.011)), ("0.5 [0.25, 1] (n = 40)", (0.5, 0.25, 1))],
)
def test_a_printed_estimate_is_read_back(words: str, numbers: tuple[float, float, float]) -> None:
    assert reading.parsed(words) == numbers


def test_numbers_as_printed() -> None:
    row = pd.Series({"value": -0.5, "low": -1.0, "high": 0.25})
    assert reading.with_minus(reading.interval(row)) == "\N{MINUS SIGN}0.50 [\N{MINUS SIGN}1.00, 0.25]"
    assert reading.with_minus("3e-16 and top-1") == "3e-16 and top-1"
    assert (reading.count(10418.4), reading.share(0.123, 1)) == ("10,418", "12.3%")


def test_one_machine_is_the_first() -> None:
    table = pd.DataFrame({"machine": ["b", "a", "b"], "ms": [1, 2, 3]})
    assert list(reading.one_machine(table).ms) == [1, 3]
