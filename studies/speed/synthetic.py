"""Synthetic pairs: random-weight models of any published shape with a chosen acceptance probability
alpha.

A synthetic pair reads every weight and executes every operation of its shapes, so its times are
those of trained models of these shapes; only its output is meaningless. Each token has one
successor that both models prefer. The logits are `weight * shared + independent`: `shared` has its
peak at that successor, `independent` is random and different in the two models, and `weight` is set
to reach alpha. At temperature 0 the draft instead prefers another successor after a fraction 1 -
alpha of the tokens. Everything is in the weights of the output heads, so any program that runs
transformers models can run a synthetic pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.optimize import brentq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedModel, PreTrainedTokenizerFast

from specnb.distributions import Sampling, overlap, standardise
from specnb.loading import Pair


class Shape(NamedTuple):
    layers: int
    width: int
    feed_forward: int
    heads: int


def empty_model(shape: Shape, vocab: int, context: int, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model with the initial weights of transformers.

    >>> empty_model(Shape(1, 8, 8, 2), vocab=4, context=16, device="meta", dtype=torch.float32).num_parameters()
    544
    """
    config = GPTNeoXConfig(
        vocab_size=vocab, num_hidden_layers=shape.layers, hidden_size=shape.width, num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward, max_position_embeddings=context, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()  # type: ignore[no-any-return]


TARGET = Shape(12, 768, 3072, 12)  # the paper's GPT-like pair on lm1b: 97M parameters
DRAFT = Shape(2, 256, 1024, 4)  # and 6M, at a vocabulary of 8k
# Standard deviation of the independent logits; with weight 0 the models overlap by 0.08.
INDEPENDENT_STD = 2.5
PROBES = 1024  # contexts on which `weight` is set
MAX_WEIGHT = 100.0
AT_A_TIME = 64  # of them, so that distributions over large vocabularies fit
BEGIN = 0  # token that begins a sequence


@torch.inference_mode()
def synthetic_pair(
    alpha: float = 0.76,
    target: Shape = TARGET,
    draft: Shape = DRAFT,
    *,
    temperature: float = 1.0,
    vocab: int = 8192,
    context: int = 1024,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Pair:
    """A pair of these shapes whose mean acceptance at `temperature` is `alpha`, up to the variation
    between contexts.

    At another temperature the acceptance differs; a pair made for temperature 1 nearly always
    agrees at 0. The models are made on `device` in `dtype`; this also needs, temporarily, float32
    copies of the largest matrices and 16 KiB for each token of `vocab`.

    Raises `ValueError` for an alpha that no weight reaches, because the independent logits overlap
    more (at temperatures above 1) or the largest weight gives less.

    >>> small = Shape(layers=1, width=64, feed_forward=64, heads=2)
    >>> pair = synthetic_pair(0.7, small, small, vocab=64, context=32)
    >>> pair.target.config.vocab_size
    64
    """
    sampling = Sampling(temperature)
    generator = torch.Generator(device).manual_seed(seed)
    successor = torch.randperm(vocab, generator=generator, device=device)
    probes = torch.randint(vocab, (4, PROBES // 4), generator=generator, device=device)
    agreed = alpha if temperature == 0 else 1.0
    parts = [
        _headless(target, successor, probes, vocab, context, dtype, generator),
        _headless(draft, _with_disagreements(successor, agreed, generator), probes, vocab, context, dtype, generator),
    ]
    weight = _decisive_weight(parts) if temperature == 0 else _weight_for(alpha, parts, sampling)
    for part in parts:
        _weight(part.model.get_output_embeddings()).copy_(weight * part.shared_head + part.independent_head)
    return Pair(parts[0].model, parts[1].model, _number_tokenizer(vocab))


class _Headless(NamedTuple):
    """A model whose output head is not set yet, the two heads it is the sum of, and their logits on
    the probes.

    shared_head, independent_head      (vocab, width)           the first prefers each token's
                                       successor by 1
    shared_logits, independent_logits  (PROBES, vocab) float32
    peak                               (PROBES,)                shared logit of the successor
    """

    model: PreTrainedModel
    shared_head: Tensor
    independent_head: Tensor
    shared_logits: Tensor
    independent_logits: Tensor
    peak: Tensor


def _headless(
    shape: Shape, successor: Tensor, probes: Tensor, vocab: int, context: int, dtype: torch.dtype,
    generator: torch.Generator,
) -> _Headless:  # fmt: skip
    model = _random_model(shape, vocab, context, dtype, generator)
    embedding = _weight(model.get_input_embeddings()).float()
    width = embedding.shape[1]
    shared_head = torch.empty_like(embedding)
    shared_head[successor] = torch.nn.functional.normalize(embedding, dim=-1) / width**0.5
    independent_head = torch.empty_like(embedding).normal_(std=INDEPENDENT_STD / width**0.5, generator=generator)
    hidden = model.base_model(input_ids=probes, use_cache=False).last_hidden_state.flatten(0, 1).float()
    shared_logits = hidden @ shared_head.T
    peak = shared_logits.gather(1, successor[probes.flatten(), None])[:, 0]
    return _Headless(model, shared_head, independent_head, shared_logits, hidden @ independent_head.T, peak)


def _random_model(
    shape: Shape, vocab: int, context: int, dtype: torch.dtype, generator: torch.Generator
) -> PreTrainedModel:
    model = empty_model(shape, vocab, context, str(generator.device), dtype)
    # Deep and wide models get smaller weights, so that the sum of the layers' outputs stays below
    # the embedding.
    reference = TARGET.layers * TARGET.width * TARGET.feed_forward
    std = 0.02 * min(1.0, reference / (shape.layers * shape.width * shape.feed_forward)) ** 0.25
    for weights in model.parameters():
        if weights.dim() > 1:
            _normal(weights, std, generator)
    # Large embeddings: after all layers the hidden state still identifies its token.
    _normal(_weight(model.get_input_embeddings()), 1.0, generator)
    return model


def _normal(weights: Tensor, std: float, generator: torch.Generator) -> None:
    """Sampled in float32 whatever the dtype, so that a seed gives one model, rounded to the
    dtype."""
    if weights.dtype == torch.float32:
        weights.normal_(std=std, generator=generator)
    else:
        weights.copy_(torch.empty_like(weights, dtype=torch.float32).normal_(std=std, generator=generator))


def _with_disagreements(successor: Tensor, agreed: float, generator: torch.Generator) -> Tensor:
    """`successor` `(vocab,)` in which a fraction 1 - `agreed` of the tokens have exchanged their
    successors."""
    disagreements = round((1 - agreed) * len(successor))
    if disagreements == 0:
        return successor
    chosen = torch.randperm(len(successor), generator=generator, device=successor.device)[:disagreements]
    changed = successor.clone()
    changed[chosen] = successor[chosen.roll(1)]
    return changed


def _weight_for(alpha: float, parts: list[_Headless], sampling: Sampling) -> float:
    """The weight of the shared logits at which the two models overlap by `alpha` on the probes."""
    chunks = torch.arange(PROBES, device=parts[0].peak.device).split(AT_A_TIME)

    def excess(weight: float) -> float:
        overlaps = []
        for rows in chunks:
            logits = (weight * part.shared_logits[rows] + part.independent_logits[rows] for part in parts)
            overlaps.append(overlap(*(standardise(of_model, sampling) for of_model in logits)))
        return float(torch.cat(overlaps).mean()) - alpha

    least, most = excess(0.0), excess(MAX_WEIGHT)
    if least > 0 or most < 0:
        raise ValueError(
            f"alpha is {alpha}; at temperature {sampling.temperature} these shapes have one from {alpha + least:.2f} "
            f"to {alpha + most:.2f}"
        )
    return float(brentq(excess, 0.0, MAX_WEIGHT, xtol=1e-4))


def _decisive_weight(parts: list[_Headless]) -> float:
    """Twice the smallest weight at which the argmax of both models is the successor on every
    probe."""
    return 2 * max(float((part.independent_logits.amax(dim=1) / part.peak.clamp_min(0)).max()) for part in parts)


def _weight(layer: nn.Module | None) -> Tensor:
    assert layer is not None
    assert isinstance(layer.weight, Tensor)
    return layer.weight


def _number_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are the token numbers."""
    words = Tokenizer(WordLevel({str(token): token for token in range(vocab)}, unk_token=str(BEGIN)))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=str(BEGIN), unk_token=str(BEGIN))
