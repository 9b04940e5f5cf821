"""A draft model brought to the target's vocabulary: its input from the target's tokens, its logits
to them.

Models of one family share a tokenizer and differ in the sizes of their embeddings, which are padded
(Qwen2.5: 151,936 and 152,064). Others keep a part of the tokens only, to save the output head's
time, and come with a map from their tokens to the target's (d2t of EAGLE-3, VocabTrim).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from specnb.models.support import head_size, require_whole_head, vocabulary
from specnb.number_checks import require_whole, shown, whole_numbers


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

    >>> from specnb.models.shapes import Shape, empty_model
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
        raise ValueError(f"tokens is {shown(tokens)}; it must hold a token of the target, and each once")
    return np.array(numbers)
