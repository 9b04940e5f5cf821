"""Draft lengths that adapt, beside every fixed one and an oracle: counted, with the costs of a step
that were measured.

The trained pair continues passages of held-out files and of modules of Python's standard library at
temperature 1. One line of the table for each rule: tokens and draft tokens per step, the fraction
of `plain` steps without a draft token, and `speed`, the tokens over the time of the steps: v, or 1
if plain, and c for each draft token, with its c and v in `drafters` on new text. `over_best` is
over the best fixed length, which is chosen afterwards on the same sequences, with 95% intervals
over files. The oracle drafts just what will be accepted, of the longest fixed draft.

"stop at c lambda" is fitted on files of the training set: how often a draft token is accepted, by
its probability, and lambda, which is the speed that the rule reaches there with that lambda.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from specnb.distributions import Sampling
from specnb.drafters import ChainDrafter, Context, ModelDrafter, Proposal
from specnb.loading import Pair, load_pair
from specnb.sampler import generate
from specnb.statistics import Estimate, over_rows
from studies import corpus
from studies.drafters.egag import EntropyGuidedDrafter
from studies.drafters.length import Calibration, ShortenedDrafter, StopDrafter, calibrate
from studies.files import read_table
from studies.speed.pairs import PROMPT_TOKENS, texts_of
from studies.study import Study, columns

ORACLE = "oracle"


class Recorded(ShortenedDrafter):
    """All draft tokens of `drafter`; `by_step` has their probabilities by step."""

    def __init__(self, drafter: ChainDrafter, sampling: Sampling) -> None:
        super().__init__(drafter, sampling)
        self.by_step: list[Tensor] = []
        self.qs: list[Tensor] = []

    def distribution(self, context: Context, position: int) -> Tensor:
        self.qs = [*(self.qs if position else []), self.drafter.distribution(context, position)]
        return self.processed(self.qs[-1], context.lengths > 0)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        proposal = super().propose(context, uniforms)
        probs = torch.stack(self.qs, dim=1).gather(2, proposal.draft_tokens[..., None])[..., 0]
        self.by_step.append(probs.double())
        return proposal


def costs() -> tuple[float, float]:
    """c of the draft model and v, measured on new text."""
    measured = read_table("results/drafters").set_index(["drafter", "text"]).loc[("draft model", "new")]
    return float(measured.draft_cost / measured.gamma), float(measured.v)


def fitted(
    pair: Pair, prompts: list[list[int]], sampling: Sampling, longest: int, new_tokens: int
) -> tuple[Calibration, float]:
    """What `StopDrafter` needs: the acceptance of draft tokens on `prompts`, and c times the speed
    that the rule reaches with it."""
    recorded, (c, v) = Recorded(ModelDrafter(pair.draft), sampling), costs()
    made = generate(
        pair.target, prompts, recorded, gamma=longest, max_new_tokens=new_tokens, sampling=sampling, seed=1,
        progress=False,
    ).record  # fmt: skip
    active = torch.from_numpy(made.active)
    accepted, probs = torch.from_numpy(made.accepted)[active], torch.stack(recorded.by_step, dim=1)[active]
    calibration, speed = calibrate(probs, accepted), 1.0
    for _ in range(20):
        length = calibration.worth(probs, c * speed)
        tokens = torch.minimum(length, accepted) + 1
        speed = float(tokens.sum() / (v * len(tokens) + c * length.sum()))
    return calibration, c * speed


def training_prompts(pair: Pair, files: int) -> list[list[int]]:
    """The beginnings of files of the training set, of `PROMPT_TOKENS` tokens each."""
    begun = [pair.encode(text[:4000])[:PROMPT_TOKENS] for text in corpus.read("train", limit=files)]
    return [ids for ids in begun if len(ids) == PROMPT_TOKENS]


def counts_of(
    pair: Pair, prompts: list[list[int]], drafter: ChainDrafter, gamma: int, sampling: Sampling, new_tokens: int
) -> pd.DataFrame:
    """Of each sequence its tokens, steps, those without a draft token, draft tokens and accepted
    tokens; `in_vain`, the steps in which none was accepted."""
    made = generate(
        pair.target, prompts, drafter, gamma=gamma, max_new_tokens=new_tokens, sampling=sampling, batch_size=32,
        progress=False,
    ).record  # fmt: skip
    accepted, steps = (made.accepted * made.active).sum(axis=1), made.active.sum(axis=1)
    lengths = (made.draft_tokens >= 0).sum(axis=2) * made.active
    plain, in_vain = (((each == 0) & made.active).sum(axis=1) for each in (lengths, made.accepted))
    counted = {"tokens": accepted + steps, "steps": steps, "plain": plain, "drafted": lengths.sum(axis=1)}
    return pd.DataFrame(counted | {"accepted": accepted, "in_vain": in_vain})


def measure(item: str, files: int, passages: int, new_tokens: int, longest: int) -> Iterator[dict[str, Any]]:
    """The lines of all rules."""
    pair, sampling, (c, v) = load_pair(), Sampling(), costs()
    texts = [text for kind in ("held-out", "stdlib") for text in texts_of(kind, files)]
    begins = [text[len(text) * part // passages :][:4000] for text in texts for part in range(passages)]
    asked = [pair.encode(text)[:PROMPT_TOKENS] for text in begins]
    # Of each file the sum of what its passages gave: passages of one file are not independent.
    of_file = np.repeat(np.arange(len(texts)), passages)
    stop = fitted(pair, training_prompts(pair, 4 * files), sampling, longest, new_tokens)
    rules: dict[str, tuple[ChainDrafter, int]] = {
        f"fixed, {gamma}": (ModelDrafter(pair.draft, sampling), gamma) for gamma in range(1, longest + 1)
    }
    egag = EntropyGuidedDrafter(ModelDrafter(pair.draft), sampling, gamma_max=longest, max_new_tokens=new_tokens)
    rules |= {
        "EGAG": (egag, longest),
        "stop at c lambda": (StopDrafter(ModelDrafter(pair.draft), *stop, sampling), longest),
    }
    counted = {
        name: counts_of(pair, asked, drafter, gamma, sampling, new_tokens).groupby(of_file).sum()
        for name, (drafter, gamma) in rules.items()
    }
    counted[ORACLE] = counted[f"fixed, {longest}"].assign(
        drafted=lambda table: table.accepted, plain=lambda table: table.in_vain
    )

    def speed(table: pd.DataFrame) -> float:
        total = table.sum()
        return float(total.tokens / (v * (total.steps - total.plain) + total.plain + c * total.drafted))

    best = max((name for name in counted if name.startswith("fixed")), key=lambda name: speed(counted[name]))

    def over_best(table: pd.DataFrame) -> Estimate:
        return over_rows(lambda rows: speed(table.iloc[rows]) / speed(counted[best].iloc[rows]), len(texts))

    for name, table in counted.items():
        each = table.sum() / table.steps.sum()
        known = {"rule": name, "files": len(texts), "sequences": len(asked)}
        known |= {"tokens_per_step": each.tokens, "drafted_per_step": each.drafted, "plain": each.plain, "c": c, "v": v}
        yield known | {"speed": speed(table)} | columns("over_best", over_best(table))


STUDY = Study(
    measure,
    settings={"files": 46, "passages": 5, "new_tokens": 64, "longest": 8},
    small={"files": 4, "passages": 1, "new_tokens": 8, "longest": 3},
)
