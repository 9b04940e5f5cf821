"""A real CUDA device in the place of the simulated one: what can be seen of a step there is whether
the host waited."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RealCuda:
    """The log of what the host did, as that of `SimulatedCuda`; only waiting and replays are
    seen."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []

    @contextmanager
    def watched(self, batch: Any) -> Iterator[None]:
        """Logs a step of `batch` as a replay or as launches, and as reads where torch says that the
        host waited."""
        captured = batch.graph is not None and bool(batch.graph.graphs)
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        self.log.append(("replay", "a graph") if captured else ("launch", "a step"))
        waited = [str(one.message) for one in caught if "called a synchronizing CUDA operation" in str(one.message)]
        self.log += [("read", message) for message in waited]
