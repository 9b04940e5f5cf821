"""Beam search, and its speculative version (appendix A.4): the same beams from fewer passes of the target.

The draft's wider beam search builds a tree of gamma levels, evaluated by one pass of the target,
whose own search then goes down the tree while all its beams are in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.arguments import require_whole, shown
from specnb.cache import CachedModel, cache_bytes
from specnb.check import Check
from specnb.distributions import Sampling, at_least_float
from specnb.drafters import ModelDrafter
from specnb.fast import PrivateModel
from specnb.loading import Pair
from specnb.prompts import Prompts, Tokens, as_list, require_tokens, texts_of, token_lists
from specnb.sampler import require_models
from specnb.step import require_free
from specnb.support import TokenMap, require_context, vocabulary

LARGEST_PENALTY = 50  # a length to this power is a number, up to a million tokens, and so is its inverse
Path = tuple[int, ...]  # a node of the tree of continuations: the tokens from the prompt to it


class LogProbs(Protocol):
    """Log-probabilities `(paths, vocab)` after each path; after `keep` only descendants of its paths are asked for."""

    def __call__(self, paths: Sequence[Path], /) -> Tensor: ...

    def keep(self, paths: Iterable[Path], /) -> None: ...


@dataclass(frozen=True)
class BeamSettings:
    """The settings of a beam search, named as in `generate` of transformers.

    Parameters
    ----------
    width
        Number of beams; only the first `width` candidates of a level may finish.
    length_penalty
        A score is the log-probability over the number of tokens to this power.
    early_stopping
        True ends the search once `width` beams have finished; otherwise it ends once no running beam
        can score above the worst of them, by ending now (False) or at the best length ("never").

    Examples
    --------
    >>> BeamSettings(width=4, max_new_tokens=32, length_penalty=2.0).normalised(-8.0, length=2)
    -2.0
    """

    width: int
    max_new_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_whole(width=(self.width, 1), max_new_tokens=(self.max_new_tokens, 1))
        if not abs(self.length_penalty) <= LARGEST_PENALTY:
            raise ValueError(f"length_penalty is {self.length_penalty!r}; it must lie within {LARGEST_PENALTY} of 0")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'")

    def normalised(self, score: float, length: int) -> float:
        return score / float(length) ** float(self.length_penalty)  # type: ignore[no-any-return]  # float ** float is Any


class Finished(NamedTuple):
    score: float
    path: Path


class Beams(NamedTuple):
    """The state between two levels: running beams with their scores, and the best finished ones, best first."""

    paths: tuple[Path, ...]
    scores: Tensor
    finished: tuple[Finished, ...] = ()
    ended: bool = False


def start() -> Beams:
    """The state before the first level."""
    return Beams(((),), torch.zeros(1, dtype=torch.float64))


def best(totals: Float[Tensor, "rows columns"], count: int) -> tuple[list[int], list[int], Float[Tensor, " best"]]:
    """Rows, columns and values of the `count` largest entries, the first ones among equals."""
    flat = totals.flatten()
    count = min(count, len(flat))
    # topk gives the smallest value to keep, but any order among equals; a stable sort gives ours.
    at = (flat >= flat.topk(count).values[-1]).nonzero()[:, 0]
    at = at[flat[at].argsort(descending=True, stable=True)[:count]]
    return (at // totals.shape[1]).tolist(), (at % totals.shape[1]).tolist(), flat[at]


def extend(state: Beams, log_p: Float[Tensor, "beams vocab"], settings: BeamSettings) -> Beams:
    """The state after one more level, with the target's log-probabilities at `state.paths`."""
    if log_p.isnan().any():
        raise FloatingPointError("the target's distributions have NaN; look for an overflow in the model (its dtype)")
    width, length = settings.width, len(state.paths[0]) + 1
    at_end = length == settings.max_new_tokens
    parents, tokens, scores = best(_totals(state.scores, log_p), width * max(2, 1 + len(settings.eos)))
    children = [(*state.paths[parent], token) for parent, token in zip(parents, tokens, strict=True)]
    ends = [at_end or token in settings.eos for token in tokens]

    finished = state.finished
    if not (settings.early_stopping is True and len(finished) == width):
        ended = [i for i in range(min(width, len(children))) if ends[i]]
        new = [Finished(settings.normalised(float(scores[i]), length), children[i]) for i in ended]
        finished = tuple(sorted([*finished, *new], key=lambda beam: -beam.score)[:width])  # stable: the older first
    running = [i for i, end in enumerate(ends) if not end][:width]
    extended = Beams(tuple(children[i] for i in running), scores[running], finished)
    return extended._replace(ended=at_end or is_over(extended, settings))


def _totals(scores: Float[Tensor, " beams"], log_p: Float[Tensor, "beams vocab"]) -> Float[Tensor, "beams vocab"]:
    return scores.to(log_p.device)[:, None] + log_p  # float64, as scores are


