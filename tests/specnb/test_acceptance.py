"""Overlaps along the target's sequences against forward passes without a cache, one prefix at a
time."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.acceptance import distributions_along, measure_acceptance
from specnb.distributions import Sampling, overlap, standardise_probs
from specnb.ngram import NgramModel
from specnb.sampler import generate

VOCAB, NEW = 5, 6
PROMPTS = [[0, 1, 2], [3], [4, 4, 0, 1, 2], [2, 2]]
SAMPLINGS = [Sampling(), Sampling(0), Sampling(0.5), Sampling(top_k=2), Sampling(top_p=0.6)]
TARGET, MODEL = tiny.llama(VOCAB, dtype=torch.float64), tiny.gpt2(VOCAB, dtype=torch.float64)
NGRAM = NgramModel(np.random.default_rng(0).integers(VOCAB, size=80), 3, VOCAB)
UNIGRAM = NgramModel(np.array([0, 1, 1, 4]), 1, VOCAB)
DRAFTS: dict[str, PreTrainedModel | NgramModel] = {
    "model": MODEL, "trigram": NGRAM, "unigram": UNIGRAM, "itself": TARGET,
}  # fmt: skip


def slow_distribution(source: PreTrainedModel | NgramModel, prefix: list[int], sampling: Sampling) -> Tensor:
    if isinstance(source, NgramModel):
        recent = ([-1] * (source.order - 1) + prefix)[len(prefix) :]
        probs = source.probs(np.array([recent], dtype=np.int64))[0]
        return standardise_probs(torch.from_numpy(probs), sampling)
    return tiny.next_distributions(source, [prefix], sampling)[0]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_overlaps_are_those_at_every_prefix_of_plain_decoding(sampling: Sampling) -> None:
    options = {"sampling": sampling, "seed": 7}
    found = measure_acceptance(TARGET, PROMPTS, DRAFTS, new_tokens=NEW, batch=3, **options)  # type: ignore[arg-type]
    plain = generate(TARGET, PROMPTS, gamma=0, max_new_tokens=NEW, **options).tokens  # type: ignore[arg-type]
    assert found.sequences == [prompt + tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    for row, sequence in enumerate(found.sequences):
        for at in range(NEW):
            p = slow_distribution(TARGET, sequence[: at - NEW], sampling)
            for name, draft in DRAFTS.items():
                q = slow_distribution(draft, sequence[: at - NEW], sampling)
                assert found.beta[name][row, at] == pytest.approx(float(overlap(p, q)), abs=1e-9)
    if sampling.temperature == 0:  # alpha is then an agreement rate
        assert set(found.beta["model"].flat) | set(found.beta["itself"].flat) <= {0, 1}


def test_overlaps_are_at_most_1_however_float32_sums_are_rounded() -> None:
    target = tiny.llama(VOCAB)
    found = measure_acceptance(tiny.without_tokenizer(target, target), PROMPTS * 8, new_tokens=NEW)
    assert found.beta["draft"].max() <= 1
    assert found.alpha().value == pytest.approx(1, abs=1e-5)


def test_what_cannot_be_measured_is_refused() -> None:
    for sequences, new in (([[0, 1], [0, 1, 2]], 2), ([[0, 1]], 0), ([], 1)):
        with pytest.raises(ValueError, match="new_tokens is"):
            distributions_along(TARGET, sequences, new)
    distributions_along(MODEL, [[0] * (tiny.LIMIT + 1)], 2)  # the last token needs no forward pass
    with pytest.raises(ValueError, match="positions"):
        distributions_along(MODEL, [[0] * (tiny.LIMIT + 2)], 2)
    with pytest.raises(TypeError, match="training mode"):
        measure_acceptance(TARGET, PROMPTS, tiny.llama(VOCAB).train())
