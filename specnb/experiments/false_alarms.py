"""How often the audit rejects an exact sampler: `make experiments ONLY=false_alarms`.

Tokens are sampled by the speculative rule itself from the distributions of the trained pair, at prefixes that the
target wrote. Each audit samples them anew and uses the draft model's distributions, so that all of its tests take part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
from specnb.sampling.distributions import Sampling, sample
from specnb.sampling.verification import token_verification

PROMPTS = ("def ", "class ", "import ", "    return ", "for i in range(", "x = ", "from sympy import ", "assert ")
LENGTH = 250
RATES = (1e-1, 1e-2, 1e-3, 1e-6)

TABLE = "false_alarms"
SETTINGS: dict[str, Any] = {"audits": 1000, "block": 100, "tokens": 5000}
SMOKE: dict[str, Any] = {"audits": 4, "block": 2, "tokens": 500}


@torch.inference_mode()
def distributions(pair: Pair, tokens: int, seed: int = 0) -> list[Row]:
    """The pair's distributions along `tokens` tokens that the target wrote."""
    prompts = [pair.encode(PROMPTS[number % len(PROMPTS)]) for number in range(-(-tokens // LENGTH))]
    made = generate(pair.target, prompts, max_new_tokens=LENGTH, seed=seed)
    completions = [Completion(prompt, tokens) for prompt, tokens in zip(prompts, made.tokens, strict=True)]
    return list(teacher_forced_rows(pair.target, completions, Sampling(), pair.draft, Sampling()))


@torch.inference_mode()
def peaks(rows: list[Row], seeds: Iterable[int], progress: bool = True) -> NDArray[np.float64]:
    """The decimal logarithm of the largest e-value of one audit for each of `seeds`, `(seeds,)`."""
    found = []
    for seed in tqdm(list(seeds), desc="audits", delay=3, leave=False, disable=not progress):
        auditor = Auditor(seed=seed)
        for number, row in enumerate(rows):
            auditor.add(resampled(row, seed, number))
        found.append(auditor.report(detect=False).log10_e_peak)
    return np.array(found)


def resampled(row: Row, seed: int, number: int) -> Row:
    """The same distributions with new tokens: the first token that a step of Algorithm 1 emits at each prefix."""
    assert row.q is not None
    u = torch.from_numpy(np.random.default_rng([seed, number]).random((3, len(row.tokens))))
    draft_tokens = sample(row.q, u[0])
    p = row.p[:, None].expand(-1, 2, -1)  # the distribution after an accepted draft token is not used
    accepted, token = token_verification(p, row.q[:, None], draft_tokens[:, None], u[1][:, None], u[2])
    return Row(torch.where(accepted > 0, draft_tokens, token).tolist(), row.p, row.q, prompt=row.prompt)


def table(found: NDArray[np.float64], tokens: int) -> pd.DataFrame:
    """How many audits exceeded 1/delta at any token, for several delta, and what Ville's inequality allows."""
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


def items(audits: int, block: int, **_: Any) -> list[str]:
    """Blocks of audits, named by the seed of the first."""
    return [f"{first:05d}" for first in range(0, audits, block)]


def measure(item: str, audits: int, block: int, tokens: int) -> pd.DataFrame:
    """The peaks of a block of audits, one line per audit."""
    seeds = range(int(item), min(int(item) + block, audits))
    rows = distributions(load_pair(packed=False), tokens)
    found = peaks(rows, seeds)
    return pd.DataFrame({"seed": seeds, "tokens": sum(len(row.tokens) for row in rows), "log10_e_peak": found})


def gather(parts: pd.DataFrame) -> pd.DataFrame:
    """The table of false alarms over all audits."""
    return table(parts.log10_e_peak.to_numpy(), int(parts.tokens.iloc[0]))
