"""T5 and BART in the decoding loop, by parts of its own: the encoder runs once per prompt, the
decoder in every step.

    sampler = EncoderDecoderSampler(target, EncoderDecoderDrafter(draft, sampling), sampling=sampling)
    sampler.generate(prompts)

A prompt is the encoder's input, and the completion follows the decoder's first token. Chains only,
not compiled. The check of the package asks for a decoder alone; here a decoder in the loop is
compared with itself when a sampler is made (`difference`).

A row holds the encoder's input, then the decoder's first token and those that follow. So sequences,
lengths and the record are those of a decoder-only model, and drafters that copy find the input.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from specnb.cache import CachedModel, RaggedCache, additive_mask, prefill
from specnb.check import HALF, ROUNDING, failing_clearly, probabilities, probe_tokens
from specnb.distributions import total_variation
from specnb.drafters import Drafter, ModelDrafter
from specnb.fast import Compile
from specnb.sampler import Draft, Instruments, Sampler
from specnb.step import Batch
from specnb.support import require_same_vocabulary


class EncoderDecoder(CachedModel):
    """An encoder-decoder with the caches of one batch: the decoder's own, and that of what it reads
    from the encoder.

    Each row has `slots` for tokens, of which those of the encoder's input are at most `input_slots`
    (`with_inputs`).

    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> config = T5Config(vocab_size=5, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    >>> runner = with_inputs(3)(T5ForConditionalGeneration(config).eval(), 8)
    >>> rows = torch.tensor([[1, 2, 3, 0, 4]])  # the input, the decoder's first token, and one more
    >>> runner.fill(rows, lengths=torch.tensor([4]))
    >>> runner.run(rows[:, 3:], torch.tensor([[3, 4]]), keep=2).shape
    torch.Size([1, 2, 5])
    """

    input_slots = 0

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        super().__init__(model, slots - self.input_slots)
        self.cache.shortens = False
        self.read = RaggedCache(len(self.cache.ragged), self.input_slots)
        self.both = EncoderDecoderCache(self.cache, self.read)
        self.positions = decoder_positions(model)
        self.inputs: Tensor | None = None
        self.input_mask: Tensor

    def clear(self, rows: Tensor | slice = slice(None)) -> None:
        super().clear(rows)
        self.read.clear(rows)

    def fill(self, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Runs the encoder, and the decoder over its first token, so that it keeps what it reads
        from the encoder."""
        inputs = lengths - 1
        longest = int(inputs.max())
        slots = torch.arange(self.read.capacity, device=tokens.device)
        given = slots < inputs[:, None]
        encoder = self.model.get_encoder()
        given_tokens = self.token_map.inputs(tokens[:, :longest])
        self.encoded = encoder(input_ids=given_tokens, attention_mask=given[:, :longest]).last_hidden_state
        mask = additive_mask(given[:, None], self.model.dtype)
        if rows is None:
            self.inputs, self.input_mask = inputs, mask
        else:
            if self.inputs is None:  # other rows stay without a prompt
                self.inputs = inputs.new_zeros(self.cache.batch or len(tokens))
                self.input_mask = mask.new_zeros(len(self.inputs), *mask.shape[1:])
            self.inputs[rows], self.input_mask[rows] = inputs, mask
        self.read.batch = self.cache.batch
        self.read.write_at(slots[:longest].expand(len(tokens), -1), rows)
        self.both.is_updated = dict.fromkeys(self.both.is_updated, False)
        self.run(tokens[:, :1], inputs[:, None], keep=1, rows=rows)

    def run(self, tokens: Tensor, slots: Tensor, keep: int, *_: Any, rows: Tensor | None = None, **tree: Any) -> Tensor:
        """As `CachedModel.run`, for chains. A token at a slot of the input stands for the decoder's
        first one."""
        assert self.inputs is not None
        inputs, mask = (self.inputs, self.input_mask) if rows is None else (self.inputs[rows], self.input_mask[rows])
        own = slots - inputs[:, None]
        tokens, own = self.token_map.inputs(tokens), own.clamp_min(0)
        tokens = tokens.where(own > 0, self.model.config.decoder_start_token_id)
        distance = (own[..., None] - torch.arange(self.capacity, device=own.device)).clamp_min(0)

        def with_positions(module: Any, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if isinstance(module, nn.Embedding):
                return args, arguments | {"position_ids": own.clamp_max(self.last_position)}
            by_distance = module.compute_bias(self.capacity, 1)[0, :, :, 0]  # (heads, capacity)
            return args, arguments | {"position_bias": by_distance[:, distance].transpose(0, 1)}

        self.cache.write_at(own, rows)
        # The decoder takes no positions: it counts from one length for all rows.
        with ExitStack() as hooks:
            for module in self.positions:
                hooks.enter_context(module.register_forward_pre_hook(with_positions, with_kwargs=True))
                if isinstance(module, nn.Embedding):
                    hooks.enter_context(module.register_forward_hook(lambda *called: called[-1].view(*own.shape, -1)))
            output = self.model(
                # Read in `fill` only; then the decoder reads the cache.
                encoder_outputs=(self.encoded,),
                attention_mask=mask,
                decoder_input_ids=tokens,
                decoder_attention_mask=self.mask(own),
                use_cache=True,
                **{self.cache_argument: self.both},
            )
        return self.token_map.logits(output.logits)[:, -keep:]


def with_inputs(most: int) -> type[EncoderDecoder]:
    """An `EncoderDecoder` for inputs of at most so many tokens."""
    return type("EncoderDecoder", (EncoderDecoder,), {"input_slots": most})


class EncoderDecoderDrafter(ModelDrafter):
    """A `ModelDrafter` of an encoder-decoder, for `EncoderDecoderSampler`."""

    input_slots = 0

    def require_model(self, model: PreTrainedModel) -> None:
        require_encoder_decoder(model)

    def reserve(self, input_slots: int) -> None:
        """Makes room for inputs of so many tokens in the caches of later batches."""
        if input_slots != self.input_slots:
            self.input_slots, self.runner_class, self.allocated = input_slots, with_inputs(input_slots), ()


class EncoderDecoderSampler(Sampler):
    """A `Sampler` of an encoder-decoder.

    `inputs` is the number of tokens of the encoder's input for which there is room from the first
    call on; a longer input makes a new batch. With `check` the decoder is compared with itself.
    Raises `TypeError` for what the decoder cannot run.
    """

    def __init__(
        self, target: PreTrainedModel, draft: Draft = "auto", *, compile: Compile = False, check: bool = True,
        instruments: Instruments = Instruments(), inputs: int = 1, **settings: Any,
    ) -> None:  # fmt: skip
        if compile is True:
            raise TypeError("an encoder-decoder is not compiled; leave compile=True out")
        super().__init__(target, draft, compile=compile, check=False, instruments=instruments, **settings)
        self.reserve(inputs)
        if check:
            require_agreement(target, self.private.modules)

    def require_models(self, drafter: Drafter | None) -> None:
        require_encoder_decoder(self.target)
        if drafter is not None:
            name = type(drafter).__name__
            require_same_vocabulary(self.target, name, drafter.vocab)
            if drafter.parents is not None or drafter.hidden_layers:
                raise TypeError(f"{name} proposes a tree or reads hidden states; give a drafter of chains without")

    def reserve(self, inputs: int) -> None:
        """Makes room for inputs of so many tokens; a new batch has it."""
        self.inputs, parts = inputs, {"runner_class": with_inputs(inputs)}
        self.instruments = replace(self.instruments, batch_class=type("EncoderDecoderBatch", (Batch,), parts))

    def token_lists(self, prompts: Any) -> list[list[int]]:
        """The tokens of each prompt, and the decoder's first one."""
        lists = super().token_lists(prompts)
        longest = max(map(len, lists), default=0)
        if longest > self.inputs:
            self.reserve(longest)
        if isinstance(self.drafter, EncoderDecoderDrafter):  # it may serve other samplers, too
            self.drafter.reserve(self.inputs)
        first = self.target.config.decoder_start_token_id
        return [[*tokens, first] if tokens else [] for tokens in lists]


def require_agreement(model: PreTrainedModel, modules: PreTrainedModel) -> None:
    """Raises `TypeError` unless `modules` in the loop have the distributions of `model`."""
    with failing_clearly(model):
        found = difference(model, modules)
    if found > ROUNDING:
        raise TypeError(
            f"{type(model).__name__} would be decoded from distributions that differ by {found:.2g} in total variation "
            "from its own: its decoder counts positions, or masks, in a way of its own"
        )


def require_encoder_decoder(model: PreTrainedModel) -> None:
    """Raises `TypeError` unless `model` is an encoder-decoder like T5 or BART, in evaluation
    mode."""
    name = type(model).__name__
    if not (isinstance(model, PreTrainedModel) and model.config.is_encoder_decoder):
        raise TypeError(f"{name} is no encoder-decoder; target and draft must be of one kind")
    if model.training:
        raise TypeError(f"{name} is in training mode; call its eval() first")
    if model.main_input_name != "input_ids" or not decoder_positions(model):
        raise TypeError(f"{name} is not like T5 or BART, whose decoder the loop can give the positions of each row")
    if getattr(model.config, "decoder_start_token_id", None) is None:
        raise TypeError(f"the configuration of {name} has no decoder_start_token_id, with which its decoder begins")


def decoder_positions(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of an encoder-decoder's decoder that read positions, if every row can be given
    its own.

    They are attention with a relative bias, as T5 has, or an embedding of positions, as BART has.
    """
    found = []
    for module in model.get_decoder().modules():
        relative, arguments = getattr(module, "has_relative_attention_bias", False), inspect.signature(module.forward)
        wanted = "position_bias" if relative else "position_ids" if isinstance(module, nn.Embedding) else None
        found += [module] * (wanted in arguments.parameters)
    return found


@torch.inference_mode()
def difference(model: PreTrainedModel, modules: PreTrainedModel) -> float:
    """The mean total variation between the distributions of the decoder of `modules` in the loop and
    the model's own."""
    inputs, tokens = [HALF, HALF // 2 + 1], probe_tokens(model, 2 * HALF)
    written = tokens.roll(1, dims=1)
    written[:, 0] = model.config.decoder_start_token_id
    rows = tokens.new_zeros(2, 3 * HALF)
    for row, length in enumerate(inputs):
        rows[row, :length], rows[row, length : length + 2 * HALF] = tokens[row, -length:], written[row]
    lengths = torch.tensor(inputs, device=tokens.device)
    runner = with_inputs(HALF)(modules, 3 * HALF)
    prefill(runner, rows, lengths + 1)
    at = lengths[:, None] + torch.arange(2 * HALF, device=tokens.device)
    parts = [runner.run(rows.gather(1, part), part, keep=HALF) for part in at.split(HALF, dim=1)]
    own = [model(input_ids=tokens[row : row + 1, -length:], decoder_input_ids=written[row : row + 1]).logits
           for row, length in enumerate(inputs)]  # fmt: skip
    there, alone = probabilities(torch.cat(parts, dim=1)), probabilities(torch.cat(own))
    return float(total_variation(there, alone).mean())
