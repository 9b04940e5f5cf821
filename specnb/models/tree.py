"""A model evaluated over a tree of continuations of one prompt: each node once, many nodes in one forward pass.

A node is identified by its path, the tokens from the prompt to it; the prompt itself is the path (). Each node has its
own slot in the cache, any that is free; it sees the slots of the prompt and of its ancestors, and its position follows
from its depth. When beams are reordered or dropped, only the table of slots changes; no keys or values are moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.models.cached_model import CachedModel
from specnb.sampling.beam_rules import Path


class TreeModel:
    """`model` after `prompt`, with slots for `capacity` nodes; a `specnb.sampling.beam_rules.LogProbs`.

    All but the last token of the prompt are evaluated at once; the last one is the root of the tree, the path ().

    runs  number of nodes of each forward pass after the prompt's

    >>> from specnb.models.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> tree = TreeModel(model, prompt=[1, 2], capacity=8)
    >>> tree([(), (0,), (0, 3)]).shape, tree.runs
    (torch.Size([3, 4]), [3])
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, prompt: Sequence[int], capacity: int) -> None:
        self.prompt = list(prompt)
        known = len(prompt) - 1
        slots = known + capacity
        self.runner = CachedModel(model, slots)
        # Row s: the slots that the node in slot s sees. On the host, where new nodes copy their parents' rows.
        self.visible = np.zeros((slots, slots), dtype=bool)
        self.visible[:, :known] = True
        self.free = list(range(slots - 1, known - 1, -1))
        self.slots: dict[Path, int] = {}
        self.log_distributions: dict[Path, Tensor] = {}
        self.runs: list[int] = []
        if known:
            tokens = torch.tensor([self.prompt[:-1]], device=model.device)
            self.runner.run(tokens, torch.arange(known, device=model.device)[None], keep=1)

    def __call__(self, paths: Sequence[Path]) -> Tensor:
        """The log-probabilities `(len(paths), vocab)` of the token after each path; float32 or better.

        One forward pass over the paths and ancestors that are not in the cache; none if all are. Raises `RuntimeError`
        if there are not enough free slots.
        """
        missing = self._missing(paths)
        if missing:
            self._run(missing)
        return torch.stack([self.log_distributions[path] for path in paths])

    def keep(self, paths: Iterable[Path]) -> None:
        """Drops all nodes but `paths` and their ancestors, and the distributions of the ancestors."""
        paths = set(paths)
        alive = {path[:end] for path in paths for end in range(len(path) + 1)}
        self.free += [slot for path, slot in self.slots.items() if path not in alive]
        self.slots = {path: slot for path, slot in self.slots.items() if path in alive}
        self.log_distributions = {path: probs for path, probs in self.log_distributions.items() if path in paths}

    def _missing(self, paths: Sequence[Path]) -> list[Path]:
        """The nodes to evaluate for `paths`, parents before their children."""
        missing: dict[Path, None] = {}
        for path in paths:
            unknown = []
            while path not in self.slots and path not in missing:
                unknown.append(path)
                if not path:
                    break
                path = path[:-1]
            missing.update(dict.fromkeys(reversed(unknown)))
        return list(missing)

    @torch.inference_mode()
    def _run(self, paths: list[Path]) -> None:
        if len(paths) > len(self.free):
            raise RuntimeError(
                f"{len(paths)} new nodes need {len(paths)} cache slots, but {len(self.free)} are free: "
                "drop nodes with keep(), or give a larger capacity"
            )
        for path in paths:
            slot = self.slots[path] = self.free.pop()
            if path:  # the root's row already shows it the prompt
                self.visible[slot] = self.visible[self.slots[path[:-1]]]
            self.visible[slot, slot] = True
        slots = [self.slots[path] for path in paths]
        device = self.runner.model.device
        logits = self.runner.run(
            torch.tensor([[path[-1] if path else self.prompt[-1] for path in paths]], device=device),
            torch.tensor([slots], device=device),
            keep=len(paths),
            positions=torch.tensor([[len(self.prompt) - 1 + len(path) for path in paths]], device=device),
            visible=torch.from_numpy(self.visible[slots])[None].to(device),
        )
        # Cloned, because a view would keep the logits of the whole tree in memory.
        self.log_distributions.update(
            (path, row.clone()) for path, row in zip(paths, log_distribution(logits[0]), strict=True)
        )
        self.runs.append(len(paths))


def log_distribution(logits: Tensor) -> Tensor:
    """log p `(..., vocab)` at temperature 1, in float32 or better.

    >>> log_distribution(torch.zeros(2)).exp()
    tensor([0.5000, 0.5000])
    """
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
