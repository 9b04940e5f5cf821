"""Draft lengths that adapt, beside every fixed one and an oracle: counted, with the costs of a step
that were measured.

The trained pair continues passages of held-out files and of modules of Python's standard library at
temperature 1. A rule of length looks at nothing that is sampled after it. One line of the table for
each rule: tokens, draft tokens and passes of the draft model per step, the fraction of `plain`
steps without a draft token, and `speed`, the tokens over the time of the steps: v, or 1 if plain,
and c for each pass of the draft model, with its c and v in `drafters` on new text. `over_best` is
over the best fixed length, which is chosen afterwards on the same sequences, with 95% intervals
over files. The oracle drafts just what will be accepted, of the longest fixed draft.

"calibrated" is fitted on files of the training set: how often a draft token is accepted, by its
probability under q, and the speed that its threshold needs, which is the one it reaches there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from specnb.decoding.auto_gamma import Auto
from torch import Tensor

from specnb.drafters import ChainDrafter, Context, ModelDrafter, Proposal
from specnb.loading import Pair, load_pair
from specnb.sampler import generate
from specnb.statistics import Estimate, over_rows
from studies import corpus
from studies.drafters.bandit import BanditDrafter
from studies.drafters.egag import EntropyGuidedDrafter
from studies.drafters.length import (
    CalibratedDrafter,
    HighEntropy,
    LowConfidence,
    ShortenedDrafter,
    StoppingDrafter,
    calibrate,
    worth,
)
from studies.files import read_table
from studies.speed.pairs import PROMPT_TOKENS, texts_of
from studies.study import Study, columns

ORACLE = "oracle"


class Recorded(ShortenedDrafter):
    """All draft tokens of `drafter`; `by_step` has their probabilities under q by step."""

    def __init__(self, drafter: ChainDrafter) -> None:
        super().__init__(drafter)
        self.by_step: list[Tensor] = []

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        proposal = self.drafter.propose(context, uniforms)
        self.by_step.append(proposal.q.gather(2, proposal.draft_tokens[..., None])[..., 0].double())
        return proposal


def calibrated(pair: Pair, prompts: list[list[int]], longest: int, c: float, v: float, new_tokens: int) -> ChainDrafter:
    """A `CalibratedDrafter` fitted on `prompts`. A draft token is worth its pass if it is accepted
    with a probability above c times the speed, so the speed of such drafts is sought that is the
    one assumed."""
    recorded = Recorded(ModelDrafter(pair.draft))
    made = generate(
        pair.target, prompts, recorded, gamma=longest, max_new_tokens=new_tokens, seed=1, progress=False
    ).record
    active = torch.from_numpy(made.active)
    accepted, probs = torch.from_numpy(made.accepted)[active], torch.stack(recorded.by_step, dim=1)[active]
    calibration, speed = calibrate(probs, accepted), 1.0
    for _ in range(20):
        length = worth(calibration, probs, c * speed)
        tokens = torch.minimum(length, accepted) + 1
        speed = float(tokens.sum() / (v * len(tokens) + c * length.sum()))
    return CalibratedDrafter(ModelDrafter(pair.draft), calibration, c * speed)


def counts_of(pair: Pair, prompts: list[list[int]], drafter: Any, gamma: Any, new_tokens: int) -> pd.DataFrame:
    """Of each sequence its tokens, steps, those without a draft token, draft tokens, passes of the
    draft model and accepted tokens; `in_vain`, the steps in which none was accepted."""
    made = generate(
        pair.target,
        prompts,
        drafter,
        gamma=gamma,
        max_new_tokens=new_tokens,
        seed=0,
        progress=False,
        batch_size=32,
    ).record
    accepted, steps = (made.accepted * made.active).sum(axis=1), made.active.sum(axis=1)
    lengths = (made.draft_tokens >= 0).sum(axis=2)
    drafted = (lengths * made.active).sum(axis=1)
    # A rule that reads q of the next token has it from a pass, also where it then stops.
    read = ((lengths < gamma) & made.active).sum(axis=1) if isinstance(drafter, StoppingDrafter) else 0
    plain, in_vain = (((each == 0) & made.active).sum(axis=1) for each in (lengths, made.accepted))
    counted = {"tokens": accepted + steps, "steps": steps, "plain": plain, "drafted": drafted}
    return pd.DataFrame(counted | {"passes": drafted + read, "accepted": accepted, "in_vain": in_vain})


def rules(
    draft: ChainDrafter, fitted: ChainDrafter, longest: int, c: float, v: float
) -> dict[str, tuple[ChainDrafter, Any]]:
    """Every rule with the largest number of draft tokens."""
    fixed = {f"fixed, {gamma}": (draft, gamma) for gamma in range(1, longest + 1)}
    lengths = tuple(range(1, longest + 1))
    return fixed | {
        "EGAG": (EntropyGuidedDrafter(draft, 1, longest), longest),
        "entropy of q": (StoppingDrafter(draft, HighEntropy()), longest),
        "largest q": (StoppingDrafter(draft, LowConfidence(0.3)), longest),
        "bandit": (BanditDrafter(draft, lengths, c), longest),
        "calibrated": (fitted, longest),
        "auto": (draft, "auto"),
        "auto, measured costs": (draft, Auto([1.0, *(v + c * length for length in lengths)])),
    }


def measure(item: str, files: int, passages: int, new_tokens: int, longest: int) -> Iterator[dict[str, Any]]:
    """The lines of all rules."""
    pair = load_pair()
    texts = [text for kind in ("held-out", "stdlib") for text in texts_of(kind, files)]
    begins = [text[len(text) * part // passages :][:4000] for text in texts for part in range(passages)]
    asked = [pair.encode(text)[:PROMPT_TOKENS] for text in begins]
    # Of each file the sum of what its passages gave: passages of one file are not independent.
    of_file = np.repeat(np.arange(len(texts)), passages)
    costs = read_table("results/drafters").set_index(["drafter", "text"]).loc[("draft model", "new")]
    c, v = float(costs.draft_cost / costs.gamma), float(costs.v)
    begun = [pair.encode(text[:4000])[:PROMPT_TOKENS] for text in corpus.read("train", limit=4 * files)]
    fitted = calibrated(pair, [ids for ids in begun if len(ids) == PROMPT_TOKENS], longest, c, v, new_tokens)
    counted = {
        name: counts_of(pair, asked, drafter, gamma, new_tokens).groupby(of_file).sum()
        for name, (drafter, gamma) in rules(ModelDrafter(pair.draft), fitted, longest, c, v).items()
    }
    counted[ORACLE] = counted[f"fixed, {longest}"].assign(
        drafted=lambda table: table.accepted, passes=lambda table: table.accepted, plain=lambda table: table.in_vain
    )

    def speed(table: pd.DataFrame) -> float:
        total = table.sum()
        return float(total.tokens / (v * (total.steps - total.plain) + total.plain + c * total.passes))

    best = max((name for name in counted if name.startswith("fixed")), key=lambda name: speed(counted[name]))

    def over_best(table: pd.DataFrame) -> Estimate:
        return over_rows(lambda rows: speed(table.iloc[rows]) / speed(counted[best].iloc[rows]), len(texts))

    for name, table in counted.items():
        each = table.sum() / table.steps.sum()
        per_step = {f"{what}_per_step": each[what] for what in ("tokens", "drafted", "passes")} | {"plain": each.plain}
        known = {"rule": name, "files": len(texts), "sequences": len(asked), **per_step, "c": c, "v": v}
        yield known | {"speed": speed(table)} | columns("over_best", over_best(table))


STUDY = Study(
    measure,
    settings={"files": 46, "passages": 5, "new_tokens": 64, "longest": 8},
    small={"files": 4, "passages": 1, "new_tokens": 8, "longest": 3},
)
