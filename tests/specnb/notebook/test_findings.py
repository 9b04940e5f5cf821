"""Where data is read and results are written: never over what is committed, and never half of a file."""

import errno
import sys
from pathlib import Path

import pandas as pd
import pytest

from specnb.notebook import findings
from specnb.notebook.claims import Notebook


@pytest.fixture(autouse=True)
def _out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))


def test_the_collected_table_has_every_claim_and_only_the_verdicts_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in (("02", "expected-tokens"), ("01", "unbiasedness")):
        nb = Notebook(number)
        nb.judged[name] = nb.claim(name)
        nb.judged[name].needs(True, "9 runs")
        nb.close()
    monkeypatch.setattr(sys, "argv", ["findings", str(tmp_path / "data" / "results" / "02.claims.csv")])
    findings.main()
    table = pd.read_csv(tmp_path / "data" / "results" / "claims.csv", dtype=str).set_index("id")
    assert list(table.index) == list(findings.all_claims().id)
    assert tuple(table.loc["expected-tokens", ["verdict", "evidence"]]) == ("holds", "9 runs")
    assert (table.drop("expected-tokens").verdict == "open").all()
    assert f"{len(table)} claims: 1 holds, 0 refuted, 0 conditional, {len(table) - 1} open" in capsys.readouterr().out


def test_outside_a_checkout_findings_say_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "CLAIMS", tmp_path / "claims.csv")
    for needs_claims in (lambda: Notebook("02"), lambda: findings.collect([])):
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
    Notebook("04").table("sweep", pd.DataFrame({"x": [1 / 3, 2.0]}))
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


@pytest.mark.parametrize("failing", ["mkdir", "write_bytes", "replace"])
def test_a_full_disk_is_named_with_the_path_and_the_way_to_another(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **how: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, failing, full)
    file = tmp_path / "table.csv"
    with pytest.raises(OSError, match=r"No space left on device .*SPECNB_OUT names another folder") as raised:
        findings.write(file, "new")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(file))
    assert not list(tmp_path.iterdir())
