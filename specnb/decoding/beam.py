"""Beam search: the target's own, or the same result with fewer target forward passes by drafting (appendix A.4).

One prompt at a time. Its beams and all draft tokens are one tree in one row of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.arguments import require_whole
from specnb.decoding.request import Tokens, as_list, require_context, require_models, require_tokens
from specnb.drafting.model import ModelDrafter
from specnb.models.tree import TreeModel
from specnb.sampling.beam_rules import BeamSettings, State, start, steps


@dataclass(frozen=True)
class BeamRecord:
    """What each step of a search did.

    levels       (steps,)  levels by which the target's search advanced: 1 to gamma + 1
    nodes        (steps,)  tokens of the target's forward pass: at most width + draft_width gamma
    draft_nodes  for each step, the tokens of each forward pass of the draft
    states       the search after 0, 1, ... levels
    """

    levels: NDArray[np.int64]
    nodes: NDArray[np.int64]
    draft_nodes: list[tuple[int, ...]]
    states: list[State]

    @property
    def target_passes(self) -> int:
        """Sequential forward passes of the target, one per step, after the prompt's."""
        return len(self.levels)


@dataclass(frozen=True)
class BeamSearch:
    """The new tokens and scores of the beams found, best first, and the record of every step."""

    tokens: list[list[int]]
    scores: list[float]
    record: BeamRecord


def beam_search(
    target: PreTrainedModel,
    prompt: Sequence[int],
    draft: PreTrainedModel | None = None,
    *,
    width: int = 4,
    draft_width: int | None = None,
    gamma: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    eos: Tokens = None,
    sampling: None = None,
    progress: bool = True,
) -> BeamSearch:
    """The `width` best beams after `prompt`, as `generate(num_beams=width)` of transformers finds them.

    A `draft` proposes its own `draft_width` beams (2 `width` by default) for `gamma` levels, which saves target forward
    passes; the result is the same. Log-probabilities are float32 or better and summed in float64; see `BeamSettings`
    for the other settings. A progress bar shows after 3 seconds.

    Raises `ValueError` or `TypeError`, before anything is run, for: settings out of range, `draft_width` <
    `width`, `gamma` < 1 with a draft, a width above the number of tokens that are not in `eos`, anything in `sampling`
    (beam search does not sample), an empty prompt or tokens outside the vocabulary, a context longer than a model's
    limit, different vocabularies or devices, a model that cannot be run.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2)
    >>> target, draft = (LlamaForCausalLM(config).eval() for _ in range(2))
    >>> alone = beam_search(target, [0, 1], width=2, max_new_tokens=4)
    >>> beam_search(target, [0, 1], draft, width=2, gamma=2, max_new_tokens=4).tokens == alone.tokens
    True
    """
    if sampling is not None:
        raise ValueError(
            f"sampling is {sampling}; beam search does not sample, so it takes no temperature: use generate"
        )
    settings = BeamSettings(width, max_new_tokens, length_penalty, early_stopping, tuple(sorted(set(as_list(eos)))))
    draft_width = 2 * width if draft_width is None else draft_width
    drafter = ModelDrafter(draft) if draft is not None else None
    require_models(target, drafter)
    require_tokens([prompt], [0], eos, target.config.vocab_size)
    require_context(target, drafter, len(prompt), max_new_tokens)
    drafted = (draft_width, gamma) if draft is not None else (width, 1)  # without a draft neither is read
    _require_widths(settings, *drafted, target.config.vocab_size)

    capacity = width * max_new_tokens + width + (draft_width * gamma if draft is not None else 0)
    distributions = TreeModel(target, prompt, capacity)
    draft_distributions = TreeModel(draft, prompt, capacity) if draft is not None else None
    states = [start()]
    levels: list[int] = []
    nodes: list[int] = []
    draft_nodes: list[tuple[int, ...]] = []
    with tqdm(total=max_new_tokens, desc="levels", delay=3, leave=False, disable=not progress) as bar:
        for reached in steps(distributions, settings, draft_distributions, draft_width, gamma):
            states += reached
            levels.append(len(reached))
            nodes.append(sum(distributions.runs))
            draft_nodes.append(tuple(draft_distributions.runs) if draft_distributions is not None else ())
            for model_distributions in (distributions, draft_distributions):
                if model_distributions is not None:
                    model_distributions.runs.clear()
            bar.update(len(reached))
    record = BeamRecord(np.array(levels), np.array(nodes), draft_nodes, states)
    found = states[-1].finished
    return BeamSearch([list(beam.path) for beam in found], [beam.score for beam in found], record)


def _require_widths(settings: BeamSettings, draft_width: int, gamma: int, vocab: int) -> None:
    require_whole(draft_width=(draft_width, 1), gamma=(gamma, 1))
    if draft_width < settings.width:
        raise ValueError(
            f"draft_width is {draft_width} and width {settings.width}: fewer drafted beams than beams cannot cover "
            "them; draft at least as many"
        )
    most = vocab - len(settings.eos)
    for name, value in (("width", settings.width), ("draft_width", draft_width)):
        if value > most:
            raise ValueError(
                f"{name} is {value}, and {most} tokens of the vocabulary are not in eos; choose at most {most}"
            )
