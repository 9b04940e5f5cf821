"""A model run over a tree of continuations of one prompt: every node once, all of them at a time.

A node is named by its path, the tokens from the prompt to it; the prompt itself is the path (). In the
cache a node has a slot of its own, wherever one is free; it sees the slots of the prompt and of its
ancestors, and its position is that of its depth. So nothing is ever moved or copied: beams change their
order, branches die, and only the table of slots knows.
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
    """`model` after `prompt`, with room for `capacity` nodes at a time; called with paths it returns what follows them.

    All but the last token of the prompt are run at once; that one is the tree's root, the path ().

    runs   for each run since the prompt's, over how many nodes it was
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, prompt: Sequence[int], capacity: int) -> None:
        self.prompt = list(prompt)
        known = len(prompt) - 1
        slots = known + capacity
        self.runner = CachedModel(model, slots)
        # Row s is what the node in slot s sees. On the host, where new nodes copy their parents' rows.
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

        One run of the model over those of them and of their ancestors that are not in the cache; none if all
        are. Raises `RuntimeError` when there is no room for them.
        """
        missing = self._missing(paths)
        if missing:
            self._run(missing)
        return torch.stack([self.log_distributions[path] for path in paths])

    def keep(self, paths: Iterable[Path]) -> None:
        """Forgets every node that is not one of `paths` or above it, and the distributions of those above."""
        paths = set(paths)
        alive = {path[:end] for path in paths for end in range(len(path) + 1)}
        self.free += [slot for path, slot in self.slots.items() if path not in alive]
        self.slots = {path: slot for path, slot in self.slots.items() if path in alive}
        self.log_distributions = {path: probs for path, probs in self.log_distributions.items() if path in paths}

    def _missing(self, paths: Sequence[Path]) -> list[Path]:
        """What has to be run for `paths`, parents before their children."""
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
            raise RuntimeError(f"the tree has room for {len(self.free)} more nodes, not for {len(paths)}; keep fewer")
        for path in paths:
            slot = self.slots[path] = self.free.pop()
            if path:  # the root, first of all, finds its row as it was made
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
        # Rows of their own: a view would keep the logits of the whole tree alive.
        self.log_distributions.update(
            (path, row.clone()) for path, row in zip(paths, log_distribution(logits[0]), strict=True)
        )
        self.runs.append(len(paths))


def log_distribution(logits: Tensor) -> Tensor:
    """log p of the target's own distribution, temperature 1, in float32 or better."""
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