def is_over(state: Beams, settings: BeamSettings) -> bool:
    """Whether no running beam can become one of the best finished ones."""
    if not state.paths or len(state.finished) < settings.width:
        return not state.paths
    longest_is_best = settings.early_stopping == "never" and settings.length_penalty > 0
    length = settings.max_new_tokens if longest_is_best else len(state.paths[0])
    best_possible = settings.normalised(float(state.scores[0]), length)
    return settings.early_stopping is True or best_possible <= state.finished[-1].score


def draft_levels(
    state: Beams, draft: LogProbs, width: int, gamma: int, settings: BeamSettings
) -> Iterator[tuple[Path, ...]]:
    """Up to `gamma` levels of `width` paths, which the draft finds from the running beams and their target scores.

    Paths that end are left out, and so is the last level: no forward pass follows them.
    """
    paths, scores = state.paths, state.scores
    for _ in range(min(gamma, settings.max_new_tokens - 1 - len(paths[0]))):
        totals = _totals(scores, draft(paths))
        totals[:, list(settings.eos)] = -torch.inf
        parents, tokens, scores = best(totals, width)
        paths = tuple((*paths[parent], token) for parent, token in zip(parents, tokens, strict=True))
        yield paths


def advance(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """The states that the target's search reaches while all running beams are in the tree, and the first beyond it."""
    states: list[Beams] = []
    while not state.ended and all(path in log_p for path in state.paths):
        state = extend(state, torch.stack([log_p[path] for path in state.paths]), settings)
        states.append(state)
    return states


def steps(
    target: LogProbs, settings: BeamSettings, draft: LogProbs | None = None, draft_width: int = 1, gamma: int = 0
) -> Iterator[list[Beams]]:
    """Yield the states of each step: draft a tree, evaluate the target once, `advance`."""
    state = start()
    while not state.ended:
        tree = draft_levels(state, draft, draft_width, gamma, settings) if draft is not None else ()
        paths = [*state.paths, *(path for level in tree for path in level)]
        states = advance(state, dict(zip(paths, target(paths), strict=True)), settings)
        state = states[-1]
        for distributions in (target, draft):
            if distributions is not None:
                distributions.keep(state.paths)
        yield states


class TreeModel:
    """`model` after `prompt`, evaluated over a tree of continuations with `capacity` nodes; a `LogProbs`.

    Each node is evaluated once, in a cache slot of its own; when beams are reordered or dropped, only
    the table of slots changes. `runs` has the nodes of each pass.
    """

    @torch.inference_mode()
    def __init__(
        self, model: PreTrainedModel, prompt: Sequence[int], capacity: int, token_map: TokenMap | None = None
    ) -> None:
        self.prompt = list(prompt)
        known = len(prompt) - 1
        slots = known + capacity
        self.runner = CachedModel(model, slots)
        self.runner.token_map = token_map or self.runner.token_map
        # Row s has the slots that the node in slot s sees; new nodes copy their parents' rows on the host.
        self.visible = np.zeros((slots, slots), dtype=bool)
        self.visible[:, :known] = True
        self.free = list(range(slots - 1, known - 1, -1))
        self.slots: dict[Path, int] = {}
        self.log_distributions: dict[Path, Tensor] = {}
        self.runs: list[int] = []
        if known:
            tokens = torch.tensor([self.prompt[:-1]], device=model.device)
            self.runner.run(tokens, torch.arange(known, device=model.device)[None], keep=1)

    def __call__(self, paths: Sequence[Path]) -> Tensor:
        """One pass over the nodes of `paths` that are not in the cache."""
        needed = dict.fromkeys(path[:end] for path in paths for end in range(len(path) + 1))
        missing = [path for path in needed if path not in self.slots]  # parents before their children
        if missing:
            self._run(missing)
        return torch.stack([self.log_distributions[path] for path in paths])

    def keep(self, paths: Iterable[Path]) -> None:
        paths = set(paths)
        alive = {path[:end] for path in paths for end in range(len(path) + 1)}
        self.free += [slot for path, slot in self.slots.items() if path not in alive]
        self.slots = {path: slot for path, slot in self.slots.items() if path in alive}
        self.log_distributions = {path: probs for path, probs in self.log_distributions.items() if path in paths}

    @torch.inference_mode()
    def _run(self, paths: list[Path]) -> None:
        for path in paths:
            slot = self.slots[path] = self.free.pop()
            if path:  # the root's row already shows it the prompt
                self.visible[slot] = self.visible[self.slots[path[:-1]]]
            self.visible[slot, slot] = True
        slots = [self.slots[path] for path in paths]
        device = self.runner.model.device
        logits = self.runner.run(
            torch.tensor([[path[-1] if path else self.prompt[-1] for path in paths]], device=device),
            torch.tensor([slots], device=device),
            keep=len(paths),
            positions=torch.tensor([[len(self.prompt) - 1 + len(path) for path in paths]], device=device),
            visible=torch.from_numpy(self.visible[slots])[None].to(device),
        )
        log_p = torch.log_softmax(at_least_float(logits[0]), dim=-1)
        # Cloned, because a view would keep the logits of the whole tree in memory.
        self.log_distributions.update((path, row.clone()) for path, row in zip(paths, log_p, strict=True))
        self.runs.append(len(paths))


@dataclass(frozen=True)
class BeamRecord:
    """What each step of a search did: `levels` by which it advanced, and `nodes` of the target's pass `(steps,)`;
    `states` after 0, 1, ... levels."""

    levels: NDArray[np.int64]
    nodes: NDArray[np.int64]
    states: list[Beams]

    @property
    def target_passes(self) -> int:
        return len(self.levels)


@dataclass(frozen=True)
class BeamSearch:
    """Tokens and scores of the best beams, best first, the record, and texts with a tokenizer."""

    tokens: list[list[int]]
    scores: list[float]
    record: BeamRecord
    texts: list[str] | None = None


def beam_search(
    target: PreTrainedModel | Pair,
    prompt: Prompts,
    draft: PreTrainedModel | ModelDrafter | Literal["auto"] | None = "auto",
    *,
    width: int = 4,
    draft_width: int | None = None,
    gamma: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    eos: Tokens = None,
    tokenizer: Any = None,
    progress: bool = True,
) -> BeamSearch:
    """The `width` best beams after `prompt`, as `generate(num_beams=width)` of transformers finds them.

    Parameters
    ----------
    prompt
        One prompt, in any form that `Sampler.generate` takes.
    draft
        A draft model, which changes no result. "auto" is that of a `Pair`, or None.
    draft_width, gamma
        Beams of the draft, by default 2 `width`, and levels drafted per step.
    width, max_new_tokens, length_penalty, early_stopping, eos
        As in `BeamSettings`.

    Examples
    --------
    >>> from specnb import load_pair
    >>> len(beam_search(load_pair(), [1], width=2, gamma=2, max_new_tokens=4).tokens)
    2
    """
    if isinstance(target, Pair):
        draft = target.draft if isinstance(draft, str) and draft == "auto" else draft
        tokenizer, target = tokenizer or target.tokenizer, target.target
    settings = BeamSettings(width, max_new_tokens, length_penalty, early_stopping, tuple(sorted(set(as_list(eos)))))
    draft_width = 2 * width if draft_width is None else draft_width
    drafter: Any = None if isinstance(draft, str) and draft == "auto" else draft
    if isinstance(draft, PreTrainedModel) and isinstance(target, PreTrainedModel):
        drafter = ModelDrafter(draft, Sampling(), vocab=vocabulary(target))
    require_models(target, drafter)
    if not isinstance(drafter, ModelDrafter | None):
        raise TypeError(f"draft is {shown(drafter)}; a search drafts with a model: give one, a ModelDrafter or None")
    prompts = token_lists(prompt, target, tokenizer)
    require_tokens(prompts, settings.eos, vocabulary(target))
    if len(prompts) != 1:
        raise ValueError(f"there are {len(prompts)} prompts; a search has one")
    prompt = prompts[0]
    drafting = None if drafter is None else drafter.draft_model
    require_context([len(prompt)], max_new_tokens, target=target, draft=drafting)
    require_whole(draft_width=(draft_width, 1), gamma=(gamma, 1))

    nodes = width + (draft_width * gamma if drafter is not None else 0)  # of a pass
    capacity = width * max_new_tokens + nodes
    slots = len(prompt) - 1 + capacity
    # Of each model the cache and `visible`; of the target's pass the mask, logits, log-probabilities and their copies.
    caches = sum(slots * (cache_bytes(model) + slots) for model in (target, drafting) if model is not None)
    in_a_pass = nodes * (slots + 3 * vocabulary(target)) * max(target.dtype.itemsize, torch.float32.itemsize)
    require_free(target.device, caches + in_a_pass, f"{width} beams", "ask for fewer beams or tokens")
    private = PrivateModel(target)
    check = Check(target, gamma)
    check.new_batch(private.modules, slots, tree=True)
    of_target = TreeModel(private.modules, prompt, capacity)
    of_draft = None if drafter is None else TreeModel(drafter.private.modules, prompt, capacity, drafter.token_map)
    states, levels = [start()], list[int]()
    with tqdm(total=max_new_tokens, desc="levels", delay=3, leave=False, disable=not progress) as bar:
        for reached in steps(of_target, settings, of_draft, draft_width, gamma):
            states += reached
            levels.append(len(reached))
            bar.update(len(reached))
    best_beams = states[-1].finished
    for beam in (best_beams[0], best_beams[-1]):
        check.score(prompt, beam.path, beam.score / settings.normalised(1.0, len(beam.path)))
    record = BeamRecord(np.array(levels), np.array(of_target.runs), states)
    tokens = [list(beam.path) for beam in best_beams]
    return BeamSearch(tokens, [beam.score for beam in best_beams], record, texts_of(tokens, tokenizer))
