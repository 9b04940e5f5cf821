"""What README, package metadata, pins and pipeline say agrees with each other and with what is
there."""

import ast
import json
import re
import tomllib
from functools import partial, reduce
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from packaging.requirements import Requirement

import specnb
from notebooks.support import dependencies
from notebooks.support.findings import UNCHECKED, VERDICTS, all_claims
from notebooks.support.predictions import SETTINGS
from studies.files import located, notebooks

ROOT = Path(__file__).parent.parent
NOTEBOOKS = notebooks()


def _source(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def test_every_requirement_has_a_pin_that_satisfies_it() -> None:
    files = [ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml")]
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    lists = [names for one in projects for names in (one["dependencies"], *one["optional-dependencies"].values())]
    required = [Requirement(line) for entries in lists for line in entries]
    pins = dict(
        line.split(";")[0].strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    assert not [str(one) for one in required if one.name != "specnb" and pins[one.name] not in one.specifier]
    assert not [str(one) for one in required if "==" in str(one.specifier)], "exact pins stand in constraints.txt alone"


def test_the_lock_holds_for_every_platform() -> None:
    lock = (ROOT / "constraints.txt").read_text()
    assert "+cpu" not in lock
    assert "://" not in lock
    names = [line.split("==")[0] for line in lock.splitlines() if "==" in line]
    assert len(names) == len(set(names)), "a package has two versions: the text that the pair learned from would differ"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_pipeline_finds_what_a_notebook_writes_and_reads(name: str) -> None:
    """It would not run again when a table has changed that is read in another way."""
    code, number = dependencies.code_of(NOTEBOOKS[name]), _number(name)
    places = [(folder, located(folder, number)) for folder in ("data/results", "figures")]
    made = [file.relative_to(ROOT).as_posix() for _, place in places for file in ROOT.glob(f"{place}[._]*")]
    assert sorted(file for file in dependencies.writes(name, code) if "_timed." not in file) == sorted(made)
    assert not [file for file in dependencies.reads(code) if not (ROOT / file).exists()]
    assert not re.findall(r"\bROOT\b|corpus\.DATA|read_csv", _source(NOTEBOOKS[name])), "use read_table or data_file"


def test_calls_say_what_a_notebook_reads() -> None:
    def read(code: str) -> list[str]:
        return dependencies.reads(ast.parse(code))

    assert read('read_table("results/09_sampled", dtype=str), data_file("workloads.jsonl")') == [
        "data/results/09_sampled.csv", "data/workloads.jsonl",
    ]  # fmt: skip
    pair = ["data/results/drafters.csv", "data/results/drafters.record.json"]
    assert read('for name in ("drafters", "drafted"): made_on(name)') == read('pooled("drafters")') == pair
    assert read("pooled()") == sorted(
        f"data/results/{name}.{end}" for name in (*SETTINGS, "real_passes") for end in ("csv", "record.json")
    )
    assert read('read_table("audit/results/engines")') == ["audit/data/results/engines.csv"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_notebooks_were_run_top_to_bottom(name: str) -> None:
    code = [
        cell for cell in nbformat.read(NOTEBOOKS[name], as_version=4).cells if cell.cell_type == "code" and cell.source
    ]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


def test_the_table_of_claims_has_a_row_for_every_claim() -> None:
    table = pd.read_csv(ROOT / "data" / "results" / "claims.csv", dtype=str)
    for name, claim in all_claims().items():
        (row,) = table[table.id == name].to_dict("records")
        assert row["verdict"] in VERDICTS
        assert row["evidence"] != UNCHECKED, name
        columns = ["source", "place", "about", "statement", "notebook"]
        assert [row[column] for column in columns] == [claim[column] for column in columns]
    assert len(table) == len(all_claims())


def test_readme_counts_the_verdicts_and_misprints() -> None:
    counts = pd.read_csv(ROOT / "data" / "results" / "claims.csv", dtype=str).verdict.value_counts()
    said = [counts.sum(), *(counts[verdict] for verdict in ("holds", "conditional", "refuted", "open"))]
    said.append(len(pd.read_csv(ROOT / "data" / "errata.csv")))
    words = r"Of {} claims.* {} are confirmed.* {} hold only.* {} are contradicted .* {} cannot .* {} misprints"
    assert re.search(words.format(*said), " ".join(_readme().split()))


def test_readme_says_how_fast_the_real_model_and_a_gpu_were_measured_to_be() -> None:
    """The losing case is among them, and what is compared is the fastest plain decoding."""
    results = ROOT / "data" / "results"
    record = json.loads((results / "workloads.record.json").read_text(encoding="utf-8"))
    assert f"on two threads of an {record['processor'].split(',')[0]}" in _readme()
    timed = pd.read_csv(results / "workloads.csv").query("temperature == 0").set_index(["kind", "way"])
    names = ["transformers", "transformers, prompt lookup", "llama.cpp", "llama.cpp, n-grams", "plain, compiled"]
    names += ["copies, compiled", "copies or head 2, compiled"]
    for kind in ("chat", "summary", "edit"):
        ways = timed.loc[kind].loc[names]
        assert (ways.over[5:] == "plain, compiled").all()
        plain = timed.loc[kind].filter(regex="^(plain|transformers$)", axis=0).ms_per_token
        assert plain.idxmin() == "plain, compiled"
        cells = [f"{1000 / ms:.1f}" for ms in ways.ms_per_token]
        gains = [_interval(*row) for row in ways[["speed_up", "speed_up_low", "speed_up_high"]].itertuples(index=False)]
        cells[5:] = [f"{cell} ({gain})" for cell, gain in zip(cells[5:], gains[5:], strict=True)]
        assert f"| {kind} | {' | '.join(cells)} |" in _readme()
    on_device = pd.read_csv(results / "gpu.csv").query("models == '6b' and way.str.startswith('model', na=False)")
    best = on_device[on_device["rows"] == 1].nlargest(1, "speed_up")
    (said,) = best[["speed_up", "speed_up_low", "speed_up_high"]].itertuples(index=False)
    assert best.way.item() == "model 4, graph"
    assert f"speculation was {_interval(*said)} times as fast as plain decoding" in _readme()
    assert f"most {on_device[on_device['rows'] == 16].speed_up.max():.2f} times" in _readme()


def _interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _number(name: str) -> str:
    return name.partition("_")[0]


def _readme() -> str:
    return (ROOT / "README.md").read_text()


PAGES = [
    page
    for pattern in ("README.md", "docs/*.md", "*/README.md", "*/docs/*.md")
    for page in sorted(ROOT.glob(pattern))
    if "```python" in page.read_text()
]
CODE = re.compile(r"```python\n(.*?)```(?:\n+```(?:text)?\n(?!\$)(.*?)```)?|`(specnb\.\w+\([^`\n]*\))`", re.DOTALL)
SMALLER = {  # the same code, faster
    "] * 10:": "]:",
    "prompts * 8": "prompts",
    "max_new_tokens=64": "max_new_tokens=8",
    "max_new_tokens=32": "max_new_tokens=8",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).with_suffix("").as_posix())
def test_code_on_pages_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks and calls in the text, in order, in another folder; with the output that stands
    below."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(specnb, "recommend_gamma", partial(specnb.recommend_gamma, largest=2, repetitions=3))
    namespace: dict[str, object] = {"__name__": "page", "specnb": specnb}
    for block, output, call in CODE.findall(page.read_text()):
        capsys.readouterr()
        code = reduce(lambda text, pair: text.replace(*pair), SMALLER.items(), block or call)
        # It is the page's own code that is under test.
        exec(compile(code, page.name, "exec"), namespace)
        assert capsys.readouterr().out == output or not output


def test_notebooks_hold_no_trace_of_a_machine() -> None:
    for path in NOTEBOOKS.values():
        content = json.loads(path.read_text())
        assert set(content["metadata"]) <= {"kernelspec", "language_info"}
        assert not re.search(r"/(home|root|tmp|Users)/[\w.]", path.read_text()), path.name
