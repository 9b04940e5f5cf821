"""The tree drafter: its tokens, its distributions against the model without a cache, and what it
leaves out."""

from __future__ import annotations

import pytest
import torch
from distributions_for_tests import distribution_pair
from tiny import llama, near_copy, next_distributions
from torch import Tensor

from specnb.distributions import Sampling
from specnb.drafters import Context, Proposal, TreeDrafter
from specnb.enumeration import completed, joint_distribution, step_distribution
from specnb.rules import PlannedRule, exact_match, recursive_rejection, token_verification, traversal_verification
from specnb.sampler import generate
from specnb.trees import SCHEMES, Scheme, distinct_children, independent_children, top_children

SHAPES = [(-1, -1), (-1, 0, 1), (-1, -1, 0, 0, 1), (-1, 0, -1, 1, 2, 1)]
PROMPTS = ((0,), (3, 1), (2, 0, 1, 3))


class Checked(TreeDrafter):
    """Compares each q with the model's distribution without a cache."""

    checked = 0

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        proposal = super().propose(context, uniforms)
        for row, length in enumerate(context.lengths.tolist()):
            known, tokens = context.tokens[row, :length].tolist(), proposal.draft_tokens[row].tolist()
            for node, parent in enumerate(self.parents):
                prefix = tuple(tokens[i] for i in self.tree.paths[parent + 1].tolist() if i >= 0)
                if length + len(prefix) > 16:
                    continue
                siblings = [torch.tensor(tokens[i]) for i in range(node) if self.parents[i] == parent]
                if -1 in prefix:
                    expected = torch.zeros(4, dtype=torch.float64)
                else:
                    expected = self.scheme(next_distributions(self.model, [known + list(prefix)])[0], siblings)
                assert torch.allclose(proposal.q[row, node], expected, atol=1e-9)
                assert (tokens[node] >= 0) == bool(expected.sum() > 0)
                self.checked += 1
        return proposal


@pytest.mark.parametrize("scheme", [independent_children, distinct_children, top_children])
@pytest.mark.parametrize("parents", SHAPES, ids=str)
def test_the_cache_follows_the_accepted_path(parents: tuple[int, ...], scheme: Scheme) -> None:
    """After accepted leaves too, which the draft model has not seen, and in refilled rows."""
    target = llama(dtype=torch.float64)
    drafter = Checked(near_copy(target, 0.1), parents, scheme=scheme)
    made = generate(
        target, PROMPTS * 8, drafter, gamma=len(parents), max_new_tokens=9, eos=1, batch_size=8, progress=False
    )
    assert made.record.accepted.max() == drafter.tree.depth
    assert drafter.checked > 50


def proposal_of(parents: tuple[int, ...], scheme: Scheme, sampling: Sampling = Sampling(), vocab: int = 4) -> Proposal:
    drafter = TreeDrafter(llama(vocab), parents, sampling, scheme)
    context = Context(torch.zeros(5, 12, dtype=torch.int64).random_(vocab), torch.full((5,), 3))
    drafter.start(context)
    with torch.inference_mode():
        return drafter.propose(context, torch.rand(5, len(parents), dtype=torch.float64))


def test_distinct_children_differ_and_the_fifth_of_four_is_missing() -> None:
    tokens, q = proposal_of((-1,) * 5 + (4,), distinct_children)
    assert (tokens[:, :4].sort(-1).values == torch.arange(4)).all()
    assert (tokens[:, 4:] == -1).all()  # the fifth child, and the child of that
    assert (q[:, 4:] == 0).all()


def test_at_temperature_0_only_the_top_children_are_several() -> None:
    tokens, _ = proposal_of((-1, -1), distinct_children, Sampling(temperature=0))
    assert (tokens[:, 1] == -1).all()
    tokens, q = proposal_of((-1, -1), top_children, Sampling(temperature=0))
    assert (tokens[:, 0] != tokens[:, 1]).all()
    assert (q.amax(-1) == 1).all()


FOR_INDEPENDENT = PlannedRule(token_verification.plan, schemes=(independent_children,))
RULES = (recursive_rejection, traversal_verification, exact_match)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_rule_is_refused_for_the_schemes_that_the_enumeration_finds_it_wrong_for(scheme: Scheme) -> None:
    target, prompt = llama(), [[0, 1]]
    for rule in RULES:
        deviation = 0.0
        for seed in range(2):
            p, q = distribution_pair("dense", 3, seed)
            emitted = step_distribution(rule, p, q, (-1, -1), scheme=scheme)
            deviation += float((completed(emitted, p, 2) - joint_distribution(p, 2)).abs().sum()) / 2
        drafter = TreeDrafter(target, (-1, -1), scheme=scheme)
        assert (deviation < 1e-12) == (scheme in rule.schemes), (rule, deviation)
        if deviation < 1e-12:
            generate(target, prompt, drafter, gamma=2, max_new_tokens=2, rule=rule, progress=False)
        else:
            with pytest.raises(ValueError, match=f"not exact for children sampled by {scheme.__name__}"):
                generate(target, prompt, drafter, gamma=2, max_new_tokens=2, rule=rule, progress=False)


def test_a_tree_that_is_a_chain_fits_rules_for_every_scheme() -> None:
    drafter = TreeDrafter(llama(), (-1, 0), scheme=distinct_children)
    generate(llama(), [[0, 1]], drafter, gamma=2, max_new_tokens=2, rule=FOR_INDEPENDENT, progress=False)
