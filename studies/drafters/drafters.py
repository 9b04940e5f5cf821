"""Drafters compared on the same prompts.

One line of `data/results/drafters.csv` for each kind of text and drafter, on the trained pair at
temperature 1:

- `alpha`: mean acceptance probability of the first draft token of a step, 0 where none is proposed;
  `acceptance_rate`: accepted over drafted tokens; `drafted`: draft tokens per step;
  `tokens_per_step`: the bonus token included. All with 95% intervals over sequences. They are
  counts, and do not depend on the machine's speed
- times of one row at a time in eager float32: `draft_cost`, the time of drafting in a step, and
  `v`, that of the target's forward pass and the rest of the step, both in units of a step of plain
  decoding; `predicted` is tokens_per_step / (draft_cost + v), and `measured` the seconds of all
  whole calls, their check included, of plain decoding over those with this drafter, in turn in one run

Texts: `new` is the beginning of held-out files; `edited` a passage of a held-out file, followed by
the beginning of the same passage with a name changed; `repetitive` a table of numbered entries.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import slots_for
from specnb.copies import PromptLookupDrafter, match_lengths
from specnb.distributions import Sampling, one_hot
from specnb.drafters import ChainDrafter, Context, Drafter, ModelDrafter
from specnb.loading import TRAINED_PAIR, Pair, load_pair
from specnb.record import StepRecord
from specnb.released import load_drafter
from specnb.sampler import Instruments, Sampler
from specnb.statistics import Estimate, machine, ratio_of_sums
from studies import corpus, study
from studies.drafters.heads import FeatureDrafter, ParallelHeadsDrafter, load_head
from studies.drafters.hierarchical import HierarchicalDrafter
from studies.drafters.tables import MixtureDrafter, NgramDrafter, NgramModel, UniformDrafter
from studies.study import columns, timed_in_turn
from studies.training.training import encode

TEXTS = ("new", "edited", "repetitive")
PASSAGE, BEGUN = 96, 32  # tokens of a passage, and of its edited copy in the prompt
ENTRIES = 8


class CountedCopy(ChainDrafter):
    """What followed the longest matches of the row's newest tokens: the most frequent token, or one
    sampled in proportion to the counts."""

    def __init__(self, vocab: int, longest: int = 8, shortest: int = 1, proportional: bool = True) -> None:
        self.vocab, self.longest, self.shortest, self.proportional = vocab, longest, shortest, proportional

    def distribution(self, context: Context, position: int) -> Tensor:
        matched = match_lengths(context.tokens, context.lengths, self.longest)
        chosen = (matched == matched.amax(dim=1, keepdim=True)) & (matched >= self.shortest)
        counts = torch.zeros(len(matched), self.vocab, device=matched.device)
        counts.scatter_add_(1, context.tokens, chosen.float())
        total = counts.sum(dim=1, keepdim=True)
        if self.proportional:
            return counts / total.clamp_min(1)
        return one_hot(counts.argmax(dim=1), self.vocab).where(total > 0, 0.0)


class Entry(NamedTuple):
    """A drafter in the league table: how it is made for a temperature, and its gamma."""

    make: Callable[[Sampling], Drafter | None]
    gamma: int


def league(pair: Pair, counted_files: int) -> dict[str, Entry]:
    """Every drafter by name; "none" is plain decoding."""
    vocab = pair.target.config.vocab_size
    tokens = encode(pair.tokenizer, corpus.read("train", limit=counted_files)).astype(np.int64)
    counted = {order: NgramModel(tokens, order, vocab) for order in (1, 2, 5)}
    copy = partial(PromptLookupDrafter, vocab)
    heads: dict[str, Any] = {
        name: load_head(TRAINED_PAIR / f"draft-{name}", pair.target.dtype) for name in ("recurrent", "parallel")
    }

    def model(sampling: Sampling) -> ModelDrafter:
        return ModelDrafter(pair.draft, sampling)

    return {
        "none": Entry(lambda _: None, 0),
        "random": Entry(lambda _: UniformDrafter(vocab), 1),
        "unigram": Entry(partial(NgramDrafter, counted[1]), 4),
        "bigram": Entry(partial(NgramDrafter, counted[2]), 4),
        "5-gram": Entry(partial(NgramDrafter, counted[5]), 4),
        "prompt lookup": Entry(lambda _: copy(shortest=2), 6),
        "prompt lookup, proportional": Entry(lambda _: CountedCopy(vocab, shortest=2), 6),
        "draft model": Entry(model, 4),
        "mixture of copy and model": Entry(lambda s: MixtureDrafter(copy(shortest=2), model(s), 0.3), 4),
        "recurrent head": Entry(partial(FeatureDrafter, pair.target, heads["recurrent"]), 4),
        "EAGLE-3 head": Entry(partial(load_drafter, pair.target, TRAINED_PAIR / "draft-eagle3"), 4),
        "next-token layer": Entry(partial(load_drafter, pair.target, TRAINED_PAIR / "draft-next-token"), 4),
        "parallel heads": Entry(partial(ParallelHeadsDrafter, pair.target, heads["parallel"]), 4),
        "hierarchical": Entry(lambda s: HierarchicalDrafter(model(s), NgramDrafter(counted[2], s), 2), 4),
    }


def prompts_of(pair: Pair, text: str, count: int) -> list[list[int]]:
    """`count` prompts of one of the kinds in `TEXTS`."""
    files = corpus.read("held-out", limit=count)
    if text == "new":
        return [pair.encode(source[:4000])[:PASSAGE] for source in files]
    if text == "edited":
        return [edited(pair, source) for source in files]
    return [_repetitive(pair, source, number) for number, source in enumerate(files)]


def names_in(source: str) -> list[str]:
    """Names of at least four letters, the most frequent first, the first one among equals."""
    found = re.findall(r"[a-z_]{4,}", source)
    return sorted(set(found), key=lambda name: (-found.count(name), found.index(name)))


def edited(pair: Pair, source: str, renamed: str = "new_") -> list[int]:
    """A passage of `source`, and the beginning of a copy in which its commonest name begins with
    `renamed`."""
    begin, *ids = pair.encode(source[len(source) // 2 :][:2000])
    passage = str(pair.tokenizer.decode(ids[:PASSAGE]))
    name = next(iter(names_in(passage)), "self")
    copied = pair.encode(passage.replace(name, f"{renamed}{name}"))[1:]
    return [begin, *ids[:PASSAGE], *pair.encode("\n\n")[1:], *copied[:BEGUN]]


def _repetitive(pair: Pair, source: str, number: int) -> list[int]:
    name = names_in(source)[number % 3]
    lines = [f'    "{name}_{entry}": ({entry}, {name}[{entry}]),\n' for entry in range(ENTRIES)]
    return pair.encode(f"{name} = {{\n" + "".join(lines))


def measure(item: str, sequences: int, timed_sequences: int, new_tokens: int, counted_files: int) -> pd.DataFrame:
    """The lines of one kind of text; with `timed_sequences` 0 the counts alone."""
    pair, sampling = load_pair(), Sampling()
    prompts, entries = prompts_of(pair, item, sequences), league(pair, counted_files)
    timed = _times(pair.target, prompts[:timed_sequences], entries, sampling, new_tokens) if timed_sequences else {}
    lines: list[dict[str, object]] = []
    for name, entry in entries.items():
        counts = counts_of(record_of(pair.target, prompts, entry, sampling, new_tokens))
        lines.append({"text": item, "drafter": name, "gamma": entry.gamma})
        lines[-1] |= {"sequences": len(prompts), "new_tokens": new_tokens}
        for quantity, estimate in counts.items():
            lines[-1] |= columns(quantity, estimate)
        if timed:
            lines[-1] |= _costs(timed, name, counts["tokens_per_step"].value)
            lines[-1] |= {"machine": machine(), "threads": torch.get_num_threads(), "timed_sequences": timed_sequences}
    return pd.DataFrame(lines)


def record_of(
    target: PreTrainedModel, prompts: list[list[int]], entry: Entry, sampling: Sampling, new_tokens: int
) -> StepRecord:
    """What the steps did that continue `prompts` with the drafter of `entry`."""
    sampler = Sampler(target, entry.make(sampling), gamma=entry.gamma, sampling=sampling, compile=False, progress=False)
    return sampler.generate(prompts, max_new_tokens=new_tokens).record


def counts_of(record: StepRecord) -> dict[str, Estimate]:
    """The columns of a record that are counts."""
    active, nothing = record.active, np.zeros((*record.active.shape, 1))
    first = np.concatenate([record.beta, nothing], axis=-1)[..., 0] * active
    drafted = ((record.draft_tokens >= 0) & active[..., None]).sum(axis=(1, 2))
    accepted, steps = (record.accepted * active).sum(axis=1), active.sum(axis=1)
    found = {
        "alpha": ratio_of_sums(first.sum(axis=1), steps),
        "tokens_per_step": ratio_of_sums(accepted + steps, steps),
        "drafted": ratio_of_sums(drafted, steps),
    }
    return found | {"acceptance_rate": ratio_of_sums(accepted, np.maximum(drafted, 1e-9))}


def _times(
    target: PreTrainedModel, prompts: list[list[int]], entries: dict[str, Entry], sampling: Sampling, new_tokens: int
) -> dict[str, pd.DataFrame]:
    """For each drafter, a line per prompt: seconds per token of a whole call; of drafting and the
    rest of a step."""
    longest = max(map(len, prompts))
    samplers = {
        name: Sampler(
            target, entry.make(sampling), gamma=entry.gamma, sampling=sampling, compile=False,
            slots=slots_for(longest, new_tokens, entry.gamma), instruments=Instruments(timed=True), progress=False,
        )
        for name, entry in entries.items()
    }  # fmt: skip
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in entries}

    def call(name: str, prompt: list[int], number: int) -> None:
        seconds = samplers[name].generate([prompt], max_new_tokens=new_tokens, numbers=[number]).record.seconds
        rest = np.median(seconds["target"] + seconds["rest"])
        parts[name].append({"draft": float(np.median(seconds["draft"])), "rest": float(rest)})

    whole = timed_in_turn(call, [*entries], prompts) / new_tokens
    return {  # the first call warmed up
        name: pd.DataFrame(parts[name][1:]).assign(whole=own) for name, own in zip(entries, whole.T, strict=True)
    }


def _costs(timed: dict[str, pd.DataFrame], name: str, tokens_per_step: float) -> dict[str, float]:
    own, plain = timed[name], timed["none"]
    draft, v = (float((own[part] / (plain.draft + plain.rest)).median()) for part in ("draft", "rest"))
    predicted = {"draft_cost": draft, "v": v, "predicted": tokens_per_step / (draft + v)}
    return predicted | columns("measured", study.faster(plain.whole.to_numpy(), own.whole.to_numpy()))


STUDY = study.Study(
    measure,
    settings={"sequences": 24, "timed_sequences": 12, "new_tokens": 48, "counted_files": 100},
    small={"sequences": 8, "timed_sequences": 3, "new_tokens": 8, "counted_files": 10},
    items=TEXTS,
    small_items=TEXTS[:1],
)
