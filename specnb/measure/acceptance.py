"""Alpha on text that the target wrote: the overlap of both distributions at every position (Corollary 3.6).

Nothing is drafted or accepted here, so one text serves any number of drafts. What a loop accepts, and
at which prefixes it asks, is in the record of a generation (`specnb.decoding.record`).
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

from specnb.decoding.loop import generate
from specnb.drafting.ngram import NgramModel
from specnb.models.support import context_limit, require_same_vocabulary, require_supported
from specnb.sampling.distributions import Sampling, overlap, standardise, standardise_probs

Array = NDArray[np.float64]
Draft = PreTrainedModel | NgramModel
CHUNK = 64  # n-gram distributions made at a time, few enough to stay in the processor's cache


@dataclass(frozen=True)
class Acceptance:
    """What the target wrote, and how each draft would have fared at every position of it.

    texts    one list of tokens per row, prompt and new tokens
    entropy  (rows, new_tokens)          of p, in bits
    beta     draft -> (rows, new_tokens) overlap of p and q: the chance that a draft is accepted there
    kept     draft -> (rows, new_tokens) min(1, q(x)/p(x)) of the token x that stands there: the chance
             that it came as an accepted draft, given the text
    Both have the mean alpha: `kept` is one draw from p of what `beta` sums over all tokens.
    """

    sequences: list[list[int]]
    entropy: Array
    beta: dict[str, Array]
    kept: dict[str, Array]


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
    """The target continues each prompt by `new_tokens` tokens, alone; every draft is then run once over the text.

    All distributions are made by the same `sampling`. An end of text does not stop a row, so all positions count
    alike. The distributions of `batch` rows are held at a time: batch x new_tokens x vocab numbers, twice. A row
    depends on `seed`, its number and its prompt, and is the one that `generate` writes with gamma = 0.
    Raises `ValueError` for a draft of another vocabulary, and what `generate` raises.
    """
    for draft in drafts.values():
        if isinstance(draft, PreTrainedModel):
            require_supported(draft)
        require_same_vocabulary(target, draft.vocab if isinstance(draft, NgramModel) else draft.config.vocab_size)
    sequences: list[list[int]] = []
    entropy: list[Tensor] = []
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in drafts}
    for at in tqdm(range(0, len(prompts), batch), desc="sequences", delay=3, leave=False, disable=not progress):
        part = prompts[at : at + batch]
        written, p = _generate_with_probs(target, part, new_tokens, sampling, seed, list(range(at, at + len(part))))
        entropy.append(-torch.xlogy(p, p).sum(dim=-1) / np.log(2))
        for name, draft in drafts.items():
            q = distributions_along(draft, written, new_tokens, sampling).to(p.device)
            found[name].append((overlap(p, q), _kept(p, q, written)))
        sequences += written
    beta = {name: _joined([beta for beta, _ in parts]) for name, parts in found.items()}
    kept = {name: _joined([kept for _, kept in parts]) for name, parts in found.items()}
    return Acceptance(sequences, _joined(entropy), beta, kept)


def _generate_with_probs(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling,
    seed: int,
    rows: Sequence[int],
) -> tuple[list[list[int]], Tensor]:
    """The sequences that the target samples alone, and the p `(rows, new_tokens, vocab)` of their new tokens."""
    made = generate(
        target, prompts, gamma=0, max_new_tokens=new_tokens, sampling=sampling, seed=seed, rows=rows, progress=False,
        keep_probs=True,
    )  # fmt: skip
    assert made.probs is not None
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(prompts, made.tokens, strict=True)]
    return sequences, torch.stack(made.probs)


def _kept(p: Tensor, q: Tensor, sequences: list[list[int]]) -> Tensor:
    written = torch.tensor([text[-p.shape[1] :] for text in sequences], device=p.device)[..., None]
    return (q.gather(-1, written) / p.gather(-1, written)).clamp_max(1)[..., 0]


def _joined(parts: Sequence[Tensor]) -> Array:
    return torch.cat(list(parts)).double().cpu().numpy()


@torch.inference_mode()
def distributions_along(
    source: Draft, sequences: Sequence[Sequence[int]], new_tokens: int, sampling: Sampling = Sampling()
) -> Tensor:
    """The distributions `(rows, new_tokens, vocab)` that `source` has for the last `new_tokens` of each text, in one run.

    Texts may differ in length. Raises `ValueError` unless each has a token before those, and for a text that
    is longer than a model's limit.
    """
    lengths = [len(text) for text in sequences]
    if not 1 <= new_tokens < min(lengths, default=0):
        raise ValueError(
            f"new_tokens is {new_tokens} and the texts have {sorted(set(lengths))} tokens; each needs more"
        )
    if isinstance(source, NgramModel):
        return standardise_probs(_ngram_distributions(source, sequences, new_tokens), sampling)
    limit, longest = context_limit(source), max(lengths)
    if limit is not None and longest - 1 > limit:
        raise ValueError(f"a text of {longest} tokens is run but for its last, and the model has {limit} positions")
    # Padding stands behind a text, where nothing of it sees it; the last token is run by none.
    padded = torch.tensor([[*text[:-1], *[0] * (longest - len(text))] for text in sequences], device=source.device)
    first = min(lengths) - 1 - new_tokens
    logits = source(input_ids=padded, use_cache=False, logits_to_keep=longest - 1 - first).logits
    starts = torch.tensor([length - 1 - new_tokens - first for length in lengths], device=source.device)
    at = starts[:, None] + torch.arange(new_tokens, device=source.device)
    return standardise(logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1])), sampling)


def _ngram_distributions(model: NgramModel, sequences: Sequence[Sequence[int]], new_tokens: int) -> Tensor:
    back = model.order - 1
    padded = np.stack([np.concatenate([np.full(back, -1), text])[-new_tokens - back :] for text in sequences])
    contexts = np.lib.stride_tricks.sliding_window_view(padded, model.order, axis=1)[..., :-1]
    contexts = contexts.reshape(len(sequences) * new_tokens, back)
    distributions = [model.probs(contexts[at : at + CHUNK]) for at in range(0, len(contexts), CHUNK)]
    return torch.from_numpy(np.concatenate(distributions)).reshape(len(sequences), new_tokens, model.vocab)
