"""Audits of the samplers of the installed `transformers`, each called as its users call it.

A line has the verdict, the total variation per token that the audit saw, and from which total variation on two kinds of
error would have been detected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple

import torch

from specnb.distributions import Sampling
from specnb.models.loading import Pair, load_pair
from specnb_audit.api import audit
from specnb_audit.report import Report
from studies.audit_power.bug_suite import prompts_of
from studies.study import Study

DELTA = 1e-6


class Sampler(NamedTuple):
    """A way of calling `generate`: its name, the rows of a call, and the arguments."""

    name: str
    rows: int
    arguments: dict[str, Any]
    assisted: bool = False


SAMPLERS = [
    Sampler("sampling", 1, {}),
    Sampler("sampling, batch 16", 16, {}),
    Sampler("assisted", 1, {}, assisted=True),
    Sampler("prompt lookup", 1, {"prompt_lookup_num_tokens": 4}),
]
FILTERS = {
    "none": Sampling(),
    "top-k 50": Sampling(top_k=50),
    "top-p 0.9": Sampling(top_p=0.9),
    "temperature 0.7": Sampling(0.7),
}
CASES = [(sampler, name) for sampler in SAMPLERS for name in ("none", "top-k 50")]
CASES += [(SAMPLERS[2], "top-p 0.9"), (SAMPLERS[2], "temperature 0.7")]
ITEMS = {re.sub("[^a-z0-9]+", "-", f"{sampler.name} {name}"): (sampler, name) for sampler, name in CASES}


def written(
    sampler: Sampler, sampling: Sampling, pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int, seed: int
) -> list[list[int]]:
    """The completion of each prompt. Prompts of one call must be equally long, so that no padding is needed."""
    torch.manual_seed(seed)
    more = {"assistant_model": pair.draft} if sampler.assisted else {}
    generate: Any = pair.target.generate
    completions: list[list[int]] = []
    for at in range(0, len(prompts), sampler.rows):
        ids = torch.tensor([list(prompt) for prompt in prompts[at : at + sampler.rows]])
        made = generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=sampling.temperature,
            top_k=sampling.top_k or 0, top_p=sampling.top_p, max_new_tokens=new_tokens, min_new_tokens=None,
            eos_token_id=None, pad_token_id=0, **sampler.arguments, **more,
        )  # fmt: skip
        completions += made[:, ids.shape[1] :].tolist()
    return completions


def audited(sampler: Sampler, sampling: Sampling, pair: Pair, completions: int, new_tokens: int) -> Report:
    """The audit of so many completions of a sampler, with the draft model's distributions."""
    starts = prompts_of(pair)
    prompts = [starts[number % len(starts)] for number in range(completions)]
    made = written(sampler, sampling, pair, prompts, new_tokens, seed=0)
    return audit(
        pair.target, made, prompts=prompts, sampling=sampling, draft=pair.draft, delta=DELTA, seed=0,
        max_new_tokens=new_tokens, progress=False,
    )  # fmt: skip


def measure(item: str, completions: int, new_tokens: int) -> list[dict[str, Any]]:
    """The line of one sampler with one filter."""
    sampler, filters = ITEMS[item]
    report = audited(sampler, FILTERS[filters], load_pair(packed=False), completions, new_tokens)
    line = {
        "sampler": sampler.name,
        "filters": filters,
        "tokens": report.tokens,
        "verdict": report.verdict,
        "found after": report.found_after,
        "kind": report.diagnosis,
        "log10 e": report.log10_e_peak,
        "TV seen": report.tv.value,
        "low": report.tv.low,
        "high": report.tv.high,
        "a leak of q shows from": report.detectable.get("draft-leak"),
        "a wrong q shows from": report.detectable.get("wrong-q"),
        "transformers": metadata.version("transformers"),
        "torch": metadata.version("torch"),
    }
    return [line]


STUDY = Study(
    measure,
    settings={"completions": 32, "new_tokens": 96},
    small={"completions": 16, "new_tokens": 8},
    items=tuple(ITEMS),
    small_items=tuple(ITEMS)[:2],
)
