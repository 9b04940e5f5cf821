"""EGAG: the draft length of a step, from the entropy of the drafter's logits at its beginning.

The implementation document (section 7) names what goes in: the entropy H of the drafter's current
logits over log(vocabulary), bounds `gamma_min` and `gamma_max`, the smoothing `egag_ema_beta`, and
`corrected_gamma` at the end of a text; H and gamma of each step are to be recorded. What it leaves
open is chosen here: a straight line between the bounds, and an exponential average. Its switch
`use_egag` is whether this drafter is put around another one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specnb.arguments import require_whole
from specnb.distributions import Sampling
from specnb.drafters import ChainDrafter, Context
from studies.drafters.length import ShortenedDrafter
from studies.drafters.tables import require_number


class EntropyGuidedDrafter(ShortenedDrafter):
    """Drafts gamma_max - (gamma_max - gamma_min) H tokens in a step, rounded.

    The length is settled before the first draft token is sampled, so the step stays exact. A row
    starts anew with its prompt.

    Parameters
    ----------
    drafter
        What proposes, without a `sampling` of its own: its q is the softmax of its logits.
    sampling
        How draft tokens are sampled. H does not depend on it.
    gamma_min, gamma_max
        Fewest and most draft tokens of a step.
    egag_ema_beta
        The weight of earlier steps in H: 0 for none, less than 1.
    max_new_tokens
        Of each sequence. If it is given, a step drafts no more tokens than it can still use:
        `corrected_gamma`, which may be 0.

    Raises
    ------
    ValueError
        For bounds that are not 1 <= gamma_min <= gamma_max, and an average outside [0, 1).

    Examples
    --------
    >>> from studies.drafters.tables import UniformDrafter
    >>> drafter = EntropyGuidedDrafter(UniformDrafter(4), gamma_max=3)
    >>> context = Context(torch.tensor([[1, 0, 0, 0]]), torch.tensor([1]))
    >>> drafter.start(context)
    >>> drafter.propose(context, torch.full((1, 3), 0.9)).draft_tokens
    tensor([[3]])
    >>> entropy, gamma = drafter.history[0]
    >>> round(float(entropy), 6), int(gamma)
    (1.0, 1)

    """

    def __init__(
        self, drafter: ChainDrafter, sampling: Sampling = Sampling(), *, gamma_min: int = 1, gamma_max: int = 8,
        egag_ema_beta: float = 0.0, max_new_tokens: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(drafter, sampling)
        require_whole(gamma_min=(gamma_min, 1), gamma_max=(gamma_max, gamma_min))
        require_number(most=math.nextafter(1, 0), egag_ema_beta=egag_ema_beta)
        if max_new_tokens is not None:
            require_whole(max_new_tokens=(max_new_tokens, 1))
        self.gamma_min, self.gamma_max, self.gamma = gamma_min, gamma_max, gamma_max
        self.egag_ema_beta, self.max_new_tokens = egag_ema_beta, max_new_tokens
        self.entropy, self.total = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        self.history: list[tuple[Tensor, Tensor]] = []
        """H `(rows,)`, averaged, and gamma `(rows,)` of every step since the batch began."""

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        super().start(context, rows)
        total = context.lengths + (self.max_new_tokens or 2**62)
        if rows is None:
            rows, self.history = torch.arange(len(total), device=total.device), []
            if self.total.shape != total.shape or self.total.device != total.device:
                # Kept for later batches: a graph may hold them.
                self.entropy, self.total = torch.zeros_like(total, dtype=torch.float64), torch.zeros_like(total)
        self.entropy[rows], self.total[rows] = math.nan, total[rows]

    def distribution(self, context: Context, position: int) -> Tensor:
        if position == 0:
            q = self.drafter.distribution(context, 0)
            entropy = torch.special.entr(q).sum(dim=-1).double() / math.log(self.vocab)
            before = entropy.where(self.entropy.isnan(), self.entropy)
            self.entropy.copy_(self.egag_ema_beta * before + (1 - self.egag_ema_beta) * entropy)
            gamma = self.gamma_max - (self.gamma_max - self.gamma_min) * self.entropy
            corrected = (self.total - context.lengths - 1).clamp_min(0)
            self.limit = torch.minimum(gamma.round().long(), corrected)
            self.history.append((self.entropy.clone(), self.limit))
            return self.processed(q, self.limit > 0)
        going = position < self.limit
        if self.ends(going):
            return context.lengths.new_zeros(len(going), self.vocab, dtype=torch.float32)
        return self.processed(self.drafter.distribution(context, position), going)
