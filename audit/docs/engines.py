"""Writes engines.md, the tables of audited engines, from the committed results:
`python audit/docs/engines.py`."""

import json
from pathlib import Path

import pandas as pd

from audit_studies.bugs.known_bugs import EXACT, KNOWN_BUGS

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"openvino": "OpenVINO GenAI", "llama_cpp": "llama.cpp", "mlx_lm": "mlx-lm", "vllm": "vLLM (CPU build)",
         "vllm_mended": "vLLM (CPU build), mended", "onnxruntime": "ONNX Runtime GenAI",
         "transformers_mended": "transformers, mended"}  # fmt: skip
TARGETS = {"pair": "trained pair", "llama": "Llama", "gemma4": "Gemma 4", "glm4-moe": "GLM-4-MoE",
           "deepseek-v3": "DeepSeek-V3"}  # fmt: skip
HEAD = """\
# Engines and versions that were audited

Made by `python audit/docs/engines.py` from [engines.csv](../data/results/engines.csv),
[kernels.csv](../data/engines/kernels.csv) and [engine_checks.csv](../data/results/engine_checks.csv).
An engine that is not here: [any engine in twenty minutes](any-engine.md).

## Tokens

Audited on {date}, at a false-alarm rate of {delta:g}. The target is that of the pair that ships, or a small model of
the architecture named, with random weights. *Control*: the verdict on the same engine, target and settings without
speculation, in which a wrong conversion would show if it is large enough. *Smallest deviation*: the total variation per
token from which on a leak of the draft, and a wrong q in the acceptance test, would have been found in so many tokens
with probability 0.9; the size of one kind says nothing of another. A rejected row says after how many tokens it was. At
temperature 0 any token but the argmax is a deviation, so no size is given.

"""
CHECKS = """
## Tests of the engines themselves

The tests that engines apply to their own acceptance functions, reimplemented, on known bugs ({date}): in how many
bugs each found the error, in every run and in some runs. *Exact*: how many runs with an exact sampler passed.

"""
KERNELS = """
## Acceptance functions

Enumerated without a GPU; [what this shows](kernels.md). *Planted errors*: how many of those tried, all with
a vocabulary of 3 tokens, were found.

"""


def markdown(head: list[str], rows: list[list[object]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]]) + "\n"


def record(study: str) -> dict:
    return json.loads((ROOT / f"audit/data/results/{study}.record.json").read_text(encoding="utf-8"))


def settings(row: pd.Series) -> str:
    words = [f"temperature {row.temperature:g}"]
    words += [f"top-k {row.top_k}"] if row.top_k else []
    words += [f"top-p {row.top_p:g}"] if row.top_p < 1 else []
    return ", ".join([*words, "its own dtype"] if row.dtype == "default" else words)


def tokens() -> str:
    table = pd.read_csv(ROOT / "audit/data/results/engines.csv").set_index("row")
    rows = []
    for row in table[table.speculation != "none"].itertuples():
        found = {"leak": row.draft_leak_shows_from, "wrong q": row.wrong_q_shows_from}
        smallest = ", ".join(f"{name} {size:.2g}" for name, size in found.items() if size == size)
        smallest = f"after {row.found_after:.0f} tokens" if row.verdict == "rejected" else smallest
        control = table.verdict.get(row.control, "none")
        verdict = f"**{row.verdict}**" if row.verdict == "rejected" else row.verdict
        rows.append([NAMES.get(row.engine, row.engine), row.version, TARGETS[row.target], row.speculation,
                     settings(row), f"{row.tokens:,}", control, verdict, smallest])  # fmt: skip
    return markdown(["engine", "version", "target", "speculation", "settings", "tokens", "control", "verdict",
                     "smallest deviation"], rows)  # fmt: skip


def kernels() -> str:
    table = pd.read_csv(ROOT / "audit/data/engines/kernels.csv")
    rows = []
    for (package, version, kernel), lines in table.groupby(["package", "version", "kernel"], sort=False):
        planted = lines[lines.planted_error.notna()]
        for row in lines[lines.planted_error.isna()].itertuples():
            seen = f"{(planted.verdict == 'deviates').sum()} of {len(planted)}" if len(planted) else "none tried"
            found = f"{max(row.resolution, row.total_variation):.2g}"
            rows.append([package, version, kernel, row.vocab, row.verdict, found, seen])
    size = "total variation (exact: at most)"
    head = ["package", "version", "function", "vocabulary", "verdict", size, "planted errors"]
    return markdown(head, rows)


def checks() -> str:
    rows, samplers = [], KNOWN_BUGS | {EXACT.name: EXACT}
    for check, lines in pd.read_csv(ROOT / "audit/data/results/engine_checks.csv").groupby("check", sort=False):
        exact = lines[lines.bug == EXACT.name].iloc[0]
        bugs = lines[[not samplers[name].lossless for name in lines.bug]]
        always, some = (bugs.passed == 0).sum(), ((bugs.passed > 0) & (bugs.passed < bugs.runs)).sum()
        rows.append([check, len(bugs), always, some, f"{exact.passed} of {exact.runs}"])
    return markdown(["test", "known bugs", "found in every run", "in some", "exact"], rows)


def page() -> str:
    head = HEAD.format(date=record("engines")["date"], delta=1e-6)
    said = CHECKS.format(date=record("engine_checks")["date"])
    return head + tokens() + KERNELS + kernels() + said + checks()


if __name__ == "__main__":
    (ROOT / "audit/docs/engines.md").write_text(page(), encoding="utf-8")
