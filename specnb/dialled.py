"""Pairs of any published shape at a chosen acceptance: random weights whose two heads share a bigram law.

A dialled pair spends every byte and every operation of its shapes, so its times are those of trained
models of these shapes; only its text means nothing. Each token has one successor that both models prefer,
by a weight that is set so that alpha comes out as asked; everything else in their logits is noise of
their own. It is all in the weights: any program that runs transformers runs a dialled pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.optimize import brentq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from specnb.fast import pack
from specnb.law import overlap, standardise
from specnb.models import Pair

NOISE = 2.5  # standard deviation of the logits that the models do not share: alone they overlap by 0.08
PROBES = 1024  # contexts on which the weight of the shared law is set
BEGIN = 0


class Shape(NamedTuple):
    """A GPT-like decoder: layers, width, feed-forward width, heads."""

    layers: int
    width: int
    feed_forward: int
    heads: int


TARGET = Shape(12, 768, 3072, 12)  # the paper's GPT-like pair on lm1b: 97M parameters
DRAFT = Shape(2, 256, 1024, 4)  # and 6M, at a vocabulary of 8k


@torch.inference_mode()
def dialled_pair(
    alpha: float = 0.76,
    target: Shape = TARGET,
    draft: Shape = DRAFT,
    *,
    vocab: int = 8192,
    context: int = 1024,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
    seed: int = 0,
) -> Pair:
    """A pair of these shapes whose alpha at temperature 1 is `alpha`, up to how far contexts differ.

    `packed` as in `specnb.models.load_pair`. At temperature 0 the two agree nearly always, whatever `alpha` is.
    Raises `ValueError` for an alpha outside [0.1, 0.99]: below it the models' own noise overlaps more, above
    it no weight is heavy enough.
    """
    if not 0.1 <= alpha <= 0.99:
        raise ValueError(f"alpha is {alpha}; a dialled pair has one from 0.1 to 0.99")
    generator = torch.Generator(device).manual_seed(seed)
    successor = torch.randperm(vocab, generator=generator, device=device)
    probes = torch.randint(vocab, (4, PROBES // 4), generator=generator, device=device)
    models, shared, own = [], [], []
    for shape in (target, draft):
        model = _random_model(shape, vocab, context, device, dtype, generator)
        likes, noise = _heads(model, successor, generator)
        hidden = model.base_model(input_ids=probes, use_cache=False).last_hidden_state.flatten(0, 1).float()
        models.append((model, likes, noise))
        shared.append(hidden @ likes.T)
        own.append(hidden @ noise.T)

    def excess(weight: float) -> float:
        p, q = (standardise(weight * peak + noise) for peak, noise in zip(shared, own, strict=True))
        return float(overlap(p, q).mean()) - alpha

    weight = brentq(excess, 0.0, 100.0, xtol=1e-4)
    for model, likes, noise in models:
        _weight(model.get_output_embeddings()).copy_(weight * likes + noise)
        if packed:
            pack(model)
    return Pair(models[0][0], models[1][0], _numbers(vocab))


def _random_model(
    shape: Shape, vocab: int, context: int, device: str, dtype: torch.dtype, generator: torch.Generator
) -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        vocab_size=vocab, num_hidden_layers=shape.layers, hidden_size=shape.width, num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward, max_position_embeddings=context, tie_word_embeddings=False,
        bos_token_id=BEGIN, eos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = GPTNeoXForCausalLM(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            weights.normal_(std=0.02, generator=generator)
    # Tall embeddings: after all layers the state still tells which token it came from.
    _weight(model.get_input_embeddings()).normal_(generator=generator)
    model.to(dtype)  # type: ignore[arg-type]  # the stub of `to` lacks its argument
    return model.eval()


def _heads(model: GPTNeoXForCausalLM, successor: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two output matrices: one that prefers each token's successor by 1, and one of noise."""
    embedding = _weight(model.get_input_embeddings()).float()
    width = embedding.shape[1]
    likes = torch.empty_like(embedding)
    likes[successor] = torch.nn.functional.normalize(embedding, dim=-1) / width**0.5
    noise = torch.empty_like(embedding).normal_(std=NOISE / width**0.5, generator=generator)
    return likes, noise


def _weight(layer: nn.Module | None) -> Tensor:
    assert layer is not None
    assert isinstance(layer.weight, Tensor)
    return layer.weight


def _numbers(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are the tokens' numbers."""
    words = Tokenizer(WordLevel({str(token): token for token in range(vocab)}, unk_token=str(BEGIN)))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=str(BEGIN), unk_token=str(BEGIN))
