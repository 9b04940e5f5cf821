"""Does the implementation document's `prune_dynamic_cache` prune, on the releases that it was written for?

The function slices the lists `key_cache` and `value_cache` and lowers the counter `_seen_tokens`, which a cache of
transformers had in some releases only. This file needs nothing of this project and runs in an environment with such a
release: `make engines ENGINE=dynamic_cache` makes one for each of `data/engines/dynamic_cache_*.txt`, and
`data/engines/dynamic_cache.csv` of what they print. One line for each number of entries removed from `TOKENS`:

- `kept`: entries afterwards, and `seen`: those that the counter says
- `gap`: the largest difference of a key or value from the cache of a fresh pass over the tokens that remain
- `logit_gap`: the same for the logits after the next token, evaluated with the pruned cache and without any
- `sha256` of the source of the function, as it was run
"""

import hashlib
import inspect
import sys

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

TOKENS, MOST = 12, 6


def prune_dynamic_cache(cache, num_tokens_to_discard):  # type: ignore[no-untyped-def]
    """As printed in section 5.4."""
    if cache is None:
        return None

    for layer in range(len(cache)):
        cache.key_cache[layer] = cache.key_cache[layer][:, :, :-num_tokens_to_discard, :]
        cache.value_cache[layer] = cache.value_cache[layer][:, :, :-num_tokens_to_discard, :]
    cache._seen_tokens -= num_tokens_to_discard

    return cache


@torch.no_grad()
def rows():  # type: ignore[no-untyped-def]
    """A row for each number of entries removed, 0 to `MOST`; the error in place of numbers where one is raised."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=32, **sizes)).double().eval()
    tokens = torch.randint(32, (1, TOKENS))
    source = hashlib.sha256(inspect.getsource(prune_dynamic_cache).encode()).hexdigest()
    for removed in range(MOST + 1):
        cache, fresh, left = DynamicCache(), DynamicCache(), TOKENS - removed
        model(tokens, past_key_values=cache, use_cache=True)
        model(tokens[:, :left], past_key_values=fresh, use_cache=True)
        row = {"transformers": transformers.__version__, "torch": torch.__version__, "removed": removed, "error": ""}
        try:
            prune_dynamic_cache(cache, removed)  # type: ignore[no-untyped-call]
            pairs = zip(cache.key_cache + cache.value_cache, fresh.key_cache + fresh.value_cache)  # noqa: B905
            gaps = [float((a - b).abs().max()) if a.shape == b.shape else float("inf") for a, b in pairs]
            row.update(kept=cache.get_seq_length(), seen=cache._seen_tokens, gap=max(gaps))
            after = model(tokens[:, :1], past_key_values=cache, use_cache=True).logits[:, -1]
            whole = model(torch.cat([tokens[:, :left], tokens[:, :1]], dim=1), use_cache=False).logits[:, -1]
            row["logit_gap"] = float((after - whole).abs().max())
        except Exception as error:  # whatever it is, it is what is to be known
            row["error"] = type(error).__name__
        yield {**row, "sha256": source}


if __name__ == "__main__":
    names = ["transformers", "torch", "removed", "kept", "seen", "gap", "logit_gap", "error", "sha256"]
    sys.stdout.write(",".join(names) + "\n")
    for row in rows():  # type: ignore[no-untyped-call]
        sys.stdout.write(",".join(str(row.get(name, "")) for name in names) + "\n")
