"""How far the output of a step with a bug is from the target's distribution, by enumeration."""

from __future__ import annotations

from typing import NamedTuple

import torch

from audit_studies.bugs.bug import Bug, Change
from audit_studies.bugs.cells import POINTS, chain_distribution, estimated_distribution
from audit_studies.bugs.step import sampled_as, unchanged
from specnb.distributions import Conditional, total_variation
from specnb.enumeration import Emissions, completed, draft_trees, joint_distribution
from specnb.rules import Rule, token_verification
from specnb.trees import chain, independent_children
from specnb_audit.kernels.enumeration import random_distributions as random_distributions


class Step(NamedTuple):
    """A step whose output should have the distribution `intended`.

    `rule` reads p and q; draft tokens come from `sampled`.
    """

    intended: Conditional
    rule: Rule
    p: Conditional
    q: Conditional
    sampled: Conditional


def step(bug: Bug, p: Conditional, q: Conditional) -> Step:
    """The step with `bug`, for a target and a draft with the distributions p and q at temperature
    1."""
    claimed = sampled_as(bug.claimed)
    sampled, read = bug.sampled or claimed, bug.q or (unchanged if bug.sampled else claimed)
    return Step(_changed(p, claimed), bug.rule, _changed(p, bug.p or claimed), _changed(q, read), _changed(q, sampled))


def corrected(step: Step) -> Step:
    """The correct step with the same intended distribution and the same draft tokens."""
    return step._replace(rule=token_verification, p=step.intended, q=step.sampled)


def deviation(step: Step, gamma: int) -> float:
    """Total variation between the joint distribution of the next gamma + 1 tokens and the intended
    one.

    Raises `ValueError` where a rule uses uniforms in a way that cannot be enumerated; see
    `deviation_on_points`.
    """
    return _distance(step, chain_distribution(step.rule, step.p, step.q, gamma, step.sampled), gamma)


def deviation_on_points(step: Step, gamma: int, points: int = POINTS) -> float:
    """The same for any rule, approximately: on that many quasi-random points in place of the
    uniforms."""
    drafts = draft_trees(chain(gamma), step.q, independent_children, step.sampled)
    return _distance(step, estimated_distribution(step.rule, drafts, step.p, chain(gamma), points), gamma)


def _distance(step: Step, emitted: Emissions, gamma: int) -> float:
    have, want = completed(emitted, step.intended, gamma + 1), joint_distribution(step.intended, gamma + 1)
    return float(total_variation(have.flatten(), want.flatten()))


def _changed(distributions: Conditional, change: Change) -> Conditional:
    """`change` is given the distributions at all positions of a context, and the last one is
    used."""
    return lambda context: change(torch.stack([distributions(context[:i]) for i in range(len(context) + 1)]))[-1]
