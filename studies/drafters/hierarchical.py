"""A drafter that is itself speculative: a small drafter speeds up the sampling of a larger draft
model (section 6).

The inner loop is Algorithm 1 with the larger draft model as its target. What it emits is
distributed exactly as if that model had sampled it token by token, so the exact q of an emitted
token is the larger model's own distribution at the emitted prefix, whether the token was accepted,
recovered or a bonus. The distribution that the inner rule took the token from (the small drafter's,
or a residual) is not the q of the outer step: it depends on the inner rejection, which the outer
rule does not see.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specnb.cache import CachedModel, prefill
from specnb.distributions import standardise
from specnb.drafters import NEWEST, Context, Drafter, ModelDrafter, Proposal, padded
from specnb.rules import Outcome, token_verification


class HierarchicalDrafter(Drafter):
    """Draft tokens of the larger draft model in `large`, which `small` drafts for, `inner_gamma`
    tokens at a time.

    Inner steps are made until every row has gamma tokens, for which the host waits; so a step
    cannot be captured. What the last inner step emits beyond gamma is cut off, by number and not by
    token. The inner steps need more uniforms than the step has: they are made from the step's own
    by hashing (`more_uniforms`). `small` proposes chains, reads tokens alone, and has no model: the
    cache of one would lack more of the newest tokens than it evaluates. Raises `TypeError` for one
    that has.
    """

    def __init__(self, large: ModelDrafter, small: Drafter, inner_gamma: int = 3) -> None:
        if small.draft_model is not None:
            raise TypeError(f"small is a {type(small).__name__} with a model; give one that counts or copies tokens")
        self.large, self.small, self.inner_gamma = large, small, inner_gamma
        self.vocab, self.draft_model = large.vocab, large.draft_model
        self.can_refill = small.can_refill

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        # The last inner step emits at most inner_gamma tokens beyond gamma. In a row that has them,
        # as many again are drafted and evaluated while other rows go on.
        self.padding = context.tokens.new_zeros(len(context.tokens), 2 * self.inner_gamma)
        wider = Context(torch.cat([context.tokens, self.padding], dim=1), context.lengths)
        if rows is None:
            self.runner = CachedModel(self.large.private.modules, wider.tokens.shape[1])
            self.runner.token_map = self.large.token_map
        prefill(self.runner, wider.tokens, wider.lengths, rows)
        self.small.start(wider, rows)

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

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        ahead = torch.arange(-NEWEST, tokens.shape[1] - 1, device=tokens.device)
        slots = (context.lengths[:, None] + ahead).clamp_min(0)
        fed = torch.cat([context.tokens.gather(1, slots[:, :NEWEST]), tokens[:, :-1]], dim=1)
        logits = self.runner.run(fed, slots, keep=tokens.shape[1])
        return standardise(logits, self.large.sampling, check=False)

    def _inner_step(self, context: Context, uniform: Tensor) -> tuple[Tensor, Outcome, Tensor]:
        """The larger model's distributions `(rows, inner_gamma + 1, vocab)`, the outcome, the small
        drafts."""
        inner = self.inner_gamma
        own = more_uniforms(uniform, 2 * inner + 1)
        drafted, small_q = padded(*self.small.propose(context, own[:, :inner]), inner)
        # The newest tokens that the cache may lack, and the small drafts.
        slots = (context.lengths[:, None] + torch.arange(-NEWEST, inner, device=uniform.device)).clamp_min(0)
        tokens = context.tokens.scatter(1, slots[:, NEWEST:], drafted.clamp_min(0))
        logits = self.runner.run(tokens.gather(1, slots), slots, keep=inner + 1)
        p = standardise(logits, self.large.sampling, check=False)
        outcome = token_verification(p, small_q.to(p.dtype), drafted, own[:, inner : 2 * inner], own[:, -1])
        return p, outcome, drafted


def more_uniforms(uniform: Tensor, count: int) -> Tensor:
    """`count` numbers in [0, 1) `(rows, count)` from each uniform `(rows,)`, by hashing its bits
    (splitmix64).

    A deterministic function, so equal seeds give equal tokens; numbers of different uniforms, and
    of one uniform, are as good as independent.
    """
    bits = uniform.double().cpu().numpy().view(np.uint64)[:, None]
    counter = np.arange(1, count + 1, dtype=np.uint64)
    mixed = bits * np.uint64(0xD1342543DE82EF95) + counter * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed >> np.uint64(11)) * 2.0**-53).to(uniform.device)
