"""Tiny random transformers whose next token depends strongly on every token before it, and their
exact distributions.

Weights are large on purpose: with the usual small ones all contexts give nearly the same
distribution, and a broken cache or a wrong position would change nothing that a test could see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeVar, cast

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from specnb.distributions import Conditional, Sampling, standardise
from specnb.loading import Pair

Model = TypeVar("Model", bound=PreTrainedModel)
LIMIT = 16  # positions of every tiny model
ROUNDING = {"sdpa": 1e-10, "eager": 1e-5}
"""How far two ways to the same float64 logits may lie apart: Llama's eager attention has a float32
softmax."""
SHAPE: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 1.0,
                         "attn_implementation": "sdpa"}  # fmt: skip


def llama(vocab: int = 4, seed: int = 1, dtype: torch.dtype = torch.float32, layers: int = 2) -> LlamaForCausalLM:
    """Rotary positions, grouped-query attention."""
    return _made(LlamaForCausalLM, LlamaConfig, vocab, seed, dtype, intermediate_size=8, num_key_value_heads=1,
                 **_sizes(layers))  # fmt: skip


def gpt2(vocab: int = 4, seed: int = 2, dtype: torch.dtype = torch.float32, layers: int = 2) -> GPT2LMHeadModel:
    """Learned positions: one more than `LIMIT` is an error."""
    sizes: dict[str, Any] = {"n_embd": 8, "n_layer": layers, "n_head": 2, "n_inner": 8, "n_positions": LIMIT}
    return _made(GPT2LMHeadModel, GPT2Config, vocab, seed, dtype, tie_word_embeddings=False, **sizes)


def neox(vocab: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2) -> GPTNeoXForCausalLM:
    """Rotary on a quarter of each head, parallel residual."""
    return _made(GPTNeoXForCausalLM, GPTNeoXConfig, vocab, seed, dtype, intermediate_size=8, **_sizes(layers))


def qwen2(vocab: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2) -> Qwen2ForCausalLM:
    """Llama's shape with biases in attention."""
    return _made(Qwen2ForCausalLM, Qwen2Config, vocab, seed, dtype, intermediate_size=8, num_key_value_heads=1,
                 **_sizes(layers))  # fmt: skip


def mistral(vocab: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2) -> MistralForCausalLM:
    """Every layer sees two tokens only."""
    return _made(MistralForCausalLM, MistralConfig, vocab, seed, dtype, intermediate_size=8, num_key_value_heads=1,
                 sliding_window=2, **_sizes(layers))  # fmt: skip


def gemma2(vocab: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2) -> Gemma2ForCausalLM:
    """Every other layer sees two tokens only; scores and logits are capped."""
    kinds = (["sliding_attention", "full_attention"] * layers)[:layers]
    return _made(Gemma2ForCausalLM, Gemma2Config, vocab, seed, dtype, intermediate_size=8, num_key_value_heads=1,
                 head_dim=4, sliding_window=2, layer_types=kinds, final_logit_softcapping=4.0,
                 attn_logit_softcapping=9.0, attn_implementation="eager", tie_word_embeddings=False,
                 **_sizes(layers))  # fmt: skip


WORDS = ("begin", "one", "two", "three")


def tokenizer(words: Sequence[str] = WORDS, begins: bool = True, **more: Any) -> PreTrainedTokenizerFast:
    """A token for each of `words`; `begins` if it adds its begin token."""
    own = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[1]))
    own.pre_tokenizer = WhitespaceSplit()
    if begins:
        own.post_processor = TemplateProcessing(single="begin $A", special_tokens=[("begin", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=own, bos_token="begin", **more)


def roomy(vocab: int, seed: int = 1, dtype: torch.dtype = torch.float64, layers: int = 2) -> LlamaForCausalLM:
    """A Llama of 128 positions."""
    model = llama(vocab, seed, dtype, layers)
    model.config.max_position_embeddings = 128
    return model


def roomy_pair() -> Pair:
    return without_tokenizer(roomy(13, dtype=torch.float32), roomy(13, 2, torch.float32, layers=1))


def without_tokenizer(target: PreTrainedModel, draft: PreTrainedModel) -> Pair:
    """A pair for tests that read and write token ids only."""
    return Pair(target, draft, cast(PreTrainedTokenizerBase, None))


ARCHITECTURES = {"llama": llama, "gpt2": gpt2}


def _sizes(layers: int) -> dict[str, int]:
    return {
        "hidden_size": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "max_position_embeddings": LIMIT,
    }


def _made(
    model_class: type[Model],
    config_class: Callable[..., PretrainedConfig],
    vocab: int,
    seed: int,
    dtype: torch.dtype,
    **sizes: Any,
) -> Model:
    torch.manual_seed(seed)
    config = config_class(vocab_size=vocab, **(SHAPE | sizes))
    model: Model = model_class(config).to(dtype).eval()  # type: ignore[arg-type]
    # Logits of standard deviation near 1: distributions that differ much and still give every token
    # a chance.
    model.get_output_embeddings().weight.data *= 0.4  # type: ignore[no-untyped-call]
    return model


def near_copy(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A draft that is accepted often: the same weights with some noise."""
    torch.manual_seed(3)
    copied = copy.deepcopy(model)
    for weights in copied.parameters():
        weights.data += noise * torch.randn_like(weights)
    return copied


@torch.inference_mode()
def next_distributions(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], sampling: Sampling = Sampling()
) -> Tensor:
    """The float64 distributions `(len(sequences), vocab)` after equally long sequences, without
    cache or mask."""
    exact = model if model.dtype == torch.float64 else copy.deepcopy(model).double()
    logits = exact(input_ids=torch.tensor(sequences), use_cache=False).logits[:, -1]
    return standardise(logits, sampling)


def distributions_after(
    model: PreTrainedModel, prompt: Sequence[int], length: int, sampling: Sampling = Sampling()
) -> Conditional:
    """`specnb.enumeration.Conditional` of `model` for the `length` tokens after `prompt`."""
    model = copy.deepcopy(model).double()
    table: dict[tuple[int, ...], Tensor] = {}
    for known in range(length):
        rests = list(product(range(model.config.vocab_size), repeat=known))
        distributions = next_distributions(model, [[*prompt, *rest] for rest in rests], sampling)
        table.update(zip(rests, distributions, strict=True))
    return table.__getitem__
