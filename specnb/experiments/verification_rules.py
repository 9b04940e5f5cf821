"""Verification rules side by side: `make experiments ONLY=verification_rules`.

Every rule is enumerated exactly on the same small distributions. The table `data/results/verification_rules.csv` has
one line for each rule, number of draft tokens, vocabulary and family of distributions:

- `kind`: `chain` (gamma draft tokens in a row) or `several` (k draft tokens for one position); `draft_tokens`: how many
- `rule`, `source` (where it is from) and `read` (what of the source could be read)
- `tv`: the largest total variation between what a step emits, completed by the target, and the target's distribution
- `accepted`: the mean over the pairs of the expected number of accepted tokens (chain) or of the probability that a
  draft token is accepted (several); `optimum`: the mean of the largest value of any exact rule for the same draft
  tokens, by linear programming
- `fraction_min`, `fraction_mean`, `fraction_max`: accepted / optimum over the pairs, 1 where nothing can be accepted;
  above 1 for no exact rule

Besides the families there are examples: that of HSD's README, and the smallest for the rules that are not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.sampling.block_verification import block_plan, hierarchical_code_plan, hierarchical_plan
from specnb.sampling.draft_schemes import (
    DraftTuple,
    hub_pairs,
    independent,
    merged,
    most_probable,
    without_replacement,
)
from specnb.sampling.enumeration import Conditional, Emissions, completed, joint_distribution, step_distribution
from specnb.sampling.multi_draft import (
    SelectionPlanner,
    k_sequential_plan,
    recursive_plan,
    spechub_code_plan,
    spechub_plan,
    top_k_plan,
)
from specnb.sampling.optimal_acceptance import optimal_block, optimal_selection
from specnb.sampling.threshold_enumeration import expected_accepted, planned_selection, planned_step_distribution
from specnb.sampling.verification import exact_match, rejection_sampling, token_verification

TABLE = "verification_rules"
PAIRS = 12  # pairs p, q of each family
SETTINGS = {"pairs": PAIRS}
SMOKE = {"pairs": 2}
CHAIN_SIZES = ((3, 2), (3, 3), (4, 2))  # vocabulary, gamma
VOCABULARIES, DRAFTS = (3, 4, 5), (1, 2, 3, 4)
EXACT = 1e-12  # largest total variation of a rule that is called exact
README = "p = (1/3, 2/3), q = (2/3, 1/3)"
EXAMPLES = {  # p, q and the number of draft tokens
    "p = (0, 0.3, 0.7), q = (0.6, 0.2, 0.2)": ((0, 0.3, 0.7), (0.6, 0.2, 0.2), 2),
    "p = q = (0.7, 0.3)": ((0.7, 0.3), (0.7, 0.3), 3),
    "p = (0.9995, 0.0005), q = (0.6, 0.4)": ((0.9995, 0.0005), (0.6, 0.4), 2),
}

Floats = NDArray[np.float64]


class ChainRule(NamedTuple):
    """A rule for one chain: how its step is enumerated, where it is from, and what was read."""

    emissions: Callable[[Conditional, Conditional, int], Emissions]
    source: str
    read: str


class SelectionRule(NamedTuple):
    """A rule for several draft tokens, with the proposals that it is used with."""

    plan: SelectionPlanner
    tested: Callable[[Tensor, int], list[DraftTuple]]
    proposed: Callable[[Tensor, int], list[DraftTuple]]
    source: str
    read: str


CHAIN_RULES = {
    "token verification": ChainRule(partial(step_distribution, token_verification), "2211.17192", "paper"),
    "rejection sampling": ChainRule(partial(step_distribution, rejection_sampling), "2211.17192 A.2", "paper"),
    "exact match": ChainRule(partial(step_distribution, exact_match), "transformers, llama.cpp", "code"),
    "block verification": ChainRule(partial(planned_step_distribution, block_plan), "2403.10444", "abstract"),
    "hierarchical, capped": ChainRule(
        partial(planned_step_distribution, hierarchical_plan), "2601.05724 definitions 4-6", "a third party's code"
    ),
    "hierarchical, authors' code": ChainRule(
        partial(planned_step_distribution, hierarchical_code_plan), "HSD algorithm.py b8575e2", "code"
    ),
}


def _merged(shuffled: bool) -> Callable[[Tensor, int], list[DraftTuple]]:
    return lambda q, k: merged(independent(q, k), shuffled)


def _pairs(q: Tensor, k: int) -> list[DraftTuple]:
    return hub_pairs(q)


SELECTION_RULES = {
    "recursive, independent drafts": SelectionRule(
        recursive_plan, independent, independent, "Stratos' notes 2; SpecInfer 2305.09781 with repeats", "notes"
    ),
    "recursive, without replacement": SelectionRule(
        recursive_plan, without_replacement, without_replacement, "RSD 2402.14160", "abstract"
    ),
    "recursive, merged children in random order": SelectionRule(
        recursive_plan, _merged(shuffled=True), independent, "SpecInfer 2305.09781 on a prefix tree", "notes"
    ),
    "recursive, merged children in order": SelectionRule(
        recursive_plan, _merged(shuffled=False), independent, "SpecHub's code 7d592b7, mode RRS", "code"
    ),
    "k-sequential selection": SelectionRule(
        k_sequential_plan, independent, independent, "SpecTr 2310.15141", "not read"
    ),
    "top-k, q = 1": SelectionRule(top_k_plan, most_probable, most_probable, "EAGLE issues 93, 183, 221", "issues"),
    "q = 1, sampled without replacement": SelectionRule(
        top_k_plan, without_replacement, without_replacement, "EAGLE's rule on RSD's draft tokens", "issues"
    ),
    "SpecHub": SelectionRule(spechub_plan, _pairs, _pairs, "2411.05289", "comment in code"),
    "SpecHub, authors' code": SelectionRule(spechub_code_plan, _pairs, _pairs, "SpecHub's code 7d592b7", "code"),
}


def _random(generator: np.random.Generator, vocab: int) -> tuple[Floats, Floats]:
    return generator.dirichlet(np.ones(vocab)), generator.dirichlet(np.ones(vocab))


def _near(generator: np.random.Generator, vocab: int) -> tuple[Floats, Floats]:
    p = generator.dirichlet(np.ones(vocab))
    q = p * np.exp(0.3 * generator.standard_normal(vocab))
    return p, q / q.sum()


def _peaked(generator: np.random.Generator, vocab: int) -> tuple[Floats, Floats]:
    """Most of the probability on one token, half of the time on the same one; no probability below 0.01 / vocab."""
    p, q = (np.sort(generator.dirichlet(np.full(vocab, 0.2)))[::-1] * 0.99 + 0.01 / vocab for _ in range(2))
    order = generator.permutation(vocab)
    return p[order], q[order] if generator.random() < 0.5 else q[generator.permutation(vocab)]


def _one_in_common(generator: np.random.Generator, vocab: int) -> tuple[Floats, Floats]:
    """Supports that share a single token."""
    order, half = generator.permutation(vocab), vocab // 2
    p, q = np.zeros(vocab), np.zeros(vocab)
    p[order[: half + 1]], q[order[half:]] = (
        generator.dirichlet(np.ones(half + 1)),
        generator.dirichlet(np.ones(vocab - half)),
    )
    return p, q


def _nearly_one_hot(generator: np.random.Generator, vocab: int) -> tuple[Floats, Floats]:
    """p gives one token all but 0.0005, q most."""
    sure = np.eye(vocab)[generator.integers(vocab)]
    return tuple((1 - rest) * sure + rest * generator.dirichlet(np.ones(vocab)) for rest in (5e-4, 0.4))


FAMILIES: dict[str, Callable[[np.random.Generator, int], tuple[Floats, Floats]]] = {
    "random": _random,
    "near": _near,
    "peaked": _peaked,
    "one token in common": _one_in_common,
    "nearly one-hot p": _nearly_one_hot,
}


def conditionals(family: str, vocab: int, seed: int) -> tuple[Conditional, Conditional]:
    """p and q of pair `seed` of a family, drawn anew in each context."""

    @cache
    def both(context: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng([list(FAMILIES).index(family), vocab, seed, len(context), *context])
        p, q = FAMILIES[family](generator, vocab)
        return torch.from_numpy(p), torch.from_numpy(q)

    return lambda context: both(context)[0], lambda context: both(context)[1]


def chain_rows(pairs: int = PAIRS, sizes: Sequence[tuple[int, int]] = CHAIN_SIZES) -> Iterator[dict[str, object]]:
    """A line for each chain rule, size and family, and for the example of HSD's README."""
    thirds = torch.tensor([1, 2], dtype=torch.float64) / 3
    cases = [(README, 2, 2, [(lambda _: thirds, lambda _: thirds.flip(0))])]
    for vocab, gamma in sizes:
        for family in FAMILIES:
            cases.append((family, vocab, gamma, [conditionals(family, vocab, seed) for seed in range(pairs)]))
    for family, vocab, gamma, chosen in cases:
        best = [optimal_block(p, q, gamma).value for p, q in chosen]
        for name, rule in CHAIN_RULES.items():
            steps = [rule.emissions(p, q, gamma) for p, q in chosen]
            distances = [
                float((completed(step, p, gamma + 1) - joint_distribution(p, gamma + 1)).abs().sum()) / 2
                for step, (p, _) in zip(steps, chosen, strict=True)
            ]
            label = {"kind": "chain", "rule": name, "draft_tokens": gamma, "vocab": vocab, "family": family}
            yield label | _summary(rule, distances, [expected_accepted(step) for step in steps], best)


