"""The model card of the trained pair: how well it predicts text it never saw, beside xz and a 5-gram.

`python -m studies.training.model_card` measures and writes `data/pair/README.md` and `data/pair/quality.csv`.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decoding.generate import generate
from specnb.distributions import Sampling
from specnb.drafting.ngram import NgramModel
from specnb.models.loading import TRAINED_PAIR, Pair, load_pair
from specnb.notebook import corpus
from specnb.notebook.findings import write
from studies.training.larger_target import LARGER
from studies.training.training import CONTEXT, encode

STRIDE = CONTEXT // 2
PROMPTS = ('def is_connected(G):\n    """', "class Polygon(GeometrySet):\n    def ")


@torch.inference_mode()
def model_bits(model: PreTrainedModel, tokens: NDArray[np.int64], batch: int = 16) -> float:
    """Bits that `model` needs for `tokens` after the first; each is predicted from at least `STRIDE`
    tokens before it, or from all there are."""
    total = 0.0
    starts = range(0, len(tokens) - 1, STRIDE)
    for at in tqdm(range(0, len(starts), batch), desc="held-out text", delay=3, leave=False):
        rows = [tokens[start : start + CONTEXT + 1] for start in starts[at : at + batch]]
        for start, row in zip(starts[at : at + batch], _token_bits(rows, model), strict=True):
            fresh = row if start == 0 else row[STRIDE:]
            total += float(fresh.sum())
    return total


def _token_bits(rows: list[NDArray[np.int64]], model: PreTrainedModel) -> list[torch.Tensor]:
    """The bits of every token of each row after its first; padding stands behind, where nothing sees it."""
    longest = max(map(len, rows))
    window = torch.stack([torch.from_numpy(np.pad(row, (0, longest - len(row)))) for row in rows])
    logits = model(input_ids=window[:, :-1], use_cache=False).logits.float()
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none")
    return [bits[: len(row) - 1] for bits, row in zip(nats / math.log(2), rows, strict=True)]


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


def quality(pair: Pair, larger: Pair) -> pd.DataFrame:
    """Bits per byte of the held-out files: both targets, draft, a 5-gram, xz alone and after the training text."""
    train, held_out = corpus.read("train"), corpus.read("held-out")
    text = "".join(held_out).encode()
    tokens = encode(pair.tokenizer, held_out).astype(np.int64)
    ngram = NgramModel(encode(pair.tokenizer, train).astype(np.int64), 5, len(pair.tokenizer))
    before = "".join(train).encode()
    bits = {
        "target": model_bits(pair.target, tokens),
        "larger target": model_bits(larger.target, tokens),
        "draft": model_bits(pair.draft, tokens),
        "5-gram (Kneser-Ney, training text)": ngram_bits(ngram, tokens[1:]),
        "xz -9e, held-out text alone": 8 * xz_bytes(text),
        "xz -9e, after the training text": 8 * (xz_bytes(before + text) - xz_bytes(before)),
    }
    return pd.DataFrame({"name": list(bits), "bits_per_byte": [value / len(text) for value in bits.values()]})


def samples(pair: Pair, temperature: float, seed: int = 0) -> list[str]:
    """Each of `PROMPTS` with a continuation drawn from the target's own distribution, as Markdown."""
    encoded = [pair.encode(prompt) for prompt in PROMPTS]
    made = generate(
        pair.target, encoded, pair.draft,
        max_new_tokens=110, seed=seed, eos=pair.tokenizer.eos_token_id, sampling=Sampling(temperature),
    )  # fmt: skip
    texts = [prompt + str(pair.tokenizer.decode(tokens)) for prompt, tokens in zip(PROMPTS, made.tokens, strict=True)]
    return [f"```python\n{text}\n```\n" for text in texts]


def main() -> None:
    """Writes card and quality table of the pair in `data/pair`."""
    pair, larger = load_pair(packed=False), load_pair(target=LARGER, packed=False)
    table = quality(pair, larger)
    write(TRAINED_PAIR / "quality.csv", table.to_csv(index=False, lineterminator="\n", float_format="%.4f"))
    write(TRAINED_PAIR / "README.md", card(pair, larger, table))


