"""How well the trained pair predicts text that it never saw, beside xz and a 5-gram.

`python -m studies.training.quality` writes `data/pair/quality.csv`: bits per byte of the held-out files. The numbers in
`data/pair/README.md` are these and those in `training.json` of each model.
"""

from __future__ import annotations

import lzma
import math

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.drafting.ngram import NgramModel
from specnb.models.loading import TRAINED_PAIR, Pair, load_pair
from specnb.notebook.findings import write
from studies import corpus
from studies.training.training import CONTEXT, encode

STRIDE = CONTEXT // 2


@torch.inference_mode()
def model_bits(model: PreTrainedModel, tokens: NDArray[np.int64]) -> float:
    """Bits that `model` needs for `tokens` after the first; each is predicted from at least `STRIDE` tokens before it,
    or from all there are."""
    total = 0.0
    for start in tqdm(range(0, len(tokens) - 1, STRIDE), desc="held-out text"):
        window = torch.from_numpy(tokens[start : start + CONTEXT + 1])
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        nats = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
        total += float(nats[STRIDE if start else 0 :].sum()) / math.log(2)
    return total


def ngram_bits(model: NgramModel, tokens: NDArray[np.int64], chunk: int = 2048) -> float:
    """Bits that the n-gram `model` needs for `tokens`, all of them, the first without any context."""
    padded = np.concatenate([np.full(model.order - 1, -1), tokens])
    contexts = np.lib.stride_tricks.sliding_window_view(padded, model.order)[:, :-1]
    total = 0.0
    for at in range(0, len(tokens), chunk):
        distributions = model.probs(contexts[at : at + chunk])
        total -= np.log2(distributions[np.arange(len(distributions)), tokens[at : at + chunk]]).sum()
    return float(total)


def xz_bytes(text: bytes) -> int:
    """The size of `text` after xz at its strongest."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def quality(pair: Pair) -> pd.DataFrame:
    """Bits per byte of the held-out files: target, draft, a 5-gram, xz alone and after the training text."""
    train, held_out = corpus.read("train"), corpus.read("held-out")
    text = "".join(held_out).encode()
    tokens = encode(pair.tokenizer, held_out).astype(np.int64)
    ngram = NgramModel(encode(pair.tokenizer, train).astype(np.int64), 5, len(pair.tokenizer))
    before = "".join(train).encode()
    bits = {
        "target": model_bits(pair.target, tokens),
        "draft": model_bits(pair.draft, tokens),
        "5-gram (Kneser-Ney, training text)": ngram_bits(ngram, tokens[1:]),
        "xz -9e, held-out text alone": 8 * xz_bytes(text),
        "xz -9e, after the training text": 8 * (xz_bytes(before + text) - xz_bytes(before)),
    }
    return pd.DataFrame({"name": list(bits), "bits_per_byte": [value / len(text) for value in bits.values()]})


if __name__ == "__main__":
    table = quality(load_pair(packed=False))
    write(TRAINED_PAIR / "quality.csv", table.to_csv(index=False, lineterminator="\n", float_format="%.4f"))
