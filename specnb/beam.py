"""Beam search, and its speculative version (appendix A.4): the same beams from fewer forward passes
of the target.

The draft model's beam search, wider than the target's, builds a tree of gamma levels. One forward
pass of the target gives its distributions at all nodes. The target's beam search then continues
down this tree while all its beams are in it. Only the target's scores decide which beams are kept;
the draft decides how many levels one forward pass covers.

The first part of this file is the search on any source of log-probabilities, the second gives it
models. A node of the tree is named by its path, the tokens from the prompt to it; the prompt itself
is the path ().

Ties: of two candidates with equal scores, the one whose parent ranks higher comes first, then the
lower token; of two finished beams, the one that finished first.

>>> settings = BeamSettings(width=1, max_new_tokens=2)
>>> beams = extend(start(), torch.tensor([[0.25, 0.75]]).log(), settings)
>>> beams.paths, beams.ended
(((1,),), False)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.cache import CachedModel
from specnb.check import require_agreement
from specnb.distributions import Sampling
from specnb.drafters import ModelDrafter
from specnb.models.known import one_at_a_time
from specnb.number_checks import require_whole
from specnb.sampler import (
    Tokens,
    as_drafter,
    as_list,
    named_settings,
    require_context,
    require_models,
    require_tokens,
    token_lists,
)
from specnb.support import TokenMap, vocabulary

Path = tuple[int, ...]
"""A node of the tree of all continuations: the tokens from the prompt to it."""


class LogProbs(Protocol):
    """Next-token log-probabilities of a model or a table.

    Called with paths it returns `(len(paths), vocab)`. `keep(paths)` says that from now on only
    these paths and their descendants are asked for.
    """

    def __call__(self, paths: Sequence[Path], /) -> Tensor: ...

    def keep(self, paths: Iterable[Path], /) -> None: ...


@dataclass(frozen=True)
class BeamSettings:
    """The settings of a beam search, with the names and meanings of `generate` in transformers.

    A beam ends with a token of `eos`, or after `max_new_tokens`. Its score is the sum of its
    log-probabilities divided by its number of tokens (the last included) to the power
    `length_penalty`. Only the first `width` candidates of a level may finish. With
    `early_stopping=True` the search ends once `width` beams have finished; otherwise once no
    running beam can score above the worst of them, assuming that it ends now (False) or at the best
    length ("never").

    Raises `ValueError` for a width or max_new_tokens < 1, an infinite penalty or another
    `early_stopping`.

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
        penalty: Any = self.length_penalty
        if not (isinstance(penalty, Real) and math.isfinite(penalty)):
            raise ValueError(f"length_penalty is {self.length_penalty!r}; it must be a finite number (1: the mean)")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'")

    def normalised(self, score: float, length: int) -> float:
        """The final score of a beam of `length` tokens whose log-probabilities sum to `score`."""
        return score / length**self.length_penalty  # type: ignore[no-any-return]  # int ** float is Any


class Finished(NamedTuple):
    """A beam that has ended, and its final score, length penalty included."""

    score: float
    path: Path


class Beams(NamedTuple):
    """The state of a beam search between two levels.

    paths, scores  the running beams, best first, and the sums of their log-probabilities `(beams,)`
    finished       the best finished beams so far, best first, at most `width`
    ended          whether the search is over
    """

    paths: tuple[Path, ...]
    scores: Tensor
    finished: tuple[Finished, ...] = ()
    ended: bool = False


def start() -> Beams:
    """The state before the first level: one beam, the prompt, at score 0.

    >>> start().paths
    ((),)
    """
    return Beams(((),), torch.zeros(1, dtype=torch.float64))