def card(pair: Pair, larger: Pair, table: pd.DataFrame) -> str:
    """The card as Markdown; every number in it is computed or read from what the training wrote."""
    models = {"target": pair.target, "draft": pair.draft, LARGER.name: larger.target}
    notes = {name: json.loads((TRAINED_PAIR / name / "training.json").read_text()) for name in models}
    sources = pd.DataFrame(corpus.manifest())
    packages = ", ".join(sorted({f"{row.package} {row.version}" for row in sources.itertuples()}))
    held_out = int((sources.split == "held-out").sum())
    lines = [
        "# The trained pair",
        "",
        "Target and draft of the notebooks: two small Llama-shaped models of Python source code that share a",
        "byte-level BPE of 4096 tokens. Made by `make models` from the text of packages that specnb depends on",
        f"anyway ({packages}); `data/corpus.csv` names every file and its SHA-256.",
        f"{held_out} of {len(sources)} files were held out.",
        "",
        _row("", [f"`{name}`" for name in models]),
        "|---|---|---|---|",
        *[_row(label, [shown(note) for note in notes.values()]) for label, shown in _FACTS.items()],
        *[
            _row(label, [str(getattr(model.config, name)) for model in models.values()])
            for label, name in _SHAPE.items()
        ],
        "",
        f"`{LARGER.name}` has twice the layers. It began as `target` with layers between that did nothing, and was",
        "trained further on the same text (`make larger`); its weights are the mean of those before and after. It is",
        "there as a slower target for the same drafts.",
        "",
        "Held-out text, bits per byte (lower is better):",
        "",
        "| | bits per byte |",
        "|---|---|",
        *[f"| {row.name_} | {row.bits_per_byte:.3f} |" for row in table.rename(columns={"name": "name_"}).itertuples()],
        "",
        "What the target writes when drawn from its own distribution (temperature 1), first seed, not chosen:",
        "",
        *samples(pair, 1.0),
        "What the larger target writes at temperature 0.5, likewise:",
        "",
        *samples(larger, 0.5),
        *_distilled(),
        *_heads(),
        "The weights are bfloat16; they know nothing but this text, and are for studying decoding only.",
        "The text they learned from is under the BSD licences of its packages.",
    ]
    return "\n".join(lines) + "\n"


def _row(label: str, cells: list[str]) -> str:
    return f"| {label} | {' | '.join(cells)} |"


def _distilled() -> list[str]:
    folder = TRAINED_PAIR / "draft-distilled"
    if not folder.exists():
        return []
    note = json.loads((folder / "training.json").read_text())
    return [
        f"`{folder.name}` is a copy of the draft that was trained on {note['tokens']:,} more tokens for the objective",
        f'"{note["objective"]}" (`make distilled`, notebook 08). No other result uses it. To load it:',
        "",
        "```python",
        "from specnb import load_pair",
        "from specnb.models.loading import TRAINED_PAIR",
        "",
        f'pair = load_pair(draft=TRAINED_PAIR / "{folder.name}")',
        "```",
        "",
    ]


def _heads() -> list[str]:
    if not (TRAINED_PAIR / "draft-attention").exists():
        return []
    return [
        "`draft-attention`, `draft-recurrent` and `draft-parallel` draft from the target's hidden states (`make",
        "features`, notebook 08); `draft-attention-larger` is the first, trained further on the larger target's",
        "states. To use the first, which is accepted most often:",
        "",
        "```python",
        "from specnb import generate, load_pair",
        "from specnb.drafting.heads import AttentionDrafter",
        "from specnb.drafting.heads import load_head",
        "from specnb.models.loading import TRAINED_PAIR",
        "",
        "pair = load_pair()",
        'drafter = AttentionDrafter(pair.target, load_head(TRAINED_PAIR / "draft-attention"))',
        'made = generate(pair.target, [pair.encode("def area(")], drafter, max_new_tokens=40)',
        "```",
        "",
    ]


_FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "parameters": lambda note: f"{note['parameters']:,}",
    "begins with": lambda note: f"`{note['from']}`" if "from" in note else "random weights",
    "training tokens seen": lambda note: f"{note['tokens_seen']:,} of a text of {note['tokens_in_corpus']:,}",
}
_SHAPE = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "feed-forward": "intermediate_size",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
}


if __name__ == "__main__":
    main()
