"""SpecHub as its authors' code has it (source: see `specnb.rules`)."""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.rules import AtEachNode, PlannedRule, spechub

CERTAIN = 1e-3  # a target this close to one-hot counts as one-hot


def with_shortcut(p: Tensor, q: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`spechub`, but the hub a is always accepted where p(a) > 1 - 1e-3.

    Not exact: there the hub is the only token ever emitted. The total variation is 1 - p(a), below 1e-3.
    """
    accept, after = spechub(p, q, draft_tokens)
    hub = q[..., 0, :].argmax(-1, keepdim=True)
    only_hub = p.gather(-1, hub) > 1 - CERTAIN
    return torch.where(only_hub, (draft_tokens == hub).to(p.dtype), accept), after


spechub_code = PlannedRule(AtEachNode(with_shortcut), schemes=())
