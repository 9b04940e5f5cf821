"""Findings: verdicts come from checks, unknown claims are refused, and nothing is half-written."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from specnb.measure.statistics import Estimate
from specnb.notebook import findings
from specnb.notebook.findings import Findings


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
        *((verdict, False, verdict) for verdict in findings.VERDICTS),
    ],
)
def test_a_verdict_follows_from_its_checks(holds: Any, holds_if: bool, verdict: str) -> None:
    assert Findings("01").verdict("unbiasedness", holds, "9 runs", holds_if) == verdict


def test_a_rule_decides_from_what_was_measured() -> None:
    found = Findings("01", {"unbiasedness": lambda passes: findings.named(passes < 10)})
    assert found.verdict("unbiasedness", measured={"passes": 9}, evidence="9 runs") == "holds"
    assert found.verdict("unbiasedness", measured={"passes": 11}, evidence="11 runs") == "refuted"


@pytest.mark.parametrize(
    ("error", "says", "given"),
    [
        (ValueError, "give one of", {"holds": "true", "evidence": "9 runs"}),
        (ValueError, "give one of", {"holds": "holds", "evidence": "9 runs", "holds_if": True}),
        (ValueError, "give one of", {"holds": None, "evidence": "9 runs", "holds_if": True}),
        (ValueError, "open without a reason", {}),
        (ValueError, "names no figure", {"holds": True, "evidence": "looks right"}),
        (KeyError, "unbiasedness", {"claim": "expected-tokens", "holds": True, "evidence": "1e-12"}),
        (ValueError, "unbiasedness: x is nan", {"holds": True, "evidence": "9 runs", "numbers": {"x": float("nan")}}),
        (TypeError, "unbiasedness: x is a list", {"holds": True, "evidence": "9 runs", "numbers": {"x": [1, 2]}}),
        (TypeError, "NoneType", {"holds": True, "evidence": "9 runs", "numbers": {"x": None}}),
    ],
)
def test_bad_verdicts_are_refused(error: type[Exception], says: str, given: dict[str, Any]) -> None:
    with pytest.raises(error, match=says):
        Findings("01").verdict(**{"claim": "unbiasedness", **given})


def test_an_unknown_notebook_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no notebook '99'; there are \['00', "):
        Findings("99")


def test_every_claim_has_a_row_and_its_numbers(tmp_path: Path) -> None:
    """Floats are rounded as in tables; estimates keep their interval; what was not checked is open."""
    found = Findings("02", seed=1, pair=Path("a"))
    numbers = {
        "alpha": Estimate(2 / 3, 0.5, 0.75, 10),
        "n": np.int64(3),
        "exact": np.True_,
        "bound": Fraction(1, 4),
        "name": "x",
    }
    found.verdict("expected-tokens", True, "44 of\n  45", numbers=numbers)
    table = found.close().set_index("id")
    assert tuple(table.loc["expected-tokens", ["verdict", "evidence"]]) == ("holds", "44 of 45")
    assert set(table.drop("expected-tokens").verdict) == {"open"}
    stored = json.loads((tmp_path / "data" / "results" / "02.numbers.json").read_text())
    assert stored["expected-tokens"] == {
        "alpha": {"value": 0.666667, "low": 0.5, "high": 0.75, "n": 10},
        "n": 3,
        "exact": True,
        "bound": 0.25,
        "name": "x",
    }
    assert set(stored) == set(found.claims.index)
    run = json.loads((tmp_path / "data" / "results" / "02.run.json").read_text())
    assert run["parameters"] == {"seed": 1, "pair": "a"}
    assert "torch" in run["packages"]


def test_the_collected_table_has_every_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Findings("01")
    found.verdict("unbiasedness", True, "9 runs")
    found.close()
    findings.main()
    table = pd.read_csv(tmp_path / "data" / "results" / "claims.csv", dtype=str).set_index("id")
    assert list(table.index) == list(findings.all_claims().id)
    assert tuple(table.loc["unbiasedness", ["verdict", "evidence"]]) == ("holds", "9 runs")
    assert (table.drop("unbiasedness").verdict == "open").all()
    assert f"{len(table)} claims: 1 holds, 0 refuted, 0 conditional, {len(table) - 1} open" in capsys.readouterr().out


def test_outside_a_checkout_findings_say_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "CLAIMS", tmp_path / "claims.csv")
    for needs_claims in (lambda: Findings("02"), findings.collect):
        with pytest.raises(RuntimeError, match=r"claims\.csv does not exist: .* need the project's checkout"):
            needs_claims()
    monkeypatch.delenv("SPECNB_OUT")
    monkeypatch.chdir(tmp_path)
    assert findings.out() == tmp_path / "build" / "own"


@pytest.mark.parametrize("unset", [True, False])
def test_results_go_elsewhere_unless_asked(unset: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECNB_OUT") if unset else monkeypatch.setenv("SPECNB_OUT", "")
    assert findings.out() == findings.ROOT / "build" / "own"


def test_a_table_of_this_run_is_read_before_the_committed_one() -> None:
    committed = findings.read_table("results/04_sweep")
    Findings("04").table("sweep", pd.DataFrame({"x": [1 / 3, 2.0]}))
    assert findings.data_file("results/04_sweep.csv").read_bytes() == b"x\n0.333333\n2\n"
    assert len(committed) > 2
    assert findings.read_table("results/04_sweep", dtype=str).x.tolist() == ["0.333333", "2"]


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
        *((0.1234565 * (1 + bits * 2.0**-52), "0.123456") for bits in range(-3, 4)),  # the last bit decides no tie
    ],
)
def test_numbers_are_written_with_six_digits_and_counts_with_all(value: float, text: str) -> None:
    assert findings.written(value) == text


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = findings.write(tmp_path / "table.csv", "old")

    def stop(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        findings.write(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_every_small_parameter_is_named() -> None:
    given = {"rows": 1, "gamma": 0, "device": "cpu"}
    with pytest.raises(ValueError, match=r"rows = 1 \(at least 2\), gamma = 0 \(at least 1\)"):
        findings.require_at_least(given, rows=2, gamma=1)
    findings.require_at_least(given, rows=1, gamma=0)
