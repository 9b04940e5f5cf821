"""Which models the decoding loop supports, how long a context they have, and how the vocabularies of
a target and a draft model go together.

Models of one family share a tokenizer and differ in the sizes of their embeddings, which are padded
(Qwen2.5: 151,936 and 152,064). Others keep a part of the tokens only, to save the output head's
time, and come with a map from their tokens to the target's (d2t of EAGLE-3, VocabTrim): `TokenMap`.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specnb.number_checks import require_whole, shown, whole_numbers

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""In which models compute. Weights of other dtypes, such as float8, belong to quantised models."""


def vocabulary(model: PreTrainedModel) -> int:
    """The number of tokens that `model` has, those included that only pad its embedding to a round
    size."""
    return int(model.config.get_text_config().vocab_size)


def head_size(model: PreTrainedModel) -> int:
    """The number of logits of `model` after each token."""
    return int(getattr(model.get_output_embeddings(), "out_features", vocabulary(model)))


def require_whole_head(model: PreTrainedModel) -> None:
    """Raises `ValueError` unless `model` has a logit for each token."""
    if head_size(model) != vocabulary(model):
        raise ValueError(
            f"the output head of {type(model).__name__} gives {head_size(model)} logits, and its vocabulary has "
            f"{vocabulary(model)} tokens; only a draft may have fewer: give ModelDrafter(model, vocab=..., tokens=...) "
            "the target's token of each logit"
        )


def require_same_vocabulary(target: PreTrainedModel, drafter: str, draft_vocab: int) -> None:
    """Raises `ValueError` unless a drafter, named `drafter`, proposes as many tokens as the target
    has."""
    vocab = vocabulary(target)
    if vocab != draft_vocab:
        raise ValueError(
            f"the target has {vocab} tokens and the {drafter} {draft_vocab}; a drafter proposes tokens of the target's "
            f"vocabulary: make it with vocab={vocab}, which ModelDrafter takes, too"
        )


