"""Drafters with a head, a small network that turns the target's hidden states and the newest token
into the next distributions. The heads are those that are released (`specnb.released`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from specnb.cache import LengthBound, RaggedCache, additive_mask, decoder_config
from specnb.distributions import Sampling, standardise
from specnb.drafters import Context, Drafter, Proposal, SequentialDrafter, needs_cache, padded
from specnb.fast import GROUPED, Compile, pack, shared_copy
from specnb.rules import Outcome
from specnb.support import require_supported, vocabulary

# Layers, norms and rotary embeddings of which released heads are made, by their `model_type`
PARTS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


def pair_mask(slots: Tensor, seen: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """The mask by which a token sees those up to its own but the first, which has no state before it."""
    at = torch.arange(seen, device=slots.device)
    visible = (at <= slots[..., None]) & ((at > 0) | (slots[..., None] == 0))
    if window is not None:
        visible &= at > slots[..., None] - window
    return additive_mask(visible, dtype)


class ReleasedHead(nn.Module):
    """A head that reads the target's last hidden state as it is, and of which the output head reads the state."""

    hidden_layers: tuple[int, ...] = (-1,)
    cached = chained = 1  # layers with a cache, and those of which each drafts the next token

    def combined(self, states: Tensor) -> Tensor:
        """The state that enters, from the target's `hidden_layers`."""
        return states

    def features(self, state: Tensor) -> Tensor:
        return state


