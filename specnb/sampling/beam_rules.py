"""Beam search, and its speculative version (appendix A.4): the same beams from fewer runs of the target.

A draft's own beam search, wider than the target's, grows a tree of gamma levels; one run of the target
gives its distributions at all nodes; and the target's beam search then walks down this tree as long as its beams
are in it. It is the target's search that walks, with the target's numbers: the draft decides only how
far one run carries.

Ties: of two candidates with equal scores that one is better whose parent stood higher, and of one
parent's the lower token; of two finished beams the one that finished first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Path = tuple[int, ...]
"""A node of the tree of all continuations: the tokens from the prompt to it."""


class LogProbs(Protocol):
    """Log-probabilities `(len(paths), vocab)` after each path, and leave to forget: of a model, or of any table."""

    def __call__(self, paths: Sequence[Path], /) -> Tensor: ...

    def keep(self, paths: Iterable[Path], /) -> None: ...


@dataclass(frozen=True)
class BeamSettings:
    """What is searched for; the words and their meaning are those of `generate` in transformers.

    A beam ends with a token of `eos`, or after `max_new_tokens`; its score is the sum of its
    log-probabilities over its number of tokens, that token included, to the power `length_penalty`.
    Among the candidates of a level only the first `width` may finish. The search ends with `width`
    finished beams if `early_stopping` is True; otherwise when no running beam can become better than the
    worst of them, where False supposes that it ends here and "never" that it runs to the end if that is better.

    Raises `ValueError` for a width or max_new_tokens < 1, an infinite penalty or another `early_stopping`.
    """

    width: int
    max_new_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("width", "max_new_tokens"):
            if not hasattr(getattr(self, name), "__index__") or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a whole number from 1")
        if not abs(self.length_penalty) < float("inf"):
            raise ValueError(f"length_penalty is {self.length_penalty}; it must be a finite number (1: the mean)")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'")

    def normalised(self, score: float, length: int) -> float:
        """The score of a beam of `length` tokens whose log-probabilities sum to `score`."""
        return score / length**self.length_penalty


class Finished(NamedTuple):
    """A beam that has ended, and its score with the length penalty."""

    score: float
    path: Path


class State(NamedTuple):
    """A beam search between two levels.

    paths, scores  the running beams, best first, and the sums of their log-probabilities `(beams,)`
    finished       the best finished ones so far, best first, at most `width`
    ended          whether the search is over
    """

    paths: tuple[Path, ...]
    scores: Tensor
    finished: tuple[Finished, ...] = ()
    ended: bool = False


def start() -> State:
    """A search that has not begun: one beam, the prompt, at score 0."""
    return State(((),), torch.zeros(1, dtype=torch.float64))


def best(totals: Tensor, count: int) -> tuple[list[int], list[int], Tensor]:
    """Row and column of the `count` largest `totals` `(rows, columns)`, and those, in order of the rule for ties."""
    flat = totals.flatten()
    count = min(count, len(flat))
    # topk says how small they get, but picks any among equals: the order is made here.
    at = (flat >= flat.topk(count).values[-1]).nonzero()[:, 0]
    at = at[flat[at].argsort(descending=True, stable=True)[:count]]
    return (at // totals.shape[1]).tolist(), (at % totals.shape[1]).tolist(), flat[at]


def extend(state: State, log_p: Tensor, settings: BeamSettings) -> State:
    """One level of the target's beam search: `log_p` `(beams, vocab)` are the distributions after `state.paths`."""
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
    going = State(tuple(children[i] for i in running), scores[running], finished)
    return going._replace(ended=at_end or _is_over(going, settings))


def _totals(scores: Tensor, log_p: Tensor) -> Tensor:
    return scores.to(log_p.device)[:, None] + log_p  # float64, as scores are


def _is_over(state: State, settings: BeamSettings) -> bool:
    if len(state.finished) < settings.width:
        return False
    to_the_end = settings.early_stopping == "never" and settings.length_penalty > 0
    length = settings.max_new_tokens if to_the_end else len(state.paths[0])
    hope = settings.normalised(float(state.scores[0]), length)
    return settings.early_stopping is True or hope <= state.finished[-1].score


def draft_levels(
    state: State, draft: LogProbs, width: int, gamma: int, settings: BeamSettings
) -> Iterator[tuple[Path, ...]]:
    """Up to `gamma` levels of `width` paths each: the draft's beam search from the running beams.

    It begins with the scores that the target gave these beams and adds the draft's log-probabilities.
    Paths that end are left out, since nothing is ever run after them, and so is the last level, where all end.
    """
    paths, scores = state.paths, state.scores
    for _ in range(min(gamma, settings.max_new_tokens - 1 - len(paths[0]))):
        totals = _totals(scores, draft(paths))
        totals[:, list(settings.eos)] = -torch.inf
        parents, tokens, scores = best(totals, width)
        paths = tuple((*paths[parent], token) for parent, token in zip(parents, tokens, strict=True))
        yield paths


Rule = Callable[[State, Mapping[Path, Tensor], BeamSettings], list[State]]


def advance(state: State, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[State]:
    """The states that the target's search reaches with its distributions `log_p` at the running beams and in the tree.

    A level is accepted while all running beams are in the tree, top_w(target) inside top_u(draft); the
    first that is not is the target's own and ends the list. At least one state, at most one more than levels.
    """
    states: list[State] = []
    while not state.ended and all(path in log_p for path in state.paths):
        state = extend(state, torch.stack([log_p[path] for path in state.paths]), settings)
        states.append(state)
    return states


def advance_pooled(state: State, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[State]:
    """The "more elaborate procedure" of A.4: every node of the tree is a beam that the target may continue.

    From the same parents nothing scores higher than the target's own best, so a candidate that does
    descends from a node that the target's search had dropped and the draft, wider, had kept. No level is
    worse than what `advance` makes of the same beams, but the result is not that of beam search.
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
    """The steps of a search: draft, one run of the target, the states it leads to. Without a draft, one at a time."""
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
