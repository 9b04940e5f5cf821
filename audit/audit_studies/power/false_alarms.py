"""How often the audit rejects an exact sampler.

Tokens are sampled by the speculative rule itself from the distributions of the trained pair, at
prefixes that the target wrote, with several settings and two dtypes. Each audit samples them anew
and uses the draft model's distributions, so that all of its tests take part. As for an engine that
computes in bfloat16, the audit's own distributions are those of float32, and the difference is
measured as every audit does it.

The last setting is the committed tokens of the engines without speculation, cut into audits of as
many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from audit_studies.engines import engines
from specnb.decoding.generate import generate
from specnb.distributions import Sampling, sample
from specnb.models.loading import Pair, load_pair
from specnb.rules import token_verification
from specnb_audit.auditor import Auditor
from specnb_audit.bets import Row
from specnb_audit.claimed import claimed_probs
from specnb_audit.numerics import Numerics, crossing, in_dtype, measure_numerics
from specnb_audit.report import Report
from specnb_audit.teacher_forcing import Completion, Models, batch_logits, cutoff_gaps, teacher_forced_rows
from studies.study import Study

PROMPTS = ("def ", "class ", "import ", "    return ", "for i in range(", "x = ", "from sympy import ", "assert ")
LENGTH = 250
RATES = (1e-1, 1e-2, 1e-3, 1e-6)

CONTROLS = "engines without speculation"
NOT_EXACT = ("onnxruntime-none-t07-p09",)  # audit/data/findings/onnxruntime-genai-top-p.md


class Setting(NamedTuple):
    """What target and draft are sampled with, and the dtype that the engine's target computes
    in."""

    sampling: Sampling
    dtype: torch.dtype = torch.float32


MIXED = {
    "t-1": Setting(Sampling()),
    "top-k": Setting(Sampling(0.7, top_k=40)),
    "top-p": Setting(Sampling(0.7, top_p=0.9)),
    "bfloat16": Setting(Sampling(), torch.bfloat16),
    "top-p-bfloat16": Setting(Sampling(0.7, top_p=0.9), torch.bfloat16),
}


class ExactEngine(NamedTuple):
    """What an exact sampler with rounding errors samples from, and what the audit compares its
    tokens with.

    rows      the audit's distributions, a row for each sequence
    probs     the engine's distributions `(n, vocab)`, one tensor for each row
    logits    the audit's logits `(n, vocab)`: how far a token that only the engine keeps is from
              being kept
    sampling  the setting of both
    numerics  how far the two are apart, as an audit measures it
    """

    rows: list[Row]
    probs: list[Tensor]
    logits: list[Tensor]
    sampling: Sampling
    numerics: Numerics | None = None


@torch.inference_mode()
def exact_engine(pair: Pair, setting: Setting, tokens: int) -> ExactEngine:
    """The pair's distributions along `tokens` tokens that the target wrote."""
    sampling = setting.sampling
    prompts = [pair.encode(PROMPTS[number % len(PROMPTS)]) for number in range(-(-tokens // LENGTH))]
    made = generate(pair.target, prompts, None, max_new_tokens=LENGTH, sampling=sampling)
    completions = [Completion(prompt, tokens) for prompt, tokens in zip(prompts, made.tokens, strict=True)]
    rows = list(teacher_forced_rows(Models(pair.target, sampling, pair.draft, sampling), completions))
    logits = [own for _, _, own in batch_logits(pair.target, completions)]
    rounded = logits
    if setting.dtype != pair.target.dtype:
        engine = in_dtype(pair.target, setting.dtype)
        rounded = [own.float() for _, _, own in batch_logits(engine, completions)]
    probs = [claimed_probs(own, sampling) for own in rounded]
    numerics = measure_numerics(pair.target, completions, sampling, engine_dtype=setting.dtype)
    return ExactEngine(rows, probs, logits, sampling, numerics)


@torch.inference_mode()
def run_audits(engine: ExactEngine, seeds: Iterable[int], progress: bool = True) -> pd.DataFrame:
    """One audit for each of `seeds`: the decimal logarithm of its largest e-value, infinite after a
    violation; and `rejected_at`, the smallest of `RATES` at which it would have rejected the engine
    at any token, NaN for none."""

    def report(seed: int) -> Report:
        auditor = Auditor(seed=seed, numerics=engine.numerics)
        for number in range(len(engine.rows)):
            auditor.add(resampled(engine, seed, number))
        return auditor.report(detect=False)

    bar = tqdm(list(seeds), desc="audits", delay=3, leave=False, disable=not progress)
    return outcomes((seed, report(seed)) for seed in bar)


def outcomes(reports: Iterable[tuple[int, Report]]) -> pd.DataFrame:
    """The line of each report, by its number; they may come one at a time: each holds e-values of
    all its tokens."""
    found = []
    for number, report in reports:
        nats = 0.0 if report.numerics is None else report.numerics.nats
        rejected = [rate for rate in RATES if crossing(report.running * np.log(10), rate, nats) is not None]
        found.append((number, report.tokens, report.log10_e_peak, min(rejected, default=np.nan)))
    return pd.DataFrame(found, columns=["seed", "tokens", "log10_e_peak", "rejected_at"])


def controls() -> list[str]:
    """The rows of `audit/data/engines/rows.csv` without speculation, but those whose sampler is not
    exact."""
    plain = [row for row in engines.rows().values() if row.speculation == "none" and row.file.exists()]
    return [row.name for row in plain if row.name not in NOT_EXACT]


def resampled(engine: ExactEngine, seed: int, number: int) -> Row:
    """Row `number` with new tokens: the first token that a step of Algorithm 1 emits at each of its
    prefixes."""
    row, probs = engine.rows[number], engine.probs[number]
    assert row.q is not None
    u = torch.from_numpy(np.random.default_rng([seed, number]).random((3, len(row.tokens))))
    draft_tokens = sample(row.q, u[0])
    # The distribution after an accepted draft token is not used.
    p = probs[:, None].expand(-1, 2, -1)
    accepted, token, _ = token_verification(p, row.q[:, None], draft_tokens[:, None], u[1][:, None], u[2])
    tokens = torch.where(accepted > 0, draft_tokens, token)
    emitted = tokens.tolist()
    gaps = cutoff_gaps(emitted, row.p, engine.logits[number], engine.sampling)
    return replace(row, tokens=emitted, steps=None, cutoff_gaps=gaps)


def measure(item: str, audits: int, tokens: int) -> pd.DataFrame:
    """A line for each audit with one setting; of an engine's row at most `audits`, each of about
    `tokens` tokens."""
    if item in controls():
        row, size = engines.rows()[item], max(1, tokens // engines.NEW_TOKENS)
        starts = range(0, row.completions, size)[:audits]
        reports = ((number, engines.audited(row, slice(at, at + size))) for number, at in enumerate(starts))
        return outcomes(reports).assign(setting=CONTROLS)
    engine = exact_engine(load_pair(), MIXED[item], tokens)
    return run_audits(engine, range(audits)).assign(setting=item)


def counted(parts: pd.DataFrame) -> pd.DataFrame:
    """For each setting, and for all of them together: how many audits exceeded 1/delta at any
    token, for several delta, and how many Ville's inequality allows."""
    return pd.DataFrame(
        {
            "setting": setting,
            "delta": rate,
            "audits": len(audited),
            "tokens": int(audited.tokens.sum()),
            "alarms": int((audited.rejected_at <= rate).sum()),
            "alarms_allowed": rate * len(audited),
            "largest_log10_e": float(audited.log10_e_peak.max()),
            "median_peak_log10_e": float(audited.log10_e_peak.median()),
        }
        for setting, audited in [*parts.groupby("setting", sort=False), ("all", parts)]
        for rate in RATES
    )


STUDY = Study(
    measure,
    settings={"audits": 200, "tokens": 5000},
    small={"audits": 2, "tokens": 500},
    items=(*MIXED, *controls()),
    small_items=("t-1", "bfloat16", *controls()[:1]),
    finish=counted,
)
