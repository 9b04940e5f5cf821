"""Rules of studies are refused for the ways to sample children for which the enumeration finds them
wrong."""

from __future__ import annotations

import pytest
from distributions_for_tests import distribution_pair
from tiny import llama

from specnb.drafters import TreeDrafter
from specnb.enumeration import completed, joint_distribution, step_distribution
from specnb.sampler import generate
from specnb.trees import SCHEMES, Scheme
from studies.rules.published_rules import best_path_block, hub_children, k_sequential_tree, spechub_tree

RULES = (best_path_block, k_sequential_tree, spechub_tree)


@pytest.mark.parametrize("scheme", [*SCHEMES, hub_children])
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
