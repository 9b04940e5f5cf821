"""Numbers in findings and guides are those of the tables."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest

from specnb_audit import fit_steps, predict
from studies.files import read_table

AUDIT = Path(__file__).parents[2]
ENGINES = read_table("audit/results/engines").set_index("row")
FINDINGS = {path.stem: path.read_text() for path in (AUDIT / "data" / "findings").glob("*-*.md")}
ROW = re.compile(r"^\| `([\w-]+)`(?: \(control\))? \|(.*)\|$", re.MULTILINE)


@pytest.mark.parametrize("name", [name for name, text in FINDINGS.items() if ROW.search(text)])
def test_rows_of_findings_are_those_of_the_table(name: str) -> None:
    for row, rest in ROW.findall(FINDINGS[name]):
        line, cells = ENGINES.loc[row], [cell.strip() for cell in rest.split("|")]
        assert f"{line.tokens:,}" in cells, row
        verdict = "rejected" if line.verdict == "rejected" else "not rejected"
        after = f"rejected after {line.found_after:.0f} tokens" if verdict == "rejected" else verdict
        assert any(cell.split(";")[0] == after for cell in cells), row
        assert cells[-1] == f"{line.tv_low:.3f} to {line.tv_high:.3f}", row
        impossible = [cell for cell in cells if "impossible" in cell]
        assert not impossible or f"{line.impossible:,.0f} impossible" in impossible[0], row


def test_the_sentence_on_openvino_is_of_its_row() -> None:
    row, text = ENGINES.loc["openvino-draft-t1"], " ".join(FINDINGS["openvino-genai-acceptance"].split())
    assert f"rejects exactness after {row.found_after:.0f} tokens; over {row.tokens:,} tokens" in text
    assert f"per token is at least {math.floor(1000 * row.tv_low) / 1000}." in text
    onnx = ENGINES.loc["onnxruntime-none-t07-p09"]
    assert f"| {onnx.impossible:,.0f} |" in FINDINGS["onnxruntime-genai-top-p"]


def test_tokens_without_the_draft_model_are_as_many_times_more_as_the_readme_says() -> None:
    needed = read_table("audit/results/03_detection").set_index("bug")
    columns = [column for column in needed.columns if column.startswith("audit")]
    with_draft, without = ("audit", next(column for column in columns if column != "audit"))
    times = (needed[without] / needed[with_draft]).max()
    assert f"up to {times:.0f} times the tokens" in (AUDIT / "README.md").read_text()


def test_the_guide_on_speed_quotes_the_tables() -> None:
    text = " ".join((AUDIT / "docs" / "speed.md").read_text().split())
    overall = read_table("audit/results/04_predictors").set_index("predictor")
    sets = read_table("audit/results/04_sets").set_index("cases")

    def both(row: pd.Series) -> tuple[str, str]:
        return f"{row['median error']:.0%}", f"{row['worst error']:.0%}"

    median, worst = both(overall.loc["predict"])
    assert f"Of {overall.n.max():.0f} published cases the median error is {median}, the worst {worst}." in text
    for name in ("second", "third", "fourth"):
        line = sets.loc[f"{name} set, as first predicted"]
        median, worst = both(line)
        assert re.search(rf"\b{line.n:.0f}( cases| more)?, (median error )?{median}(, worst| and) {worst}", text)
    median, worst = both(overall.loc["one constant"])
    assert f"One constant for all is off by {median} in the median and {worst} at worst." in text


def test_the_guide_on_speed_prints_what_the_functions_print() -> None:
    text = (AUDIT / "docs" / "speed.md").read_text()
    assert str(fit_steps([(2, 2.36, 231.5), (7, 3.54, 233.1)], plain=141.4)) in text
    assert "predict(tokens_per_step=2.3, gamma=4, layers=(32, 1)" in text
    given = {"tokens_per_step": 2.3, "gamma": 4, "layers": (32, 1), "gpu": "NVIDIA H100 80GB HBM3", "plain": 150}
    assert str(predict(**given)) in text  # type: ignore[arg-type]
