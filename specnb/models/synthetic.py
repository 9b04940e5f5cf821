"""Pairs of any published shape at a chosen acceptance: random weights whose two heads share a bigram distribution.

A synthetic pair spends every byte and every operation of its shapes, so its times are those of trained
models of these shapes; only its text means nothing. Each token has one successor that both models prefer,
by a weight that is set so that alpha comes out as asked; everything else in their logits is noise of
their own. At temperature 0, where a preference is all or nothing, the draft prefers another successor after
a share 1 - alpha of the tokens. It is all in the weights: any program that runs transformers runs a synthetic pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.optimize import brentq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specnb.models.loading import Pair
from specnb.models.packing import pack
from specnb.models.shapes import DRAFT, TARGET, Shape, empty_model
from specnb.sampling.distributions import Sampling, overlap, standardise

NOISE = 2.5  # standard deviation of the logits that the models do not share: alone they overlap by 0.08
PROBES = 1024  # contexts on which the weight of the shared distribution is set
MAX_WEIGHT = 100.0  # weight of the shared distribution
CHUNK_PROBS = 2**23  # probabilities that setting the weight looks at together, for each model
BEGIN = 0


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
    packed: bool = True,
    seed: int = 0,
) -> Pair:
    """A pair of these shapes whose alpha at `temperature` is `alpha`, up to how far contexts differ.

    `packed` as in `specnb.models.loading.load_pair`. At another temperature alpha is another; at 0 a pair that was synthetic
    at 1 agrees nearly always. The models are made where and as they stay; beside them this needs for a while
    float32 copies of the largest matrices, and 16 KiB for each token of `vocab`.

    Raises `ValueError` for an alpha outside [0.1, 0.99] or that no weight reaches: below it the models' own noise
    overlaps more (at a temperature above 1 it does so sooner), above it no weight is heavy enough.
    """
    if not 0.1 <= alpha <= 0.99:
        raise ValueError(f"alpha is {alpha}; a synthetic pair has one from 0.1 to 0.99")
    sampling = Sampling(temperature)
    generator = torch.Generator(device).manual_seed(seed)
    successor = torch.randperm(vocab, generator=generator, device=device)
    probes = torch.randint(vocab, (4, PROBES // 4), generator=generator, device=device)
    agreed = alpha if temperature == 0 else 1.0
    halves = [
        _half(target, successor, probes, vocab, context, dtype, generator),
        _half(draft, _with_disagreements(successor, agreed, generator), probes, vocab, context, dtype, generator),
    ]
    weight = _decisive_weight(halves) if temperature == 0 else _weight_for(alpha, halves, sampling)
    for half in halves:
        _weight(half.model.get_output_embeddings()).copy_(weight * half.likes + half.noise)
        if packed:
            pack(half.model)
    return Pair(halves[0].model, halves[1].model, _numbers(vocab))


class _Half(NamedTuple):
    """A model whose head is not set yet: the two matrices it is made of, and the logits of each on the probes.

    likes, noise  (vocab, width)   a head that prefers each token's successor by 1, and one of noise
    shared, own   (PROBES, vocab)  their logits, float32
    peak          (PROBES,)        of `shared`, at the successor
    """

    model: PreTrainedModel
    likes: Tensor
    noise: Tensor
    shared: Tensor
    own: Tensor
    peak: Tensor


def _half(
    shape: Shape, successor: Tensor, probes: Tensor, vocab: int, context: int, dtype: torch.dtype,
    generator: torch.Generator,
) -> _Half:  # fmt: skip
    model = _random_model(shape, vocab, context, dtype, generator)
    embedding = _weight(model.get_input_embeddings()).float()
    width = embedding.shape[1]
    likes = torch.empty_like(embedding)
    likes[successor] = torch.nn.functional.normalize(embedding, dim=-1) / width**0.5
    noise = torch.empty_like(embedding).normal_(std=NOISE / width**0.5, generator=generator)
    hidden = model.base_model(input_ids=probes, use_cache=False).last_hidden_state.flatten(0, 1).float()
    shared = hidden @ likes.T
    peak = shared.gather(1, successor[probes.flatten(), None])[:, 0]
    return _Half(model, likes, noise, shared, hidden @ noise.T, peak)


def _random_model(
    shape: Shape, vocab: int, context: int, dtype: torch.dtype, generator: torch.Generator
) -> PreTrainedModel:
    model = empty_model(shape, vocab, context, str(generator.device), dtype)
    # Deep and wide models get smaller weights, so that what the layers add does not drown the token itself.
    reference = TARGET.layers * TARGET.width * TARGET.feed_forward
    std = 0.02 * min(1.0, reference / (shape.layers * shape.width * shape.feed_forward)) ** 0.25
    for weights in model.parameters():
        if weights.dim() > 1:
            _normal(weights, std, generator)
    # Tall embeddings: after all layers the state still tells which token it came from.
    _normal(_weight(model.get_input_embeddings()), 1.0, generator)
    return model


def _normal(weights: Tensor, std: float, generator: torch.Generator) -> None:
    """Drawn in float32 whatever the dtype, one matrix at a time: a seed gives one model, rounded to the dtype."""
    if weights.dtype == torch.float32:
        weights.normal_(std=std, generator=generator)
    else:
        weights.copy_(torch.empty_like(weights, dtype=torch.float32).normal_(std=std, generator=generator))


def _with_disagreements(successor: Tensor, agreed: float, generator: torch.Generator) -> Tensor:
    """`successor` `(vocab,)` with those of a share 1 - `agreed` of the tokens passed on among them."""
    disagreements = round((1 - agreed) * len(successor))
    if disagreements == 0:
        return successor
    chosen = torch.randperm(len(successor), generator=generator, device=successor.device)[:disagreements]
    changed = successor.clone()
    changed[chosen] = successor[chosen.roll(1)]
    return changed


def _weight_for(alpha: float, halves: list[_Half], sampling: Sampling) -> float:
    """The weight of the shared distribution at which the two models overlap by `alpha` on the probes."""

    def excess(weight: float) -> float:
        overlaps = []
        for part in torch.arange(PROBES, device=halves[0].own.device).split(
            max(1, CHUNK_PROBS // halves[0].own.shape[1])
        ):
            p, q = (standardise(weight * half.shared[part] + half.own[part], sampling) for half in halves)
            overlaps.append(overlap(p, q))
        return float(torch.cat(overlaps).mean()) - alpha

    least, most = excess(0.0), excess(MAX_WEIGHT)
    if least > 0 or most < 0:
        raise ValueError(
            f"alpha is {alpha}; at temperature {sampling.temperature} these shapes have one from {alpha + least:.2f} "
            f"to {alpha + most:.2f}"
        )
    return float(brentq(excess, 0.0, MAX_WEIGHT, xtol=1e-4))


def _decisive_weight(halves: list[_Half]) -> float:
    """Twice the weight at which on every probe both models' first choice is the successor."""
    weight = 2 * max(float((half.own.amax(dim=1) / half.peak.clamp_min(0)).max()) for half in halves)
    if weight > MAX_WEIGHT:
        raise ValueError(f"these shapes need a weight of {weight:.3g} to agree at temperature 0; take wider ones")
    return weight


def _weight(layer: nn.Module | None) -> Tensor:
    assert layer is not None
    assert isinstance(layer.weight, Tensor)
    return layer.weight


def _numbers(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are the tokens' numbers."""
    words = Tokenizer(WordLevel({str(token): token for token in range(vocab)}, unk_token=str(BEGIN)))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=str(BEGIN), unk_token=str(BEGIN))
