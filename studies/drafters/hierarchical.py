"""A drafter that is itself speculative: a small drafter speeds up the sampling of a larger draft model (section 6).

The inner loop is Algorithm 1 with the larger draft model as its target. What it emits is distributed exactly as if that
model had sampled it token by token, so the exact q of an emitted token is the larger model's own distribution at the
emitted prefix, whether the token was accepted, recovered or a bonus. The distribution that the inner rule took the
token from (the small drafter's, or a residual) is not the q of the outer step: it depends on the inner rejection, which
the outer rule does not see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specnb.distributions import standardise
from specnb.drafting.base import Context, Drafter, Proposal, missing_members, padded
from specnb.drafting.model import ModelDrafter
from specnb.models.cached_model import CachedModel, prefill
from specnb.rules import Outcome, token_verification


class HierarchicalDrafter(Drafter):
    """Draft tokens of the larger draft model in `large`, which `small` drafts for, `inner_gamma` tokens at a time.

    Inner steps are made until every row has gamma tokens, for which the host waits; so a step cannot be captured. What
    the last inner step emits beyond gamma is cut off, by number and not by token. The inner steps need more uniforms
    than the step has: they are made from the step's own by hashing (`more_uniforms`). `small` proposes chains and reads
    tokens alone.
    """

    def __init__(self, large: ModelDrafter, small: Drafter, inner_gamma: int = 3) -> None:
        self.large, self.small, self.inner_gamma = large, small, inner_gamma
        self.vocab, self.draft_model = large.vocab, large.draft_model
        self.can_refill = small.can_refill
        self.unseen = 2  # the newest token, and the last one of the inner loop, which no forward pass has seen

    @property
    def unseen(self) -> int:
        """How many of a row's newest tokens the larger model evaluates at the start of a step; see `ModelDrafter`."""
        return self._unseen

    @unseen.setter
    def unseen(self, count: int) -> None:
        self._unseen = count
        # The small drafter also misses the last of its own tokens, if the inner rule accepts all.
        evaluate_again(self.small, count + 1)

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        # Inner draft tokens reach further than those of the outer step.
        padding = context.tokens.new_zeros(len(context.tokens), self.inner_gamma + 1)
        wider = Context(torch.cat([context.tokens, padding], dim=1), context.lengths)
        if rows is None:
            self.runner = CachedModel(self.large.model, wider.tokens.shape[1])
            self.runner.token_map = self.large.token_map
        prefill(self.runner, wider.tokens, wider.lengths, rows)
        self.small.start(wider, rows)
        self.padding = padding

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        rows, gamma = uniforms.shape
        tokens, lengths = torch.cat([context.tokens, self.padding], dim=1), context.lengths
        q = torch.zeros(rows, gamma + self.inner_gamma + 1, self.vocab, device=uniforms.device)
        for step in range(gamma):  # every inner step emits at least one token
            emitted = lengths - context.lengths
            if bool((emitted >= gamma).all()):
                break
            p, outcome, drafted = self._inner_step(Context(tokens, lengths), uniforms[:, step])
            q = q.to(p.dtype)
            active = emitted < gamma
            block = torch.cat([drafted, outcome.token[:, None]], dim=1)
            block = block.scatter(1, outcome.accepted[:, None], outcome.token[:, None]).clamp_min(0)
            at = emitted.clamp_max(gamma)[:, None] + torch.arange(self.inner_gamma + 1, device=uniforms.device)
            here = active[:, None] & (at < q.shape[1])
            slots = context.lengths[:, None] + at
            tokens = tokens.scatter(1, slots, block.where(here, tokens.gather(1, slots)))
            q = q.scatter(
                1, at[..., None].expand(p.shape), p.where(here[..., None], q.take_along_dim(at[..., None], 1))
            )
            lengths = (lengths + outcome.accepted + 1).where(active, lengths)
        own = context.lengths[:, None] + torch.arange(gamma, device=uniforms.device)
        return Proposal(tokens.gather(1, own), q[:, :gamma])

    def _inner_step(self, context: Context, uniform: Tensor) -> tuple[Tensor, Outcome, Tensor]:
        """The larger model's distributions `(rows, inner_gamma + 1, vocab)`, the outcome, the small drafts."""
        inner = self.inner_gamma
        own = more_uniforms(uniform, 2 * inner + 1)
        drafted, small_q = padded(*self.small.propose(context, own[:, :inner]), inner)
        back = torch.arange(self.unseen, 0, -1, device=uniform.device)
        slots = (context.lengths[:, None] - back).clamp_min(0)
        after = context.lengths[:, None] + torch.arange(inner, device=uniform.device)
        given = torch.cat([context.tokens.gather(1, slots), drafted.clamp_min(0)], dim=1)
        logits = self.runner.run(given, torch.cat([slots, after], dim=1), keep=inner + 1)
        p = standardise(logits, self.large.sampling, check=False)
        outcome = token_verification(p, small_q.to(p.dtype), drafted, own[:, inner : 2 * inner], own[:, -1])
        return p, outcome, drafted


def evaluate_again(drafter: Any, count: int) -> None:
    """From now on each model in `drafter` begins a step with at least the `count` newest tokens of a row.

    A drafter that is called by another one misses tokens: those that the other adds without calling it.
    """
    if hasattr(drafter, "unseen"):
        drafter.unseen = max(drafter.unseen, count)
    for part in getattr(drafter, "__dict__", {}).values():
        if not isinstance(part, type) and not missing_members(part):
            evaluate_again(part, count)


def more_uniforms(uniform: Tensor, count: int) -> Tensor:
    """`count` numbers in [0, 1) `(rows, count)` from each uniform `(rows,)`, by hashing its bits (splitmix64).

    A deterministic function, so equal seeds give equal tokens; numbers of different uniforms, and of one uniform, are
    as good as independent.
    """
    bits = uniform.double().contiguous().view(torch.int64)
    counter = torch.arange(1, count + 1, device=uniform.device, dtype=torch.int64)
    mixed = bits[:, None] * _signed(0xD1342543DE82EF95) + counter * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-53


def _shifted(bits: Tensor, by: int) -> Tensor:
    """An unsigned shift to the right."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """The 64 bits of `value` as a signed number."""
    return value - 2**64 if value >= 2**63 else value
