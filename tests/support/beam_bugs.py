"""Known bugs of speculative beam search: wrong rules for following the drafted tree, and wrong
inputs of the model that evaluates it.

The reference is the search without drafts, which is compared with transformers on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from specnb import beam as beam_rules
from specnb.beam import Beams, BeamSettings, Path, TreeModel, advance

Rule = Callable[[Beams, Mapping[Path, Tensor], BeamSettings], list[Beams]]


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


_RULES: tuple[Rule, ...] = (
    one_may_be_missing, wrong_parents, scores_not_reordered, one_level_off, past_the_end, ties_the_other_way,
    without_length_penalty, end_inside,
)  # fmt: skip
BEAM_BUGS: dict[str, Rule] = {one.__name__: one for one in _RULES}
"""The rules with a bug by name."""


# Tree attention: each gives the model, or the table of cache slots, one wrong input.


class ChangedInputs(TreeModel):
    """A tree model whose positions and mask pass through `change` before the model sees them."""

    def _run(self, paths: list[Path]) -> None:
        run = self.runner.run

        def changed(tokens: Tensor, slots: Tensor, keep: int, positions: Tensor, visible: Tensor) -> Tensor:
            return run(tokens, slots, keep, *self.change(slots, positions, visible))

        with patch.object(self.runner, "run", changed):
            super()._run(paths)

    def change(self, slots: Tensor, positions: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def _rolled(visible: Tensor, columns: Tensor) -> Tensor:
    visible = visible.clone()
    visible[:, :, columns] = visible[:, :, columns].roll(1, dims=1)
    return visible


class BeamsNotReordered(ChangedInputs):
    """Beams are reordered and the cache is not: a node attends to the prefix of the node before
    it."""

    def change(self, slots: Tensor, positions: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        columns = torch.ones(visible.shape[-1], dtype=torch.bool)
        columns[slots[0]] = False
        return positions, _rolled(visible, columns)


class WrongParent(ChangedInputs):
    """Within the forward pass, a node is attached to the parent of the node before it."""

    def change(self, slots: Tensor, positions: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        return positions, _rolled(visible, slots[0]).scatter(2, slots[..., None], True)


class CausalMask(ChangedInputs):
    """A causal mask instead of the tree mask: a node attends to its siblings."""

    def change(self, slots: Tensor, positions: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        return positions, visible.cumsum(dim=1) > 0


class WithoutItself(ChangedInputs):
    """A node does not attend to its own token."""

    def change(self, slots: Tensor, positions: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        return positions, visible.scatter(2, slots[..., None], False)


class PositionsOfSlots(ChangedInputs):
    """The position id of a node is its slot, not its depth."""

    def change(self, slots: Tensor, positions: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        return slots, visible


class AncestorsOverwritten(TreeModel):
    """Only the last nodes of the beams keep their slots; their ancestors are overwritten while
    still in use."""

    def keep(self, paths: Iterable[Path]) -> None:
        super().keep(paths)
        self.free += [slot for path, slot in self.slots.items() if path and path not in set(paths)]


TREE_BUGS: dict[str, type[TreeModel]] = {
    one.__name__: one
    for one in (BeamsNotReordered, WrongParent, CausalMask, WithoutItself, PositionsOfSlots, AncestorsOverwritten)
}
"""The models with a bug by name."""
