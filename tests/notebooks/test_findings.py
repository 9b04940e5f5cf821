"""Verdicts are collected in one table, and numbers are written with six digits."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from notebooks.support import findings
from studies.files import ROOT

pytestmark = pytest.mark.usefixtures("own_results")


def test_the_collected_table_has_every_claim_and_only_the_verdicts_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    header = "id,verdict,evidence,notebook\n"
    judged = tmp_path / "02.claims.csv"
    judged.write_text(header + "unbiasedness,holds,9 cases,02\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["findings", str(judged)])
    findings.main()
    table = pd.read_csv(tmp_path / "data" / "results" / "claims.csv", dtype=str).set_index("id")
    assert list(table.index) == list(findings.all_claims())
    wanted = ["source", "place", "verdict", "evidence", "notebook"]
    assert tuple(table.loc["unbiasedness", wanted]) == ("leviathan", "2.3 and A.1", "holds", "9 cases", "02")
    assert (table.drop("unbiasedness").verdict == "open").all()
    assert f"{len(table)} claims: 1 holds, 0 refuted, 0 conditional, {len(table) - 1} open" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1 / 3, "0.333333"),
        (1234567.0, "1234567"),
        (1e300, "1e+300"),
        (-2.5e-17, "-2.5e-17"),
        (-0.0, "-0"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        # The last bit decides no tie.
        *((0.1234565 * (1 + bits * 2.0**-52), "0.123456") for bits in range(-3, 4)),
    ],
)
def test_numbers_are_written_with_six_digits_and_counts_with_all(value: float, text: str) -> None:
    assert findings.written(value) == text


def test_no_claim_holds_with_one_seed_and_is_refuted_with_another() -> None:
    table = pd.read_csv(ROOT / "data" / "results" / "verdicts_by_seed.csv")
    assert not table.failed.any()
    assert not ((table.holds > 0) & (table.refuted > 0)).any()
    assert (table[[*findings.VERDICTS]].sum(axis=1) == 10).all()
