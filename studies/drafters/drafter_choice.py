"""Which kind of drafter should be trained for a target? One of each kind, on the same prompts in
one run.

One line of the table for each drafter. Items are the target and the temperature: the trained pair,
and the real model, for which nothing was trained here. Columns as in `drafters`, and for each depth
d from 1 to `DEPTHS`

- `alpha_d`: of the steps with d - 1 accepted draft tokens or more, the fraction that accepted d or
  more. So tokens per step are 1 + alpha_1 + alpha_1 alpha_2 + ..., for chains and trees. With
  intervals over sequences
- `parameters` and `trained_tokens`: of what was trained, as its `training.json` says

Prompts are passages of held-out files, and for the real model questions. The one-pass drafters
draft within the target's pass, so their drafting is in v. Typical acceptance does not keep the
target's distribution.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from specnb.distributions import Sampling
from specnb.drafters import ModelDrafter
from specnb.heads import AttentionDrafter, load_head
from specnb.loading import TRAINED_PAIR, Pair, load_model, load_pair
from specnb.ngram import PromptLookupDrafter
from specnb.record import StepRecord
from specnb.statistics import Estimate, ratio_of_sums
from specnb.trees import distinct_children, top_children
from studies import study
from studies.drafters.drafters import Entry, table
from studies.drafters.head_tree import TREE, HeadTreeDrafter, typical_verification
from studies.drafters.heads import FeatureDrafter, ParallelHeadsDrafter
from studies.drafters.lookahead import LookaheadDrafter
from studies.drafters.lookahead_embeddings import PassDrafter, extended, load_vectors
from studies.drafters.one_pass import OnePassBatch
from studies.real.smollm2 import model_and_tokenizer
from studies.real.smollm2 import prompts_of as questions
from studies.real.workloads import KINDS
from studies.training.evaluation import held_out_windows

DEPTHS, PROMPT = 4, 96
FOLDERS = {
    "draft model": "draft",
    "distilled draft model": "draft-distilled",
    "recurrent head": "draft-recurrent",
    "attention head": "draft-attention",
    "parallel heads": "draft-parallel",
    "look-ahead embeddings": "lookahead",
}


def without_training(vocab: int) -> dict[str, Entry]:
    """Plain decoding, and the drafters that need no training."""
    lookahead = LookaheadDrafter(vocab)
    return {
        "none": Entry(lambda _: None, 0),
        "prompt lookup": Entry(lambda _: PromptLookupDrafter(vocab, shortest=2), 6),
        "lookahead": Entry(lambda _: lookahead, len(lookahead.parents), OnePassBatch),
    }


def entries(pair: Pair) -> dict[str, Entry]:
    """Every drafter by name, for a target extended by look-ahead embeddings."""
    vocab, count = pair.target.config.vocab_size, len(load_vectors())
    heads: dict[str, Any] = {
        name: load_head(TRAINED_PAIR / f"draft-{name}", pair.target.dtype)
        for name in ("recurrent", "attention", "parallel")
    }
    distilled = load_model(TRAINED_PAIR / "draft-distilled")

    def tree(sampling: Sampling, typical: bool = False) -> HeadTreeDrafter:
        """Sampled children are accepted more often by an exact rule; at temperature 0 there would
        be one only."""
        scheme = top_children if typical or sampling.temperature == 0 else distinct_children
        return HeadTreeDrafter(pair.target, heads["parallel"], TREE, sampling, scheme)

    return without_training(vocab) | {
        "draft model": Entry(partial(ModelDrafter, pair.draft), 4),
        "distilled draft model": Entry(partial(ModelDrafter, distilled), 4),
        "recurrent head": Entry(partial(FeatureDrafter, pair.target, heads["recurrent"]), 4),
        "attention head": Entry(partial(AttentionDrafter, pair.target, heads["attention"]), 4),
        "parallel heads": Entry(partial(ParallelHeadsDrafter, pair.target, heads["parallel"]), 4),
        "parallel heads, 2 tokens": Entry(partial(ParallelHeadsDrafter, pair.target, heads["parallel"]), 2),
        "parallel heads, tree": Entry(tree, len(TREE)),
        "parallel heads, tree, typical": Entry(partial(tree, typical=True), len(TREE), None, typical_verification),
        "look-ahead embeddings": Entry(lambda s: PassDrafter(vocab, count, s), count, OnePassBatch),
    }


def counts_of(record: StepRecord) -> dict[str, Estimate]:
    """Tokens per step, and alpha by depth."""
    active = record.active
    reached = [((record.accepted >= depth) & active).sum(axis=1) for depth in range(DEPTHS + 1)]
    tokens = (record.accepted * active).sum(axis=1) + reached[0]
    found = {"tokens_per_step": ratio_of_sums(tokens, reached[0])}
    for depth, (before, this) in enumerate(pairwise(reached), start=1):
        found[f"alpha_{depth}"] = ratio_of_sums(this, np.maximum(before, 1e-9))
    return found


def trained() -> pd.DataFrame:
    """The size of each of `FOLDERS`, and the tokens it was trained on, a continued training on
    both."""
    notes = {name: json.loads((TRAINED_PAIR / of / "training.json").read_text()) for name, of in FOLDERS.items()}
    first = {name: notes["draft model"]["tokens_seen"] * ("continued" in note) for name, note in notes.items()}
    return pd.DataFrame(
        {"drafter": name, "parameters": note["parameters"]}
        | {"trained_tokens": note.get("tokens_seen") or note["tokens"] + first[name]}
        for name, note in notes.items()
    )


def measure(
    item: str, sequences: Mapping[str, int], timed_sequences: Mapping[str, int], new_tokens: int
) -> pd.DataFrame:
    """The lines of one target and temperature; with `timed_sequences` 0 the counts alone."""
    kind, temperature = item.split("-")
    if kind == "real":
        target, tokenizer = model_and_tokenizer("float32")
        prompts = [prompt for text in KINDS for prompt in questions(tokenizer, text, sequences[kind])]
        chosen = without_training(target.config.vocab_size)
    else:
        pair = load_pair()
        pair = replace(pair, target=extended(pair.target, load_vectors()))
        windows, _ = held_out_windows(pair, PROMPT, per_file=2)
        target, prompts, chosen = pair.target, windows[: sequences[kind]].tolist(), entries(pair)
    sampling, timed = Sampling(float(temperature)), timed_sequences[kind]
    lines = table(target, prompts, chosen, sampling, timed, new_tokens, counts_of)
    return lines.assign(target=kind, temperature=float(temperature)).merge(trained(), how="left", on="drafter")


STUDY = study.Study(
    measure,
    settings={
        "sequences": {"trained": 32, "real": 2}, "timed_sequences": {"trained": 26, "real": 0}, "new_tokens": 48,
    },
    small={"sequences": {"trained": 8, "real": 2}, "timed_sequences": {"trained": 3, "real": 0}, "new_tokens": 8},
    items=("trained-1", "trained-0", "real-0"),
    small_items=("trained-1",),
)  # fmt: skip
