"""Remarks: each stands in the paper, is true of the results, and would not be of others."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from paper.reading import Missing, Results
from paper.remarks import REMARKS, require_true
from studies.run import code

ROOT = Path(__file__).parent.parent.parent
TEXT = " ".join((ROOT / "paper" / "paper.typ").read_text().split())
RESULTS = Results(ROOT / "data" / "results")


class Contrary(Results):
    """Results that say the opposite: what was larger is smaller, what held is refuted, what was found was not."""

    def _table(self, name: str) -> pd.DataFrame:
        table = super()._table(name)
        for column in table:
            if table[column].dtype == bool:
                table[column] = ~table[column]
            elif pd.api.types.is_float_dtype(table[column]):
                table[column] = -table[column]
        return table

    def claims(self) -> pd.DataFrame:
        return super().claims().assign(verdict="open")

    def record(self, name: str) -> dict[str, Any]:
        """What is old is new."""
        experiment = {"bug_suite": "detection"}.get(name, name)
        return super().record(name) | {"code": code(experiment)}

    def numbers(self) -> dict[str, dict[str, Any]]:
        return {
            claim: {name: _contrary(value, at) for at, (name, value) in enumerate(named.items())}
            for claim, named in super().numbers().items()
        }


def _contrary(value: Any, at: int) -> Any:
    """The other sign, different for equal numbers, and for an interval not around zero."""
    if isinstance(value, dict):
        return {"value": 1 - value["value"], "low": 1 - value["high"], "high": 1 - value["low"]}
    return not value if isinstance(value, bool) else -value - at


@pytest.mark.parametrize("words", REMARKS)
def test_a_remark_stands_in_the_paper_and_is_true(words: str) -> None:
    assert words in TEXT
    assert REMARKS[words](RESULTS)


class Planted(Results):
    """Results of which one column of one table is another."""

    def __init__(self, table: str, column: str, value: float) -> None:
        super().__init__(RESULTS.folder)
        self.planted = table, column, value

    def _table(self, name: str) -> pd.DataFrame:
        table, column, value = self.planted
        return super()._table(name).assign(**{column: value}) if name == table else super()._table(name)


# What turning everything round leaves true: ratios, and counts of which none may be there.
PLANTED = {
    "exact if the last draft token that a row keeps is not sampled again": ("10_truncation", "gamma 1", 0.1),
    "the layout of the weights decides whether more tokens cost more": ("bench_costs", "ms", 1.0),
    "is closer to the prediction with the measured $v$": ("bench_walltime", "predicted", 9.0),
    "speculation gains less over the faster baseline; for the synthetic pair": (
        "bench_against_transformers",
        "ms_per_token",
        1.0,
    ),
    "two plausible bugs": ("06_every_tree", "different: A.4", 1),
    "both keep every token below $p\\/l$": ("07_readings", "breaks_bound", 1),
    "whether sequences become less diverse depends on the draft model": ("07_diversity", "high", -1.0),
    "the audit misses fewer bugs than any of these tests": ("engine_checks", "passed", 0),
}


@pytest.mark.parametrize("words", [words for words in REMARKS if words != "Nothing here ran on a GPU"])
def test_a_remark_could_be_untrue(words: str) -> None:
    results = Planted(*PLANTED[words]) if words in PLANTED else Contrary(RESULTS.folder)
    try:
        assert not REMARKS[words](results)
    except Missing:
        assert words not in PLANTED  # the evidence says nothing of the kind any more


@pytest.mark.parametrize("name", ["bench_gpu.csv", "bench_walltime.csv"])
def test_a_gpu_would_be_noticed(tmp_path: Path, name: str) -> None:
    check = REMARKS["Nothing here ran on a GPU"]
    (tmp_path / "bench_costs.csv").write_text('machine,ms\n"AMD EPYC, 2 cores",1\n')
    assert check(Results(tmp_path))
    (tmp_path / name).write_text("machine,ms\nNVIDIA H200,1\n")
    assert not check(Results(tmp_path))


def test_what_is_untrue_is_quoted() -> None:
    require_true(RESULTS)
    with pytest.raises(Missing, match=r"no longer true: “two plausible bugs” \(bugs_of_beam_search_show\); correct"):
        require_true(Planted("06_every_tree", "different: A.4", 1))
