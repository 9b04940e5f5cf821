"""Audits of the tokens of other engines, without the engines.

`audit/data/engines/rows.csv` lists the rows: an engine, a kind of speculation and settings. The
tokens of each row are committed as `audit/data/engines/tokens/<row>.jsonl.gz`, with a record beside
them. This module only audits them. `make engines` collects them anew
(`audit_studies.engines.engines_collect`).
"""

from __future__ import annotations

import csv
import hashlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from audit_studies.engines import random_targets
from specnb.distributions import Sampling
from specnb.loading import load_pair
from specnb_audit.api import audit
from specnb_audit.claimed import Claimed, other_orders
from specnb_audit.engine import Engine
from specnb_audit.report import Report
from specnb_audit.setting_names import ENGINE_ORDERS
from specnb_audit.token_file import read_tokens
from studies.files import data_file
from studies.study import Study, columns

ROWS = data_file("audit/engines/rows.csv")
TOKENS = data_file("audit/engines/tokens")
DELTA = 1e-6
NEW_TOKENS = 64  # of every completion that no end token ends
SHIPPED = "pair"  # the target that ships
HEADS = {"eagle3": "draft-eagle3"}  # folders beside it of heads that draft, by kind of speculation
# Of the filters, where it is not that of `Sampling`
ORDERS = {"llama_cpp": "llama.cpp", "mlx_lm": "mlx-lm"}


class Row(NamedTuple):
    """One row of the table: what an engine was asked for.

    `number` from 1 is also the seed of its run. `target` is the pair that ships, or one of
    `random_targets`. `eos` is the token that ends a completion, for an engine that cannot be asked
    to go on without taking that token out of the distribution.
    """

    number: int
    name: str
    engine: str
    target: str
    speculation: str
    temperature: float
    top_k: int
    top_p: float
    dtype: str
    completions: int
    eos: int | None

    @property
    def sampling(self) -> Sampling:
        """The settings claimed, as the audit takes them, with the engine's order of filters where
        it matters."""
        plain = Sampling(self.temperature, self.top_k or None, self.top_p)
        if self.engine not in ORDERS or not other_orders(plain):
            return plain
        return Claimed(plain.temperature, plain.top_k, plain.top_p, order=ENGINE_ORDERS[ORDERS[self.engine]])

    @property
    def released(self) -> str:
        """The engine, or the released one of which it is a mended one."""
        return self.engine.removesuffix("_mended")

    @property
    def environment(self) -> str:
        """What environment it runs in: the engine's, or that of a release which has the
        architecture."""
        return "gemma4" if self.target == "gemma4" else self.released

    @property
    def file(self) -> Path:
        """The committed file of tokens."""
        return TOKENS / f"{self.name}.jsonl.gz"


def rows(path: Path = ROWS) -> dict[str, Row]:
    """The rows of the table by name, in order."""
    with path.open(newline="", encoding="utf-8") as lines:
        return {
            one["row"]: Row(
                number, one["row"], one["engine"], one["target"], one["speculation"], float(one["temperature"]),
                int(one["top_k"]), float(one["top_p"]), one["dtype"], int(one["completions"]),
                int(one["eos"]) if one["eos"] else None,
            )
            for number, one in enumerate(csv.DictReader(lines), 1)
        }  # fmt: skip


def control(row: Row) -> str | None:
    """The name of the row without speculation at the same settings; None for a control, and where
    there is none.

    A mended engine has the control of the release: its mend changes nothing without speculation.
    """
    same = [
        other.name
        for other in rows().values()
        if other.speculation == "none"
        and (other.engine, other.target) == (row.released, row.target)
        and other[5:9] == row[5:9]
    ]
    return None if row.speculation == "none" or not same else same[0]


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def record(row: Row) -> dict[str, Any]:
    """What `audit_studies.engines.engines_collect` noted beside a row's tokens."""
    noted: dict[str, Any] = json.loads(row.file.with_name(f"{row.name}.json").read_text(encoding="utf-8"))
    return noted


def audited(row: Row, part: slice = slice(None)) -> Report:
    """The audit of a row's committed completions, or of `part` of them, with the draft model's
    distributions where there is one."""
    (target, draft), sequences = models(row), read_tokens(row.file)[part]
    return audit(
        target, [one.tokens for one in sequences], prompts=[one.prompt for one in sequences],
        sampling=row.sampling, draft=draft, eos=row.eos, max_new_tokens=NEW_TOKENS, delta=DELTA, progress=False,
        engine=Engine(dtype=getattr(torch, record(row)["computes_in"])),
    )  # fmt: skip


def models(row: Row) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The target of a row, and its draft model; None where a head drafts, or no model of tokens."""
    if row.target != SHIPPED:
        return random_targets.target(row.target), random_targets.draft_model(row.target, row.speculation)
    pair = load_pair()
    return pair.target, None if row.speculation in HEADS else pair.draft


def collected() -> list[str]:
    """The rows that have a file of tokens, engine by engine, each in the order of `rows.csv`."""
    found = [row for row in rows().values() if row.file.exists()]
    engines = list(dict.fromkeys(row.engine for row in found))
    return [row.name for row in sorted(found, key=lambda row: engines.index(row.engine))]


def measure(item: str, completions: int | None) -> list[dict[str, Any]]:
    """The line of one row: its settings, the verdict, the distance seen, and what would have been
    found.

    `<kind>_shows_from` is the total variation per token from which on that kind of deviation would
    have been found in as many tokens with power 0.9; empty where none of its size would.
    """
    row, start = rows()[item], time.perf_counter()
    noted, report = record(row), audited(row, slice(completions))
    detectable = report.detectable or {}
    line: dict[str, Any] = {"row": row.name, "engine": row.engine, "version": noted["version"]}
    line |= {name: getattr(row, name) for name in ("target", "speculation", "temperature", "top_k", "top_p", "dtype")}
    line |= {"control": control(row), "tokens": report.tokens, "verdict": report.verdict}
    line |= {"found_after": report.found_after, "kind": report.diagnosis, "log10_e": report.log10_e_peak}
    line |= columns("tv", report.tv) | {"impossible": report.violations.get("impossible", 0)}
    line |= {f"{name.replace('-', '_')}_shows_from": detectable.get(name) for name in ("draft-leak", "wrong-q")}
    line |= {"generated_in_s": noted["seconds"], "audited_in_s": round(time.perf_counter() - start, 1)}
    return [line | {"sha256": digest(row.file)}]


STUDY = Study(
    measure, settings={"completions": None}, small={"completions": 2}, items=collected(), small_items=collected()[:2]
)
