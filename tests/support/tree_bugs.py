"""Known bugs of tree attention: each gives the model, or the table of cache slots, one wrong
input."""

from collections.abc import Iterable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from specnb.beam import Path, TreeModel
from specnb_audit.bugs.bug import KnownBug


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


@dataclass(frozen=True)
class TreeBug(KnownBug):
    """A bug of tree attention, and the `model` that has it."""

    model: type[TreeModel]


TREE_BUGS = {
    one.__name__: TreeBug(one.__name__, str(one.__doc__), "-", "tree", one)
    for one in (BeamsNotReordered, WrongParent, CausalMask, WithoutItself, PositionsOfSlots, AncestorsOverwritten)
}
"""The bugs of tree attention by name."""