class LayeredHead(ReleasedHead):
    """What `Eagle3Head` and `NextTokenHead` share: parts of the model that `config` describes."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = copy.deepcopy(config)
        self.config._attn_implementation = GROUPED
        self.layer_class, self.norm_class, rotary_class = PARTS[config.model_type]
        with torch.device("cpu"):  # its frequencies are in no file
            self.rotary_emb = rotary_class(self.config)

    def new_norm(self, width: int | None = None) -> Any:
        return self.norm_class(width or self.config.hidden_size, eps=self.config.rms_norm_eps)

    def passed(self, embedded: Tensor, slots: Tensor, cache: RaggedCache) -> dict[str, Any]:
        """What a layer or its attention takes beside its input."""
        return {
            "attention_mask": pair_mask(slots, cache.seen, embedded.dtype),
            "position_embeddings": self.rotary_emb(embedded, slots),
            "position_ids": slots,
            "past_key_values": cache,
        }


class Eagle3Head(LayeredHead):
    """The draft layer of EAGLE-3 (arXiv:2503.01840), with the names of `speculators` for its tensors.

    Parameters
    ----------
    config
        A `LlamaConfig` or `Qwen3Config` of the head's layers, usually one.
    hidden_layers
        The target's hidden states to read, as in `Drafter`.
    draft_vocab
        Number of tokens that can be drafted, set by `choose`; None for all.
    target_width
        Width of the target's states, if it is not the head's.
    own_embedding
        Whether the head has embeddings; otherwise it takes the target's.
    norm_before_residual
        Whether the states are normalised before the residual connection and not beside it.
    norm_before_fc, fc_norm
        Whether the target's states are normalised before `fc`: all together, or each by itself.
    norm_output
        Whether the next token reads the state after the last norm and not before it.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(
        self, config: PreTrainedConfig, hidden_layers: Sequence[int], draft_vocab: int | None = None, *,
        target_width: int | None = None, own_embedding: bool = False, norm_before_residual: bool = False,
        norm_before_fc: bool = False, fc_norm: bool = False, norm_output: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(config)
        width, vocab = config.hidden_size, config.vocab_size
        self.hidden_layers, self.cached = tuple(hidden_layers), config.num_hidden_layers
        self.settings = {"norm_before_residual": norm_before_residual, "norm_before_fc": norm_before_fc,
                         "fc_norm": fc_norm, "norm_output": norm_output}  # fmt: skip
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        read = target_width or width
        self.input_norm = self.new_norm(len(self.hidden_layers) * read) if norm_before_fc else nn.Identity()
        if fc_norm:
            self.fc_norm = nn.ModuleList([self.new_norm(read) for _ in self.hidden_layers])
        self.fc = nn.Linear(len(self.hidden_layers) * read, width, bias=False)
        self.layers = nn.ModuleList([self.layer_class(self.config, number) for number in range(self.cached)])
        first: Any = self.layers[0]
        first.hidden_norm = self.new_norm()
        for name in ("q_proj", "k_proj", "v_proj"):
            usual = getattr(first.self_attn, name)
            wide = nn.Linear(2 * width, usual.out_features, bias=usual.bias is not None)
            setattr(first.self_attn, name, wide)
        self.norm = self.new_norm()
        self.lm_head = nn.Linear(width, draft_vocab or vocab, bias=False)
        self.embed_tokens = nn.Embedding(vocab, width) if own_embedding else None
        self.register_buffer("d2t", None if draft_vocab is None else torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", None if draft_vocab is None else torch.arange(vocab) < draft_vocab)

    def choose(self, tokens: Tensor) -> None:
        """Draft `tokens` of the target, in ascending order."""
        assert self.d2t is not None
        assert self.t2d is not None
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()[tokens] = True

    @property
    def proposed(self) -> Tensor | None:
        """The target's token of each logit; None if they are the same."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def combined(self, states: Tensor) -> Tensor:
        if self.settings["fc_norm"]:
            each = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(one) for norm, one in zip(self.fc_norm, each, strict=True)], dim=-1)
        return self.fc(self.input_norm(states))  # type: ignore[no-any-return]

    def after(self, state: Tensor, embedded: Tensor, slots: Tensor, cache: RaggedCache, layer: int) -> Tensor:
        passed = self.passed(embedded, slots, cache)
        first: Any = self.layers[0]
        read = first.hidden_norm(state)
        mixed, _ = first.self_attn(torch.cat([first.input_layernorm(embedded), read], dim=-1), **passed)
        seen = (read if self.norm_before_residual else state) + mixed
        state = seen + first.mlp(first.post_attention_layernorm(seen))
        for each in list(self.layers)[1:]:
            state = each(state, **passed)
        return self.norm(state) if self.norm_output else state

    def features(self, state: Tensor) -> Tensor:
        return state if self.norm_output else self.norm(state)


class NextTokenHead(LayeredHead):
    """A next-token layer with the names of `speculators`; embeddings and output head are the target's.

    It reads the target's last hidden state, after the last norm, and later its own.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        layer = self.layer_class(self.config, 0)
        for name in ("hidden_layernorm", "token_layernorm", "final_layernorm"):
            setattr(layer, name, self.new_norm())
        layer.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.mtp_layers = nn.ModuleList([layer])

    def after(self, state: Tensor, embedded: Tensor, slots: Tensor, cache: RaggedCache, layer: int) -> Tensor:
        only: Any = self.mtp_layers[0]
        both = torch.cat([only.token_layernorm(embedded), only.hidden_layernorm(state)], dim=-1)
        return only.final_layernorm(only(only.input_proj(both), **self.passed(embedded, slots, cache)))  # type: ignore[no-any-return]


class NextTokenLayers(ReleasedHead):
    """The next-token layers of a target's checkpoint, as transformers loads them.

    Each layer reads the states of the one before it, and predicts one token further.
    """

    def __init__(self, loaded: MtpModel) -> None:
        super().__init__()
        self.loaded: Any = loaded
        self.embed_tokens, self.lm_head = self.loaded.embed_tokens, self.loaded._project_to_logits
        self.cached = self.chained = len(loaded.layers)

    def after(self, state: Tensor, embedded: Tensor, slots: Tensor, cache: RaggedCache, layer: int) -> Tensor:
        loaded, config = self.loaded, self.loaded.config
        positions = slots + layer  # those of its tokens, which stand one further than in the layer before
        kinds: Any = getattr(config, "layer_types", None)
        window = config.sliding_window if kinds and kinds[layer] == "sliding_attention" else None
        rope = {"layer_type": kinds[layer]} if getattr(loaded, "has_per_layer_rope", False) else {}
        state = loaded.layers[layer](
            embedded,
            state,
            position_embeddings=loaded.rotary_emb(embedded, position_ids=positions, **rope),
            attention_mask=pair_mask(slots, cache.seen, embedded.dtype, window),
            position_ids=positions,
            past_key_values=cache,
        )
        return loaded.shared_post_norm(state) if loaded.use_shared_post_norm else state


class AttentionDrafter(SequentialDrafter):
    """Draft tokens sampled one after the other from a head that attends to the tokens so far.

    A step first computes the tokens since the last step anew, with the target's states. `chained`
    layers draft a token each, and the last one all others. Parameters are those of `load_drafter`.
    """

    cache: RaggedCache
    bound: LengthBound | None = None

    def __init__(
        self, target: PreTrainedModel, head: Any, sampling: Sampling = Sampling(), *, compile: Compile = False,
        capturable: bool = False, most: int | None = None,
    ) -> None:  # fmt: skip
        require_supported(target)
        self.head = shared_copy(head)
        self.sampling, self.most = sampling, most
        self.vocab = vocabulary(target)
        self.proposed: Tensor | None = getattr(head, "proposed", None)
        if compile:
            pack(self.head)
        self.embedding: Any = getattr(self.head, "embed_tokens", None) or target.get_input_embeddings()
        self.output: Any = getattr(self.head, "lm_head", None) or target.get_output_embeddings()
        self.hidden_layers, self.capturable = self.head.hidden_layers, capturable
        weight = next(self.head.parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self.read = len(self.hidden_layers) * decoder_config(target).hidden_size  # numbers of a token's states
        self.allocated: tuple[Any, ...] = ()

    @property
    def may_be_left_out(self) -> bool:
        """Whether a step may do without the head."""
        return self.device.type == "cpu" and not self.capturable

    def lengths(self, gamma: int) -> tuple[int, ...]:
        return () if self.most is None else (min(self.most, gamma),)

    @torch.no_grad()
    def start(self, context: Context, rows: Tensor | None = None) -> None:
        given: Any = context.hidden_states
        if given.shape[-1] != self.read:
            raise ValueError(f"states have {given.shape[-1]} numbers, not {self.read}: give the drafter its own target")
        if rows is None:
            if needs_cache(self, sizes := (*context.tokens.shape, self.dtype, self.device)):
                self.cache = RaggedCache(self.head.cached, context.tokens.shape[1])
                self.allocated = sizes
            self.cache.clear()
            self.entered = context.lengths.clone()
        else:
            self.entered[rows] = context.lengths[rows]
            context = Context(context.tokens[rows], context.lengths[rows], given[rows])
        slots = torch.arange(int(context.lengths.max()), device=context.lengths.device)
        slots = slots.expand(len(context.lengths), -1)
        self.bound = None
        window = self._enter(context, slots, rows)
        for layer in range(1, self.head.chained):
            # Entries whose tokens are not known yet are computed again in the next step.
            tokens = context.tokens.gather(1, (slots + layer).clamp_max(context.tokens.shape[1] - 1))
            window = self._read(window, tokens, slots, rows, layer)

    @torch.no_grad()
    def in_turn(self, context: Context, width: int, choose: Callable[[int, Tensor], Tensor]) -> Proposal:
        # The last step may have accepted tokens of another drafter, as many as were asked for.
        state = self.first_state(context, width)
        draft_tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for position in range(width if self.most is None else min(width, self.most)):
            if position:
                state = self.next_state(state, draft_tokens[-1], context.lengths + position - 1)
            distributions.append(self.q(self.head.features(state)))
            draft_tokens.append(choose(position, distributions[-1]))
        return Proposal(torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1))

    def first_state(self, context: Context, drafted: int) -> Tensor:
        """The state for the first draft token; the last step evaluated at most `drafted` draft tokens."""
        # Tokens that came since the last call are to be computed with the target's states, and a chained layer read
        # tokens of its own for those before them. A CPU knows how many they are; else there may be `drafted` + 1. In a
        # row of fewer tokens the first one is computed several times.
        new = drafted + 1
        if self.may_be_left_out:
            new = max(1, int((context.lengths - self.entered).max()))
            self.entered = context.lengths.clone()
        back = torch.arange(1 - self.head.chained - new, 0, device=context.lengths.device)
        self.bound, self.depth = context.bound, 0
        self.tokens, self.slots = pad(context.tokens, (0, drafted)), (context.lengths[:, None] + back).clamp_min(0)
        self.window = self._enter(context, self.slots)
        return self.window[:, -1]

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        self.depth += 1
        last = self.head.chained - 1
        if self.depth > last:
            return self._read(state[:, None], token[:, None], slot[:, None] - last, layer=last)[:, 0]
        self.tokens.scatter_(1, slot[:, None], token[:, None])
        tokens = self.tokens.gather(1, self.slots + self.depth)
        self.window = self._read(self.window, tokens, self.slots, layer=self.depth)
        return self.window[:, -1]

    def q(self, features: Tensor) -> Tensor:
        q = standardise(self.output(features), self.sampling, check=False)
        if self.proposed is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.vocab).index_copy_(-1, self.proposed, q)

    def _enter(self, context: Context, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """The head's states of the tokens in `slots` `(rows, n)`, from the target's states."""
        states: Any = context.hidden_states
        before = states.take_along_dim((slots - 1).clamp_min(0)[..., None], dim=1).to(self.dtype)
        state = self.head.combined(before).where(slots[..., None] > 0, 0.0)
        return self._read(state, context.tokens.gather(1, slots), slots, rows)

    def _read(self, state: Tensor, tokens: Tensor, slots: Tensor, rows: Tensor | None = None, layer: int = 0) -> Tensor:
        self.cache.write_at(slots, rows, self.cache.least(slots, bound=self.bound))
        after: Tensor = self.head.after(state, self.embedding(tokens.clamp_min(0)), slots, self.cache, layer)
        return after


class FallbackDrafter(Drafter):
    """Rows with a match copy for the whole step, as `copy` does; the other rows draft with `head`.

    The sequence alone decides, so q is exact. On a CPU the head is left out if all rows copy.
    """

    def __init__(self, copy: Drafter, head: AttentionDrafter, gamma: int = 10) -> None:
        self.copy, self.head, self.gamma = copy, head, gamma
        self.vocab, self.hidden_layers = head.vocab, head.hidden_layers
        self.can_refill = copy.can_refill

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.copy.start(context, rows)
        self.head.start(context, rows)

    def lengths(self, gamma: int) -> tuple[int, ...]:
        return (*self.head.lengths(gamma), *filter(None, self.copy.lengths(gamma)))

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        copied = self.copy.propose(context, uniforms)
        if self.head.may_be_left_out and copied.draft_tokens.shape[1] and bool((copied.draft_tokens[:, 0] >= 0).all()):
            return copied
        sampled = self.head.propose(context, uniforms)
        width = max(copied.draft_tokens.shape[1], sampled.draft_tokens.shape[1])
        copied, sampled = padded(*copied, width), padded(*sampled, width)
        copies = copied.draft_tokens[:, :1] >= 0
        draft_tokens = copied.draft_tokens.where(copies, sampled.draft_tokens)
        return Proposal(draft_tokens, copied.q.to(sampled.q.dtype).where(copies[..., None], sampled.q))

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        copied, sampled = (drafter.along(context, tokens) for drafter in (self.copy, self.head))
        copies = copied[:, :1].sum(dim=-1, keepdim=True) > 0
        return copied.to(sampled.dtype).where(copies, sampled)

    def update(self, context: Context, outcome: Outcome) -> None:
        self.copy.update(context, outcome)
        self.head.update(context, outcome)
