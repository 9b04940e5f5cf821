"""Trees of a head, counted along answers: against every path of a tiny model, and against the
loop."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from drafter_kinds import VOCAB, attending, near_model, next_token

from specnb.acceptance import measure_acceptance
from specnb.distributions import Sampling
from specnb.drafters import Context
from specnb.heads import AttentionDrafter
from specnb.sampler import generate
from studies.drafters import tree_counts
from studies.drafters.tree_counts import CHAIN, Setting, along, counted, fixed_trees, sampled

NODES = 4
PROMPTS = [[1, 2, 3], [3, 0], [2, 2, 1]]


def setting(drafter: AttentionDrafter) -> Setting:
    return Setting(near_model("llama"), drafter, PROMPTS, PROMPTS)


@pytest.mark.parametrize("drafter", [attending(), next_token()])
@torch.no_grad()
def test_the_largest_products_are_those_of_all_paths(
    drafter: AttentionDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_counts, "DEPTH", 3)
    of, answer = setting(drafter), [0, 3, 1, 1, 2]
    found = along(of, PROMPTS[0], answer, Sampling(), NODES)
    tokens = torch.tensor([[*PROMPTS[0], *answer, 0, 0, 0, 0]])
    states = of.target(tokens, output_hidden_states=True).hidden_states
    context = Context(tokens, torch.tensor([0]), torch.cat([states[layer] for layer in drafter.hidden_layers], dim=-1))
    for place in range(len(answer)):
        context = context._replace(lengths=torch.tensor([len(PROMPTS[0]) + place]))
        products: dict[tuple[int, ...], float] = {}
        for path in product(range(VOCAB), repeat=3):
            drafter.start(context)
            q = drafter.along(context, torch.tensor([path]))[0]
            each = q.gather(1, torch.tensor(path)[:, None])[:, 0].cumprod(dim=0)
            products |= {path[: depth + 1]: float(each[depth]) for depth in range(3)}
        expected = sorted(products.values(), reverse=True)[:NODES]
        assert found.values is not None
        assert found.values[place].tolist() == pytest.approx(expected, abs=1e-5), place
        next_ones = tuple(answer[place : place + 3])
        own = found.probability[place, : len(next_ones)].cumprod(dim=0)
        assert own.tolist() == pytest.approx([products[next_ones[: at + 1]] for at in range(len(next_ones))], abs=1e-5)


def test_a_chain_is_counted_as_in_the_loop() -> None:
    """At temperature 0 exactly, where steps are not cut off; above it in expectation, as acceptance
    is."""
    drafter, greedy = attending(), Sampling(0)
    of, how = setting(drafter), dict[str, Any](max_new_tokens=12, progress=False)
    drafter.sampling = greedy
    made = generate(of.target, PROMPTS, drafter, gamma=2, sampling=greedy, **how)
    drafter.sampling = Sampling()
    answers = [along(of, *each, greedy, 2) for each in zip(PROMPTS, made.tokens, strict=True)]
    for row, answer in zip(made.record.accepted, answers, strict=True):
        taken = tree_counts.accepted(answer, CHAIN, 2, {(1,), (1, 1)})
        place = 0
        for accepted in row:
            if place < 12 - 2:
                assert taken[place] == accepted
                place += accepted + 1
    texts = generate(of.target, PROMPTS * 3, None, **how).tokens
    measured = measure_acceptance(of.target, PROMPTS * 3, drafter, completions=texts, gamma=2)
    found = [along(of, *each, Sampling(), 2) for each in zip(PROMPTS * 3, texts, strict=True)]
    assert sampled(found, 2).value == pytest.approx(measured.by_depth().tokens_per_step.value, abs=1e-5)


def test_a_fixed_tree_has_the_most_frequent_ranks_and_never_less_than_the_chain_on_its_own_answers() -> None:
    of = setting(attending())
    texts = generate(of.target, PROMPTS * 3, None, max_new_tokens=12, progress=False).tokens
    answers = [along(of, *each, Sampling(), NODES) for each in zip(PROMPTS * 3, texts, strict=True)]
    trees = fixed_trees(answers, (2, NODES))
    for count, tree in trees.items():
        assert len(tree) == count
        assert all(path[:-1] in tree or len(path) == 1 for path in tree)
    assert trees[2] < trees[NODES]
    chain = {(1,) * depth for depth in range(1, NODES + 1)}
    every = [
        sum(tree_counts.accepted(one, CHAIN, NODES, tree).sum() for one in answers) for tree in (trees[NODES], chain)
    ]
    assert every[0] >= every[1]
    assert counted(answers, CHAIN, NODES, chain, NODES).value >= 1
