"""One small drafter of each kind that the interface is for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny import ARCHITECTURES, near_copy
from torch import Tensor
from transformers import PreTrainedModel

from specnb.distributions import Sampling, sample, standardise
from specnb.drafting.base import Context, Drafter, Proposal, TemplateDrafter
from specnb.models.cached_model import CachedModel, prefill
from specnb.rules import Outcome, TreeOutcome
from specnb.trees import TokenTree

VOCAB = 4
TWO_DRAFTS = (-1, -1)
DEPTH_2 = (-1, -1, 0, 0, 1)
DEEP = (-1, 0, -1, 1, 2, 1)
"""Depth 3, nodes of different branches in turn."""


def table(seed: int = 0) -> Tensor:
    """Random next-token probabilities `(VOCAB, VOCAB)` after each token."""
    return torch.softmax(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)), dim=-1)


class TableTreeDrafter(Drafter):
    """A tree, or several independent drafts of one token: each node is sampled given its parent's token."""

    vocab = VOCAB

    def __init__(self, parents: tuple[int, ...]) -> None:
        self.parents: tuple[int, ...] = parents
        self.table = table()

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for parent, uniform in zip(self.parents, uniforms.unbind(dim=1), strict=True):
            distributions.append(self.table[context.newest if parent < 0 else tokens[parent]])
            tokens.append(sample(distributions[-1], uniform))
        return Proposal(torch.stack(tokens, dim=1), torch.stack(distributions, dim=1))


class ModelTreeDrafter(Drafter):
    """A tree sampled from a model with a cache of its own, which keeps the accepted path as the target's does."""

    def __init__(self, model: PreTrainedModel, parents: tuple[int, ...], sampling: Sampling = Sampling()) -> None:
        self.model = self.draft_model = model
        self.parents: tuple[int, ...] = parents
        self.sampling = sampling
        self.vocab = model.config.vocab_size
        self.tree = TokenTree(parents)

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        if rows is None:
            self.runner = CachedModel(self.model, context.tokens.shape[1])
        prefill(self.runner, context.tokens, context.lengths, rows)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        root = context.lengths - 1
        self.first_node = context.lengths.clone()
        slots, positions = self.tree.slots(root), self.tree.positions(root)
        visible = self.tree.visible(root, self.runner.capacity)
        tokens, after = [context.newest], []  # of the root and of each node
        for entry in range(len(self.parents) + 1):
            here = slice(entry, entry + 1)
            logits = self.runner.run(
                tokens[entry][:, None], slots[:, here], 1, positions=positions[:, here], visible=visible[:, here]
            )
            after.append(standardise(logits[:, 0], self.sampling, check=False))
            if entry < len(self.parents):
                tokens.append(sample(after[self.parents[entry] + 1], uniforms[:, entry]))
        q = torch.stack([after[parent + 1] for parent in self.parents], dim=1)
        return Proposal(torch.stack(tokens[1:], dim=1), q)

    def update(self, context: Context, outcome: Outcome | TreeOutcome) -> None:
        first = self.first_node[:, None]
        assert isinstance(outcome, TreeOutcome)
        path = outcome.path.clamp_min(0)
        self.runner.move(first + path, first + torch.arange(path.shape[1]))


class FeatureDrafter(Drafter):
    """A head for each token to come, on the target's last hidden states of two layers, as Medusa has them."""

    vocab = VOCAB
    hidden_layers = (-1, 1)

    def __init__(self, width: int, gamma: int) -> None:
        self.heads = torch.randn(gamma, 2 * width, VOCAB, generator=torch.Generator().manual_seed(1))

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        states = context.last_hidden_state.to(self.heads.dtype)
        q = torch.softmax(torch.einsum("rw,gwv->rgv", states, self.heads), dim=-1)
        return Proposal(sample(q, uniforms), q)


class AdaptiveDrafter(TemplateDrafter):
    """Proposes one token more after a step that accepted all, one fewer after any other."""

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        if rows is None:
            self.limit = torch.full_like(context.lengths, 2)
        else:
            self.limit[rows] = 2

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        self.gamma = uniforms.shape[1]
        draft_tokens, q = super().propose(context, uniforms)
        missing = torch.arange(self.gamma) >= self.limit[:, None]
        return Proposal(draft_tokens.masked_fill(missing, -1), q.masked_fill(missing[..., None], 0.0))

    def update(self, context: Context, outcome: Outcome | TreeOutcome) -> None:
        step = torch.where(outcome.accepted == self.limit, 1, -1)
        self.limit = (self.limit + step).clamp(1, self.gamma)


def near_model(architecture: str) -> PreTrainedModel:
    """A draft model that is accepted often."""
    return near_copy(ARCHITECTURES[architecture](VOCAB), noise=0.2)


DRAFTERS: dict[str, Callable[[], tuple[Drafter, int]]] = {
    "chain": lambda: (TemplateDrafter(table()), 3),
    "two drafts": lambda: (TableTreeDrafter(TWO_DRAFTS), 2),
    "tree of depth 2": lambda: (TableTreeDrafter(DEPTH_2), len(DEPTH_2)),
    "tree of a model": lambda: (ModelTreeDrafter(near_model("llama"), DEPTH_2), len(DEPTH_2)),
    "deep tree of a model": lambda: (ModelTreeDrafter(near_model("llama"), DEEP), len(DEEP)),
    "features": lambda: (FeatureDrafter(8, 2), 2),
    "adaptive": lambda: (AdaptiveDrafter(table()), 3),
}
"""Name -> makes a drafter and its gamma."""
