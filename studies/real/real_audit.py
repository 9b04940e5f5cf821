"""Audits of decoding with the real model: copies, a trained head, a tree, and a planted leak.

Samplers are as they are by default, one row at a time, so that in bfloat16 weights are read in 4 bits where few tokens
are verified. An item names what drafts, the temperature and the dtype. Copies are drafted at their usual length;
the tree samples from the target's first `LAYERS` layers. The leak drafts with these layers, too,
and accepts each tested draft token with a probability of `leak` whatever p and q are, so that some
of the draft's distribution gets into the output; it is audited until it is rejected. Where a model
drafts, the audit reads its q. Every line has the total variation per token that the audit saw, and
from which one on two kinds of error would have been detected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling
from specnb.drafters import TreeDrafter
from specnb.rules import Outcome, token_verification
from specnb.sampler import Sampler
from specnb_audit.api import audit
from specnb_audit.engine import Engine
from studies.drafters.early_exit import early_exit
from studies.real.smollm2 import head_drafter, model_and_tokenizer, prompts_of
from studies.real.workloads import KINDS
from studies.study import Study

LAYERS = 15
PARENTS = (-1, -1, 0)


def measure(item: str, tokens: int, new_tokens: int, rows: int, leak: float) -> list[dict[str, Any]]:
    """The audit of about so many `tokens`, decoded `rows` sequences at a time."""
    drafting, at, dtype = item.split("-")
    target, tokenizer = model_and_tokenizer(dtype)
    sampling, layers = Sampling(float(at)), early_exit(target, LAYERS)
    drafters: dict[str, Any] = {
        "copies": PromptLookupDrafter(target.config.vocab_size),
        "head": head_drafter(target, sampling),
        "tree": TreeDrafter(layers, PARENTS, sampling),
        "leak": layers,
    }
    leaking = drafting == "leak"

    def leaky(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, ((accept - leak) / (1 - leak)).clamp_min(0), final)

    of_kind = (prompts_of(tokenizer, kind, 12) for kind in KINDS)
    every = [prompt for one_of_each in zip(*of_kind, strict=True) for prompt in one_of_each]
    prompts = (every * (tokens // new_tokens // len(every) + 1))[: tokens // new_tokens + 1]
    sampler = Sampler(
        target, drafters[drafting], gamma="auto" if drafting == "copies" else len(PARENTS), sampling=sampling,
        rule=leaky if leaking else None, rows=rows, progress=False,
    )  # fmt: skip
    made = sampler.generate(prompts, max_new_tokens=new_tokens)
    report = audit(
        target, made.tokens, prompts=prompts, sampling=sampling, max_new_tokens=new_tokens,
        draft=layers if drafting in ("leak", "tree") else None, stop=leaking,
        engine=Engine(dtype=getattr(torch, dtype)), progress=False,
    )  # fmt: skip
    line: dict[str, Any] = {"drafts": drafting, "temperature": sampling.temperature, "dtype": dtype}
    line |= {"tokens": report.tokens, "verdict": report.verdict, "found_after": report.found_after}
    line |= {"kind": report.diagnosis, "log10_e": report.log10_e_peak}
    line |= {"tv_low": report.tv.low, "tv_high": report.tv.high}
    return [line | {f"{kind}_from": report.detectable.get(kind) for kind in ("draft-leak", "temperature")}]


STUDY = Study(
    measure,
    settings={"tokens": 4_000, "new_tokens": 96, "rows": 1, "leak": 0.02},
    small={"tokens": 64, "new_tokens": 8, "rows": 1, "leak": 0.02},
    items=(
        "copies-0.7-float32", "copies-1-bfloat16", "head-0.7-bfloat16", "head-1-float32", "tree-0.7-float32",
        "tree-1-bfloat16", "leak-0.7-bfloat16", "leak-1-float32",
    ),
    small_items=("copies-0.7-float32",),
)  # fmt: skip
