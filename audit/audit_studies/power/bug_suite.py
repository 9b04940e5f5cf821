"""How many tokens the audit needs to detect each bug of the bug suite.

For every bug, the audit reads sequences that the trained pair generates with the bug, until it
rejects exactness at `DELTA` or has read `CAP` tokens. Seeds come in groups. If no audit of the
first group detects the bug within the cap, the other groups are left out: if the median were within
the cap, this would happen with probability 2^-GROUP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from audit_studies.bugs.bug import Bug
from audit_studies.bugs.known_bugs import EXACT, KNOWN_BUGS, generate
from specnb.loading import Pair, load_pair
from specnb_audit.auditor import Auditor
from specnb_audit.numerics import measure_numerics
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows
from studies import corpus, study

GROUP, CAP, DELTA = 5, 20_000, 1e-6
GAMMA, PROMPT_TOKENS = 4, 24
# Completions and their tokens: each audit reads one chunk after the other.
CHUNKS = [(8, 64), *[(16, 160)] * 8]
BATCH = 80  # rows that are generated together
POOLED = 10_000  # tokens of a group that its total variation is estimated from
BUG_SUITE = {EXACT.name: EXACT} | KNOWN_BUGS
ENDING = ("eos-inside", "after-the-end")  # these need sequences that end; a line break ends them


class Audited(NamedTuple):
    """One audit: tokens read, and after how many it rejected; `tv` (total variation) is that of the
    whole group."""

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
    """Prompts: the first tokens of the held-out files."""
    return [pair.encode(text[:2000])[:PROMPT_TOKENS] for text in corpus.read("held-out")]


def line_breaks(pair: Pair) -> list[int]:
    """The tokens that begin with a line break."""
    return [token for token in range(len(pair.tokenizer)) if str(pair.tokenizer.decode([token])).startswith("\n")]


def chunk_of_completions(bug: Bug, pair: Pair, seeds: Sequence[int], chunk: int) -> dict[int, list[Completion]]:
    """The completions that one chunk adds to each audit. Each has independent uniforms, unless that
    is the bug."""
    count, length = CHUNKS[chunk]
    prompts = prompts_of(pair)
    before = sum(completions for completions, _ in CHUNKS[:chunk])
    eos = line_breaks(pair) if bug.name in ENDING else None
    found: dict[int, list[Completion]] = {seed: [] for seed in seeds}
    # Some bugs let rows of a batch affect each other; they must not affect those of other audits.
    together = 1 if bug.in_loop else max(1, BATCH // count)
    for start in range(0, len(seeds), together):
        numbers = [(seed, before + one) for seed in seeds[start : start + together] for one in range(count)]
        starts = [prompts[(seed * 7 + one) % len(prompts)] for seed, one in numbers]
        rows = [seed * 1000 + one for seed, one in numbers]
        made = generate(
            bug, pair.target, starts, pair.draft, gamma=GAMMA, max_new_tokens=length, eos=eos, numbers=rows,
            progress=False,
        )  # fmt: skip
        for (seed, _), prompt, tokens in zip(numbers, starts, made.tokens, strict=True):
            found[seed].append(Completion(prompt, tokens))
    return found


@torch.inference_mode()
def audited(bug: Bug, pair: Pair, seeds: Sequence[int], chunks: int = len(CHUNKS)) -> list[Audited]:
    """One group of audits, each of its own completions, of at most so many of `CHUNKS`."""
    eos = line_breaks(pair) if bug.name in ENDING else None
    numerics = None
    auditors: dict[int, Auditor] = {}
    pooled = Auditor(DELTA, seed=seeds[0], eos=eos)
    models = Models(pair.target, bug.claimed, pair.draft, bug.claimed)
    open_, bar = list(seeds), tqdm(total=CAP, desc=f"{bug.name}, seeds from {seeds[0]}", leave=False, delay=3)
    for chunk in range(min(chunks, len(CHUNKS))):
        completions = chunk_of_completions(bug, pair, open_, chunk)
        if numerics is None:
            numerics = measure_numerics(pair.target, completions[open_[0]], bug.claimed)
            auditors = {seed: Auditor(DELTA, seed, eos, numerics=numerics) for seed in seeds}
        for seed in open_:
            for row in teacher_forced_rows(models, completions[seed]):
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


def measure(item: str, seeds: int, chunks: int) -> pd.DataFrame:
    """All audits of the bug `item`, one line each."""
    pair = load_pair()
    rows: list[Audited] = []
    for first in range(0, seeds, GROUP):
        rows += audited(BUG_SUITE[item], pair, range(first, min(first + GROUP, seeds)), chunks)
        if all(row.found_after is None for row in rows):
            break
    return pd.DataFrame(rows)


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """One line per bug: audits, how many detected it, median and 90th percentile of the tokens
    required (NaN beyond the cap), the kind of error reported most often, and the total variation
    per token estimated by the audit."""
    lines = []
    for name, mine in runs.groupby("bug", sort=False):
        required = mine.found_after.astype(float).fillna(np.inf).to_numpy()
        middle, high = np.quantile(required, [0.5, 0.9], method="inverted_cdf")
        kinds = mine.kind.dropna().mode()
        tv = mine[mine.seed % GROUP == 0]  # one line of each group
        weights = tv.tv_tokens / tv.tv_tokens.sum()
        lines.append(
            {"bug": name, "audits": len(mine), "found": int(np.isfinite(required).sum()), "median": middle,
             "90%": high, "looks like": kinds.iloc[0] if len(kinds) else "-", "tv": float((weights * tv.tv).sum()),
             "tv_low": float((weights * tv.tv_low).sum()), "tokens": int(mine.tokens.sum())}
        )  # fmt: skip
    return pd.DataFrame(lines).replace(np.inf, np.nan)


STUDY = study.Study(
    measure,
    settings={"seeds": 20, "chunks": len(CHUNKS)},
    small={"seeds": 5, "chunks": 1},
    items=tuple(BUG_SUITE),
    small_items=("exact", "no-residual"),
)