def require_supported(model: PreTrainedModel) -> None:
    """Raises `TypeError`, with the reason, for a model that the loop cannot run exactly."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{name} is no model of transformers; give one of from_pretrained, of a Pair its target (pair.target), "
            "and of a PeftModel its merge_and_unload()"
        )
    if model.training or any(map(_drops, model.modules())):
        raise TypeError(
            f"{name} is in training mode, or a part of it, where dropout makes its distributions random; call its "
            "eval() first"
        )
    arguments = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder:
        raise TypeError(f"{name} is an encoder-decoder, and only models without an encoder are decoded; choose another")
    if "position_ids" not in arguments:
        raise TypeError(f"{name} takes no position_ids, which rows of different lengths need")
    if model.get_output_embeddings() is None or "logits_to_keep" not in arguments:
        raise TypeError(f"{name} gives no next-token logits; load it with load_pair or as a ...ForCausalLM")
    embedded = getattr(model.get_input_embeddings(), "num_embeddings", vocabulary(model))
    if embedded != vocabulary(model):
        raise TypeError(
            f"the configuration of {name} has {vocabulary(model)} tokens, and its embedding {embedded}; "
            "change both with its resize_token_embeddings()"
        )
    config = model.config.get_text_config(decoder=True)
    attention = config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise TypeError(f"{name} runs {attention} attention; load it with attn_implementation='sdpa' or 'eager'")
    # The loop keeps what a window leaves behind, and masks it. A chunk has the cache of a window,
    # and another mask.
    chunked = getattr(config, "attention_chunk_size", None) is not None
    plain = (DynamicLayer,) if chunked else (DynamicLayer, DynamicSlidingWindowLayer)
    reason = why_not_croppable(DynamicCache(config=model.config), plain)
    if reason:
        raise TypeError(f"the cache of {name} cannot be cropped: {reason}")


def why_not_croppable(cache: Any, plain: tuple[type, ...] = (DynamicLayer,)) -> str:
    """The reason why `cache` cannot be cropped; empty if it can, so if all its layers are `plain`.

    >>> why_not_croppable(DynamicCache())
    ''
    """
    if not isinstance(cache, DynamicCache):
        return "it is neither a DynamicCache nor a tuple of per-layer tensors"
    for number, layer in enumerate(cache.layers):
        # Not `is_croppable`, which is true for subclasses that drop tokens (a window, a
        # convolution) or hold more.
        if type(layer) not in plain:
            return f"its layer {number} is a {type(layer).__name__}, which is not plain full attention"
    return ""


def _drops(part: nn.Module) -> bool:
    """Whether a part of a model sets random values to 0."""
    if not part.training:
        return False
    dropout = {value for name, value in vars(part).items() if "drop" in name and isinstance(value, float)}
    own = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else 0.0
    return max(own, *dropout, 0.0) > 0


def sliding_window(config: PreTrainedConfig) -> int:
    """How many tokens, its own included, a token sees in the layers with a window; 0 if there are
    none."""
    layers = DynamicCache(config=config).layers
    windows = (layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0 for layer in layers)
    return max(windows, default=0)


def context_limit(model: PreTrainedModel) -> int | None:
    """The largest number of tokens that `model` has positions for; None if its configuration states
    no limit.

    >>> import torch
    >>> from specnb.shapes import Shape, empty_model
    >>> context_limit(empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="meta", dtype=torch.float32))
    64
    """
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):  # one for each type of layer
        if part.get("rope_type") == "longrope":
            # Beyond this length the angles of all rows depend on the longest sequence of the batch.
            limits.append(int(part["original_max_position_embeddings"]))
    return min((limit for limit in limits if limit is not None), default=None)


class TokenMap:
    """Maps between a target's `vocab` tokens and those of `model`, whose logit number i is of the
    target's `tokens[i]`.

    Where `tokens` has -1, the target has no such token. None: both number their tokens alike, and
    either may have more than the other. Logits become those of the target's tokens, -inf where the
    model has none: so the distribution that a drafter makes of them, and samples from, is the
    model's restricted to the target's tokens.

    A model with as many logits as embeddings reads tokens in its own numbering, one with fewer
    logits in the target's. It is given its token 0 in place of a token that it does not have; the
    draft is worse then, and no less exact.

    Raises `TypeError` for tokens that are no list of whole numbers; `ValueError` unless they are as
    many as the model has logits, each once, from -1 to `vocab` - 1.

    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=3, context=64, device="cpu", dtype=torch.float32)
    >>> reduced = TokenMap(model, vocab=5, tokens=[4, 0, -1])
    >>> reduced.logits(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[2., -inf, -inf, -inf, 1.]])
    >>> reduced.inputs(torch.tensor([[0, 4, 2]]))
    tensor([[1, 0, 0]])
    """

    def __init__(self, model: PreTrainedModel, vocab: int | None = None, tokens: Any = None) -> None:
        own = vocabulary(model)
        self.vocab = own if vocab is None else vocab
        require_whole(vocab=(self.vocab, 1))
        if tokens is None:
            require_whole_head(model)
            of_logits = np.where(np.arange(own) < self.vocab, np.arange(own), -1)
        else:
            of_logits = _target_tokens(tokens, self.vocab, head_size(model))
        every, has_token = np.arange(self.vocab), of_logits >= 0
        number = np.full(self.vocab, -1)  # of the logit of each of the target's tokens
        number[of_logits[has_token]] = np.arange(len(of_logits))[has_token]
        own_number = number if len(of_logits) == own else np.where(every < own, every, -1)
        self.same_logits = np.array_equal(of_logits, every)
        self.same_inputs = np.array_equal(own_number, every)
        self.missing = torch.tensor(number < 0, device=model.device)
        self.number, self.own_number = (
            torch.tensor(one.clip(min=0), device=model.device) for one in (number, own_number)
        )

    def inputs(self, tokens: Tensor) -> Tensor:
        """What the model reads for the target's `tokens`, of any shape."""
        return tokens if self.same_inputs else self.own_number[tokens]

    def logits(self, logits: Tensor) -> Tensor:
        """The logits `(..., vocab)` of the target's tokens, from the model's own
        `(..., number of logits)`."""
        if self.same_logits:
            return logits
        return logits.index_select(-1, self.number).masked_fill(self.missing, float("-inf"))


def _target_tokens(tokens: Any, vocab: int, logits: int) -> NDArray[np.int64]:
    numbers = whole_numbers(tokens)
    if numbers is None:
        raise TypeError(
            f"tokens is {shown(tokens)}; it must be a list of whole numbers, a target's token for each logit"
        )
    known = [token for token in numbers if token != -1]
    if len(numbers) != logits:
        raise ValueError(f"tokens has {len(numbers)} entries and the model {logits} logits; give the token of each")
    outside = [token for token in known if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"tokens has {outside[0]}; it must hold the target's tokens, 0 to {vocab - 1}, or -1 for none")
    if not known or len(set(known)) < len(known):
        advice = ": these look like offsets, as EAGLE-3's d2t has them; give torch.arange(len(d2t)) + d2t"
        offsets = advice if known and numbers == sorted(known) else ""
        raise ValueError(f"tokens is {shown(tokens)}; it must hold a token of the target, and each once{offsets}")
    return np.array(numbers)
