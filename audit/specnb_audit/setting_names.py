"""The sampling settings that an engine can claim, and those that are refused; without imports, so
that the command's options are known before torch is."""

from __future__ import annotations

from typing import Any

FILTERS = ("temperature", "top-k", "top-p", "min-p")
"""The filters, in the order of `Sampling`, which is that of transformers."""
ENGINE_ORDERS = {
    "transformers": FILTERS,
    "vllm": ("temperature", "min-p", "top-k", "top-p"),
    "llama.cpp": ("top-k", "top-p", "min-p", "temperature"),
    "mlx-lm": ("top-p", "min-p", "top-k", "temperature"),
}
"""The order of each engine's default, by its name; other versions and settings may have another."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
"""What changes the logits before temperature and filters, in any order of them."""
DECLARED = ("min_tokens", "allowed_token_ids")
"""What belongs to single sequences, and is declared in each line of a token file."""
NOT_AUDITED: dict[str, Any] = {
    "no_repeat_ngram_size": 0,
    "bad_words": None,
    "grammar": None,
    "stop_strings": None,
    "typical_p": 1,
    "xtc_probability": 0,
    "dry_multiplier": 0,
    "top_n_sigma": -1,
    "top_a": 0,
    "tfs_z": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "dynatemp_range": 0,
    "mirostat": 0,
}
"""Settings that the audit cannot claim, with the value that switches each off."""
APPLIED = {
    "xtc_probability": "w * removed + (1 - w) * probs; removed lacks all tokens above xtc_threshold but the least "
    "probable of them, if there are two, and w is xtc_probability",
    "dry_multiplier": "logits[x] -= dry_multiplier * dry_base ** (n - dry_allowed_length) where x would follow n "
    "tokens as it did before, n at least dry_allowed_length",
    "top_n_sigma": "logits[logits < logits.max() - top_n_sigma * logits.std()] = -inf",
    "top_a": "probs[probs < top_a * probs.max() ** 2] = 0",
}
"""What a function as target has to apply."""
INSTEAD = (
    "or give specnb_audit.audit a function as target, whose probabilities have it applied{applied}, or declare in each "
    "line of the file which tokens were possible (allowed_token_ids)"
)
"""What to do where an engine cannot do without one of them."""
