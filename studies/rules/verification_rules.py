"""Verification rules side by side.

Every rule is enumerated exactly on the same small distributions. The table
`data/results/verification_rules.csv` has one line for each rule, number of draft tokens, vocabulary
and family of distributions:

- `kind`: `chain` (gamma draft tokens in a row), `several` (k draft tokens for one position) or
  `tree` (both); `draft_tokens`: how many; `shape`: of a tree, see `TREES`
- `rule`, `source` (where it is from) and `read` (what of the source could be read)
- `tv`: the largest total variation between what a step emits, completed by the target, and the
  target's distribution
- `accepted`: the mean over the pairs of the expected number of accepted tokens (chain, tree) or of
  the probability that a draft token is accepted (several); `optimum`: the mean of the largest value
  of any exact rule for the same draft tokens, by linear programming
- `fraction_min`, `fraction_mean`, `fraction_max`: accepted / optimum over the pairs, 1 where
  nothing can be accepted; above 1 for no exact rule

Besides the families there are examples: that of HSD's README, and the smallest for the rules that
are not exact. One family is the trained pair's, see `studies.rules.rule_families`.

Sizes: the programs reach 8 draft tokens of one position for vocabulary 3, and 4 for 4 and 5 (the
limit is the enumeration of the rules, over vocab^k tuples), chains of two and three, and trees with
at most two or three positions and vocabulary 2 or 3. Three positions with vocabulary 3 and several
chains (2^27 sets of chains) are out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from specnb.distributions import Conditional
from specnb.enumeration import (
    Drafts,
    Emissions,
    completed,
    draft_trees,
    expected_accepted,
    joint_distribution,
    step_distribution,
)
from specnb.rules import (
    PlannedRule,
    block_verification,
    exact_match,
    recursive_rejection,
    rejection_sampling,
    token_verification,
    traversal_verification,
)
from specnb.trees import Scheme, distinct_children, independent_children, node_depths, top_children
from studies.rules.merged_drafts import (
    first_appearances,
    hub_pairs,
    independent,
    merged,
    most_probable,
    selected,
    without_replacement,
)
from studies.rules.optimal_acceptance import drafted_trees, optimal_chains, optimal_selection, optimal_tree
from studies.rules.published_rules import (
    best_draft_code_rule,
    best_path_block,
    hierarchical_verification,
    hierarchical_verification_code,
    hierarchical_verification_file,
    k_sequential_tree,
    spechub_code,
    spechub_tree,
)
from studies.rules.rule_families import FAMILIES, TRAINED, conditionals_of
from studies.study import Study

Proposals = Callable[[Tensor, int], Drafts]
"""From q `(vocab,)` and k to every proposal of k draft tokens for one position."""


class Listed(NamedTuple):
    """A rule, where it is from, and what was read of that.

    scheme   of a rule for trees: how the children of a node are sampled
    tested   of a rule for several draft tokens of one position: the proposals that it is given
    sampled  those before tokens were merged, which the optimum is for
    """

    rule: PlannedRule
    source: str
    read: str
    scheme: Scheme = independent_children
    tested: Proposals = independent
    sampled: Proposals = independent


CHAIN_RULES = {
    "token verification": Listed(token_verification, "2211.17192", "paper"),
    "rejection sampling": Listed(rejection_sampling, "2211.17192 A.2", "paper"),
    "exact match": Listed(exact_match, "transformers, llama.cpp", "code"),
    "block verification": Listed(block_verification, "2403.10444", "equations, in 2601.05724 D.2; code"),
    "hierarchical, paper": Listed(hierarchical_verification, "2601.05724 Algorithm 2", "paper, text conversion"),
    "hierarchical, authors' code": Listed(hierarchical_verification_code, "HSD generation/utils.py f3adf7f", "code"),
    "hierarchical, algorithm.py": Listed(hierarchical_verification_file, "HSD algorithm.py b8575e2", "code"),
}


def _merged(q: Tensor, k: int, shuffled: bool) -> Drafts:
    return merged(independent(q, k), shuffled)


def _with_own_q(q: Tensor, k: int) -> Drafts:
    return first_appearances(independent(q, k))


def _several(rule: PlannedRule, source: str, read: str, proposals: Proposals = independent) -> Listed:
    return Listed(rule, source, read, tested=proposals, sampled=proposals)


SPECTR = "SpecTr 2310.15141", "as restated in 2602.16994 B.3"
SELECTION_RULES = {
    "recursive, independent drafts": _several(
        recursive_rejection, "Stratos' notes 2; SpecInfer as in 2602.16994 B.4", "notes"
    ),
    "recursive, without replacement": _several(recursive_rejection, "RSD 2402.14160", "abstract", without_replacement),
    "recursive, merged children in random order": Listed(
        recursive_rejection, "SpecInfer 2305.09781 on a prefix tree", "notes", tested=partial(_merged, shuffled=True)
    ),
    "recursive, merged children in order": Listed(
        recursive_rejection, "SpecHub's code 7d592b7, mode RRS", "code", tested=partial(_merged, shuffled=False)
    ),
    "recursive, merged children with their own q": Listed(recursive_rejection, "this project", "-", tested=_with_own_q),
    "k-sequential selection": _several(k_sequential_tree, *SPECTR),
    "best draft token": _several(best_path_block, "GBV 2602.16961, one position", "copy of the code"),
    "best draft token by min(1, p/q)": _several(best_draft_code_rule, "another copy of GBV's code", "code"),
    "top-k, q = 1": _several(exact_match, "EAGLE issues 93, 183, 221", "issues", most_probable),
    "q = 1, sampled without replacement": _several(
        exact_match, "EAGLE's rule on RSD's draft tokens", "issues", without_replacement
    ),
    "SpecHub": _several(spechub_tree, "2411.05289", "comment in code", hub_pairs),
    "SpecHub, authors' code": _several(spechub_code, "SpecHub's code 7d592b7", "code", hub_pairs),
}
TRAVERSAL = traversal_verification, "2505.12398", "abstract; code in GBV's"
TREE_METHODS = {
    "recursive, chains": Listed(recursive_rejection, "Stratos' notes 2.1, repeats kept", "notes"),
    "k-sequential, chains": Listed(k_sequential_tree, *SPECTR),
    "traversal, chains": Listed(*TRAVERSAL),
    "best path, chains": Listed(best_path_block, "GBV 2602.16961", "copy of the code"),
    "recursive, tree": Listed(recursive_rejection, "RSD 2402.14160", "abstract", distinct_children),
    "traversal, tree": Listed(*TRAVERSAL, distinct_children),
    "q = 1, top-k tree": Listed(exact_match, "EAGLE issues 93, 183, 221", "issues", top_children),
    "traversal, top-k tree": Listed(*TRAVERSAL, top_children),
}

PAIRS = 4  # pairs p, q of each family
CHAIN_SIZES = ((3, 2), (3, 3), (4, 2))  # vocabulary, gamma
# Numbers of draft tokens for each vocabulary.
DRAFTS = {3: (1, 2, 3, 4, 6, 8), 4: (1, 2, 3, 4), 5: (1, 2, 3, 4)}
TREE_PAIRS = 2  # of the pairs of each family, for trees
TREES = {  # shape: vocabulary and parents
    "2 chains of 2": (3, (-1, -1, 0, 1)),
    "3 chains of 2": (2, (-1, -1, -1, 0, 1, 2)),
    "2 chains of 3": (2, (-1, -1, 0, 1, 2, 3)),
    "tree of 4": (3, (-1, -1, 0, 0)),
}
EXACT = 1e-12  # largest total variation of a rule that is called exact
README = "p = (1/3, 2/3), q = (2/3, 1/3)"
EXAMPLES = {  # p, q and the number of draft tokens
    "p = (0, 0.3, 0.7), q = (0.6, 0.2, 0.2)": ((0, 0.3, 0.7), (0.6, 0.2, 0.2), 2),
    "p = q = (0.7, 0.3)": ((0.7, 0.3), (0.7, 0.3), 3),
    "p = (0.9995, 0.0005), q = (0.6, 0.4)": ((0.9995, 0.0005), (0.6, 0.4), 2),
    "p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2)": ((0.5, 0.5, 0), (0.25, 0.25, 0.5), 2),
}


def chain_rows(
    pairs: int = PAIRS, sizes: Sequence[tuple[int, int]] = CHAIN_SIZES, families: Sequence[str] = (*FAMILIES, TRAINED)
) -> Iterator[dict[str, object]]:
    """A line for each chain rule, size and family, and for the example of HSD's README."""
    thirds = torch.tensor([1, 2], dtype=torch.float64) / 3
    cases = [(README, 2, 2, [(lambda _: thirds, lambda _: thirds.flip(0))])]
    for vocab, gamma in sizes:
        for family in families:
            cases.append((family, vocab, gamma, conditionals_of(family, vocab, pairs)))
    for family, vocab, gamma, chosen in cases:
        best = [optimal_chains(p, q, gamma).value for p, q in chosen]
        for name, rule in CHAIN_RULES.items():
            steps = [step_distribution(rule.rule, p, q, gamma) for p, q in chosen]
            label = {"kind": "chain", "rule": name, "draft_tokens": gamma, "vocab": vocab, "family": family}
            yield label | _summary(rule, *_of_steps(steps, chosen, gamma), best)


