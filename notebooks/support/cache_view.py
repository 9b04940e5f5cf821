"""Figures of key-value caches: the owner and state of each entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from notebooks.support.figures import COLOURS, PAGE

ENTRY_KINDS = {"sequence": "target", "newest": "recovered", "accepted": "accepted", "rejected": "rejected"}
PADDING = "\u00d7"
GAP = 3  # squares between two caches in a figure


class Snapshot(NamedTuple):
    """The entries of a cache: `owners` and `positions` `(rows, width)`, -1 for padding, and
    `lengths` `(sequences,)`.

    `owners` is the sequence that an entry belongs to, `positions` the entry's position in it.
    `moves` says whether the layout moves entries between steps.
    """

    owners: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: NDArray[np.int64]
    moves: bool


def snapshot(batch: Any) -> Snapshot:
    """The cache of one of the layouts of notebook 11: packed sequences have `owners`, padded rows
    `positions`, and rows with pointers neither."""
    lengths = batch.lengths.numpy().copy()
    if not hasattr(batch, "positions"):
        owners, slots = np.indices((len(lengths), batch.kept.slots))
        return Snapshot(owners, slots, lengths, moves=False)
    positions = np.atleast_2d(batch.positions.numpy())
    owners = batch.owners.numpy()[None] if hasattr(batch, "owners") else np.indices(positions.shape)[0]
    return Snapshot(np.where(positions < 0, -1, owners), positions.clip(-1), lengths, moves=True)


def draw_caches(
    shots: dict[tuple[str, str], Snapshot], known: Sequence[int], accepted: Sequence[int], drafted: int
) -> Figure:
    """One column per layout and one line per moment; the keys of `shots` are (layout, moment).

    `known` is the length of each sequence before the forward pass over its newest token and
    `drafted` draft tokens, `accepted` how many of these were accepted.
    """
    layouts, moments = (list(dict.fromkeys(key[at] for key in shots)) for at in (0, 1))
    widths = [max(shot.owners.shape[1] for key, shot in shots.items() if key[0] == layout) for layout in layouts]
    lefts = np.cumsum([0, *(width + GAP for width in widths)])
    tall = max(shot.owners.shape[0] for shot in shots.values()) + 1.6
    figure, axis = plt.subplots(figsize=(PAGE, PAGE * (tall * len(moments) + 1) / lefts[-1] + 0.3))
    for (layout, moment), shot in shots.items():
        left, top = lefts[layouts.index(layout)], tall * moments.index(moment)
        _draw(axis, shot, left, top, known, accepted, drafted)
        if moment == moments[0]:
            axis.text(left + widths[layouts.index(layout)] / 2, top - 0.5, layout, ha="center", fontsize=8)
    for number, moment in enumerate(moments):
        axis.text(-0.5, tall * number + 1.5, moment, rotation=90, ha="right", va="center", fontsize=7)
    axis.set(xlim=(-2, lefts[-1] - GAP + 0.5), ylim=(tall * len(moments) - 0.5, -1.5), aspect="equal")
    axis.axis("off")
    axis.set_title("With pointers only lengths change; the other layouts move entries")
    figure.legend([Rectangle((0, 0), 1, 1, fc=COLOURS[ENTRY_KINDS[kind]]) for kind in ENTRY_KINDS], ENTRY_KINDS,
                  loc="outside lower center", ncols=len(ENTRY_KINDS))  # fmt: skip
    return figure


def _draw(
    axis: Axes, shot: Snapshot, left: int, top: float, known: Sequence[int], accepted: Sequence[int], drafted: int
) -> None:
    for row, column in np.ndindex(shot.owners.shape):
        owner, at = int(shot.owners[row, column]), (left + column, top + row)
        place = shot.positions[row, column] - known[owner]
        if owner >= 0 and place <= drafted:
            drafted_kind = "accepted" if place <= accepted[owner] else "rejected"
            kind = "sequence" if place < 0 else "newest" if place == 0 else drafted_kind
            here = shot.positions[row, column] < shot.lengths[owner]
            axis.add_patch(Rectangle(at, 1, 0.9, fc=COLOURS[ENTRY_KINDS[kind]], alpha=1 if here else 0.2))
            axis.text(at[0] + 0.5, at[1] + 0.5, "abcdefgh"[owner] if here else "", color="white", fontsize=7,
                      ha="center", va="center")  # fmt: skip
        elif owner < 0:
            axis.text(at[0] + 0.5, at[1] + 0.5, PADDING, color=COLOURS["muted"], fontsize=7, ha="center", va="center")
        axis.add_patch(Rectangle(at, 1, 0.9, fill=False, ec="white" if owner >= 0 else COLOURS["muted"], lw=0.4))
        if not shot.moves:
            axis.add_patch(Rectangle(at, 1, 0.9, fill=False, ec=COLOURS["muted"], lw=0.3))
    if not shot.moves:
        for row, end in enumerate(shot.lengths):
            axis.plot([left + end] * 2, [top + row - 0.08, top + row + 0.98], color=COLOURS["theory"], lw=2)
