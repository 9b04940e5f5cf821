"""Encoder-decoder models in the decoding loop: the encoder runs once per prompt, the decoder in every step.

A row holds the encoder's input, then the decoder's first token and those that follow. So sequences, lengths and the
record are those of a decoder-only model, and drafters that copy find the input.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from specnb.models.cache import RaggedCache, additive_mask
from specnb.models.cached_model import CachedModel
from specnb.models.support import decoder_positions


class EncoderDecoder(CachedModel):
    """An encoder-decoder with the caches of one batch: the decoder's own, and that of what it reads from the encoder.

    Each row has `slots` for tokens, of which those of the encoder's input are `input_slots` at most.

    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> config = T5Config(vocab_size=5, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    >>> runner = EncoderDecoder(T5ForConditionalGeneration(config).eval(), slots=8, input_slots=3)
    >>> rows = torch.tensor([[1, 2, 3, 0, 4]])  # the input, the decoder's first token, and one more
    >>> runner.fill(rows, lengths=torch.tensor([4]))
    >>> runner.run(rows[:, 3:], torch.tensor([[3, 4]]), keep=2).shape
    torch.Size([1, 2, 5])
    """

    def __init__(self, model: PreTrainedModel, slots: int, input_slots: int) -> None:
        super().__init__(model, slots - input_slots)
        self.read = RaggedCache(len(self.cache.ragged), input_slots)
        self.both = EncoderDecoderCache(self.cache, self.read)
        self.positions = decoder_positions(model)

    def clear(self) -> None:
        super().clear()
        self.read.clear()

    def fill(self, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Runs the encoder, and the decoder over its first token, so that it keeps what it reads from the encoder."""
        inputs = lengths - 1
        longest = int(inputs.max())
        slots = torch.arange(self.read.capacity, device=tokens.device)
        given = slots < inputs[:, None]
        encoder = self.model.get_encoder()
        given_tokens = self.own_tokens(tokens[:, :longest])
        self.encoded = encoder(input_ids=given_tokens, attention_mask=given[:, :longest]).last_hidden_state
        mask = additive_mask(given[:, None], self.model.dtype)
        if rows is None:
            self.inputs, self.input_mask = inputs, mask
        else:
            self.inputs[rows], self.input_mask[rows] = inputs, mask
        self.read.batch = self.cache.batch
        self.read.write_at(slots[:longest].expand(len(tokens), -1), rows)
        self.both.is_updated = dict.fromkeys(self.both.is_updated, False)
        self.run(tokens[:, :1], inputs[:, None], keep=1, rows=rows)

    def run(self, tokens: Tensor, slots: Tensor, keep: int, *_: Any, rows: Tensor | None = None, **tree: Any) -> Tensor:
        """As `CachedModel.run`, for chains. A token at a slot of the input stands for the decoder's first one."""
        inputs, mask = (self.inputs, self.input_mask) if rows is None else (self.inputs[rows], self.input_mask[rows])
        own = slots - inputs[:, None]
        tokens, own = self.own_tokens(tokens), own.clamp_min(0)
        tokens = tokens.where(own > 0, self.model.config.decoder_start_token_id)
        distance = (own[..., None] - torch.arange(self.capacity, device=own.device)).clamp_min(0)

        def with_positions(module: Any, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if isinstance(module, nn.Embedding):
                return args, arguments | {"position_ids": own.clamp_max(self.last_position)}
            by_distance = module.compute_bias(self.capacity, 1)[0, :, :, 0]  # (heads, capacity)
            return args, arguments | {"position_bias": by_distance[:, distance].transpose(0, 1)}

        self.cache.write_at(own, rows)
        with ExitStack() as hooks:  # the decoder takes no positions: it counts from one length for all rows
            for module in self.positions:
                hooks.enter_context(module.register_forward_pre_hook(with_positions, with_kwargs=True))
                if isinstance(module, nn.Embedding):
                    hooks.enter_context(module.register_forward_hook(lambda *called: called[-1].view(*own.shape, -1)))
            output = self.model(
                encoder_outputs=(self.encoded,),  # read in `fill` only; then the decoder reads the cache
                attention_mask=mask,
                decoder_input_ids=tokens,
                decoder_attention_mask=self.mask(own),
                use_cache=True,
                **{self.cache_argument: self.both},
            )
        return self.target_logits(output)[:, -keep:]


def cached_model(
    model: PreTrainedModel, slots: int, input_slots: int = 0, kind: type[CachedModel] = CachedModel
) -> CachedModel:
    """`model` with caches for rows of `slots`: a `kind`, or an `EncoderDecoder`, which no other `kind` can stand for.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> cached_model(empty_model(Shape(1, 8, 8, 2), 4, context=64, device="cpu", dtype=torch.float32), 8).capacity
    8
    """
    if not model.config.is_encoder_decoder:
        return kind(model, slots)
    if kind is not CachedModel:
        raise TypeError(f"{kind.__name__} runs decoder-only models, and {type(model).__name__} is an encoder-decoder")
    return EncoderDecoder(model, slots, input_slots)
