"""Every causal architecture of the installed transformers, and every encoder-decoder, as tiny random
models."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from specnb.record import Generation

VOCAB = 24
START = 1
THRESHOLD = 20
"""Tokens at which a model changes what it computes: windows, chunks, sparse indices, temperature."""
ROUNDING = 2e-4  # in float32, with weights as large as those of `tiny_model`
KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
ENCODER_DECODERS = sorted(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
LARGEST = 20_000_000  # parameters; some sizes of a few architectures are not among these names
SIZES = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings n_positions max_seq_len n_ctx seq_length",
    32: "hidden_size intermediate_size n_embd d_model ffn_dim ffn_hidden_size decoder_ffn_dim word_embed_proj_dim d_ff "
    "attention_hidden_size lru_width intermediate_size_mlp expert_ffn_hidden_size shared_expert_intermediate_size "
    "embedding_size dim_model dim_ff dff moe_intermediate_size moe_shared_expert_intermediate_size encoder_ffn_dim "
    "rotary_emb_dim encoder_hidden_size n_inner",
    16: "head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank global_head_dim linear_key_head_dim d_head "
    "linear_value_head_dim mamba_d_head mamba_head_dim d_kv kv_channels o_lora_rank dim_head index_head_dim",
    8: "hidden_size_per_layer_input rotary_dim qk_rope_head_dim mamba_d_state query_pre_attn_scalar "
    "num_local_experts n_routed_experts moe_num_experts n_experts num_experts",
    THRESHOLD: "sliding_window attention_chunk_size window_size index_topk attention_window_size floor_scale "
    "keep_window_size original_max_position_embeddings",
    4: "state_size ssm_state_size laurel_rank mamba_n_heads mamba_num_heads chunk_size",
    2: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_attention_heads n_head "
    "decoder_attention_heads attention_heads encoder_attention_heads num_key_value_heads linear_num_value_heads "
    "linear_num_key_heads num_experts_per_tok moe_top_k moe_topk altup_num_inputs top_k_experts expand mamba_expand "
    "num_heads num_kv_heads index_n_heads o_groups n_heads moe_k",
    1: "n_group topk_group n_shared_experts first_k_dense_replace num_shared_experts mamba_n_groups n_groups",
    0: "num_kv_shared_layers num_nextn_predict_layers",
}
TINY = {name: size for size, names in SIZES.items() for name in names.split()}
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
MORE: dict[str, dict[str, Any]] = {  # what their sizes must agree with
    "codegen": {"n_head": 4, "rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "ministral": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    **{kind: {"head_dim": 8} for kind in ("axk1", "deepseek_v3", "longcat_flash", "youtu")},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "zaya": {"num_experts_per_tok": 1},
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 8},
}


def tiny(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` of a configuration with small sizes in place of its own; nested ones too."""
    small: dict[str, Any] = {}
    for name, value in settings.items():
        if name in TINY and isinstance(value, int) and not isinstance(value, bool):
            small[name] = TINY[name]
        elif name in SPECIAL:
            small[name] = START
        elif name.endswith("_config") and isinstance(value, dict):
            small[name] = tiny(value)
    return small


def tiny_config(kind: str, **more: Any) -> Any:
    """The configuration of `kind` with small sizes; raises what transformers raises where they do
    not fit together."""
    made: Any = CONFIG_MAPPING[kind]
    settings = made().to_dict()
    sizes = tiny(settings) | more | ({"is_decoder": True} if "is_decoder" in settings else {}) | MORE.get(kind, {})
    while True:
        try:
            return made(**sizes)
        except AttributeError as error:  # a name that stands for another one
            read_only = re.search(r"property '(\w+)'", str(error))
            if read_only is None or read_only[1] not in sizes:
                raise
            del sizes[read_only[1]]


def decoded(model: PreTrainedModel, tokens: list[int]) -> dict[str, torch.Tensor]:
    """What the decoder of an encoder-decoder reads; nothing for another model."""
    return {"decoder_input_ids": torch.tensor([tokens])} if model.config.is_encoder_decoder else {}


def tiny_model(kind: str, encodes: bool = False, vocab: int = VOCAB, start: int = START) -> PreTrainedModel | None:
    """A random model of `kind`, whose tokens depend strongly on all before them; None if it cannot
    be made so small."""
    made: Any = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
    try:
        config = tiny_config(kind, **({} if vocab == VOCAB else {"vocab_size": vocab}))
        config.decoder_start_token_id = start
        with torch.device("meta"):
            size = made.from_config(config).num_parameters()
        if size > LARGEST:
            return None
        torch.manual_seed(0)
        model: PreTrainedModel = made.from_config(config).float().eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 0.5)
        model.get_output_embeddings().weight.data *= 0.4
        with torch.inference_mode():
            model(input_ids=torch.tensor([[2, 3, 4]]), **decoded(model, [START]), use_cache=False)
    except Exception:
        return None
    return model


def require_exact_or_refused(
    kind: str,
    prompts: list[list[int]],
    run: Callable[[PreTrainedModel], Generation],
    own: Callable[[PreTrainedModel, list[int], list[int]], torch.Tensor],
    encodes: bool = False,
    may_be_refused: bool = True,
) -> None:
    """`run` keeps the distributions that `own` has after each prompt and its tokens so far, or raises
    `TypeError` that names the model."""
    model = tiny_model(kind, encodes)
    if model is None:
        pytest.skip(f"{kind} cannot be made as a tiny model from its names of sizes")
    try:
        made = run(model)
    except TypeError as refusal:
        if not may_be_refused or type(model).__name__ not in str(refusal):
            raise
        return
    assert made.probs is not None
    for prompt, tokens, probs in zip(prompts, made.tokens, made.probs, strict=True):
        for at in range(len(tokens)):
            assert float((own(model, prompt, tokens[:at]) - probs[at]).abs().max()) < ROUNDING
