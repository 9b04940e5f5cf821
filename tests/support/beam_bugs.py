"""Known bugs of speculative beam search: wrong rules for following the drafted tree.

The reference is the search without drafts, which is compared with transformers on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from specnb import beam as beam_rules
from specnb.beam import Beams, BeamSettings, Path, Rule, advance
from specnb_audit.bugs.bug import KnownBug


def with_functions(**wrong: Any) -> Rule:
    """`advance` with other functions in place of those that it calls."""

    def rule(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
        with patch.multiple(beam_rules, **wrong):
            return advance(state, log_p, settings)

    return rule


def one_may_be_missing(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """A level is accepted with w - 1 of the beams inside the tree; the one outside is dropped."""
    states = []
    while not state.ended:
        inside = [i for i, path in enumerate(state.paths) if path in log_p]
        if len(inside) < max(1, len(state.paths) - 1):
            break
        kept = state._replace(paths=tuple(state.paths[i] for i in inside), scores=state.scores[inside])
        state = beam_rules.extend(kept, torch.stack([log_p[path] for path in kept.paths]), settings)
        states.append(state)
    return states


def wrong_parents(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """Children keep their scores and tokens, and are attached to the next beam."""
    right = beam_rules.best

    def best(totals: Tensor, count: int) -> tuple[list[int], list[int], Tensor]:
        parents, tokens, scores = right(totals, count)
        return [(parent + 1) % len(totals) for parent in parents], tokens, scores

    return with_functions(best=best)(state, log_p, settings)


def scores_not_reordered(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """Scores stay where they were while their beams change places."""
    right = beam_rules.best

    def best(totals: Tensor, count: int) -> tuple[list[int], list[int], Tensor]:
        parents, tokens, scores = right(totals, count)
        return parents, tokens, scores.roll(1)

    return with_functions(best=best)(state, log_p, settings)


def one_level_off(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """Below the first level a node is given its parent's distribution."""
    shifted = {path: log_p.get(path[:-1], probs) if path not in state.paths else probs for path, probs in log_p.items()}
    return advance(state, shifted, settings)


def past_the_end(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """The search continues in the tree after its end."""
    return with_functions(is_over=lambda *given: False)(state, log_p, settings)


def ties_the_other_way(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """Of equal scores the later parent and the higher token come first."""

    def best(totals: Tensor, count: int) -> tuple[list[int], list[int], Tensor]:
        flat = totals.flatten()
        at = flat.flip(0).argsort(descending=True, stable=True)[:count]
        at = len(flat) - 1 - at
        return (at // totals.shape[1]).tolist(), (at % totals.shape[1]).tolist(), flat[at]

    return with_functions(best=best)(state, log_p, settings)


def without_length_penalty(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """Beams that end inside the tree are not divided by their length."""
    return advance(state, log_p, replace(settings, length_penalty=0.0))


def end_inside(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """An end token inside the tree is ignored."""
    return advance(state, log_p, replace(settings, eos=()))


@dataclass(frozen=True)
class BeamBug(KnownBug):
    """A bug of speculative beam search, and the `rule` that has it."""

    rule: Rule


_RULES: tuple[Rule, ...] = (
    one_may_be_missing, wrong_parents, scores_not_reordered, one_level_off, past_the_end, ties_the_other_way,
    without_length_penalty, end_inside,
)  # fmt: skip
BEAM_BUGS = {one.__name__: BeamBug(one.__name__, str(one.__doc__), "-", "beam", one) for one in _RULES}
"""The bugs of speculative beam search by name."""
