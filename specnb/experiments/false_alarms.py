"""How often the audit rejects an exact sampler: the check behind the rate of false alarms, run once and recorded.

`python -m specnb.experiments.false_alarms` writes `data/results/false_alarms.csv`. Tokens are drawn by the speculative
rule itself, from the distributions of the trained pair at prefixes that the target wrote; each audit draws
them anew, all of them with the draft's distributions and so with every bet. It takes a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from specnb.audit.auditor import Auditor
from specnb.audit.bets import Row
from specnb.audit.teacher_forcing import Completion, teacher_forced_rows
from specnb.decoding.loop import generate
from specnb.models.loading import Pair, load_pair
from specnb.report.results import out, write
from specnb.sampling.distributions import Sampling, sample
from specnb.sampling.verification import token_verification

PROMPTS = ("def ", "class ", "import ", "    return ", "for i in range(", "x = ", "from sympy import ", "assert ")
LENGTH = 250
RATES = (1e-1, 1e-2, 1e-3, 1e-6)


@torch.inference_mode()
def distributions(pair: Pair, tokens: int, seed: int = 0) -> list[Row]:
    """Rows of the pair's distributions along `tokens` tokens that the target wrote."""
    prompts = [pair.encode(PROMPTS[number % len(PROMPTS)]) for number in range(-(-tokens // LENGTH))]
    made = generate(pair.target, prompts, max_new_tokens=LENGTH, seed=seed)
    completions = [Completion(prompt, text) for prompt, text in zip(prompts, made.tokens, strict=True)]
    return list(teacher_forced_rows(pair.target, completions, Sampling(), pair.draft, Sampling()))


@torch.inference_mode()
def peaks(rows: list[Row], seeds: Iterable[int], progress: bool = True) -> NDArray[np.float64]:
    """Of one audit for each of `seeds` the decimal log of the largest e-value it ever saw."""
    found = []
    for seed in tqdm(list(seeds), desc="audits", delay=3, leave=False, disable=not progress):
        auditor = Auditor(seed=seed)
        for number, row in enumerate(rows):
            auditor.add(_drawn_anew(row, seed, number))
        found.append(auditor.report(detect=False).log10_e_peak)
    return np.array(found)


def _drawn_anew(row: Row, seed: int, number: int) -> Row:
    """The row's distributions with other tokens: what a step of Algorithm 1 emits first at each of its prefixes."""
    assert row.q is not None
    u = torch.from_numpy(np.random.default_rng([seed, number]).random((3, len(row.tokens))))
    draft_tokens = sample(row.q, u[0])
    p = row.p[:, None].expand(-1, 2, -1)  # what stands behind an accepted draft is not looked at
    accepted, token = token_verification(p, row.q[:, None], draft_tokens[:, None], u[1][:, None], u[2])
    return Row(torch.where(accepted > 0, draft_tokens, token).tolist(), row.p, row.q, prompt=row.prompt)


def table(found: NDArray[np.float64], tokens: int) -> pd.DataFrame:
    """How many audits crossed 1/delta at any token, for several delta, beside what Ville's inequality allows."""
    rows = [
        {
            "delta": rate,
            "audits": len(found),
            "tokens": tokens,
            "alarms": int((found >= -np.log10(rate)).sum()),
            "alarms_allowed": rate * len(found),
            "largest_log10_e": float(found.max()),
            "median_peak_log10_e": float(np.median(found)),
        }
        for rate in RATES
    ]
    return pd.DataFrame(rows)


def main() -> None:
    """Runs the check and writes its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--audits", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=5000)
    options = parser.parse_args()
    rows = distributions(load_pair(), options.tokens)
    tokens = sum(len(row.tokens) for row in rows)
    record(peaks(rows, range(options.audits)), tokens)


def record(found: NDArray[np.float64], tokens: int) -> pd.DataFrame:
    """Writes the table of what was found, and returns it."""
    frame = table(found, tokens)
    content = frame.to_csv(index=False, lineterminator="\n", float_format="%.6g")
    write(out() / "data" / "results" / "false_alarms.csv", content)
    return frame


if __name__ == "__main__":
    main()
