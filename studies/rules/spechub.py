"""SpecHub's rule for pairs of draft tokens, and as its authors' code has it.

Source: Sun et al., 2411.05289, from the comment above the verification in the authors' code
(github.com/MasterGodzilla/Speculative_decoding_OT, EAGLE/eagle/model/utils.py), read at 7d592b7.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specnb.distributions import normalise, one_hot
from specnb.rules import PlannedRule, acceptance_ratio
from specnb.trees import top_children
from studies.rules.selection import AtEachNode

CERTAIN = 1e-3  # a target this close to one-hot counts as one-hot


def hub_children(q: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """SpecHub's pair: a sample from q, then the most probable token a; after a itself, one of the others.

    Nothing after a if q is one-hot. Raises `ValueError` for a third child.

    >>> hub_children(torch.tensor([0.5, 0.25, 0.25]), [torch.tensor(0)])
    tensor([0.0000, 0.5000, 0.5000])
    """
    if not earlier:
        return q
    if len(earlier) > 1:
        raise ValueError(f"SpecHub proposes 2 children; child {len(earlier) + 1} was asked for")
    hub = q.argmax(-1)
    is_hub = one_hot(hub, q.shape[-1], q.dtype)
    others = normalise(q * (1 - is_hub)).nan_to_num(0.0)
    return others.where((earlier[0] == hub).unsqueeze(-1), is_hub)


def spechub(p: Tensor, q: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """SpecHub's rule for the pairs of `hub_children`; exact for these.

    In (x, a), x is accepted with probability min(1, p(x) / q(x)); in (a, x), with min(1, (p(x) - q(x))+ / Q(a, x)).
    What is left of the pairs goes to the hub a, the pairs (a, x) first, as far as p(a) reaches.
    Raises `ValueError` unless there are two draft tokens.
    """
    if draft_tokens.shape[-1] != 2:
        raise ValueError(f"SpecHub verifies 2 draft tokens; it was given {draft_tokens.shape[-1]}")
    shared = q[..., 0, :]
    hub = shared.argmax(-1, keepdim=True)
    is_hub = one_hot(hub.squeeze(-1), p.shape[-1], p.dtype)
    first = shared * (1 - is_hub)  # Q(x, a)
    second = (shared.gather(-1, hub) * normalise(first)).nan_to_num(0.0)  # Q(a, x)
    from_first = torch.minimum(p, first)
    from_second = torch.minimum(p - from_first, second) * (1 - is_hub)
    left_second, left_first = (second - from_second).sum(-1), (first - from_first).sum(-1)
    alone = first.sum(-1) == 0  # q is one-hot: the hub is the only draft token
    at_hub = p.gather(-1, hub).squeeze(-1)
    hub_second = (at_hub / left_second).clamp_max(1).nan_to_num(1.0)
    hub_first = ((at_hub - left_second).clamp_min(0) / left_first).clamp_max(1).nan_to_num(1.0)
    hub_taken = torch.minimum(at_hub, left_first + left_second + alone)
    starts_with_hub = draft_tokens[..., 0] == hub.squeeze(-1)
    other = draft_tokens[..., 1].where(starts_with_hub, draft_tokens[..., 0])
    other_first = acceptance_ratio(from_first, first, other).nan_to_num(0.0).clamp_max(1)
    other_second = acceptance_ratio(from_second, second, other).nan_to_num(0.0).clamp_max(1)
    # In (a, x) the code tests x and then a; the plan lists a first, with the same probabilities of both.
    hub_tested_first = torch.where(alone, at_hub, (1 - other_second) * hub_second)
    then_other = (other_second / (1 - hub_tested_first)).nan_to_num(1.0).clamp_max(1)
    accept = torch.stack(
        [
            torch.where(starts_with_hub, hub_tested_first, other_first),
            torch.where(starts_with_hub, then_other, hub_first),
        ],
        dim=-1,
    ).where(draft_tokens >= 0, 0.0)
    left = (p - from_first - from_second - hub_taken.unsqueeze(-1) * is_hub).clamp_min(0)
    return accept, left.where(left.sum(-1, keepdim=True) > 0, p)


spechub_tree = PlannedRule(AtEachNode(spechub), schemes=(hub_children, top_children))
"""`spechub` at every node, two children at each that has any."""


def with_shortcut(p: Tensor, q: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`spechub`, but the hub a is always accepted where p(a) > 1 - 1e-3.

    Not exact: there the hub is the only token ever emitted. The total variation is 1 - p(a), below 1e-3.
    """
    accept, after = spechub(p, q, draft_tokens)
    hub = q[..., 0, :].argmax(-1, keepdim=True)
    only_hub = p.gather(-1, hub) > 1 - CERTAIN
    return torch.where(only_hub, (draft_tokens == hub).to(p.dtype), accept), after


spechub_code = PlannedRule(AtEachNode(with_shortcut), schemes=())
