"""Planted bugs of the run over a tree: each gives the model, or the table of slots, one thing wrong."""

import torch

from specnb.models.tree import TreeModel


class Meddled(TreeModel):
    """A tree whose positions and visibility pass through `meddle` on their way to the model."""

    def _run(self, paths):
        run = self.runner.run

        def meddled(tokens, slots, keep, positions, visible):
            return run(tokens, slots, keep, *self.meddle(slots, positions, visible))

        self.runner.run = meddled
        super()._run(paths)
        self.runner.run = run

    def meddle(self, slots, positions, visible):
        raise NotImplementedError


def _rolled(visible, columns):
    visible = visible.clone()
    visible[:, :, columns] = visible[:, :, columns].roll(1, dims=1)
    return visible


class NotReordered(Meddled):
    """Beams change places and the rows of the cache do not: a node sees the past of the one before it."""

    def meddle(self, slots, positions, visible):
        columns = torch.ones(visible.shape[-1], dtype=torch.bool)
        columns[slots[0]] = False
        return positions, _rolled(visible, columns)


class WrongParent(Meddled):
    """Within the run, a node hangs below the parent of the one before it."""

    def meddle(self, slots, positions, visible):
        return positions, _rolled(visible, slots[0]).scatter(2, slots[..., None], True)


class Causal(Meddled):
    """No tree mask: a node sees all that stand before it in the run, its siblings among them."""

    def meddle(self, slots, positions, visible):
        return positions, visible.cumsum(dim=1) > 0


class WithoutItself(Meddled):
    """A node does not see its own token."""

    def meddle(self, slots, positions, visible):
        return positions, visible.scatter(2, slots[..., None], False)


class InLine(Meddled):
    """A node's position is that of its slot, not of its depth."""

    def meddle(self, slots, positions, visible):
        return slots, visible


class ForgetsAncestors(TreeModel):
    """Only the beams' last nodes keep their slots; those above them are overwritten while they are still seen."""

    def keep(self, paths):
        super().keep(paths)
        self.free += [slot for path, slot in self.slots.items() if path and path not in set(paths)]


TREE_BUGS = {bug.__name__: bug for bug in (NotReordered, WrongParent, Causal, WithoutItself, InLine, ForgetsAncestors)}
