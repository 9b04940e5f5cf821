"""Draft lengths that adapt, beside every fixed one and an oracle: counted, with the costs of a step
that were measured.

The trained pair continues held-out files, from their beginning and their middle, and modules of
Python's standard library at temperature 1. A rule of length
looks at nothing that is sampled after it. One line of the table for each rule: tokens and draft
tokens per step, and `speed`, the tokens over the time v + c n of a step with n draft tokens, with c
and v of the draft model in `drafters` on new text; `over_best` is over the best fixed length, which
is chosen afterwards on the same sequences, with 95% intervals over sequences. The oracle drafts
just what will be accepted, of the longest fixed draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch

from specnb.decoding.generate import generate
from specnb.drafting.base import ChainDrafter
from specnb.drafting.model import ModelDrafter
from specnb.measure.statistics import Estimate, over_rows
from specnb.models.loading import Pair, load_pair
from studies import corpus
from studies.drafters.bandit import BanditDrafter
from studies.drafters.egag import EntropyGuidedDrafter
from studies.drafters.length import HighEntropy, LowConfidence, StoppingDrafter
from studies.files import read_table
from studies.speed.pairs import PROMPT_TOKENS, prompts_of
from studies.study import Study, columns

ORACLE = "oracle"


def counts_of(pair: Pair, prompts: list[list[int]], drafter: Any, gamma: Any, new_tokens: int) -> pd.DataFrame:
    """Tokens, steps, draft tokens and accepted ones of each sequence."""
    at_once = 1 if gamma == "auto" else 16  # where it learns from each sequence alone
    made = generate(
        pair.target,
        prompts,
        drafter,
        gamma=gamma,
        max_new_tokens=new_tokens,
        seed=0,
        progress=False,
        batch_size=at_once,
    ).record
    accepted, steps = (made.accepted * made.active).sum(axis=1), made.active.sum(axis=1)
    drafted = ((made.draft_tokens >= 0) & made.active[..., None]).sum(axis=(1, 2))
    return pd.DataFrame({"tokens": accepted + steps, "steps": steps, "drafted": drafted, "accepted": accepted})


def rules(draft: ChainDrafter, longest: int, c: float) -> dict[str, tuple[ChainDrafter, int | str]]:
    """Every rule with the largest number of draft tokens."""
    fixed = {f"fixed, {gamma}": (draft, gamma) for gamma in range(1, longest + 1)}
    lengths = tuple(range(1, longest + 1))
    return fixed | {
        "EGAG": (EntropyGuidedDrafter(draft, 1, longest), longest),
        "entropy of q": (StoppingDrafter(draft, HighEntropy()), longest),
        "largest q": (StoppingDrafter(draft, LowConfidence(0.3)), longest),
        "bandit": (BanditDrafter(draft, lengths, c), longest),
        "auto": (draft, "auto"),
    }


def measure(item: str, prompts: int, new_tokens: int, longest: int) -> Iterator[dict[str, Any]]:
    """The lines of all rules."""
    pair = load_pair(dtype=torch.float64)
    asked = [text for kind in ("held-out", "stdlib") for text in prompts_of(pair, kind, prompts)]
    halves = [pair.encode(text[len(text) // 2 :])[:PROMPT_TOKENS] for text in corpus.read("held-out", limit=prompts)]
    asked += [half for half in halves if len(half) == PROMPT_TOKENS]
    costs = read_table("results/drafters").set_index(["drafter", "text"]).loc[("draft model", "new")]
    c, v = float(costs.draft_cost / costs.gamma), float(costs.v)
    counted = {
        name: counts_of(pair, asked, drafter, gamma, new_tokens)
        for name, (drafter, gamma) in rules(ModelDrafter(pair.draft), longest, c).items()
    }
    counted[ORACLE] = counted[f"fixed, {longest}"].assign(drafted=lambda table: table.accepted)

    def speed(table: pd.DataFrame) -> float:
        return float(table.tokens.sum() / (v * table.steps.sum() + c * table.drafted.sum()))

    best = max((name for name in counted if name.startswith("fixed")), key=lambda name: speed(counted[name]))

    def over_best(table: pd.DataFrame) -> Estimate:
        return over_rows(lambda rows: speed(table.iloc[rows]) / speed(counted[best].iloc[rows]), len(asked))

    for name, table in counted.items():
        steps = table.steps.sum()
        per_step = {"tokens_per_step": table.tokens.sum() / steps, "drafted_per_step": table.drafted.sum() / steps}
        yield {"rule": name, "sequences": len(asked), **per_step, "c": c, "v": v, "speed": speed(table)} | columns(
            "over_best", over_best(table)
        )


STUDY = Study(
    measure,
    settings={"prompts": 46, "new_tokens": 48, "longest": 8},
    small={"prompts": 4, "new_tokens": 8, "longest": 3},
)
