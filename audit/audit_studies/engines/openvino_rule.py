"""The acceptance rule of OpenVINO GenAI 2026.4.1.0 with a draft model, as its source has it, on any
pair.

`Sampler::validate_candidate` and `sample_from_sequence_group` in
`src/cpp/src/sampling/sampler.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specnb.distributions import Sampling, standardise
from specnb.loading import Pair


def step(p: Tensor, q: Tensor, drafts: Sequence[int], first: bool, generator: torch.Generator) -> list[int]:
    """The tokens of one step, from `p` `(gamma + 1, vocab)`, `q` `(gamma, vocab)` and the draft
    tokens.

    A draft token x is accepted if r <= q(x)/p(y), y an unrelated sample of p and r one of 101
    values; in the `first` step of a completion, if x = y. After a rejection the token is sampled
    from p at the *next* position:

    >>> certain = torch.eye(3)
    >>> step(certain, certain[[1, 0]], [1, 0], True, torch.Generator())
    [1]
    """
    for at, x in enumerate(drafts):
        y = sample(p[at], generator)
        r = int(torch.randint(0, 101, (), generator=generator)) / 100
        if not (x == y if first else r <= float(q[at, x] / p[at, y])):
            return [*drafts[:at], sample(p[at + 1], generator)]
    return [*drafts, sample(p[-1], generator)]


def sample(probs: Tensor, generator: torch.Generator) -> int:
    """One token of `probs` `(vocab,)`."""
    return int(torch.multinomial(probs, 1, generator=generator))


@torch.inference_mode()
def completion(pair: Pair, prompt: Sequence[int], new_tokens: int, gamma: int, seed: int) -> list[int]:
    """`new_tokens` tokens after `prompt` at temperature 1. Runs the models on the whole sequence
    each time."""
    generator = torch.Generator().manual_seed(seed)

    def probs(model: torch.nn.Module, ids: list[int], keep: int) -> Tensor:
        return standardise(model(torch.tensor([ids]), logits_to_keep=keep).logits[0], Sampling())

    tokens: list[int] = []
    while len(tokens) < new_tokens:
        ids, q = [*prompt, *tokens], []
        for _ in range(gamma):
            q.append(probs(pair.draft, ids, 1)[-1])
            ids = [*ids, sample(q[-1], generator)]
        p = probs(pair.target, ids, gamma + 1)
        tokens += step(p, torch.stack(q), ids[-gamma:], not tokens, generator)
    return tokens[:new_tokens]
