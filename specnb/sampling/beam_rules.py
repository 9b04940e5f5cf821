"""Beam search, and its speculative version (appendix A.4): the same beams from fewer forward passes of the target.

The draft model's beam search, wider than the target's, builds a tree of gamma levels. One forward pass of the target
gives its distributions at all nodes. The target's beam search then continues down this tree while all its beams are in
it. Only the target's scores decide which beams are kept; the draft decides how many levels one forward pass covers.

Ties: of two candidates with equal scores, the one whose parent ranks higher comes first, then the lower token; of two
finished beams, the one that finished first.

>>> settings = BeamSettings(width=1, max_new_tokens=2)
>>> state = extend(start(), torch.tensor([[0.25, 0.75]]).log(), settings)
>>> state.paths, state.ended
(((1,),), False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from specnb.arguments import require_whole

Path = tuple[int, ...]
"""A node of the tree of all continuations: the tokens from the prompt to it."""


@runtime_checkable
class LogProbs(Protocol):
    """Next-token log-probabilities of a model or a table.

    Called with paths it returns `(len(paths), vocab)`. `keep(paths)` says that from now on only these paths and
    their descendants are asked for.
    """

    def __call__(self, paths: Sequence[Path], /) -> Tensor: ...

    def keep(self, paths: Iterable[Path], /) -> None: ...


@dataclass(frozen=True)
class BeamSettings:
    """The settings of a beam search, with the names and meanings of `generate` in transformers.

    A beam ends with a token of `eos`, or after `max_new_tokens`. Its score is the sum of its log-probabilities divided
    by its number of tokens (the last included) to the power `length_penalty`. Only the first `width` candidates of a
    level may finish. With `early_stopping=True` the search ends once `width` beams have finished; otherwise once no
    running beam can score above the worst of them, assuming that it ends now (False) or at the best length ("never").

    Raises `ValueError` for a width or max_new_tokens < 1, an infinite penalty or another `early_stopping`.

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
        given: Any = self.length_penalty
        penalty: Any = given if isinstance(given, Real) else float("nan")
        if not abs(penalty) < float("inf"):
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


class State(NamedTuple):
    """A beam search between two levels.

    paths, scores  the running beams, best first, and the sums of their log-probabilities `(beams,)`
    finished       the best finished beams so far, best first, at most `width`
    ended          whether the search is over
    """

    paths: tuple[Path, ...]
    scores: Tensor
    finished: tuple[Finished, ...] = ()
    ended: bool = False


def start() -> State:
    """The state before the first level: one beam, the prompt, at score 0.

    >>> start().paths
    ((),)
    """
    return State(((),), torch.zeros(1, dtype=torch.float64))


def best(totals: Float[Tensor, "rows columns"], count: int) -> tuple[list[int], list[int], Float[Tensor, " best"]]:
    """Rows, columns and values of the `count` largest of `totals` `(rows, columns)`, best first; ties as in the module.

    >>> best(torch.tensor([[1.0, 3.0], [3.0, 2.0]]), count=2)
    ([0, 1], [1, 0], tensor([3., 3.]))
    """
    flat = totals.flatten()
    count = min(count, len(flat))
    # topk gives the smallest value that is kept, but any order among equals; a stable sort gives ours.
    at = (flat >= flat.topk(count).values[-1]).nonzero()[:, 0]
    at = at[flat[at].argsort(descending=True, stable=True)[:count]]
    return (at // totals.shape[1]).tolist(), (at % totals.shape[1]).tolist(), flat[at]


def extend(state: State, log_p: Float[Tensor, "beams vocab"], settings: BeamSettings) -> State:
    """The state after one more level, with the target's log-probabilities `log_p` `(beams, vocab)` at `state.paths`.

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
        finished = tuple(sorted([*finished, *new], key=lambda beam: -beam.score)[:width])  # stable: the older first
    running = [i for i, end in enumerate(ends) if not end][:width]
    extended = State(tuple(children[i] for i in running), scores[running], finished)
    return extended._replace(ended=at_end or is_over(extended, settings))


def _totals(scores: Float[Tensor, " beams"], log_p: Float[Tensor, "beams vocab"]) -> Float[Tensor, "beams vocab"]:
    return scores.to(log_p.device)[:, None] + log_p  # float64, as scores are


def is_over(state: State, settings: BeamSettings) -> bool:
    """Whether no running beam of `state` can still become one of the best finished ones, as `settings` define it.

    >>> running = State(((0, 1),), torch.tensor([-4.0]), finished=(Finished(-1.0, (2,)),))
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
    state: State, draft: LogProbs, width: int, gamma: int, settings: BeamSettings
) -> Iterator[tuple[Path, ...]]:
    """Up to `gamma` levels of `width` paths each: the draft model's beam search from the running beams.

    It starts from the target's scores of these beams and adds the draft's log-probabilities. Paths that end are left
    out because no forward pass follows them, and so is the last level, where all paths end.

    >>> from specnb.sampling.beam_enumeration import DyadicLogProbs
    >>> draft, settings = DyadicLogProbs(vocab=3, seed=0), BeamSettings(width=1, max_new_tokens=8)
    >>> list(draft_levels(start(), draft, width=2, gamma=2, settings=settings))
    [((1,), (0,)), ((1, 0), (1, 1))]
    """
    paths, scores = state.paths, state.scores
    for _ in range(min(gamma, settings.max_new_tokens - 1 - len(paths[0]))):
        totals = _totals(scores, draft(paths))
        totals[:, list(settings.eos)] = -torch.inf
        parents, tokens, scores = best(totals, width)
        paths = tuple((*paths[parent], token) for parent, token in zip(parents, tokens, strict=True))
        yield paths


