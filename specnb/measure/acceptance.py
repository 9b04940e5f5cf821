"""Acceptance probabilities along sequences that the target wrote: the overlap of p and q (Corollary
3.6).

Nothing is drafted or verified, so one set of sequences serves several draft models. What a decoding
loop accepted is in the record of a generation (`specnb.decoding.record`).
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

from specnb.decoding.generate import Hooks, generate
from specnb.decoding.given_tokens import named_settings
from specnb.distributions import Sampling, overlap, standardise, standardise_probs
from specnb.drafting.ngram import NgramModel
from specnb.measure.statistics import Estimate, ratio_of_sums
from specnb.models.support import context_limit, require_same_vocabulary, require_supported
from specnb.models.token_map import TokenMap

Array = NDArray[np.float64]
Draft = PreTrainedModel | NgramModel
CHUNK = 64  # n-gram distributions computed at a time, few enough for the processor's cache


@dataclass(frozen=True)
class Acceptance:
    """Sequences of the target, and the acceptance probability of each draft model at every
    position.

    sequences      one list of tokens per row, prompt and new tokens
    entropy        (rows, new_tokens)          entropy of p in bits
    beta           draft -> (rows, new_tokens) overlap of p and q: the probability that a draft
                   token is accepted
    accepted_prob  draft -> (rows, new_tokens) min(1, q(x)/p(x)) of the token x in the sequence: the
                   probability that it was an accepted draft token, given the sequence
    The last two have the same expectation, alpha: E_p[min(1, q/p)] = sum min(p, q).
    """

    sequences: list[list[int]]
    entropy: Array
    beta: dict[str, Array]
    accepted_prob: dict[str, Array]

    def alpha(self, draft: str, seed: int = 0) -> Estimate:
        """alpha of a draft, the mean of its beta (Corollary 3.6), with a 95% interval over rows.

        >>> beta = np.full((8, 2), 0.75)
        >>> print(Acceptance([], beta, {"draft": beta}, {"draft": beta}).alpha("draft"))
        0.75 [0.75, 0.75] (n = 16)
        """
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
    """The target continues each prompt by `new_tokens` tokens; each draft model then runs once over
    the sequences.

    All distributions are standardised by `sampling`. An end-of-sequence token does not stop a row.
    A row depends on `seed`, its number and its prompt, and equals that of `generate` with gamma =
    0. Memory: the distributions of `batch` rows, batch x new_tokens x vocab numbers, twice. A draft
    model may have more or fewer tokens than the target, as in `generate`. Raises `ValueError` for
    an n-gram model of another vocabulary, and what `generate` raises.

    >>> from specnb import load_pair
    >>> pair = load_pair()
    >>> found = measure_acceptance(pair.target, {"draft": pair.draft}, [[1], [2, 3]], new_tokens=5)
    >>> found.beta["draft"].shape, [len(sequence) for sequence in found.sequences]
    ((2, 5), [6, 7])
    """
    for draft in drafts.values():
        if isinstance(draft, PreTrainedModel):
            require_supported(draft)
        elif isinstance(draft, NgramModel):
            require_same_vocabulary(target, type(draft).__name__, draft.vocab)
        else:
            raise TypeError(f"a draft is a {type(draft).__name__}; it must be a model or an NgramModel")
    sequences: list[list[int]] = []
    entropy: list[Tensor] = []
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in drafts}
    for at in tqdm(range(0, len(prompts), batch), desc="sequences", delay=3, leave=False, disable=not progress):
        part = prompts[at : at + batch]
        made = generate(
            target, part, gamma=0, max_new_tokens=new_tokens, sampling=sampling, seed=seed, progress=False,
            hooks=Hooks(rows=range(at, at + len(part)), keep_probs=True),
        )  # fmt: skip
        written = [[*prompt, *tokens] for prompt, tokens in zip(part, made.tokens, strict=True)]
        assert made.probs is not None
        p, x = torch.stack(made.probs), torch.tensor(made.tokens, device=target.device)[..., None]
        entropy.append(-torch.xlogy(p, p).sum(dim=-1) / np.log(2))
        for name, draft in drafts.items():
            q = distributions_along(draft, written, new_tokens, sampling, p.shape[-1]).to(p.device)
            accepted_prob = (q.gather(-1, x) / p.gather(-1, x)).clamp_max(1)[..., 0]
            # The sum of a float32 distribution can exceed 1 in its last bits.
            found[name].append((overlap(p, q).clamp_max(1), accepted_prob))
        sequences += written
    beta, accepted = ({name: _joined([one[at] for one in parts]) for name, parts in found.items()} for at in (0, 1))
    return Acceptance(sequences, _joined(entropy), beta, accepted)


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
    """Distributions `(rows, new_tokens, vocab)` of `source` for the last `new_tokens` tokens of
    each sequence.

    One forward pass over all sequences, which may differ in length. `vocab` is the number of the
    target's tokens, if a draft model has another (`specnb.models.token_map`). Raises `ValueError`
    unless each has a token before those, and for a sequence longer than the model's positions.

    >>> source = NgramModel(np.array([0, 1, 2, 0, 1]), order=2, vocab=3)
    >>> distributions_along(source, [[0, 1, 2], [2, 0]], 1).shape
    torch.Size([2, 1, 3])
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
