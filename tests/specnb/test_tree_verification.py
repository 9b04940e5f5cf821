"""Tree rules: the joint distribution of everything a step emits, enumerated exactly, and the rule's edge cases."""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from specnb.distributions import Conditional, residual
from specnb.enumeration import Emissions, completed, joint_distribution
from specnb.rules import TreeOutcome, TreeRule, recursive_rejection, token_verification
from specnb.trees import node_depths

VOCAB = 3
TREES = [(-1,), (-1, -1), (-1, -1, -1), (-1, 0), (-1, 0, -1), (-1, -1, 0, 0), (-1, 0, 0, -1, 3), (-1, 0, 1)]


def conditionals(seed: int, zeros: float = 0.0) -> Conditional:
    """Random distributions that depend on every token before."""
    generator = torch.Generator().manual_seed(seed)
    table = {}

    def after(prefix: tuple[int, ...]) -> Tensor:
        if prefix not in table:
            weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64)
            weights[torch.rand(VOCAB, generator=generator) < zeros] = 0.0
            table[prefix] = (weights + (weights.sum() == 0)) / (weights + (weights.sum() == 0)).sum()
        return table[prefix]

    return after


def prefixes(parents: tuple[int, ...], tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(parents, tokens, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return paths


def step_distribution(rule: TreeRule, p: Conditional, q: Conditional, parents: tuple[int, ...]) -> Emissions:
    """The probability of everything a step can emit, by asking `rule` in every cell of the uniforms.

    A uniform is compared with one number, or not at all: r(x)/q(x) of its node, where r is what earlier siblings leave
    when all of them are rejected. The final uniform is compared with cumulated distributions, each of them one r.
    """
    emitted: Emissions = {}
    for tokens in product(range(VOCAB), repeat=len(parents)):
        paths = prefixes(parents, tokens)
        own = torch.stack([q(path[:-1]) for path in paths])
        chance = float(torch.stack([own[i, x] for i, x in enumerate(tokens)]).prod())
        if chance == 0:
            continue
        target = torch.stack([p(()), *map(p, paths)])
        left = list(target)  # what is left after each node, and each r on the way
        edges, seen = [], list(target)
        for node, parent in enumerate(parents):
            ratio = float(left[parent + 1][tokens[node]] / own[node, tokens[node]])
            edges.append(sorted({0.0, min(ratio, 1.0), 1.0}))
            left[parent + 1] = residual(left[parent + 1], own[node])
            seen.append(left[parent + 1])
        final = torch.cat([torch.zeros(1), torch.stack(seen).cumsum(-1).flatten(), torch.ones(1)]).clamp(0, 1)
        edges.append(final.double().unique().tolist())
        cells = [[((low + high) / 2, high - low) for low, high in pairwise(e)] for e in edges]
        grid = torch.tensor(list(product(*cells)), dtype=torch.float64)  # (cells, uniforms, 2)
        size = len(grid)
        outcome = rule(
            target.expand(size, *target.shape), own.expand(size, *own.shape),
            torch.tensor(tokens).expand(size, -1), parents, grid[:, :-1, 0], grid[:, -1, 0],
        )  # fmt: skip
        volumes = grid[..., 1].prod(-1)
        for accepted, token, path, volume in zip(*(part.tolist() for part in (*outcome, volumes)), strict=True):
            key = (*(tokens[node] for node in path[:accepted]), token)
            emitted[key] = emitted.get(key, 0.0) + chance * volume
    return emitted


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_recursive_rejection_is_exact(parents: tuple[int, ...], zeros: float) -> None:
    """Whatever a step emits, the target continued from there has its own joint distribution."""
    length = max(node_depths(parents)) + 1
    p, q = conditionals(0, zeros), conditionals(100, zeros)
    have = completed(step_distribution(recursive_rejection, p, q, parents), p, length)
    assert (have - joint_distribution(p, length)).abs().max() < 1e-12


def test_a_rule_that_forgets_the_rejected_sibling_is_found() -> None:
    """Two drafts, each tested against p itself: the enumeration sees it."""

    def forgetful(
        p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...], accept: Tensor, final: Tensor
    ) -> TreeOutcome:
        both = [
            recursive_rejection(
                p[..., [0, node + 1], :],
                q[..., [node], :],
                draft_tokens[..., [node]],
                (-1,),
                accept[..., [node]],
                final,
            )
            for node in range(2)
        ]
        return type(both[0])(
            *(first.where(both[0].accepted.view(-1, *[1] * (first.dim() - 1)) > 0, second)
              for first, second in zip(*both, strict=True))
        )  # fmt: skip

    p, q = conditionals(0), conditionals(100)
    have = completed(step_distribution(TreeRule(forgetful), p, q, (-1, -1)), p, 2)
    assert (have - joint_distribution(p, 2)).abs().max() > 1e-3


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_on_a_chain_it_is_algorithm_1(gamma: int) -> None:
    generator = torch.Generator().manual_seed(gamma)
    p, q = (torch.softmax(torch.randn(500, n, 5, generator=generator).double(), -1) for n in (gamma + 1, gamma))
    tokens = torch.randint(-1, 5, (500, gamma), generator=generator)
    q = q.where(tokens[..., None] >= 0, 0.0)
    accept, final = torch.rand(500, gamma, generator=generator), torch.rand(500, generator=generator)
    chain = token_verification(p, q, tokens, accept, final)
    tree = recursive_rejection(p, q, tokens, tuple(range(-1, gamma - 1)), accept, final)
    assert torch.equal(tree.accepted, chain.accepted)
    assert torch.equal(tree.token, chain.token)
    assert torch.equal(tree.path, torch.arange(gamma).where(torch.arange(gamma) < chain.accepted[:, None], -1))


def test_nodes_without_a_token_are_passed_over() -> None:
    p = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.5, 0.5]])
    q = torch.tensor([[0.0, 0.0], [0.2, 0.8]])
    half = torch.tensor([0.5, 0.5])
    outcome = recursive_rejection(p, q, torch.tensor([-1, 1]), (-1, -1), half, torch.tensor(0.3))
    assert (int(outcome.accepted), int(outcome.token), outcome.path.tolist()) == (1, 0, [1])


def test_rules_are_values() -> None:
    assert TreeRule(recursive_rejection.function) == recursive_rejection
    assert hash(TreeRule(recursive_rejection.function)) == hash(recursive_rejection)


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 2, 0)])
def test_parents_come_before_their_children(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="it must be an earlier node, or -1"):
        node_depths(parents)