def tree_rows(
    pairs: int = TREE_PAIRS, shapes: Sequence[str] = tuple(TREES), families: Sequence[str] = (*FAMILIES, TRAINED)
) -> Iterator[dict[str, object]]:
    """A line for each rule for trees, shape and family: chains are independent, other trees have
    distinct children."""
    for shape in shapes:
        vocab, parents = TREES[shape]
        depth = max(node_depths(parents))
        methods = {name: m for name, m in TREE_METHODS.items() if name.endswith("chains") == ("chains" in shape)}
        for family in families:
            chosen = conditionals_of(family, vocab, pairs)
            optima: dict[object, list[float]] = {}
            for name, method in methods.items():
                if method.scheme not in optima:
                    optima[method.scheme] = [_optimum(p, q, parents, method.scheme) for p, q in chosen]
                steps = [step_distribution(method.rule, p, q, parents, scheme=method.scheme) for p, q in chosen]
                label = {"kind": "tree", "rule": name, "draft_tokens": len(parents), "vocab": vocab, "family": family}
                found = label | {"shape": shape}
                yield found | _summary(method, *_of_steps(steps, chosen, depth), optima[method.scheme])


def _optimum(p: Conditional, q: Conditional, parents: tuple[int, ...], scheme: Scheme) -> float:
    depth = max(node_depths(parents))
    if scheme is independent_children:
        return optimal_chains(p, q, depth, parents.count(-1)).value
    return optimal_tree(p, drafted_trees(draft_trees(parents, q, scheme), parents), depth).value