def best(totals: Float[Tensor, "rows columns"], count: int) -> tuple[list[int], list[int], Float[Tensor, " best"]]:
    """Rows, columns and values of the `count` largest of `totals` `(rows, columns)`, best first;
    ties as in the module.

    >>> best(torch.tensor([[1.0, 3.0], [3.0, 2.0]]), count=2)
    ([0, 1], [1, 0], tensor([3., 3.]))
    """
    flat = totals.flatten()
    count = min(count, len(flat))
    # topk gives the smallest value that is kept, but any order among equals; a stable sort gives
    # ours.
    at = (flat >= flat.topk(count).values[-1]).nonzero()[:, 0]
    at = at[flat[at].argsort(descending=True, stable=True)[:count]]
    return (at // totals.shape[1]).tolist(), (at % totals.shape[1]).tolist(), flat[at]


def extend(state: Beams, log_p: Float[Tensor, "beams vocab"], settings: BeamSettings) -> Beams:
    """The state after one more level, with the target's log-probabilities `log_p` `(beams, vocab)`
    at `state.paths`.

    Raises `FloatingPointError` if `log_p` has NaN.
    """
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
        # stable: the older first.
        finished = tuple(sorted([*finished, *new], key=lambda beam: -beam.score)[:width])
    running = [i for i, end in enumerate(ends) if not end][:width]
    extended = Beams(tuple(children[i] for i in running), scores[running], finished)
    return extended._replace(ended=at_end or is_over(extended, settings))


def _totals(scores: Float[Tensor, " beams"], log_p: Float[Tensor, "beams vocab"]) -> Float[Tensor, "beams vocab"]:
    return scores.to(log_p.device)[:, None] + log_p  # float64, as scores are


def is_over(state: Beams, settings: BeamSettings) -> bool:
    """Whether no running beam of `state` can still become one of the best finished ones, as
    `settings` define it.

    >>> running = Beams(((0, 1),), torch.tensor([-4.0]), finished=(Finished(-1.0, (2,)),))
    >>> is_over(running, BeamSettings(width=1, max_new_tokens=8))  # -4 / 2 tokens is below -1
    True
    """
    if len(state.finished) < settings.width:
        return False
    longest_is_best = settings.early_stopping == "never" and settings.length_penalty > 0
    length = settings.max_new_tokens if longest_is_best else len(state.paths[0])
    best_possible = settings.normalised(float(state.scores[0]), length)
    return settings.early_stopping is True or best_possible <= state.finished[-1].score


def draft_levels(
    state: Beams, draft: LogProbs, width: int, gamma: int, settings: BeamSettings
) -> Iterator[tuple[Path, ...]]:
    """Up to `gamma` levels of `width` paths each: the draft model's beam search from the running
    beams.

    It starts from the target's scores of these beams and adds the draft's log-probabilities. Paths
    that end are left out because no forward pass follows them, and so is the last level, where all
    paths end.
    """
    paths, scores = state.paths, state.scores
    for _ in range(min(gamma, settings.max_new_tokens - 1 - len(paths[0]))):
        totals = _totals(scores, draft(paths))
        totals[:, list(settings.eos)] = -torch.inf
        parents, tokens, scores = best(totals, width)
        paths = tuple((*paths[parent], token) for parent, token in zip(parents, tokens, strict=True))
        yield paths


Rule = Callable[[Beams, Mapping[Path, Tensor], BeamSettings], list[Beams]]
"""From a state and the target's log-probabilities at the nodes of a tree to the states that the
search reaches."""


def advance(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """The states that the target's search reaches with its log-probabilities `log_p` at the running
    beams and the tree.

    A level is accepted while all running beams are in the tree: top_w(target) is a subset of
    top_u(draft). The first level that is not is the last of the list. The list has one state at
    least, and one more than the tree has levels at most.

    >>> log_p = {(): torch.tensor([0.25, 0.75]).log(), (1,): torch.tensor([0.5, 0.5]).log()}
    >>> [state.paths for state in advance(start(), log_p, BeamSettings(width=1, max_new_tokens=8))]
    [((1,),), ((1, 0),)]
    """
    states: list[Beams] = []
    while not state.ended and all(path in log_p for path in state.paths):
        state = extend(state, torch.stack([log_p[path] for path in state.paths]), settings)
        states.append(state)
    return states


def steps(
    target: LogProbs,
    settings: BeamSettings,
    draft: LogProbs | None = None,
    draft_width: int = 1,
    gamma: int = 0,
    rule: Rule = advance,
) -> Iterator[list[Beams]]:
    """The steps of a search, each as its list of states: draft a tree, evaluate the target once,
    apply `rule`.

    Without a `draft` each step has one state: plain beam search.
    """
    state = start()
    while not state.ended:
        tree = draft_levels(state, draft, draft_width, gamma, settings) if draft is not None else ()
        paths = [*state.paths, *(path for level in tree for path in level)]
        states = rule(state, dict(zip(paths, target(paths), strict=True)), settings)
        state = states[-1]
        for distributions in (target, draft):
            if distributions is not None:
                distributions.keep(state.paths)
        yield states


class TreeModel:
    """`model` after `prompt`, evaluated over a tree of continuations, with slots for `capacity`
    nodes; a `LogProbs`.

    Each node is evaluated once, many nodes in one forward pass. It has its own slot in the cache,
    any that is free; it sees the slots of the prompt and of its ancestors, and its position follows
    from its depth. When beams are reordered or dropped, only the table of slots changes; no keys or
    values are moved. All but the last token of the prompt are evaluated at once; the last one is
    the root of the tree.

    runs  number of nodes of each forward pass after the prompt's
    """

    @torch.inference_mode()
    def __init__(
        self, model: PreTrainedModel, prompt: Sequence[int], capacity: int, token_map: TokenMap | None = None
    ) -> None:
        self.prompt = list(prompt)
        known = len(prompt) - 1
        slots = known + capacity
        self.runner = CachedModel(model, slots)
        self.runner.token_map = token_map
        # Row s: the slots that the node in slot s sees. On the host, where new nodes copy their
        # parents' rows.
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
        """The log-probabilities `(len(paths), vocab)` of the token after each path; float32 or
        better.

        One forward pass over the paths and ancestors that are not in the cache; none if all are.
        Raises `RuntimeError` if there are not enough free slots.
        """
        needed = dict.fromkeys(path[:end] for path in paths for end in range(len(path) + 1))
        # Parents before their children.
        missing = [path for path in needed if path not in self.slots]
        if missing:
            self._run(missing)
        return torch.stack([self.log_distributions[path] for path in paths])

    def keep(self, paths: Iterable[Path]) -> None:
        """Drops all nodes but `paths` and their ancestors, and the distributions of the
        ancestors."""
        paths = set(paths)
        alive = {path[:end] for path in paths for end in range(len(path) + 1)}
        self.free += [slot for path, slot in self.slots.items() if path not in alive]
        self.slots = {path: slot for path, slot in self.slots.items() if path in alive}
        self.log_distributions = {path: probs for path, probs in self.log_distributions.items() if path in paths}

    def taken_runs(self) -> tuple[int, ...]:
        """`runs` since the last call."""
        taken = tuple(self.runs)
        self.runs.clear()
        return taken

    @torch.inference_mode()
    def _run(self, paths: list[Path]) -> None:
        if len(paths) > len(self.free):
            raise RuntimeError(
                f"{len(paths)} new nodes need {len(paths)} cache slots, but {len(self.free)} are free: "
                "drop nodes with keep(), or give a larger capacity"
            )
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
        log_p = torch.log_softmax(logits[0] if logits.dtype == torch.float64 else logits[0].float(), dim=-1)
        # Cloned, because a view would keep the logits of the whole tree in memory.
        self.log_distributions.update((path, row.clone()) for path, row in zip(paths, log_p, strict=True))
        self.runs.append(len(paths))


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
    states: list[Beams]

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


@named_settings
@one_at_a_time
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
    progress: bool = True,
) -> BeamSearch:
    """The `width` best beams after `prompt`, as `generate(num_beams=width)` of transformers finds
    them.

    A `draft` proposes its own `draft_width` beams (2 `width` by default) for `gamma` levels, which
    saves target forward passes; the result is the same. Log-probabilities are float32 or better and
    summed in float64; see `BeamSettings` for the other settings. A progress bar shows after 3
    seconds.

    Raises `ValueError` or `TypeError`, before anything is run, for: settings out of range,
    `draft_width` < `width`, `gamma` < 1 with a draft, a width above the number of tokens that are
    not in `eos`, an empty prompt or tokens outside the vocabulary, a context longer than a model's
    limit, different vocabularies or devices, a model that cannot be run.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2)
    >>> target, draft = (LlamaForCausalLM(config).eval() for _ in range(2))
    >>> alone = beam_search(target, [0, 1], width=2, max_new_tokens=4)
    >>> beam_search(target, [0, 1], draft, width=2, gamma=2, max_new_tokens=4).tokens == alone.tokens
    True
    """
    settings = BeamSettings(width, max_new_tokens, length_penalty, early_stopping, tuple(sorted(set(as_list(eos)))))
    draft_width = 2 * width if draft_width is None else draft_width
    drafter = as_drafter(draft, Sampling(), target)
    require_models(target, drafter)
    if not (drafter is None or isinstance(drafter, ModelDrafter)):
        raise TypeError(f"draft is a {type(drafter).__name__}; a beam search drafts with a model: give that")
    require_tokens(token_lists([prompt]), settings.eos, vocabulary(target))
    require_context(target, drafter, len(prompt), max_new_tokens)
    # Without a draft neither is read.
    drafted = (draft_width, gamma) if draft is not None else (width, 1)
    _require_widths(settings, *drafted, vocabulary(target))

    capacity = width * max_new_tokens + width + (draft_width * gamma if draft is not None else 0)
    require_agreement(target, len(prompt) - 1 + capacity, tree=True)
    of_target = TreeModel(target, prompt, capacity)
    of_draft = None if drafter is None else TreeModel(drafter.model, prompt, capacity, drafter.token_map)
    found, levels, nodes, draft_nodes = [start()], list[int](), list[int](), list[tuple[int, ...]]()
    with tqdm(total=max_new_tokens, desc="levels", delay=3, leave=False, disable=not progress) as bar:
        for reached in steps(of_target, settings, of_draft, draft_width, gamma):
            found += reached
            levels.append(len(reached))
            nodes.append(sum(of_target.taken_runs()))
            draft_nodes.append(of_draft.taken_runs() if of_draft is not None else ())
            bar.update(len(reached))
    best_beams = found[-1].finished
    record = BeamRecord(np.array(levels), np.array(nodes), draft_nodes, found)
    return BeamSearch([list(beam.path) for beam in best_beams], [beam.score for beam in best_beams], record)


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
