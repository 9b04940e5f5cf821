"""Figures of caches: what is drawn of each of the three layouts of notebook 11."""

from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import to_rgb

from notebooks.support.cache_view import draw_caches, snapshot
from notebooks.support.figures import COLOURS

LENGTHS = torch.tensor([3, 1])
LAYOUTS: dict[str, Any] = {
    "padding": SimpleNamespace(lengths=LENGTHS, positions=torch.tensor([[0, 1, 2], [-2, -1, 0]])),
    "packing": SimpleNamespace(
        lengths=LENGTHS, positions=torch.tensor([0, 1, 2, 0]), owners=torch.tensor([0, 0, 0, 1])
    ),
    "pointers": SimpleNamespace(lengths=LENGTHS, kept=SimpleNamespace(slots=4)),
}


def test_entries_of_each_layout() -> None:
    shots = {name: snapshot(batch) for name, batch in LAYOUTS.items()}
    assert shots["padding"].owners.tolist() == [[0, 0, 0], [-1, -1, 1]]
    assert shots["packing"].owners.tolist() == [[0, 0, 0, 1]]
    assert shots["pointers"].positions.tolist() == [[0, 1, 2, 3]] * 2
    assert [shot.moves for shot in shots.values()] == [True, True, False]
    for shot in shots.values():
        for row, length in enumerate(shot.lengths):
            here = shot.positions[(shot.owners == row) & (shot.positions < length)]
            assert sorted(here) == list(range(length))


def test_each_entry_has_the_colour_of_its_kind() -> None:
    """Row a knew one token, got the newest and a draft token, which was accepted; row b only the
    newest."""
    figure = draw_caches({("padding", "pass"): snapshot(LAYOUTS["padding"])}, [1, 0], [1, 0], drafted=1)
    plt.close(figure)
    filled = [to_rgb(patch.get_facecolor()) for patch in figure.axes[0].patches if patch.get_fill()]
    assert filled == [to_rgb(COLOURS[name]) for name in ("target", "recovered", "accepted", "recovered")]
