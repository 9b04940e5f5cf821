"""Exact enumeration: the joint distribution that a rule gives to everything a step emits.

Plans are multiplied out in float64 over every tree of draft tokens. Drafters are asked in every cell
of uniforms in which their answer is constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from specnb.arguments import shown
from specnb.distributions import Conditional, normalise
from specnb.drafters import Context, Drafter, Proposal, no_distribution, padded
from specnb.rules import Plan, PlannedRule, Rule, token_verification
from specnb.trees import Scheme, TokenTree, chain, independent_children, leaves_first

# The probability of each sequence that a step can emit: accepted draft tokens, then the last token
Emissions = dict[tuple[int, ...], float]

GRID = 128  # points at which a drafter's uniform is tried first; less probable tokens than 1 / GRID may be overlooked
HALVINGS = 42


class Drafts(NamedTuple):
    """What may be proposed in a step: tokens (-1 for none), the q of each, and the probability."""

    tokens: Int[Tensor, "drafts nodes"]
    q: Float64[Tensor, "drafts nodes vocab"]
    probability: Float64[Tensor, " drafts"]


def joint_distribution(probs: Conditional, length: int) -> Float64[Tensor, ...]:
    """The distribution `(vocab,) * length` of `length` tokens sampled one by one from `probs`.

    >>> joint_distribution(lambda prefix: torch.tensor([0.25, 0.75]).double(), length=2).tolist()
    [[0.0625, 0.1875], [0.1875, 0.5625]]
    """
    return completed({(): 1.0}, probs, length)


def completed(emitted: Emissions, p: Conditional, length: int) -> Float64[Tensor, ...]:
    """The joint distribution `(vocab,) * length` if the target continues what a step emitted.

    A step of gamma draft tokens is exact if and only if this is `joint_distribution(p, gamma + 1)`.
    """
    joint = torch.zeros((len(p(())),) * length, dtype=torch.float64)
    for tokens, probability in emitted.items():
        if len(tokens) == length:
            joint[tokens] += probability
        else:
            longer = {(*tokens, x): probability * share for x, share in enumerate(p(tokens).tolist())}
            joint += completed(longer, p, length)
    return joint


def distribution_of_counts(emitted: Emissions, gamma: int) -> Float64[Tensor, " counts"]:
    """The distribution `(gamma + 1,)` of the number of tokens that a step emits, from 1."""
    counts = torch.zeros(gamma + 1, dtype=torch.float64)
    for tokens, probability in emitted.items():
        counts[len(tokens) - 1] += probability
    return counts


def expected_accepted(emitted: Emissions) -> float:
    """The expected number of accepted draft tokens in a step."""
    return sum(chance * (len(tokens) - 1) for tokens, chance in emitted.items())


def step_distribution(
    rule: Rule,
    p: Conditional,
    q: Conditional,
    gamma: int | Sequence[int],
    sampled: Conditional | None = None,
    scheme: Scheme = independent_children,
) -> Emissions:
    """The probability of each sequence that one step emits.

    Parameters
    ----------
    p, q
        Distributions of target and drafter given the tokens of this step so far.
    gamma
        Draft tokens of a chain, or the parents of a tree, whose siblings `scheme` samples.
    sampled
        The distribution that draft tokens come from, if it is not q.

    Examples
    --------
    >>> p = lambda prefix: torch.tensor([0.5, 0.5]).double()
    >>> q = lambda prefix: torch.tensor([0.0, 1.0]).double()
    >>> step_distribution(token_verification, p, q, gamma=1)
    {(0,): 0.5, (1, 0): 0.25, (1, 1): 0.25}
    """
    parents = chain(gamma) if isinstance(gamma, int) else tuple(gamma)
    return emissions(rule, draft_trees(parents, q, scheme, sampled), p, parents)


def draft_trees(parents: tuple[int, ...], q: Conditional, scheme: Scheme, sampled: Conditional | None = None) -> Drafts:
    """Every tree of this shape that can be proposed, its tokens sampled from `sampled`, by default q."""
    tree = TokenTree(parents)
    tokens, rows, chance = torch.zeros(1, 0, dtype=torch.int64), q(())[None, None][:, :0], torch.ones(1).double()
    for node, parent in enumerate(parents):
        earlier = [tokens[:, sibling] for sibling in range(node) if parents[sibling] == parent]
        prefixes = _prefixes(tokens, tree, parent + 1)
        reported, source = (scheme(_after(prefixes, probs), earlier) for probs in (q, sampled or q))
        possible = torch.tensor([-1 not in prefix for prefix in prefixes])[:, None]
        reported, source = reported.where(possible, 0.0), source.where(possible, 0.0)
        nothing = ~(source > 0).any(-1, keepdim=True)
        draft, choice = torch.cat([source > 0, nothing], -1).nonzero(as_tuple=True)
        token = choice.where(choice < source.shape[-1], -1)
        tokens = torch.cat([tokens[draft], token[:, None]], -1)
        rows = torch.cat([rows[draft], reported[draft][:, None]], -2)
        chance = chance[draft] * torch.cat([source, nothing.double()], -1)[draft, choice]
    return Drafts(tokens, rows, chance)


def emissions(rule: Rule, drafts: Drafts, p: Conditional, parents: tuple[int, ...]) -> Emissions:
    """As `step_distribution`, from the `drafts` that may be proposed."""
    if not isinstance(rule, PlannedRule):
        raise TypeError(f"rule is {shown(rule)}; only a PlannedRule has probabilities to multiply out: write its plan")
    tree = TokenTree(parents)
    plan = rule.plan_for(target_along(drafts, p, tree), drafts.q, drafts.tokens, tree)
    after, emitted = distributions_of(plan), Emissions()
    for entry, chance in _ends(plan, drafts.tokens, tree, rule.up):
        shares = (drafts.probability * chance)[:, None] * after[:, entry]
        prefixes = _prefixes(drafts.tokens, tree, entry)
        numbers = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
        which = torch.tensor([numbers[prefix] for prefix in prefixes])
        sums = torch.zeros(len(numbers), shares.shape[-1]).double().index_add(0, which, shares)
        for prefix, row in zip(numbers, sums.tolist(), strict=True):
            for x, share in enumerate(row):
                if share > 0:
                    emitted[*prefix, x] = emitted.get((*prefix, x), 0.0) + share
    return emitted


def _ends(plan: Plan, tokens: Tensor, tree: TokenTree, up: bool) -> Iterator[tuple[int, Tensor]]:
    """Each entry and the probability `(drafts,)` that the step ends there."""
    accept = plan.accept.double().nan_to_num(0.0).clamp(0, 1)
    # The probability that an entry is reached and none of its children accepted, the root's first.
    reached = [torch.ones(len(tokens)).double()]
    if up:
        for node in leaves_first(tree.parents):
            yield node + 1, reached[0] * accept[:, node]
            reached[0] = reached[0] * (1 - accept[:, node])
        yield 0, reached[0]
    else:
        for node, parent in enumerate(tree.parents):
            reached.append(reached[parent + 1] * accept[:, node])
            reached[parent + 1] = reached[parent + 1] * (1 - accept[:, node])
        yield from enumerate(reached)


def distributions_of(plan: Plan) -> Float64[Tensor, "drafts entries vocab"]:
    count, entries = plan.after.shape[:2]
    every = [plan.at(torch.full((count,), entry)) for entry in range(entries)]
    return normalise(torch.stack(every, dim=1).double())


def _prefixes(tokens: Tensor, tree: TokenTree, entry: int) -> list[tuple[int, ...]]:
    path = [node for node in tree.paths[entry].tolist() if node >= 0]
    return [tuple(row) for row in tokens[:, path].tolist()]


def _after(prefixes: Sequence[tuple[int, ...]], probs: Conditional) -> Tensor:
    """`probs` after each prefix; after none if a token is missing."""
    table = {prefix: probs(prefix if -1 not in prefix else ()) for prefix in prefixes}
    return torch.stack([table[prefix] for prefix in prefixes]).double()


def target_along(drafts: Drafts, p: Conditional, tree: TokenTree) -> Float64[Tensor, "drafts entries vocab"]:
    prefixes = [_prefixes(drafts.tokens, tree, entry) for entry in range(len(tree.parents) + 1)]
    return torch.stack([_after(each, p) for each in prefixes], dim=1)


def drafts_of(drafter: Drafter, prefix: tuple[int, ...], gamma: int) -> Drafts:
    """Every proposal of `drafter` after `prefix`, with its probability, by bisection of its uniforms.

    Raises `ValueError` if a draft token depends on a later uniform or other randomness, a q is no
    distribution, or a token is less probable than 1 / `GRID`.
    """
    cells, volumes = torch.full((1, gamma), 0.5, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    asked = [_proposed(drafter, prefix, cells.repeat(16, 1)) for _ in range(2)]  # 32 times the same
    if any(not torch.equal(each, each[:1].expand_as(each)) for each in map(torch.cat, zip(*asked, strict=True))):
        raise ValueError(
            f"after {prefix} the drafter proposes something else with equal uniforms; sample with `uniforms` alone, "
            "and let `start` forget what earlier steps left"
        )
    for position in range(gamma):
        splits = [_split(drafter, prefix, cell, position) for cell in cells]
        volumes = torch.cat([volume * widths for volume, (_, widths) in zip(volumes, splits, strict=True)])
        cells = torch.cat([split for split, _ in splits])
    tokens, q = proposal = _proposed(drafter, prefix, cells)
    if bool(no_distribution(proposal).any()):
        sums = q.sum(dim=-1)
        raise ValueError(
            f"after {prefix} the drafter reports a q with sums {sums.min():.4g} to {sums.max():.4g}; q is 0 or more, "
            "and sums to 1 where a token is proposed and to 0 where none is"
        )
    return Drafts(tokens, q.double(), volumes)


def drafter_step_distribution(
    drafter: Drafter, p: Conditional, prefix: tuple[int, ...], gamma: int, rule: Rule = token_verification
) -> Emissions:
    """The probability of each sequence that one step with `drafter` emits after `prefix`."""
    parents = chain(gamma) if drafter.parents is None else drafter.parents
    return emissions(rule, drafts_of(drafter, prefix, len(parents)), p, parents)


def _split(drafter: Drafter, prefix: tuple[int, ...], cell: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """The cells `(n, gamma)` into which uniform number `position` divides `cell`, and their widths."""
    # With both ends of [0, 1): a rare token there would lie between no two points of the grid.
    middles = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    points = torch.cat([middles.new_zeros(1), middles, middles.new_full((1,), 1 - 2**-53)])
    tokens = _tokens_at(drafter, prefix, cell, position, points)
    changes = tokens.diff() != 0
    low, high = points[:-1][changes], points[1:][changes]
    before, after = tokens[:-1][changes], tokens[1:][changes]
    for _ in range(HALVINGS if len(low) else 0):
        middle = (low + high) / 2
        there = _tokens_at(drafter, prefix, cell, position, middle)
        if bool(((there != before) & (there != after)).any()):
            raise ValueError(f"a draft token has a probability below 1/{GRID}: take a small vocabulary and flat tables")
        low, high = middle.where(there == before, low), middle.where(there == after, high)
    edges = torch.cat([torch.zeros(1).double(), high, torch.ones(1).double()])
    cells = cell.repeat(len(edges) - 1, 1)
    cells[:, position] = (edges[1:] + edges[:-1]) / 2
    return cells, edges.diff()


def _tokens_at(drafter: Drafter, prefix: tuple[int, ...], cell: Tensor, position: int, points: Tensor) -> Tensor:
    uniforms = cell.repeat(len(points), 1)
    uniforms[:, position] = points
    tokens = _proposed(drafter, prefix, uniforms)[0]
    if bool((tokens[:, :position] != tokens[:1, :position]).any()):
        raise ValueError(f"draft tokens before number {position} depend on its uniform")
    return tokens[:, position]


def _proposed(drafter: Drafter, prefix: tuple[int, ...], uniforms: Tensor) -> Proposal:
    rows, gamma = uniforms.shape
    tokens = torch.tensor([[*prefix, *[0] * (gamma + 1)]]).repeat(rows, 1)
    context = Context(tokens, torch.full((rows,), len(prefix)))
    drafter.start(context)
    return padded(*drafter.propose(context, uniforms), gamma)
