"""Non-autoregressive drafts: the distributions of all draft tokens are made at once, from the
newest token (3.6)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from specnb.distributions import Sampling, sample, standardise_probs
from specnb.drafters import Context, Drafter, Proposal
from specnb.ngram import NgramModel, whole_tokens


class SkipGramDrafter(Drafter):
    """Draft token number k is sampled from the counted distribution of the token k places after the
    newest one.

    No draft token depends on another, so one call gives all of them; a sequence of tokens that are
    each plausible need not be plausible as a whole. `tokens` are counted, at distances 1 to
    `gamma`; a step with a larger gamma proposes nothing beyond. The tables stay on the host.

    >>> drafter = SkipGramDrafter(np.array([0, 1, 2] * 4), gamma=2, vocab=3)
    >>> context = Context(torch.tensor([[1, 2, 0]]), torch.tensor([3]))
    >>> drafter.propose(context, torch.tensor([[0.5, 0.5]])).draft_tokens
    tensor([[1, 2]])
    """

    def __init__(self, tokens: ArrayLike, gamma: int, vocab: int, sampling: Sampling = Sampling()) -> None:
        counted = whole_tokens("tokens", tokens)
        # Every k-th token of a sequence: its bigrams are the pairs at distance k.
        strided = [np.concatenate([counted[at::k] for at in range(k)]) for k in range(1, gamma + 1)]
        self.models = [NgramModel(one, 2, vocab) for one in strided]
        self.vocab, self.sampling = vocab, sampling

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        newest = context.newest[:, None].cpu().numpy()
        gamma = min(uniforms.shape[1], len(self.models))
        tables = np.stack([model.probs(newest) for model in self.models[:gamma]], axis=1)
        q = standardise_probs(torch.from_numpy(tables), self.sampling).to(uniforms.device)
        return Proposal(sample(q, uniforms[:, :gamma]), q)
