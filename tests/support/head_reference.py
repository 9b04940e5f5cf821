"""What a released head computes, written from its format: a pass over the whole sequence for each
draft token, in float64, without cache, mask or batch, from the tensors as they lie in the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import silu

from specnb.drafters import Context, Proposal
from specnb.heads import AttentionDrafter

VOCAB = 13
PROMPTS = [[1], [2, 3, 4, 5, 6], [7, 8], [9, 10, 11], [12, 0, 3, 5], [4]]
Weights: TypeAlias = Mapping[str, Tensor]
Config: TypeAlias = Mapping[str, Any]


class Steps:
    """What a drafter proposed in each step, for the prefix of each row; it says the same of its
    tokens when they are given to it."""

    def __init__(self, drafter: AttentionDrafter) -> None:
        self.seen: list[tuple[Tensor, Proposal]] = []
        propose = drafter.propose

        def remembered(context: Context, uniforms: Tensor) -> Proposal:
            made = propose(context, uniforms)
            forced = drafter.along(context, made.draft_tokens)
            torch.testing.assert_close(forced, made.q, atol=1e-12, rtol=0)
            rows = zip(context.tokens, context.lengths, *made, strict=True)
            self.seen += [(tokens[:length].clone(), Proposal(*each)) for tokens, length, *each in rows]
            return made

        drafter.propose = remembered  # type: ignore[method-assign]


def logits_along(
    weights: Weights, config: Config, states: Tensor, tokens: Tensor, drafted: Tensor,
    embeddings: Tensor, output: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Logits `(k + 1, rows of the output head)` after `tokens` `(n,)` and each of the `k` tokens
    `drafted`.

    `states` `(n - 1, width)` are the target's at all tokens but the newest, `embeddings` the
    target's, used unless the file has its own; `output` is the target's output head for a layer
    that has none.
    """
    weights = {
        name.replace("midlayer.", "layers.0.").removeprefix("model."): one.double() for name, one in weights.items()
    }
    inner = config.get("transformer_layer_config", config)
    embeddings = weights.get("embed_tokens.weight", embeddings).double()
    next_token = "mtp_layers.0.input_proj.weight" in weights
    # Each state goes with the token after it; the first token goes with none.
    state, after = (states.double() if next_token else entered(weights, config, inner, states.double())), tokens[1:]
    logits = []
    for token in [*drafted, None]:
        if next_token:
            made = next_token_layer(weights, inner, state, embeddings[after])
            assert output is not None
            logits.append(output.double() @ made[-1])
        else:
            made = eagle_layers(weights, config, inner, state, embeddings[after])
            normed = norm(made[-1], weights["norm.weight"], inner)
            logits.append(weights["lm_head.weight"] @ normed)
            if config.get("norm_output"):
                made = torch.cat([made[:-1], normed[None]])
        if token is not None:
            # The head's own state goes with the token that was drafted from it.
            state, after = torch.cat([state, made[-1:]]), torch.cat([after, token[None]])
    return torch.stack(logits)


def entered(weights: Weights, config: Config, inner: Config, states: Tensor) -> Tensor:
    if config.get("norm_before_fc"):
        states = norm(states, weights["input_norm.weight"], inner)
    if config.get("fc_norm"):
        norms = [weights[name] for name in sorted(weights) if name.startswith("fc_norm.")]
        parts = zip(states.chunk(len(norms), dim=-1), norms, strict=True)
        states = torch.cat([norm(part, weight, inner) for part, weight in parts], dim=-1)
    return states @ weights["fc.weight"].T


def eagle_layers(weights: Weights, config: Config, inner: Config, state: Tensor, embedded: Tensor) -> Tensor:
    read = norm(state, weights["layers.0.hidden_norm.weight"], inner)
    both = torch.cat([norm(embedded, weights["layers.0.input_layernorm.weight"], inner), read], dim=-1)
    residual = read if config.get("norm_before_residual") else state
    state = with_feed_forward(weights, inner, "layers.0.", residual + attention(weights, inner, "layers.0.", both))
    number = 1
    while f"layers.{number}.input_layernorm.weight" in weights:
        state = usual_layer(weights, inner, f"layers.{number}.", state)
        number += 1
    return state


def next_token_layer(weights: Weights, inner: Config, state: Tensor, embedded: Tensor) -> Tensor:
    own = "mtp_layers.0."
    both = torch.cat(
        [
            norm(embedded, weights[own + "token_layernorm.weight"], inner),
            norm(state, weights[own + "hidden_layernorm.weight"], inner),
        ],
        dim=-1,
    )
    made = usual_layer(weights, inner, own, both @ weights[own + "input_proj.weight"].T)
    return norm(made, weights[own + "final_layernorm.weight"], inner)


def usual_layer(weights: Weights, inner: Config, own: str, state: Tensor) -> Tensor:
    read = norm(state, weights[own + "input_layernorm.weight"], inner)
    return with_feed_forward(weights, inner, own, state + attention(weights, inner, own, read))


def with_feed_forward(weights: Weights, inner: Config, own: str, seen: Tensor) -> Tensor:
    read = norm(seen, weights[own + "post_attention_layernorm.weight"], inner)
    gate, up, down = (weights[f"{own}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return seen + (silu(read @ gate.T) * (read @ up.T)) @ down.T


def norm(values: Tensor, weight: Tensor, inner: Config) -> Tensor:
    size: Tensor = (values.pow(2).mean(-1, keepdim=True) + inner["rms_norm_eps"]).sqrt()
    return values / size * weight


def attention(weights: Weights, inner: Config, own: str, read: Tensor) -> Tensor:
    heads, shared = inner["num_attention_heads"], inner["num_key_value_heads"]
    each = []
    for name, count in (("q", heads), ("k", shared), ("v", shared)):
        made = read @ weights[f"{own}self_attn.{name}_proj.weight"].T
        if f"{own}self_attn.{name}_proj.bias" in weights:
            made = made + weights[f"{own}self_attn.{name}_proj.bias"]
        made = made.unflatten(-1, (count, -1))
        if f"{own}self_attn.{name}_norm.weight" in weights:
            made = norm(made, weights[f"{own}self_attn.{name}_norm.weight"], inner)
        each.append(made.transpose(0, 1))
    query, key, value = each
    size, n = query.shape[-1], query.shape[1]
    angles = torch.arange(1, n + 1)[:, None].double() * frequencies(inner, size)
    angles = torch.cat([angles, angles], dim=-1)
    query, key = (turned(one, angles) for one in (query, key))
    mixed = []
    for number in range(heads):
        of = number // (heads // shared)
        scores = query[number] @ key[of].T / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        mixed.append(scores.softmax(dim=-1) @ value[of])
    projected: Tensor = torch.cat(mixed, dim=-1) @ weights[f"{own}self_attn.o_proj.weight"].T
    return projected + weights.get(f"{own}self_attn.o_proj.bias", torch.zeros(1))


def turned(values: Tensor, angles: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    return values * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def frequencies(inner: Config, size: int) -> Tensor:
    """In float32, as everybody computes them."""
    found: Tensor = 1.0 / inner["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    scaling = inner.get("rope_scaling")
    if scaling is None:
        return found.double()
    kind = scaling.get("rope_type", scaling.get("type"))
    factor: float = scaling["factor"]
    if kind == "linear":
        return (found / factor).double()
    assert kind == "llama3"
    low: float = scaling["low_freq_factor"]
    high: float = scaling["high_freq_factor"]
    turns: Tensor = scaling["original_max_position_embeddings"] / (2 * math.pi / found)
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - fast) * found / factor + fast * found
    return scaled.double()
