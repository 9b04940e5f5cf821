"""The model card of the trained pair: how well it predicts text it never saw, beside xz and a 5-gram.

`python -m studies.training.model_card` measures and writes `data/pair/README.md` and `data/pair/quality.csv`.
"""

from __future__ import annotations

import json
import lzma
import math

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decoding.generate import generate
from specnb.drafting.ngram import NgramModel
from specnb.models.loading import TRAINED_PAIR, Pair, load_pair
from specnb.notebook.findings import write
from studies import corpus
from studies.training.training import CONTEXT, encode

STRIDE = CONTEXT // 2
FACTS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "feed-forward": "intermediate_size",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
}
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


def samples(pair: Pair) -> str:
    """Each of `PROMPTS` with a continuation sampled from the target's own distribution, as Markdown."""
    encoded = [pair.encode(prompt) for prompt in PROMPTS]
    made = generate(pair.target, encoded, pair.draft, max_new_tokens=110, eos=pair.tokenizer.eos_token_id)
    texts = [prompt + str(pair.tokenizer.decode(tokens)) for prompt, tokens in zip(PROMPTS, made.tokens, strict=True)]
    return "\n".join(f"```python\n{text}\n```\n" for text in texts)


def card(pair: Pair, table: pd.DataFrame) -> str:
    """The card as Markdown; every number in it is computed or read from what the training wrote."""
    models = {"target": pair.target, "draft": pair.draft}
    notes = [json.loads((TRAINED_PAIR / name / "training.json").read_text()) for name in models]
    distilled = json.loads((TRAINED_PAIR / "draft-distilled" / "training.json").read_text())
    sources = pd.DataFrame(corpus.manifest())
    facts = {
        "parameters": [f"{note['parameters']:,}" for note in notes],
        "begins with": ["random weights"] * len(notes),
        "training tokens seen": [
            f"{note['tokens_seen']:,} of a text of {note['tokens_in_corpus']:,}" for note in notes
        ],
    } | {label: [str(getattr(model.config, name)) for model in models.values()] for label, name in FACTS.items()}
    return CARD.format(
        packages=", ".join(sorted({f"{row.package} {row.version}" for row in sources.itertuples()})),
        held_out=int((sources.split == "held-out").sum()),
        files=len(sources),
        facts="\n".join(f"| {label} | {' | '.join(cells)} |" for label, cells in facts.items()),
        bits="\n".join(f"| {name} | {value:.3f} |" for name, value in table.itertuples(index=False)),
        samples=samples(pair),
        tokens=distilled["tokens"],
        objective=distilled["objective"],
    )


CARD = """\
# The trained pair

Target and draft of the notebooks: two small Llama-shaped models of Python source code that share a
byte-level BPE of 4096 tokens. Made by `make models` from the text of packages that specnb depends on
anyway ({packages}); `data/corpus.csv` names every file and its SHA-256.
{held_out} of {files} files were held out.

|  | `target` | `draft` |
|---|---|---|
{facts}

Held-out text, bits per byte (lower is better):

| | bits per byte |
|---|---|
{bits}

What the target writes when drawn from its own distribution (temperature 1), first seed, not chosen:

{samples}
`draft-distilled` is a copy of the draft that was trained on {tokens:,} more tokens for the objective
"{objective}" (`make distilled`, notebook 08b). No other result uses it. To load it:

```python
from specnb import load_pair
from specnb.models.loading import TRAINED_PAIR

pair = load_pair(draft=TRAINED_PAIR / "draft-distilled")
```

`draft-attention`, `draft-recurrent` and `draft-parallel` draft from the target's hidden states (`make
features`, notebook 08b). To use the first, which is accepted most often:

```python
from specnb import generate, load_pair
from specnb.drafting.heads import AttentionDrafter, load_head
from specnb.models.loading import TRAINED_PAIR

pair = load_pair()
drafter = AttentionDrafter(pair.target, load_head(TRAINED_PAIR / "draft-attention"))
made = generate(pair.target, [pair.encode("def area(")], drafter, max_new_tokens=40)
```

The weights are bfloat16; they know nothing but this text, and are for studying decoding only.
The text they learned from is under the BSD licences of its packages.
"""


def main() -> None:
    """Writes card and quality table of the pair in `data/pair`."""
    pair = load_pair(packed=False)
    table = quality(pair)
    write(TRAINED_PAIR / "quality.csv", table.to_csv(index=False, lineterminator="\n", float_format="%.4f"))
    write(TRAINED_PAIR / "README.md", card(pair, table))


if __name__ == "__main__":
    main()
