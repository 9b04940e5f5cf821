"""A small pair of random models whose next token depends strongly on every token before it.

Broken caches and wrong positions show in such a pair, and 20,000 tokens of it cost a second. It
computes in float64, so that the last bits of a logit decide nothing.
"""

from __future__ import annotations

import copy
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specnb.loading import Pair, in_double

VOCAB, WIDTH, LAYERS, POSITIONS = 64, 32, 1, 128
# Of the weights, times 1/sqrt(width): attention is neither uniform nor all on one token.
SPREAD = 1.5
LOGITS = 2.2  # standard deviation of the target's logits
# Of the draft's weights, relative to the target's: p and q overlap by 0.7, as in the trained pair.
NOISE = 0.09


@cache
@torch.no_grad()
def random_pair(seed: int = 0) -> Pair:
    """A target with random weights, and a draft model with the same weights and some noise; without
    a tokenizer.

    >>> random_pair().target.dtype
    torch.float64
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=2, max_position_embeddings=POSITIONS, initializer_range=SPREAD / WIDTH**0.5,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        target = LlamaForCausalLM(config).double().eval()
        target.lm_head.weight.mul_(LOGITS / SPREAD)  # the last norm gives numbers of size 1
        draft = copy.deepcopy(target)
        for weights in draft.parameters():
            if weights.dim() > 1:
                weights.add_(NOISE * weights.std() * torch.randn_like(weights))
    for model in (target, draft):
        in_double(model)
    no_tokenizer: object = None
    return Pair(target, draft, no_tokenizer)  # type: ignore[arg-type]
