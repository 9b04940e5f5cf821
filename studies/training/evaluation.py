"""What trained models are measured on: held-out text, and sequences that the target samples after
its beginnings.

`python -m studies.training.evaluation` writes `data/pair/quality.csv`, whose numbers
`data/pair/README.md` has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decoding.generate import Hooks, generate
from specnb.distributions import Sampling
from specnb.measure.statistics import Estimate, ratio_of_sums
from specnb.models.loading import TRAINED_PAIR, Pair, load_pair
from studies import corpus
from studies.files import write
from studies.study import columns
from studies.training.training import CONTEXT, encode

# Tokens of text before positions at which acceptance is measured, and before sampled tokens.
PROMPT = 32
TEXT, OWN = "held-out text", "samples of the target"
SAMPLED_AT_ONCE = 64
Files = NDArray[np.int64]


def held_out_windows(pair: Pair, length: int, per_file: int, files: int | None = None) -> tuple[Tensor, Files]:
    """Passages of `length` tokens, `(n, length)`, evenly spaced over each held-out file, and the
    file of each, `(n,)`.

    Files that are shorter have none.
    """
    rows, numbers = [], []
    for number, text in enumerate(corpus.read("held-out", limit=files)):
        tokens = encode(pair.tokenizer, [text]).astype(np.int64)
        if len(tokens) >= length:
            starts = np.unique(np.linspace(0, len(tokens) - length, per_file).astype(int))
            rows += [tokens[start : start + length] for start in starts]
            numbers += [number] * len(starts)
    return torch.from_numpy(np.stack(rows)), np.array(numbers)


def sampled(target: PreTrainedModel, prompts: Tensor, length: int, temperature: float, seed: int) -> Tensor:
    """`prompts` `(n, PROMPT)` continued by the target to `length` tokens, `(n, length)`."""
    parts = []
    for at in tqdm(range(0, len(prompts), SAMPLED_AT_ONCE), desc=OWN, delay=3):
        some = prompts[at : at + SAMPLED_AT_ONCE]
        made = generate(
            target, some.tolist(), None, max_new_tokens=length - PROMPT, sampling=Sampling(temperature), seed=seed,
            progress=False, hooks=Hooks(range(at, at + len(some))),
        )  # fmt: skip
        parts.append(torch.cat([some, torch.tensor([list(tokens) for tokens in made.tokens])], dim=1))
    return torch.cat(parts)


def text_and_samples(
    target: PreTrainedModel, text: tuple[Tensor, Files], prompts: tuple[Tensor, Files], temperature: float, seed: int
) -> list[tuple[str, Tensor, Files]]:
    """The column `along`, sequences and their files: `text`, and the beginnings of `prompts`
    continued by `target`."""
    begun, files = prompts
    return [(TEXT, *text), (OWN, sampled(target, begun[:, :PROMPT], begun.shape[1], temperature, seed), files)]


def sum_per_file(values: Tensor, numbers: Files) -> NDArray[np.float64]:
    """The sum of `values` `(n, positions)` in each file, `(files,)`."""
    return np.array([float(values[torch.from_numpy(numbers == file)].double().sum()) for file in np.unique(numbers)])


def means(quantities: Mapping[str, Tensor], numbers: Files) -> dict[str, float]:
    """The columns of a line: the mean of each of `quantities` `(n, positions)`, with an interval
    over files."""
    found: dict[str, float] = {}
    for name, values in quantities.items():
        positions = sum_per_file(torch.ones_like(values), numbers)
        found |= columns(name, ratio_of_sums(sum_per_file(values, numbers), positions))
    return found | {"files": len(np.unique(numbers)), "positions": values.numel()}


@torch.inference_mode()
def bits_per_byte(pair: Pair, model: PreTrainedModel, sequences: Tensor, numbers: Files) -> Estimate:
    """Bits that `model` needs for the tokens after the first `PROMPT`, over their bytes; the
    interval is over files."""
    nats = []
    for rows in sequences.split(8):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, PROMPT - 1 :].float()
        nats.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, PROMPT:], reduction="none"))
    lengths = torch.tensor([[len(str(pair.tokenizer.decode(row[PROMPT:])).encode())] for row in sequences.tolist()])
    return ratio_of_sums(sum_per_file(torch.cat(nats) / math.log(2), numbers), sum_per_file(lengths, numbers))


if __name__ == "__main__":
    pair = load_pair()
    passages = held_out_windows(pair, CONTEXT + 1, per_file=4)
    table = {name: bits_per_byte(pair, getattr(pair, name), *passages).value for name in ("target", "draft")}
    lines = pd.Series(table, name="bits_per_byte").rename_axis("name").to_csv(float_format="%.4f")
    write(TRAINED_PAIR / "quality.csv", lines)
