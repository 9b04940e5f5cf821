"""Audits of decoding with the real model: copies and a trained head, at two temperatures, and a planted leak.

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
from studies.real.workloads import KINDS, head_drafter, model_and_tokenizer, prompts_of
from studies.study import Study

LAYERS = 15  # of the draft whose tokens leak
LEAK = "first layers, leaking"


def measure(item: str, tokens: int, new_tokens: int, rows: int, leak: float, dtype: str) -> list[dict[str, Any]]:
    """The audit of about so many `tokens`, `rows` sequences at a time; the leak's until it rejects."""
    drafting, at = item.rsplit("-", 1)
    target, tokenizer = model_and_tokenizer(dtype)
    sampling, leaking = Sampling(float(at)), drafting == "leak"
    draft = early_exit(target, LAYERS) if leaking else None
    copies = PromptLookupDrafter(target.config.vocab_size)

    def leaky(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, ((accept - leak) / (1 - leak)).clamp_min(0), final)

    every = [
        prompt for pair in zip(*(prompts_of(tokenizer, kind, 12) for kind in KINDS), strict=True) for prompt in pair
    ]
    prompts = (every * (tokens // new_tokens // len(every) + 1))[: tokens // new_tokens + 1]
    made = generate(
        target, prompts, draft or (head_drafter(target, sampling) if drafting == "head" else copies), gamma=3,
        sampling=sampling, max_new_tokens=new_tokens, rule=leaky if leaking else None, batch_size=rows, progress=False,
    )  # fmt: skip
    report = audit(
        target, made.tokens, prompts=prompts, sampling=sampling, max_new_tokens=new_tokens, draft=draft, stop=leaking,
        engine=Engine(dtype=getattr(torch, dtype)), progress=False,
    )  # fmt: skip
    line: dict[str, Any] = {"drafts": LEAK if leaking else drafting, "temperature": sampling.temperature}
    line |= {"dtype": dtype, "tokens": report.tokens, "verdict": report.verdict, "found_after": report.found_after}
    line |= {"kind": report.diagnosis, "log10_e": report.log10_e_peak}
    line |= {"tv_low": report.tv.low, "tv_high": report.tv.high}
    return [line | {f"{kind}_from": report.detectable.get(kind) for kind in ("draft-leak", "temperature")}]


STUDY = Study(
    measure,
    settings={"tokens": 4_000, "new_tokens": 96, "rows": 24, "leak": 0.02, "dtype": "float32"},
    small={"tokens": 64, "new_tokens": 8, "rows": 8, "leak": 0.02, "dtype": "float32"},
    items=("copies-0.7", "copies-1", "leak-1", "head-0.7", "head-1"),
    small_items=("copies-1",),
)
