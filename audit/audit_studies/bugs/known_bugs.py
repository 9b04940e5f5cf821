"""The registry of known bugs, and `generate` with one of them.

`KNOWN_BUGS` are the bug suite: bugs of a step and of the loop, which `generate` can run.
`MORE_BUGS` are more bugs of a step, which it can run too; no bet of the audit was designed for
those of them in `HELD_OUT_BUGS`. Beam search and tree attention (in the tests) have known bugs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from audit_studies.bugs.bug import Bug
from audit_studies.bugs.loop import LOOP_BUGS, Reseeded
from audit_studies.bugs.step import FILTERS, step_bugs
from audit_studies.bugs.verification import MORE_BUGS as MORE_BUGS
from specnb.cache import CachedModel
from specnb.distributions import Sampling
from specnb.drafters import Context, Drafter, ModelDrafter, Proposal
from specnb.record import Generation
from specnb.rules import Outcome
from specnb.sampler import Instruments
from specnb.sampler import generate as decode


def known_bugs(filters: Sampling = FILTERS) -> dict[str, Bug]:
    """The bug suite by name: the bugs of a step, with `filters` where they need some, and those of
    the loop."""
    suite = step_bugs(filters) | LOOP_BUGS
    # In the loop this is a matter of the uniforms.
    suite["reseeded"] = replace(suite["reseeded"], batch=Reseeded)
    return suite


KNOWN_BUGS = known_bugs()
HELD_OUT_BUGS = {name: bug for name, bug in MORE_BUGS.items() if bug.held_out}
"""Those of them that no bet was designed for: they judge the audit's power."""
EXACT = Bug("exact", "nothing", "-", lossless=True)
"""No bug at all, for comparison."""


class BuggyDrafter(ModelDrafter):
    """A draft model that samples from one distribution and reports another, as `bug` says."""

    def __init__(self, model: PreTrainedModel, bug: Bug) -> None:
        raw = bug.sampled is not None or bug.q is not None
        super().__init__(model, Sampling() if raw else bug.claimed)
        self.bug = bug
        self.runner_class = bug.draft_class or CachedModel

    def sample(self, probs: Tensor, uniform: Tensor) -> Tensor:
        return super().sample(self.bug.sampled(probs) if self.bug.sampled else probs, uniform)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        draft_tokens, q = super().propose(context, uniforms)
        q = self.bug.q(q) if self.bug.q else q
        # The loop refuses a q of 0 at its own token; an implementation with the bug goes on.
        at = draft_tokens[..., None]
        return Proposal(draft_tokens, q.scatter(-1, at, q.gather(-1, at).clamp_min(torch.finfo(q.dtype).tiny)))


def generate(
    bug: Bug,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    drafter: PreTrainedModel | Drafter,
    instruments: Instruments = Instruments(),
    **settings: Any,
) -> Generation:
    """`specnb.sampler.generate` with `bug`; the tokens should have the distribution under
    `bug.claimed`.

    A bug of how draft tokens are sampled needs a model as `drafter`. `settings` are those of
    `specnb.sampler.generate` except sampling, rule and check, which would find some bugs; the
    `batch_class` of `instruments` is the bug's. Raises what that raises, and `TypeError` for a drafter
    that cannot have the bug.
    """
    changes_draft = bug.sampled or bug.q or (bug.draft_class and not bug.batch)
    if isinstance(drafter, PreTrainedModel):
        drafter = BuggyDrafter(drafter, bug)
    elif changes_draft:
        raise TypeError(f"{bug.name} changes how a draft model is sampled; give the model, not a drafter")

    def rule(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return bug.rule(bug.p(p) if bug.p else p, q, draft_tokens, accept, final)

    sampling = Sampling() if bug.p else bug.claimed
    instruments = replace(instruments, batch_class=bug.batch)
    return decode(
        target, prompts, drafter, sampling=sampling, rule=rule, instruments=instruments, check=False, **settings
    )
