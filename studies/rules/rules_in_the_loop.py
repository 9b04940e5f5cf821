"""What each verification rule gains on the trained pair.

All methods of a temperature make four forward passes of the draft model and one of the target in
each step, so they differ in the tokens that the target's forward pass has to evaluate: 5 for a
chain, 9 for two chains, 13 for a tree. The tree's shape is chosen by
`studies.rules.tree_shape.best_tree` from acceptance measured on other prompts. The table
`data/results/rules_in_the_loop.csv` has a line for each temperature and method:

- `tokens_per_step` with its interval over sequences; `steps`, the number of steps behind it
- `predicted`: the speed-up over plain decoding that tokens per step, v(n) and c predict, both
  measured just before
- `measured`: the speed-up that was timed, with its interval; every method in turn on one prompt
  after another, batch 1
- `break_even`: the v(n) at which the method would be as fast as token verification of a chain of 4;
  above the measured `verify_cost` the method wins
- `block_accepted`, `token_accepted` (the line of token verification): the expected number of
  accepted tokens of both rules on the same drafts, computed from p and q without sampling;
  `block_worse`: on how many of `drafts` block verification is expected to accept fewer
- `nodes`, `depth`, `parents`: the tree; `child_rates`: the measured acceptance of the first child,
  the second and so on
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from specnb.decoding.generate import generate
from specnb.distributions import Sampling
from specnb.drafting.base import Drafter
from specnb.drafting.model import ModelDrafter, TreeDrafter
from specnb.measure.cost import Costs, measure_costs, mid_generation
from specnb.measure.statistics import ratio_of_medians, ratio_of_sums
from specnb.models.loading import Pair, load_pair
from specnb.rules import (
    Outcome,
    Rule,
    block_verification,
    exact_match,
    recursive_rejection,
    token_verification,
    traversal_verification,
)
from specnb.trees import Scheme, distinct_children, independent_children, top_children
from studies.rules.published_rules import best_path_block, k_sequential_tree
from studies.rules.tree_shape import best_tree
from studies.speed.pairs import prompts_of
from studies.study import Study, columns, timed_in_turn

# Levels and nodes of the tree; children whose acceptance is measured.
DEPTH, NODES, CHILDREN = 4, 12, 6
PROMPT_TOKENS = 32
TWO_CHAINS = (-1, -1, 0, 1, 2, 3, 4, 5)


class Method(NamedTuple):
    """A rule, and the draft tokens that it verifies; no rule is plain decoding."""

    rule: Rule | None
    parents: tuple[int, ...] | None = None
    scheme: Scheme = distinct_children

    @property
    def gamma(self) -> int:
        """Draft tokens of a step."""
        return 0 if self.rule is None else DEPTH if self.parents is None else len(self.parents)


def methods(tree: tuple[int, ...], top: tuple[int, ...], temperature: float) -> dict[str, Method]:
    """The methods of one temperature; `tree` is for sampled children, `top` for the most probable
    ones."""
    found = {
        "plain": Method(None),
        "token, chain": Method(token_verification),
        "block, chain": Method(block_verification),
        "q = 1, top-k tree": Method(exact_match, top, top_children),
        "traversal, top-k tree": Method(traversal_verification, top, top_children),
    }
    if temperature == 0:  # all samples are equal, and rules differ on trees of distinct tokens only
        return found
    return found | {
        "recursive, two chains": Method(recursive_rejection, TWO_CHAINS, independent_children),
        "k-sequential, two chains": Method(k_sequential_tree, TWO_CHAINS, independent_children),
        "best path, two chains": Method(best_path_block, TWO_CHAINS, independent_children),
        "recursive, tree": Method(recursive_rejection, tree),
        "traversal, tree": Method(traversal_verification, tree),
        "exact match, tree": Method(exact_match, tree),
    }


@dataclass(frozen=True)
class Noted:
    """Token verification that notes what both rules are expected to accept of each draft; `steps`
    at most."""

    token: list[Tensor]
    block: list[Tensor]
    steps: int

    def __call__(self, p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        if len(self.token) < self.steps:
            token, block = both_expected(p.double(), q.double(), tokens)
            self.token.append(token)
            self.block.append(block)
        return token_verification(p, q, tokens, accept, final)


def both_expected(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The expected number of accepted tokens `(...,)` of token and of block verification.

    Prefix i of a draft is accepted with probability prod_j min(1, r_j) by token verification, and
    by block verification with w_i = min(1, w_{i-1} r_i), whatever the draft tokens after it; r_j is
    p/q of token j. These are summed. Each term of the second is at least that of the first.

    >>> p, q = torch.tensor([[1, 2], [1, 2], [1, 2]]) / 3, torch.tensor([[2, 1], [2, 1]]) / 3
    >>> [round(float(expected), 3) for expected in both_expected(p, q, torch.tensor([0, 1]))]
    [1.0, 1.5]
    """
    index = tokens.clamp_min(0)[..., None]
    ratios = (p[..., :-1, :].gather(-1, index) / q.gather(-1, index))[..., 0].where(tokens >= 0, 0.0)
    weight, weights = torch.ones_like(p[..., 0, 0]), []
    for ratio in ratios.unbind(-1):
        weight = (weight * ratio).clamp_max(1)
        weights.append(weight)
    return ratios.clamp_max(1).cumprod(-1).sum(-1), torch.stack(weights, dim=-1).sum(-1)