Rule = Callable[[State, Mapping[Path, Tensor], BeamSettings], list[State]]
"""From a state and the target's log-probabilities at the nodes of a tree to the states that the search reaches."""


def advance(state: State, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[State]:
    """The states that the target's search reaches with its log-probabilities `log_p` at the running beams and the tree.

    A level is accepted while all running beams are in the tree: top_w(target) is a subset of top_u(draft). The first
    level that is not is the last of the list. The list has one state at least, and one more than the tree has levels
    at most.

    >>> log_p = {(): torch.tensor([0.25, 0.75]).log(), (1,): torch.tensor([0.5, 0.5]).log()}
    >>> [state.paths for state in advance(start(), log_p, BeamSettings(width=1, max_new_tokens=8))]
    [((1,),), ((1, 0),)]
    """
    states: list[State] = []
    while not state.ended and all(path in log_p for path in state.paths):
        state = extend(state, torch.stack([log_p[path] for path in state.paths]), settings)
        states.append(state)
    return states


def advance_pooled(state: State, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[State]:
    """The "more elaborate procedure" of A.4: the target may continue every node of the tree, not only its own beams.

    A candidate above the target's own best descends from a node that the target's search dropped and the wider draft
    search kept. Each level scores at least what `advance` gives from the same beams, but the result is not that of
    beam search.

    >>> log_p = {(): torch.tensor([0.45, 0.55]).log(), (0,): torch.tensor([0.9, 0.1]).log()}
    >>> log_p[(1,)] = torch.tensor([0.5, 0.5]).log()
    >>> [state.paths for state in advance_pooled(start(), log_p, BeamSettings(width=1, max_new_tokens=8))]
    [((1,),), ((0, 0),)]
    """
    scores = dict(zip(state.paths, state.scores, strict=True))
    for path in sorted(log_p.keys() - scores.keys(), key=lambda path: (len(path), path)):
        scores[path] = scores[path[:-1]] + log_p[path[:-1]][path[-1]]
    states: list[State] = []
    while not state.ended and all(path in log_p for path in state.paths):
        others = {path for path in scores if len(path) == len(state.paths[0])} - set(state.paths)
        pool = [*state.paths, *sorted(others, key=lambda path: (-float(scores[path]), path))]
        wider = state._replace(paths=tuple(pool), scores=torch.stack([scores[path] for path in pool]))
        state = extend(wider, torch.stack([log_p[path] for path in pool]), settings)
        states.append(state)
    return states


def steps(
    target: LogProbs,
    settings: BeamSettings,
    draft: LogProbs | None = None,
    draft_width: int = 1,
    gamma: int = 0,
    rule: Rule = advance,
) -> Iterator[list[State]]:
    """The steps of a search, each as its list of states: draft a tree, evaluate the target once, apply `rule`.

    Without a `draft` each step has one state: plain beam search.

    >>> from specnb.sampling.beam_enumeration import DyadicLogProbs
    >>> target, settings = DyadicLogProbs(vocab=3, seed=0), BeamSettings(width=1, max_new_tokens=4)
    >>> [len(states) for states in steps(target, settings)]
    [1, 1, 1, 1]
    >>> [len(states) for states in steps(target, settings, draft=target, gamma=3)]
    [4]
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
