"""Audits of decoding with the real model: prompt lookup, a choice of gamma at each step, and a planted leak.

The leak accepts each tested draft token with a probability of `leak` whatever p and q are, so that some of the draft's
distribution gets into the output; its draft is the target's first layers, whose q the audit reads. Every line has the
total variation per token that the audit saw, and from which one on two kinds of error would have been detected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specnb.decoding.generate import generate
from specnb.distributions import Sampling
from specnb.drafting.ngram import PromptLookupDrafter
from specnb.rules import Outcome, token_verification
from specnb_audit.api import audit
from specnb_audit.engine import Engine
from studies.drafters.early_exit import early_exit
from studies.real.workloads import KINDS, model_and_tokenizer, prompts_of
from studies.study import Study

LAYERS = 20  # of the draft whose tokens leak
ITEMS: dict[str, tuple[str, Any, float, str]] = {
    "auto": ("prompt lookup", "auto", 1.0, "bfloat16"),
    "lookup": ("prompt lookup", 3, 0.7, "float32"),
    "leak": ("first layers, leaking", 2, 1.0, "bfloat16"),
}


def measure(item: str, tokens: int, new_tokens: int, rows: int, leak: float) -> list[dict[str, Any]]:
    """The audit of about so many `tokens`, `rows` sequences at a time, until it rejects."""
    drafting, gamma, temperature, dtype = ITEMS[item]
    target, tokenizer = model_and_tokenizer(dtype)
    sampling = Sampling(temperature)
    leaking = "leaking" in drafting
    draft = early_exit(target, LAYERS) if leaking else None

    def leaky(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, ((accept - leak) / (1 - leak)).clamp_min(0), final)

    every = [prompt for kind in KINDS for prompt in prompts_of(tokenizer, kind, 12)]
    prompts = (every * (tokens // new_tokens // len(every) + 1))[: tokens // new_tokens + 1]
    made = generate(
        target, prompts, draft or PromptLookupDrafter(target.config.vocab_size), gamma=gamma, sampling=sampling,
        max_new_tokens=new_tokens, rule=leaky if leaking else None, batch_size=rows,
    )  # fmt: skip
    report = audit(
        target, made.tokens, prompts=prompts, sampling=sampling, max_new_tokens=new_tokens, draft=draft, stop=leaking,
        engine=Engine(dtype=getattr(torch, dtype)),
    )  # fmt: skip
    line: dict[str, Any] = {"drafts": drafting, "gamma": gamma, "temperature": temperature, "dtype": dtype}
    line |= {"tokens": report.tokens, "verdict": report.verdict, "found_after": report.found_after}
    line |= {"kind": report.diagnosis, "log10_e": report.log10_e_peak}
    line |= {"tv_low": report.tv.low, "tv_high": report.tv.high}
    return [line | {f"{kind}_from": report.detectable.get(kind) for kind in ("draft-leak", "temperature")}]


STUDY = Study(
    measure,
    settings={"tokens": 20_000, "new_tokens": 64, "rows": 16, "leak": 0.02},
    small={"tokens": 64, "new_tokens": 8, "rows": 8, "leak": 0.02},
    items=tuple(ITEMS),
    small_items=("auto",),
)