def measure(item: str, sequences: int, new_tokens: int, timed: int, timed_tokens: int) -> pd.DataFrame:
    """The lines of one temperature."""
    temperature = float(item.replace("-", "."))
    sampling, pair = Sampling(temperature=temperature), load_pair()
    prompts = prompts_of(pair, "held-out", 2 * sequences + timed, PROMPT_TOKENS)
    shaping, measured, timing = prompts[:sequences], prompts[sequences : 2 * sequences], prompts[2 * sequences :]
    run = partial(run_method, pair, sampling, new_tokens)
    sampled = distinct_children if temperature > 0 else top_children
    rates: dict[Scheme, list[float]] = {scheme: child_rates(run, shaping, scheme) for scheme in {sampled, top_children}}
    shapes = {scheme: best_tree(own, NODES, DEPTH) for scheme, own in rates.items()}
    chosen = methods(shapes[sampled], shapes[top_children], temperature)
    counted = {}
    for name, method in chosen.items():
        record = run(method, measured).record
        counted[name] = ratio_of_sums(((record.accepted + 1) * record.active).sum(1), record.active.sum(1))

    context, slots = mid_generation(PROMPT_TOKENS, timed_tokens, NODES)
    lengths = sorted({1, *(method.gamma + 1 for method in chosen.values())})
    costs = measure_costs(pair, context=context, slots=slots, lengths=lengths, repetitions=3 * timed, progress=False)
    times = timed_in_turn(
        lambda method, prompt, _: run_method(pair, sampling, timed_tokens, method, [prompt]), [*chosen.values()], timing
    )
    seconds = dict(zip(chosen, times.T, strict=True))
    chain = step_cost(chosen["token, chain"], costs)
    rows: list[dict[str, Any]] = []
    for name, method in chosen.items():
        tokens, speed = counted[name], ratio_of_medians(seconds["plain"], seconds[name])
        drafted = DEPTH * costs.cost_ratio.value if method.gamma else 0.0
        line: dict[str, Any] = {"temperature": temperature, "method": name, "nodes": method.gamma}
        line |= {"depth": DEPTH if method.gamma else 0, "tokens_per_step": tokens.value}
        line |= {"low": tokens.low, "high": tokens.high, "steps": tokens.n}
        line |= {"verify_cost": float(costs.verify_cost(method.gamma + 1)), "cost_ratio": costs.cost_ratio.value}
        line |= {"predicted": tokens.value / step_cost(method, costs)} | columns("measured", speed)
        line |= {"timed_prompts": speed.n}
        line |= {"break_even": tokens.value / counted["token, chain"].value * chain - drafted}
        line |= {"parents": " ".join(map(str, method.parents or ()))}
        line |= {"child_rates": " ".join(f"{rate:.3f}" for rate in rates.get(method.scheme, []))}
        if name == "token, chain":
            line |= block_beside_token(run, measured, new_tokens // (DEPTH + 1))
        rows.append(line)
    return pd.DataFrame(rows)


def block_beside_token(run: Callable[..., Any], prompts: list[list[int]], steps: int) -> dict[str, float]:
    """What both rules are expected to accept of the drafts of at most so many steps of token
    verification."""
    noted = Noted([], [], steps)
    run(Method(noted), prompts)
    token, block = torch.stack(noted.token), torch.stack(noted.block)
    worse, drafts = int((block < token - 1e-12).sum()), token.numel()
    found = {"token_accepted": float(token.mean()), "block_accepted": float(block.mean())}
    return found | {"block_worse": worse, "drafts": drafts}


def step_cost(method: Method, costs: Costs) -> float:
    """The cost of a step in target forward passes over one token: v(gamma + 1), and c for each
    draft pass.

    Draft passes over several nodes are taken to cost what one over one token does.
    """
    return float(costs.verify_cost(method.gamma + 1)) + (DEPTH * costs.cost_ratio.value if method.gamma else 0.0)


def child_rates(run: Callable[..., Any], prompts: list[list[int]], scheme: Scheme) -> list[float]:
    """The fraction of steps in which the first child, the second, ... of the root is accepted."""
    record = run(Method(recursive_rejection, (-1,) * CHILDREN, scheme), prompts).record
    taken = record.path[..., 0][record.active]
    return [float((taken == child).mean()) for child in range(CHILDREN)]


def run_method(pair: Pair, sampling: Sampling, new_tokens: int, method: Method, prompts: list[list[int]]) -> Any:
    drafter: Drafter | None = None
    if method.rule is not None and method.parents is None:
        drafter = ModelDrafter(pair.draft, sampling)
    elif method.parents is not None:
        drafter = TreeDrafter(pair.draft, method.parents, sampling, method.scheme)
    return generate(
        pair.target, prompts, drafter, gamma=method.gamma, max_new_tokens=new_tokens, sampling=sampling,
        rule=method.rule, seed=9, progress=False,
    )  # fmt: skip


STUDY = Study(
    measure,
    settings={"sequences": 15, "new_tokens": 60, "timed": 21, "timed_tokens": 32},
    small={"sequences": 8, "new_tokens": 8, "timed": 3, "timed_tokens": 4},
    items=("0", "0-5", "1"),
)
