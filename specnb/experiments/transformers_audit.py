"""In the wild: what `transformers` as installed writes, for the audit. `python -m specnb.experiments.transformers_audit` records it.

Every sampler here is called as its users call it. Rows of a batch, where there is one, come from one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple

import pandas as pd
import torch
from tqdm import tqdm

from specnb.audit.api import audit
from specnb.audit.report import Report
from specnb.experiments.detection import prompts_of
from specnb.models.loading import Pair, load_pair
from specnb.report.results import out, write
from specnb.sampling.distributions import Sampling

DELTA = 1e-6


class Sampler(NamedTuple):
    """A way of calling `generate`: what it is called, how many rows a call may have, and what it is given."""

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


def written(
    sampler: Sampler, sampling: Sampling, pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int, seed: int
) -> list[list[int]]:
    """What follows each prompt; prompts of one call must be equally long, since padding is another matter."""
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


def audited(
    sampler: Sampler, sampling: Sampling, pair: Pair, completions: int, new_tokens: int, seed: int = 0
) -> Report:
    """The audit of that many texts of a sampler; the draft aims it where there is one."""
    starts = prompts_of(pair)
    prompts = [starts[text % len(starts)] for text in range(completions)]
    made = written(sampler, sampling, pair, prompts, new_tokens, seed)
    return audit(
        pair.target, made, prompts=prompts, sampling=sampling, draft=pair.draft, delta=DELTA, seed=seed,
        max_new_tokens=new_tokens, progress=False,
    )  # fmt: skip


def line(sampler: Sampler, filters: str, report: Report) -> dict[str, Any]:
    """One line of the table of what was found, and from what total variation per token it would have been."""
    return {
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


def main() -> None:
    """Audits what is not recorded yet: 32 texts of 96 tokens each."""
    path, pair = out() / "data" / "results" / "transformers_audit.csv", load_pair()
    todo = [(sampler, name) for sampler in SAMPLERS for name in ("none", "top-k 50")]
    todo += [(sampler, name) for sampler in SAMPLERS if sampler.assisted for name in ("top-p 0.9", "temperature 0.7")]
    for sampler, name in tqdm(todo, desc="samplers"):
        done = pd.read_csv(path).to_dict("records") if path.exists() else []
        if any((one["sampler"], one["filters"]) == (sampler.name, name) for one in done):
            continue
        report = audited(sampler, FILTERS[name], pair, completions=32, new_tokens=96)
        table = pd.DataFrame([*done, line(sampler, name, report)]).astype({"found after": "Int64"})
        write(path, table.to_csv(index=False, lineterminator="\n", float_format="%.6g"))


if __name__ == "__main__":
    main()
