"""Does `explain_acceptance` name the mistake with which a draft was served?

Each mistake of `planted` is made in the decoding loop, or in the files of the draft, and
`explain_acceptance` is given the log: prompts and tokens, and for each of about `steps` steps how many it
emitted. The drafts are those of the trained pair: a draft model, EAGLE-3's head, the same with a map
of the tokens that it drafts, and the next-token layer. Prompts are the beginnings of windows of
held-out files, other ones for every log. Logs without a mistake are made several times.

One line of the table for each log:

- `draft`, `temperature`, `planted`, `tokens_per_step` of the log, `tested` draft tokens
- `depth1`, ...: conditional acceptance in the log; `given1`, ...: what the draft as it is given would
  have accepted at these places
- `against_none`: decimal logarithm of the e-value against no mistake; `named`, the mistakes that are
  named, in order; `right`, whether the planted one is among them, for no mistake whether none is
- `same`: whether the log is also explained by no mistake, which is then the answer
- `unknown`: the answer if the planted mistake were not among those that are tried: "none fits", "no mistake",
  "other settings" or the names of others
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from audit_studies.acceptance.planted import COOLER, GAMMA, Planted, of_draft
from specnb.distributions import Sampling
from specnb.drafters import Drafter
from specnb.loading import Pair, load_pair
from specnb.sampler import Instruments, generate
from specnb_audit import low_acceptance
from specnb_audit.draft_replay import Log, Served, Text, replay
from specnb_audit.low_acceptance import RIGHT, AcceptanceCauses, explain_acceptance, hypotheses
from studies import corpus
from studies.study import Study

PROMPT, ROWS = 24, 64  # tokens of a prompt, and sequences of a log


@cache
def held_out() -> list[list[int]]:
    tokenizer = load_pair().tokenizer
    return [tokenizer(text[:20_000])["input_ids"] for text in corpus.read("held-out")]


def prompts_of(pair: Pair, number: int, rows: int) -> list[list[int]]:
    """The prompts of log `number`: windows of held-out files, after the begin token."""
    begin, texts = pair.tokenizer.bos_token_id, held_out()
    chosen = np.random.default_rng(number)
    made = []
    for _ in range(rows):
        text = texts[chosen.integers(len(texts))]
        at = int(chosen.integers(len(text) - PROMPT))
        made.append([begin, *text[at : at + PROMPT - 1]])
    return made


def logged(pair: Pair, planted: Planted, sampling: Sampling, number: int, rows: int, steps: int) -> dict[str, Any]:
    """What an engine with the mistake logs: prompts, tokens and steps, of `steps` steps in all."""
    prompts = prompts_of(pair, number, rows)
    each = -(-steps // rows)
    made = generate(
        planted.target or pair.target, [planted.prompts(prompt) for prompt in prompts], planted.drafter, gamma=GAMMA,
        max_new_tokens=each * (GAMMA + 1), sampling=sampling, seed=number, progress=False,
        instruments=Instruments(batch_class=planted.batch),
    )  # fmt: skip
    # As an engine that is stopped after so many steps, or a token later, so that the last one is whole.
    sizes = [[int(size) for size in row[: each + 1] if size] for row in made.record.emitted]
    tokens = [row[: sum(size)] for row, size in zip(made.tokens, sizes, strict=True)]
    return {"prompts": prompts, "completions": tokens, "steps": sizes}


def explained(
    pair: Pair, given: Drafter, planted: Planted, sampling: Sampling, log: dict[str, Any]
) -> tuple[AcceptanceCauses, AcceptanceCauses]:
    """What `explain_acceptance` says, and what it would say if it did not know the planted mistake."""
    asked = partial(explain_acceptance, pair.target, given, gamma=GAMMA, sampling=sampling, progress=False, **log)
    replayed: dict[tuple[str, str], Tensor] = {}  # by hypothesis and part of the log

    def once(served: Served, text: Text, log: Log) -> Tensor:
        key = served.name, str(log)
        if key not in replayed:
            replayed[key] = replay(served, text, log)
        return replayed[key]

    def others(*arguments: Any) -> list[Served]:
        return [one for one in hypotheses(*arguments) if one.name != planted.name]

    with patch.object(low_acceptance, "replay", once):
        found = asked(others=planted.others)
        if planted.name == RIGHT:
            return found, found
        with patch.object(low_acceptance, "hypotheses", others):
            return found, asked()


def answer(found: AcceptanceCauses) -> str:
    """In a word or by names."""
    if found.settings:
        return "other settings"
    return "no mistake" if found.fits else "; ".join(found.named) or "none fits"


def measure(item: str, steps: int, rows: int, without: int, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a part of the logs of a draft at a temperature."""
    torch.set_num_threads(1)
    pair, (setting, part) = load_pair(), item.split("_")
    draft, _, temperature = setting.rpartition("-t")
    sampling = Sampling(float(temperature))
    for config in (pair.target.config, pair.target.generation_config):
        config.pad_token_id = config.eos_token_id = None  # a begin token that stands twice is no padding here
    with tempfile.TemporaryDirectory() as work:
        given, mistakes = of_draft(draft, pair, sampling, Path(work))
        right = (Planted(RIGHT, of_draft(draft, pair, sampling, Path(work))[0]) for _ in range(without))
        for number, planted in enumerate((*right, *mistakes)):
            if most is not None and number >= most:
                break
            if number % PARTS[setting] != int(part):
                continue
            log = logged(pair, planted, sampling, 1000 * list(PARTS).index(setting) + number, rows, steps)
            found, unknown = explained(pair, given, planted, sampling, log)
            none = planted.name == RIGHT
            yield {
                "draft": draft, "temperature": sampling.temperature, "planted": planted.name,
                "tokens_per_step": found.logged.tokens_per_step.value,
                "given_tokens_per_step": found.expected.tokens_per_step.value,
                **{f"depth{depth}": one.value for depth, one in enumerate(found.logged.conditional, 1)},
                **{f"given{depth}": one.value for depth, one in enumerate(found.expected.conditional, 1)},
                "tested": found.tests, "tried": len(found.tried) - 1, "against_none": found.tried[0].against,
                "size": len(found.named), "right": not found.named if none else planted.name in found.named,
                "same": not none and found.fits and planted.name in found.inseparable,
                "named": "; ".join(found.named), "unknown": answer(unknown),
            }  # fmt: skip


# Parts into which the logs of each draft and temperature are divided, so that a run can go on where it was
PARTS = {
    "model-t1": 2,
    f"model-t{COOLER.temperature}": 1,
    "eagle3-t1": 8,
    "next-token-t1": 8,
    "eagle3-map-t1": 1,
    "eagle3-t0": 2,
}
STUDY = Study(
    measure,
    settings={"steps": 1000, "rows": ROWS, "without": 2},
    small={"steps": 12, "rows": 4, "without": 1, "most": 4},
    items=tuple(f"{setting}_{part}" for setting, parts in PARTS.items() for part in range(parts)),
    small_items=("model-t1_0",),
)
