"""Does the implementation document's `prune_dynamic_cache` prune, on releases that have the names
it uses?

The function slices the lists `key_cache` and `value_cache` and lowers the counter `_seen_tokens`,
which a cache of transformers had in some releases only. `python studies/batching/dynamic_cache.py`
installs two of them, a year apart, into folders of their own, runs this file with each, and writes
`data/dynamic_cache.csv`. One line for each number of entries removed from a cache of `TOKENS`:

- `kept`: entries afterwards, and `seen`: those that the counter says
- `gap`: the largest difference of a key or value from the cache of a fresh pass over the tokens
  that remain
- `logit_gap`: the same for the logits after the next token, evaluated with the pruned cache and
  without any
- `error`: what is raised, if anything; `sha256` of the source of the function, as it was run
"""

import csv
import hashlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

TOKENS, MOST = 12, 6
RELEASES = {
    "4.42.4": ["tokenizers==0.19.1", "huggingface_hub==0.34.4", "numpy==1.26.4"],
    "4.53.3": ["tokenizers==0.21.4", "huggingface_hub==0.34.4"],
}
"""Versions of transformers, and what they need besides the packages of this project."""


def prune_dynamic_cache(cache: Any, num_tokens_to_discard: int) -> Any:
    """As printed in section 5.4."""
    if cache is None:
        return None

    for layer in range(len(cache)):
        cache.key_cache[layer] = cache.key_cache[layer][:, :, :-num_tokens_to_discard, :]
        cache.value_cache[layer] = cache.value_cache[layer][:, :, :-num_tokens_to_discard, :]
    cache._seen_tokens -= num_tokens_to_discard

    return cache


@torch.no_grad()
def rows() -> Iterator[dict[str, Any]]:
    """A row for each number of entries removed, with the transformers that is imported."""
    import transformers
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes)).double().eval()
    tokens = torch.randint(32, (1, TOKENS))
    source = hashlib.sha256(inspect.getsource(prune_dynamic_cache).encode()).hexdigest()
    for removed in range(MOST + 1):
        cache: Any = DynamicCache()
        fresh: Any = DynamicCache()
        model(tokens, past_key_values=cache, use_cache=True)
        model(tokens[:, : TOKENS - removed], past_key_values=fresh, use_cache=True)
        row = dict.fromkeys(("kept", "seen", "gap", "logit_gap", "error"), "")
        row = {"transformers": transformers.__version__, "removed": str(removed)} | row
        try:
            prune_dynamic_cache(cache, removed)
            pairs = zip(cache.key_cache + cache.value_cache, fresh.key_cache + fresh.value_cache, strict=True)
            gaps = [float((a - b).abs().max()) if a.shape == b.shape else float("inf") for a, b in pairs]
            row |= {"kept": cache.get_seq_length(), "seen": cache._seen_tokens, "gap": f"{max(gaps):.1e}"}
            after = model(tokens[:, :1], past_key_values=cache, use_cache=True).logits[:, -1]
            whole = torch.cat([tokens[:, : TOKENS - removed], tokens[:, :1]], dim=1)
            gap = (after - model(whole, use_cache=False).logits[:, -1]).abs().max()
            row |= {"logit_gap": f"{float(gap):.1e}"}
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            row |= {"error": type(error).__name__}
        yield row | {"sha256": source}


def collect(root: Path) -> None:
    """Installs the releases below `root`/build and writes the table."""
    lines: list[str] = []
    for release, others in RELEASES.items():
        folder = str(root / "build" / "dynamic_cache" / release)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", folder]
        subprocess.run([*pip, f"transformers=={release}", *others], check=True)
        own = os.environ | {"PYTHONPATH": folder}
        made = subprocess.run([sys.executable, __file__, "rows"], env=own, capture_output=True, text=True, check=True)
        lines += made.stdout.splitlines()[len(lines) > 0 :]
    (root / "data" / "dynamic_cache.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["rows"]:
        found = list(rows())
        writer = csv.DictWriter(sys.stdout, found[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    else:
        collect(Path(__file__).resolve().parents[2])
