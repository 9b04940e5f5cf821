"""When may a draft be cut short? Each rule enumerated.

For each rule: the largest total variation between the joint distribution that a step leads to and
the target's, over random pairs of distributions (vocabulary 3, gamma 2). Drafters are the ones that
the decoding loop calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specnb.distributions import Conditional
from specnb.drafters import ChainDrafter, Context, Drafter, Proposal
from specnb.enumeration import completed, drafter_step_distribution, drafts_of, joint_distribution
from specnb.rules import Outcome, token_verification
from studies.drafters.bandit import BanditDrafter
from studies.drafters.length import CalibratedDrafter, Calibration, HighEntropy, LowConfidence, StoppingDrafter

VOCAB, GAMMA, PREFIX = 3, 2, (0,)
# Largest total variation of a rule that is called exact; bisected edges are accurate to 1e-12.
EXACT = 1e-9


def after_one(q: Tensor, token_probs: Tensor) -> Tensor:
    """Stop after one draft token."""
    return torch.full((len(q),), token_probs.shape[1] >= 1, device=q.device)


@dataclass(frozen=True)
class UnlikelySoFar:
    """Stop where the draft tokens so far have together a probability below `threshold`. They are
    kept."""

    threshold: float

    def __call__(self, q: Tensor, token_probs: Tensor) -> Tensor:
        return token_probs.prod(dim=-1) < self.threshold


class TableDrafter(ChainDrafter):
    """Samples from `table` `(vocab, vocab)`, given the token before."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.vocab = table, table.shape[1]

    def distribution(self, context: Context, position: int) -> Tensor:
        return self.table[context.newest]


class Discarding(TableDrafter):
    """Takes back sampled tokens: from the first one on whose `score` is below `threshold`. Not
    exact."""

    def __init__(self, table: Tensor, score: Callable[[Tensor], Tensor], threshold: float) -> None:
        super().__init__(table)
        self.score, self.threshold = score, threshold

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        draft_tokens, q = super().propose(context, uniforms)
        own = q.gather(-1, draft_tokens[..., None])[..., 0]
        kept = (self.score(own) >= self.threshold).cumprod(dim=1).bool()
        return Proposal(draft_tokens.where(kept, -1), q.where(kept[..., None], 0.0))


def oracle(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Algorithm 1 in which the token that would be rejected was never proposed: the final token
    comes from p."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    later = torch.arange(draft_tokens.shape[1]) >= accepted[:, None]
    return token_verification(
        p, q.masked_fill(later[..., None], 0.0), draft_tokens.masked_fill(later, -1), accept, final
    )


class Case(NamedTuple):
    """A rule: the drafter made of a table, why it is exact or not, and the verification rule."""

    drafter: Callable[[Tensor], Drafter]
    why: str
    verification: Any = token_verification


BEFORE = "decided before the token is sampled, by q"
KEPT = "looks at sampled tokens, and keeps them"
DROPS = "drops a sampled token because of that token: what remains is not a sample from q"

HALVES = Calibration(torch.tensor([0.4], dtype=torch.float64), torch.tensor([0.3, 0.9], dtype=torch.float64), 0.6)

CASES = {
    "fixed gamma": Case(TableDrafter, "does not look at anything"),
    "by position": Case(lambda table: StoppingDrafter(TableDrafter(table), after_one), BEFORE),
    "confidence: max q": Case(lambda table: StoppingDrafter(TableDrafter(table), LowConfidence(0.55)), BEFORE),
    "entropy of q": Case(lambda table: StoppingDrafter(TableDrafter(table), HighEntropy(0.3, 0.5)), BEFORE),
    "probability of the tokens so far": Case(
        lambda table: StoppingDrafter(TableDrafter(table), UnlikelySoFar(0.4)), KEPT
    ),
    "estimated acceptance of the tokens so far": Case(
        lambda table: CalibratedDrafter(TableDrafter(table), HALVES, 0.3), KEPT
    ),
    "bandit over gammas": Case(
        lambda table: BanditDrafter(TableDrafter(table), (1, 2), 0.1), "decided by earlier steps alone"
    ),
    "discard a token with low q": Case(lambda table: Discarding(table, lambda own: own, 0.35), DROPS),
    "discard from where the product is low": Case(
        lambda table: Discarding(table, lambda own: own.cumprod(dim=1), 0.35), DROPS
    ),
    "oracle: do not draft what will be rejected": Case(
        TableDrafter, "knows the outcome of the test; the recovered token would come from p", oracle
    ),
}


def random_pair(seed: int) -> tuple[Conditional, Tensor]:
    """p, different in each context, and the drafter's table; no probability below 0.02."""

    @cache
    def p(context: tuple[int, ...]) -> Tensor:
        return _dense(np.random.default_rng([seed, 0, len(context), *context]))

    generator = np.random.default_rng([seed, 1])
    return p, torch.stack([_dense(generator) for _ in range(VOCAB)])


def _dense(generator: np.random.Generator) -> Tensor:
    return torch.from_numpy(0.06 / VOCAB + 0.94 * generator.dirichlet(np.ones(VOCAB)))


def deviation(case: Case, seed: int) -> tuple[float, float]:
    """The total variation of a step from the target, and the mean number of draft tokens, on one
    pair."""
    p, table = random_pair(seed)
    emitted = drafter_step_distribution(case.drafter(table), p, PREFIX, GAMMA, case.verification)
    difference = completed(emitted, p, GAMMA + 1) - joint_distribution(p, GAMMA + 1)
    drafts = drafts_of(case.drafter(table), PREFIX, GAMMA)
    drafted = float(drafts.probability @ (drafts.tokens >= 0).sum(1).double())
    return float(difference.abs().sum()) / 2, drafted


def rule_line(name: str, case: Case, pairs: int) -> dict[str, object]:
    """The line of one rule, over `pairs` pairs of distributions; a total variation below `EXACT` is
    0."""
    found = np.array([deviation(case, seed) for seed in range(pairs)])
    tv, drafted = found[:, 0].max(), found[:, 1].mean()
    exact = tv < EXACT
    return {"rule": name, "exact": exact, "tv_max": 0.0 if exact else tv, "drafted": drafted, "why": case.why}
