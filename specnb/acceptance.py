"""Acceptance probabilities along sequences that the target wrote: the overlap of p and q (Corollary 3.6).

Nothing is drafted, so one set of sequences serves several draft models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.arguments import named_settings, require_whole
from specnb.distributions import Sampling, overlap, standardise, standardise_probs
from specnb.ngram import NgramModel
from specnb.sampler import Hooks, Sampler
from specnb.statistics import Estimate, ratio_of_sums
from specnb.support import TokenMap, context_limit, require_same_vocabulary, require_supported

Array = NDArray[np.float64]
Draft = PreTrainedModel | NgramModel
CHUNK = 64  # n-gram distributions computed at a time, few enough for the processor's cache


@dataclass(frozen=True)
class Acceptance:
    """Sequences of the target, and the acceptance probability of each draft at every position.

    Attributes
    ----------
    entropy : (rows, new_tokens)
        Entropy of p in bits.
    beta : draft -> (rows, new_tokens)
        Overlap of p and q, the acceptance probability.
    accepted_prob : draft -> (rows, new_tokens)
        min(1, q(x)/p(x)) of the token x in the sequence: the probability that it was an accepted
        draft token. It has the same mean, alpha.
    """

    sequences: list[list[int]]
    entropy: Array
    beta: dict[str, Array]
    accepted_prob: dict[str, Array]

    def alpha(self, draft: str, seed: int = 0) -> Estimate:
        """alpha of a draft, the mean of its beta (Corollary 3.6), with a 95% interval over rows."""
        beta = self.beta[draft]
        return ratio_of_sums(beta.sum(axis=1), np.full(len(beta), beta.shape[1]), seed=seed)


@named_settings
@torch.inference_mode()
def measure_acceptance(
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    batch: int = 48,
    progress: bool = True,
) -> Acceptance:
    """Let the target continue each prompt by `new_tokens` tokens, and run each draft once over the sequences.

    A row equals that of `generate` with gamma = 0 and the same seed and number; end tokens do not
    stop it. The distributions of `batch` rows are kept in memory at a time.

    Parameters
    ----------
    drafts
        Models or `NgramModel`s, by name.

    Examples
    --------
    >>> from specnb import load_pair
    >>> pair = load_pair()
    >>> measure_acceptance(pair.target, {"draft": pair.draft}, [[1], [2, 3]], new_tokens=5).beta["draft"].shape
    (2, 5)
    """
    for draft in drafts.values():
        if isinstance(draft, PreTrainedModel):
            require_supported(draft)
        else:
            require_same_vocabulary(target, type(draft).__name__, draft.vocab)
    require_whole(new_tokens=(new_tokens, 1), batch=(batch, 1))
    new_tokens, batch = int(new_tokens), int(batch)
    sampler = Sampler(target, None, sampling=sampling, compile=False, hooks=Hooks(keep_probs=True), progress=False)
    prompts = sampler.token_lists(prompts)
    sequences: list[list[int]] = []
    entropy: list[Tensor] = []
    overlaps: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in drafts}
    for at in tqdm(range(0, len(prompts), batch), desc="sequences", delay=3, leave=False, disable=not progress):
        part = prompts[at : at + batch]
        generation = sampler.generate(part, max_new_tokens=new_tokens, seed=seed, numbers=range(at, at + len(part)))
        written = [[*prompt, *tokens] for prompt, tokens in zip(part, generation.tokens, strict=True)]
        assert generation.probs is not None
        p, x = torch.stack(generation.probs), torch.tensor(generation.tokens, device=target.device)[..., None]
        entropy.append(-torch.xlogy(p, p).sum(dim=-1) / np.log(2))
        for name, draft in drafts.items():
            q = distributions_along(draft, written, new_tokens, sampling, p.shape[-1]).to(p.device)
            accepted_prob = (q.gather(-1, x) / p.gather(-1, x)).clamp_max(1)[..., 0]
            # The sum of a float32 distribution can exceed 1 in its last bits.
            overlaps[name].append((overlap(p, q).clamp_max(1), accepted_prob))
        sequences += written
    beta = {name: _joined([of_part for of_part, _ in parts]) for name, parts in overlaps.items()}
    accepted_probs = {name: _joined([of_part for _, of_part in parts]) for name, parts in overlaps.items()}
    return Acceptance(sequences, _joined(entropy), beta, accepted_probs)


def _joined(parts: Sequence[Tensor]) -> Array:
    return torch.cat(list(parts)).double().cpu().numpy()


@torch.inference_mode()
def distributions_along(
    source: Draft,
    sequences: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling = Sampling(),
    vocab: int | None = None,
) -> Tensor:
    """Distributions `(rows, new_tokens, vocab)` for the last `new_tokens` tokens of each sequence, in one pass.

    `vocab` is the number of the target's tokens, if a draft model has another.
    """
    lengths = [len(sequence) for sequence in sequences]
    if not 1 <= new_tokens < min(lengths, default=0):
        raise ValueError(
            f"new_tokens is {new_tokens} and the sequences have {sorted(set(lengths))} tokens; each needs more"
        )
    if isinstance(source, NgramModel):
        return standardise_probs(_ngram_distributions(source, sequences, new_tokens), sampling)
    limit, longest = context_limit(source), max(lengths)
    if limit is not None and longest - 1 > limit:
        raise ValueError(
            f"a sequence of {longest} tokens needs {longest - 1} positions, and the model has {limit}; shorten it"
        )
    # Padding follows the sequence, where causal attention does not see it. The last token needs no
    # forward pass.
    padded = torch.tensor([[*one[:-1], *[0] * (longest - len(one))] for one in sequences], device=source.device)
    first, token_map = min(lengths) - 1 - new_tokens, TokenMap(source, vocab)
    output = source(input_ids=token_map.inputs(padded), use_cache=False, logits_to_keep=longest - 1 - first)
    logits = token_map.logits(output.logits)
    starts = torch.tensor([length - 1 - new_tokens - first for length in lengths], device=source.device)
    at = starts[:, None] + torch.arange(new_tokens, device=source.device)
    return standardise(logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1])), sampling)


def _ngram_distributions(model: NgramModel, sequences: Sequence[Sequence[int]], new_tokens: int) -> Tensor:
    back = model.order - 1
    padded = np.stack([np.concatenate([np.full(back, -1), one])[-new_tokens - back :] for one in sequences])
    contexts = np.lib.stride_tricks.sliding_window_view(padded, model.order, axis=1)[..., :-1]
    contexts = contexts.reshape(len(sequences) * new_tokens, back)
    distributions = [model.probs(contexts[at : at + CHUNK]) for at in range(0, len(contexts), CHUNK)]
    return torch.from_numpy(np.concatenate(distributions)).reshape(len(sequences), new_tokens, model.vocab)
