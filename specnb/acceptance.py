"""Acceptance probabilities along sequences that the target wrote: the overlap of p and q (Corollary 3.6).

Nothing is drafted, so one set of sequences serves several draft models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.arguments import named_settings
from specnb.distributions import Sampling, overlap, standardise, standardise_probs
from specnb.loading import Pair
from specnb.ngram import NgramModel
from specnb.prompts import Prompts
from specnb.sampler import Hooks, Sampler
from specnb.statistics import Estimate, ratio_of_sums
from specnb.support import TokenMap, require_context, require_supported

Array = NDArray[np.float64]
Draft = PreTrainedModel | NgramModel
CHUNK = 64  # n-gram distributions computed at a time: three times as fast as all at once, which leave the cache


@dataclass(frozen=True)
class Acceptance:
    """Sequences of the target, and for each draft the overlap of p and q `(rows, new_tokens)` at every new token."""

    sequences: list[list[int]]
    beta: dict[str, Array]

    def alpha(self, draft: str = "draft", seed: int = 0) -> Estimate:
        """alpha of a draft, the mean of its beta (Corollary 3.6), with a 95% interval over rows."""
        beta = self.beta[draft]
        return ratio_of_sums(beta.sum(axis=1), np.full(len(beta), beta.shape[1]), seed=seed)


@named_settings
@torch.inference_mode()
def measure_acceptance(
    target: PreTrainedModel | Pair,
    prompts: Prompts,
    draft: Draft | Mapping[str, Draft] | Literal["auto"] = "auto",
    *,
    new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    batch: int = 48,
    progress: bool = True,
) -> Acceptance:
    """Let the target continue each prompt by `new_tokens` tokens, and run the draft once over the sequences.

    A row equals that of `generate` with gamma = 0 and the same seed and number; end tokens do not
    stop it. The distributions of `batch` rows are kept in memory at a time.

    Parameters
    ----------
    draft
        A model or an `NgramModel`, named "draft" in what is returned, or several by name; of a
        `Pair` by default its own.

    Examples
    --------
    >>> from specnb import load_pair
    >>> measure_acceptance(load_pair(), [[1], [2, 3]], new_tokens=5).beta["draft"].shape
    (2, 5)
    """
    own: Any = target.draft if isinstance(target, Pair) and draft == "auto" else draft
    drafts: Mapping[str, Draft] = own if isinstance(own, Mapping) else {"draft": own}
    for each in drafts.values():
        if not isinstance(each, NgramModel):
            require_supported(each)
    sampler = Sampler(target, None, sampling=sampling, compile=False, hooks=Hooks(keep_probs=True), progress=False)
    prompts = sampler.token_lists(prompts)
    sequences: list[list[int]] = []
    beta: dict[str, list[Tensor]] = {name: [] for name in drafts}
    for at in tqdm(range(0, len(prompts), batch), desc="sequences", delay=3, leave=False, disable=not progress):
        part = prompts[at : at + batch]
        generation = sampler.generate(part, max_new_tokens=new_tokens, seed=seed, numbers=range(at, at + len(part)))
        written = [[*prompt, *tokens] for prompt, tokens in zip(part, generation.tokens, strict=True)]
        assert generation.probs is not None
        p = torch.stack(generation.probs)
        for name, each in drafts.items():
            q = distributions_along(each, written, new_tokens, sampling, p.shape[-1]).to(p.device)
            beta[name].append(overlap(p, q))
        sequences += written
    return Acceptance(sequences, {name: torch.cat(parts).double().cpu().numpy() for name, parts in beta.items()})


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
    longest = max(lengths)
    require_context(source, longest - 1, 0)
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