def selection_rows(
    pairs: int = PAIRS, vocabularies: Sequence[int] = VOCABULARIES, drafts: Sequence[int] = DRAFTS
) -> Iterator[dict[str, object]]:
    """A line for each rule for several draft tokens, each number of them, vocabulary and family, and each example."""
    for example, (p, q, k) in EXAMPLES.items():
        pair = (torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))
        yield from _selection_rows([pair], k, {"vocab": len(p), "family": example})
    for vocab in vocabularies:
        for family in FAMILIES:
            first = [conditionals(family, vocab, seed) for seed in range(pairs)]
            chosen = [(p_of(()), q_of(())) for p_of, q_of in first]
            for k in drafts:
                yield from _selection_rows(chosen, k, {"vocab": vocab, "family": family})


def _selection_rows(
    chosen: list[tuple[Tensor, Tensor]], k: int, label: dict[str, object]
) -> Iterator[dict[str, object]]:
    optima: dict[object, list[float]] = {}
    for name, rule in SELECTION_RULES.items():
        if (rule.proposed is most_probable and k > len(chosen[0][0])) or (rule.proposed is _pairs and k != 2):
            continue
        if rule.proposed not in optima:
            optima[rule.proposed] = [optimal_selection(p, rule.proposed(q, k)).value for p, q in chosen]
        done = [planned_selection(rule.plan, p, rule.tested(q, k)) for p, q in chosen]
        distances = [float((emitted - p).abs().sum()) / 2 for (emitted, _), (p, _) in zip(done, chosen, strict=True)]
        found = {"kind": "several", "rule": name, "draft_tokens": k} | label
        yield found | _summary(rule, distances, [accepted for _, accepted in done], optima[rule.proposed])


def _summary(
    rule: ChainRule | SelectionRule, distances: list[float], accepted: list[float], best: list[float]
) -> dict[str, object]:
    fractions = np.divide(accepted, best, out=np.ones(len(best)), where=np.array(best) > 0)
    return {
        "pairs": len(best),
        "tv": round(max(distances), 12),
        "exact": max(distances) < EXACT,
        "accepted": np.mean(accepted),
        "optimum": np.mean(best),
        "fraction_min": fractions.min(),
        "fraction_mean": fractions.mean(),
        "fraction_max": fractions.max(),
        "source": rule.source,
        "read": rule.read,
    }


def items(**_: Any) -> list[str]:
    """Rules for one chain, and rules for several draft tokens."""
    return ["chain", "several"]


def measure(item: str, pairs: int, **_: Any) -> pd.DataFrame:
    """The lines of one kind of rule, over `pairs` pairs of distributions of each family."""
    return pd.DataFrame(chain_rows(pairs) if item == "chain" else selection_rows(pairs))


def gather(parts: pd.DataFrame) -> pd.DataFrame:
    """The table, with total variations below the accuracy of the enumeration as 0."""
    return parts.assign(tv=parts.tv.where(parts.tv >= EXACT, 0.0))
