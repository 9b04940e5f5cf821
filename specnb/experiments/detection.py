"""How many tokens the audit needs to notice each bug of the bug suite: `python -m specnb.experiments.detection [NAME ...]`.

For every bug, `SEEDS` audits of texts that the trained pair writes with it; an audit ends when exactness is
rejected at `DELTA`, or after `CAP` tokens. One line per audit is added to `data/results/bug_suite.csv`, and what is
there already is not made again. Audits come in groups; where none of a first group finds anything within the cap,
the others are left out: were the median within the cap, that would happen once in 2^GROUP times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specnb.audit.auditor import Auditor
from specnb.audit.bugs.bug import Bug
from specnb.audit.known_bugs import EXACT, KNOWN_BUGS, generate
from specnb.audit.numerics import measure_numerics
from specnb.audit.teacher_forcing import Completion, teacher_forced_rows
from specnb.experiments import corpus
from specnb.models.loading import Pair, load_pair
from specnb.report.results import out, write

SEEDS, GROUP, CAP, DELTA = 20, 5, 20_000, 1e-6
GAMMA, PROMPT_TOKENS = 4, 24
CHUNKS = [(8, 64), *[(16, 160)] * 8]  # texts and their tokens, one chunk after the other, for each audit
BATCH = 80  # rows that are generated together
POOLED = 10_000  # tokens of a group on which its total variation is estimated
BUG_SUITE = {EXACT.name: EXACT} | KNOWN_BUGS
ENDING = ("eos-inside", "after-the-end")  # these need a text that ends; a line break ends it
FIELDS = ("bug", "seed", "tokens", "found_after", "kind", "tv", "tv_low", "tv_high", "tv_tokens")


class Audited(NamedTuple):
    """One audit: tokens read until it ended, and after how many it rejected; `tv` is that of its whole group."""

    bug: str
    seed: int
    tokens: int
    found_after: int | None
    kind: str | None
    tv: float
    tv_low: float
    tv_high: float
    tv_tokens: int


def prompts_of(pair: Pair) -> list[list[int]]:
    """Beginnings of the held-out files."""
    return [pair.encode(text[:2000])[:PROMPT_TOKENS] for text in corpus.read("held-out")]


def line_breaks(pair: Pair) -> list[int]:
    """The tokens that begin with a line break."""
    return [token for token in range(len(pair.tokenizer)) if str(pair.tokenizer.decode([token])).startswith("\n")]


def written(bug: Bug, pair: Pair, seeds: Sequence[int], chunk: int) -> dict[int, list[Completion]]:
    """What one chunk adds to each audit. Every text has noise of its own, unless the bug says otherwise."""
    count, length = CHUNKS[chunk]
    prompts = prompts_of(pair)
    before = sum(completions for completions, _ in CHUNKS[:chunk])
    eos = line_breaks(pair) if bug.name in ENDING else None
    found: dict[int, list[Completion]] = {seed: [] for seed in seeds}
    # Bugs that let rows of a batch meddle with each other are given no rows of other audits.
    together = max(1, BATCH // count) if bug.patch is None else 1
    for start in range(0, len(seeds), together):
        numbers = [(seed, before + text) for seed in seeds[start : start + together] for text in range(count)]
        starts = [prompts[(seed * 7 + text) % len(prompts)] for seed, text in numbers]
        rows = [seed * 1000 + text for seed, text in numbers]
        made = generate(
            bug, pair.target, starts, pair.draft, gamma=GAMMA, max_new_tokens=length, eos=eos, rows=rows,
            progress=False,
        )  # fmt: skip
        for (seed, _), prompt, tokens in zip(numbers, starts, made.tokens, strict=True):
            found[seed].append(Completion(prompt, tokens))
    return found


@torch.inference_mode()
def audited(bug: Bug, pair: Pair, seeds: Sequence[int]) -> list[Audited]:
    """One group of audits, each with its own texts and its own uniforms."""
    eos = line_breaks(pair) if bug.name in ENDING else None
    numerics = None
    auditors: dict[int, Auditor] = {}
    pooled = Auditor(DELTA, seed=seeds[0], eos=eos)
    open_, bar = list(seeds), tqdm(total=CAP, desc=f"{bug.name}, seeds from {seeds[0]}", leave=False, delay=3)
    for chunk in range(len(CHUNKS)):
        completions = written(bug, pair, open_, chunk)
        if numerics is None:
            numerics = measure_numerics(pair.target, completions[open_[0]], bug.claimed)
            auditors = {seed: Auditor(DELTA, seed, eos, numerics=numerics) for seed in seeds}
        for seed in open_:
            for row in teacher_forced_rows(pair.target, completions[seed], bug.claimed, pair.draft, bug.claimed):
                auditors[seed].add(row)
                if pooled.tokens < POOLED:
                    pooled.add(row)
        open_ = [seed for seed in open_ if auditors[seed].found_after is None and auditors[seed].tokens < CAP]
        bar.update(min(CAP, max(auditor.tokens for auditor in auditors.values())) - bar.n)
        if not open_:
            break
    bar.close()
    tv = pooled.report(detect=False).tv
    rows = []
    for seed, auditor in auditors.items():
        within = auditor.found_after is not None and auditor.found_after <= CAP
        kind = auditor.report(detect=False).diagnosis if within else None
        found = auditor.found_after if within else None
        rows.append(Audited(bug.name, seed, min(auditor.tokens, CAP), found, kind, *tv[:3], tv.n))
    return rows


def groups(done: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """What is still to do, in order; `done` is read anew by the caller after each."""
    for name in names:
        mine = done[done.bug == name]
        for first in range(0, SEEDS, GROUP):
            seeds = list(range(first, first + GROUP))
            if not mine.seed.isin(seeds).any():
                if first == 0 or mine.found_after.notna().any():
                    yield name, seeds
                break


def recorded(path: Path) -> pd.DataFrame:
    """The audits recorded so far; empty if there are none."""
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=list(FIELDS))


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """One line per bug: the audits, how many found it, median and 90th percentile of the tokens needed (NaN
    beyond the cap), the kind named most often, and the total variation per token seen by the audit."""
    lines = []
    for name, mine in runs.groupby("bug", sort=False):
        needed = mine.found_after.astype(float).fillna(np.inf).to_numpy()
        middle, high = np.quantile(needed, [0.5, 0.9], method="inverted_cdf")
        kinds = mine.kind.dropna().mode()
        tv = mine[mine.seed % GROUP == 0]  # one line of each group
        weights = tv.tv_tokens / tv.tv_tokens.sum()
        lines.append(
            {"bug": name, "audits": len(mine), "found": int(np.isfinite(needed).sum()), "median": middle,
             "90%": high, "looks like": kinds.iloc[0] if len(kinds) else "-", "tv": float((weights * tv.tv).sum()),
             "tv_low": float((weights * tv.tv_low).sum()), "tokens": int(mine.tokens.sum())}
        )  # fmt: skip
    return pd.DataFrame(lines).replace(np.inf, np.nan)


def main() -> None:
    """Makes the audits that are missing, of all bugs or of those named, and records them."""
    path = out() / "data" / "results" / "bug_suite.csv"
    names = sys.argv[1:] or list(BUG_SUITE)
    unknown = [name for name in names if name not in BUG_SUITE]
    if unknown:
        raise SystemExit(f"no bug is called {unknown[0]}; there are {', '.join(BUG_SUITE)}")
    pair = load_pair()
    with tqdm(desc="groups of audits", delay=3) as bar:
        while todo := next(groups(recorded(path), names), None):
            rows = [*recorded(path).itertuples(index=False), *audited(BUG_SUITE[todo[0]], pair, todo[1])]
            table = pd.DataFrame(rows, columns=list(FIELDS)).astype({"found_after": "Int64"})
            write(path, table.to_csv(index=False, lineterminator="\n", float_format="%.6g"))
            bar.update()


if __name__ == "__main__":
    main()
