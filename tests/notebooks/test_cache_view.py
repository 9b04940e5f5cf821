"""Figures of caches: the drawn mask is the mask that the model was given."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import llama
from torch import Tensor

from notebooks.support.cache_view import Snapshot, snapshot
from specnb import cache
from studies.batching import batch_layouts
from studies.batching.batch_layouts import LAYOUTS

SEQUENCES = [[1, 2, 0], [3], [0, 1]]
BLOCK = torch.tensor([[1, 2], [0, 0], [3, 1]])


def visible_entries(shot: Snapshot, n: int) -> NDArray[np.bool_]:
    """The mask of the last `n` tokens of each sequence, `(sequences * n, width)`.

    A token attends to the entries of its own sequence at positions up to its own.
    """
    owner = np.repeat(np.arange(len(shot.lengths)), n)
    position = (shot.lengths[:, None] - n + np.arange(n)).ravel()
    row = owner if len(shot.owners) > 1 else np.zeros_like(owner)
    mask = (shot.owners[row] == owner[:, None]) & (shot.positions[row] <= position[:, None])
    return np.asarray(mask, dtype=bool)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_what_is_drawn_is_what_the_model_was_given(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def kept(visible: Tensor, dtype: torch.dtype) -> Tensor:
        given.append(visible)
        return cache.additive_mask(visible, dtype)

    rows = LAYOUTS[layout](llama(), SEQUENCES, 6)
    monkeypatch.setattr(batch_layouts, "additive_mask", kept)
    if layout == "pointers":
        slots = rows.lengths[:, None] + torch.arange(2)
        given.append(cache.ragged_mask(slots, 6, torch.float32)[:, 0] == 0)
    rows.run(BLOCK)
    assert (visible_entries(snapshot(rows), 2) == given[-1].reshape(6, -1).numpy()).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_a_snapshot_holds_every_sequence(layout: str) -> None:
    rows = LAYOUTS[layout](llama(), SEQUENCES, 6)
    rows.run(BLOCK)
    rows.crop(torch.tensor([2, 0, 1]))
    shot = snapshot(rows)
    assert shot.lengths.tolist() == [3, 3, 3]
    for row, length in enumerate(shot.lengths):
        places = np.sort(shot.positions[(shot.owners == row) & (shot.positions < length)])
        assert places.tolist() == list(range(length))