def _of_steps(
    steps: Sequence[Emissions], chosen: Sequence[tuple[Conditional, Conditional]], gamma: int
) -> tuple[list[float], list[float]]:
    """The total variation of each step, completed by the target, and its expected accepted
    tokens."""
    distances = [
        float((completed(step, p, gamma + 1) - joint_distribution(p, gamma + 1)).abs().sum()) / 2
        for step, (p, _) in zip(steps, chosen, strict=True)
    ]
    return distances, [expected_accepted(step) for step in steps]


def selection_rows(
    pairs: int = PAIRS, drafts: Mapping[int, Sequence[int]] = DRAFTS, families: Sequence[str] = (*FAMILIES, TRAINED)
) -> Iterator[dict[str, object]]:
    """A line for each rule for several draft tokens, each number of them, vocabulary and family,
    and each example."""
    for example, (p, q, k) in EXAMPLES.items():
        pair = (torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))
        yield from _selection_rows([pair], k, {"vocab": len(p), "family": example})
    for vocab, numbers in drafts.items():
        for family in families:
            chosen = [(p_of(()), q_of(())) for p_of, q_of in conditionals_of(family, vocab, pairs)]
            for k in numbers:
                yield from _selection_rows(chosen, k, {"vocab": vocab, "family": family})


def _selection_rows(
    chosen: list[tuple[Tensor, Tensor]], k: int, label: dict[str, object]
) -> Iterator[dict[str, object]]:
    optima: dict[object, list[float]] = {}
    drafts: dict[object, list[Drafts]] = {}
    for name, rule in SELECTION_RULES.items():
        if (rule.sampled is most_probable and k > len(chosen[0][0])) or (rule.sampled is hub_pairs and k != 2):
            continue
        if rule.sampled not in optima:
            optima[rule.sampled] = [optimal_selection(p, rule.sampled(q, k)).value for p, q in chosen]
        if rule.tested not in drafts:
            drafts[rule.tested] = [rule.tested(q, k) for _, q in chosen]
        done = [selected(rule.rule, p, tested) for (p, _), tested in zip(chosen, drafts[rule.tested], strict=True)]
        distances = [float((emitted - p).abs().sum()) / 2 for (emitted, _), (p, _) in zip(done, chosen, strict=True)]
        found = {"kind": "several", "rule": name, "draft_tokens": k} | label
        yield found | _summary(rule, distances, [accepted for _, accepted in done], optima[rule.sampled])


def _summary(rule: Listed, distances: list[float], accepted: list[float], best: list[float]) -> dict[str, object]:
    fractions = np.divide(accepted, best, out=np.ones(len(best)), where=np.array(best) > 0)
    tv = max(distances)
    line: dict[str, object] = {"pairs": len(best), "tv": round(tv, 12) if tv >= EXACT else 0.0, "exact": tv < EXACT}
    line |= {"accepted": np.mean(accepted), "optimum": np.mean(best)}
    line |= {f"fraction_{name}": getattr(fractions, name)() for name in ("min", "mean", "max")}
    return line | {"source": rule.source, "read": rule.read}


def measure(item: str, pairs: int) -> pd.DataFrame:
    """The lines of one kind of rule, over `pairs` pairs of distributions of each family
    (`TREE_PAIRS` for trees)."""
    if item == "tree":
        return pd.DataFrame(tree_rows(min(pairs, TREE_PAIRS)))
    return pd.DataFrame(chain_rows(pairs) if item == "chain" else selection_rows(pairs))


STUDY = Study(
    measure, settings={"pairs": PAIRS}, small={"pairs": 2}, items=("chain", "several", "tree"), small_items=("chain",)
)
