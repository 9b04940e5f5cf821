"""Findings: verdicts come from checks, unknown claims are refused, and nothing is half-written."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from specnb.measure.statistics import Estimate
from specnb.notebook import claims
from specnb.notebook import findings as results


@pytest.fixture(autouse=True)
def _out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))


@pytest.mark.parametrize(
    ("holds", "holds_if", "verdict"),
    [
        (True, False, "holds"),
        (True, True, "holds"),
        (False, True, "conditional"),
        (False, False, "refuted"),
        (np.True_, False, "holds"),
        (None, False, "open"),
        *((verdict, False, verdict) for verdict in claims.VERDICTS),
    ],
)
def test_a_verdict_follows_from_its_checks(holds: Any, holds_if: bool, verdict: str) -> None:
    assert results.Findings("00").verdict("lanes-figure", holds, "9 runs", holds_if) == verdict


def test_a_rule_decides_from_what_was_measured() -> None:
    findings = results.Findings("02")
    (least,) = findings.thresholds("stratos-beta-08")
    measured = {"by_formula": least + 1, "simulated_low": least + 0.5}
    assert findings.verdict("stratos-beta-08", measured=measured, evidence="5 tokens") == "holds"
    measured["simulated_low"] = least - 1
    assert findings.verdict("stratos-beta-08", measured=measured, evidence="3 tokens") == "refuted"


def test_an_open_claim_has_a_reason_and_is_written() -> None:
    findings = results.Findings("00")
    with pytest.raises(ValueError, match="open without a reason"):
        findings.verdict("lanes-figure")
    findings.verdict("lanes-figure", evidence="the paper's pair is not public", numbers={"rows": 64})
    row = findings.close().set_index("id").loc["lanes-figure"]
    assert tuple(row[["verdict", "evidence"]]) == ("open", "the paper's pair is not public")


@pytest.mark.parametrize(("holds", "holds_if"), [("true", False), ("", False), ("holds", True), (None, True)])
def test_an_unknown_verdict_is_refused(holds: str | None, holds_if: bool) -> None:
    with pytest.raises(ValueError, match="give one of"):
        results.Findings("00").verdict("lanes-figure", holds, "9 runs", holds_if)


def test_what_was_not_checked_is_open(tmp_path: Path) -> None:
    table = results.Findings("02", seed=1).close()
    assert set(table.verdict) == {"open"}
    stamp = json.loads((tmp_path / "data" / "results" / "02.run.json").read_text())
    assert stamp["parameters"] == {"seed": 1}


def test_collect_has_every_claim_and_keeps_verdicts() -> None:
    findings = results.Findings("00")
    findings.verdict("lanes-figure", True, "9 runs\n  for 38 tokens")
    findings.close()
    table = results.collect().set_index("id")
    assert list(table.index) == list(pd.read_csv(claims.CLAIMS).id)
    assert table.loc["lanes-figure", "verdict"] == "holds"
    assert table.loc["lanes-figure", "evidence"] == "9 runs for 38 tokens"
    assert (table.drop("lanes-figure").verdict == "open").all()


def test_collect_refuses_an_unknown_verdict(tmp_path: Path) -> None:
    file = tmp_path / "data" / "results" / "00.claims.csv"
    results.write(file, "id,verdict,evidence,notebook\nlanes-figure,true,1,00\n")
    with pytest.raises(ValueError, match="true"):
        results.collect()


def test_bad_findings_are_refused() -> None:
    with pytest.raises(ValueError, match="99"):
        results.Findings("99")
    with pytest.raises(KeyError, match="lanes-figure"):
        results.Findings("00").verdict("unbiasedness", True, "1e-12")
    with pytest.raises(ValueError, match="no figure"):
        results.Findings("00").verdict("lanes-figure", True, "looks right")


def test_numbers_are_stored_beside_the_verdict(tmp_path: Path) -> None:
    """Floats are rounded as in tables; estimates keep their interval; every claim of the notebook has an entry."""
    findings = results.Findings("02")
    numbers = {
        "alpha": Estimate(2 / 3, 0.5, 0.75, 10),
        "n": np.int64(3),
        "exact": np.True_,
        "bound": Fraction(1, 4),
        "name": "x",
    }
    findings.verdict("expected-tokens", True, "44 of 45", numbers=numbers)
    findings.close()
    stored = json.loads((tmp_path / "data" / "results" / "02.numbers.json").read_text())
    assert stored["expected-tokens"] == {
        "alpha": {"value": 0.666667, "low": 0.5, "high": 0.75, "n": 10},
        "n": 3,
        "exact": True,
        "bound": 0.25,
        "name": "x",
    }
    assert stored["iid-assumption"] == {}
    assert set(stored) == set(findings.claims.index)


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [(float("nan"), ValueError, "alpha is nan"), ([1, 2], TypeError, "alpha is a list"), (None, TypeError, "NoneType")],
)
def test_what_is_no_number_is_refused(value: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"expected-tokens: .*{says}"):
        results.Findings("02").verdict("expected-tokens", True, "44 of 45", numbers={"alpha": value})


def test_outside_a_checkout_findings_say_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (claims, results):
        monkeypatch.setattr(module, "CLAIMS", tmp_path / "claims.csv")
    for needs_claims in (lambda: results.Findings("02"), results.collect):
        with pytest.raises(RuntimeError, match=r"claims\.csv does not exist: .* need the project's checkout"):
            needs_claims()
    monkeypatch.delenv("SPECNB_OUT")
    monkeypatch.chdir(tmp_path)
    assert results.out() == tmp_path / "build" / "own"


def test_main_counts_what_is_open(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results.main()
    number = len(pd.read_csv(claims.CLAIMS))
    assert f"{number} claims: 0 holds, 0 refuted, 0 conditional, {number} open" in capsys.readouterr().out
    assert len(pd.read_csv(tmp_path / "data" / "results" / "claims.csv")) == number


def test_tables_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    file = tmp_path / "data" / "results" / "00_numbers.csv"
    frame = pd.DataFrame({"x": [1 / 3, 2.0]})
    results.Findings("00").table("numbers", frame)
    first = file.read_bytes()
    results.Findings("00").table("numbers", frame)
    assert file.read_bytes() == first == b"x\n0.333333\n2\n"


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
    ],
)
def test_numbers_are_written_with_six_digits_and_counts_with_all(value: float, text: str) -> None:
    assert results.written(value) == text


def test_the_last_bit_does_not_decide_a_tie() -> None:
    tie = 0.1234565
    assert {results.written(tie * (1 + bits * 2.0**-52)) for bits in range(-3, 4)} == {"0.123456"}


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = results.write(tmp_path / "table.csv", "old")

    def stop(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        results.write(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_results_go_elsewhere_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ("", None):
        monkeypatch.setenv("SPECNB_OUT", "") if value == "" else monkeypatch.delenv("SPECNB_OUT")
        assert results.out() == claims.ROOT / "build" / "own"
