"""What each verification rule gains on the trained pair.

All methods of a temperature make four forward passes of the draft model and one of the target in
each step, so they differ in the tokens that the target's forward pass has to evaluate: 5 for a
chain, 9 for two chains, 13 for a tree. The table `data/results/rules_in_the_loop.csv` has a line
for each temperature and method:

- `tokens_per_step` with its interval over sequences; `steps`, the number of steps behind it
- `predicted`: the speed-up over plain decoding that tokens per step, v(n) and c predict, both
  measured just before
- `measured`: the speed-up that was timed, with its interval; every method in turn on one prompt
  after another, batch 1
- `break_even`: the v(n) at which the method would be as fast as token verification of a chain of 4;
  above the measured `verify_cost` the method wins
- `nodes`, `depth`, `parents`: the tree
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

from specnb.cost import Costs, measure_costs, mid_generation
from specnb.distributions import Sampling
from specnb.drafters import Drafter, ModelDrafter, TreeDrafter
from specnb.loading import Pair, load_pair
from specnb.record import Generation
from specnb.rules import (
    Rule,
    block_verification,
    exact_match,
    recursive_rejection,
    token_verification,
    traversal_verification,
)
from specnb.sampler import Sampler
from specnb.statistics import ratio_of_sums
from specnb.trees import Scheme, distinct_children, independent_children, top_children
from studies.rules.published_rules import best_path_block, k_sequential_tree
from studies.speed.pairs import prompts_of
from studies.study import Study, columns, faster, timed_in_turn

DEPTH, PROMPT_TOKENS, SEED = 4, 32, 9
TWO_CHAINS = (-1, -1, 0, 1, 2, 3, 4, 5)
SHAPES = {  # temperature: the tree of sampled children, and of the most probable ones
    0.0: ((-1, -1, 0, 0, 1, 2, 2, 3, 4, 5, 7, 8), (-1, -1, 0, 0, 1, 2, 2, 3, 4, 5, 7, 8)),
    0.5: ((-1, -1, 0, 0, 1, 2, 2, 3, 4, 5, 6, 8), (-1, -1, -1, 0, 0, 1, 3, 3, 4, 5, 6, 9)),
    1.0: ((-1, -1, -1, 0, 0, 1, 2, 3, 3, 4, 5, 7), (-1, -1, -1, -1, -1, 0, 0, 0, 1, 2, 5, 10)),
}
"""The trees of 12 nodes and depth 4 that accept most by the acceptance of the first child, the second
and so on, which was measured on other prompts: notebook 08 has the dynamic program."""


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


def measure(item: str, sequences: int, new_tokens: int, timed: int, timed_tokens: int) -> pd.DataFrame:
    """The lines of one temperature."""
    temperature = float(item.replace("-", "."))
    sampling, pair = Sampling(temperature=temperature), load_pair()
    prompts = prompts_of(pair, "held-out", 2 * sequences + timed, PROMPT_TOKENS)[sequences:]
    counting, timing = prompts[:sequences], prompts[sequences:]
    chosen = methods(*SHAPES[temperature], temperature)
    counted = {}
    for name, method in chosen.items():
        record = run_method(pair, sampling, new_tokens, method, counting).record
        counted[name] = ratio_of_sums(((record.accepted + 1) * record.active).sum(1), record.active.sum(1))

    context, slots = mid_generation(PROMPT_TOKENS, timed_tokens, max(method.gamma for method in chosen.values()))
    lengths = sorted({1, *(method.gamma + 1 for method in chosen.values())})
    costs = measure_costs(pair, context=context, slots=slots, lengths=lengths, repetitions=3 * timed, compile="auto",
        progress=False,
    )  # fmt: skip
    samplers = [sampler_of(pair, sampling, method) for method in chosen.values()]
    times = timed_in_turn(
        lambda sampler, prompt, number: sampler.generate(
            [prompt], max_new_tokens=timed_tokens, seed=SEED, numbers=[number]
        ),
        samplers,
        timing,
    )
    seconds = dict(zip(chosen, times.T, strict=True))
    chain = step_cost(chosen["token, chain"], costs)
    rows: list[dict[str, Any]] = []
    for name, method in chosen.items():
        tokens, speed = counted[name], faster(seconds["plain"], seconds[name])
        drafted = DEPTH * costs.cost_ratio.value if method.gamma else 0.0
        line: dict[str, Any] = {"temperature": temperature, "method": name, "nodes": method.gamma}
        line |= {"depth": DEPTH if method.gamma else 0, "tokens_per_step": tokens.value}
        line |= {"low": tokens.low, "high": tokens.high, "steps": tokens.n}
        line |= {"verify_cost": float(costs.verify_cost(method.gamma + 1)), "cost_ratio": costs.cost_ratio.value}
        line |= {"predicted": tokens.value / step_cost(method, costs)} | columns("measured", speed)
        line |= {"timed_prompts": speed.n}
        line |= {"break_even": tokens.value / counted["token, chain"].value * chain - drafted}
        rows.append(line | {"parents": " ".join(map(str, method.parents or ()))})
    return pd.DataFrame(rows)


def step_cost(method: Method, costs: Costs) -> float:
    """The cost of a step in target forward passes over one token: v(gamma + 1), and c for each
    draft pass.

    Draft passes over several nodes are taken to cost what one over one token does.
    """
    return float(costs.verify_cost(method.gamma + 1)) + (DEPTH * costs.cost_ratio.value if method.gamma else 0.0)


def sampler_of(pair: Pair, sampling: Sampling, method: Method) -> Sampler:
    """A sampler that decodes by `method`."""
    drafter: Drafter | None = None
    if method.rule is not None and method.parents is None:
        drafter = ModelDrafter(pair.draft, sampling, compile="auto")
    elif method.parents is not None:
        drafter = TreeDrafter(pair.draft, method.parents, sampling, method.scheme, compile="auto")
    return Sampler(pair.target, drafter, gamma=method.gamma, sampling=sampling, rule=method.rule, progress=False)


def run_method(pair: Pair, sampling: Sampling, new_tokens: int, method: Method, prompts: list[list[int]]) -> Generation:
    """The completions of `prompts` by `method`."""
    return sampler_of(pair, sampling, method).generate(prompts, max_new_tokens=new_tokens, seed=SEED)


STUDY = Study(
    measure,
    settings={"sequences": 15, "new_tokens": 60, "timed": 21, "timed_tokens": 32},
    small={"sequences": 8, "new_tokens": 8, "timed": 3, "timed_tokens": 4},
    items=("0", "0-5", "1"),
)
