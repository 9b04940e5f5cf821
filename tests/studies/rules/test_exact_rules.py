"""Rules of studies, as those of specnb are tested: exact by multiplication, carried out so; planted
bugs are found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair
from rule_checks import (
    BUGS,
    Method,
    changed,
    difference,
    emitted_by,
    error,
    from_p,
    integrated,
    is_found,
    off,
)
from tiny import llama
from torch import Tensor

from specnb.distributions import overlap, residual
from specnb.drafters import TreeDrafter
from specnb.enumeration import count_distribution, step_distribution
from specnb.rules import PlannedRule, Rule
from specnb.sampler import Sampler
from specnb.trees import SCHEMES, Scheme, chain, independent_children, top_children
from studies.rules.published_rules import (
    AtEachNode,
    best_path_block,
    division_factor,
    hierarchical_verification,
    hub_children,
    k_sequential,
    k_sequential_tree,
    spechub,
    spechub_tree,
)

TREE, WIDE, TWO = (-1, -1, 0, 0), (-1, -1, -1), (-1, -1, 0, 1)
EXACT = {
    "hierarchical, paper": Method(hierarchical_verification, chain(3)),
    "k-sequential": Method(k_sequential_tree, (-1, -1, -1, 0), independent_children),
    "SpecHub": Method(spechub_tree, TREE, hub_children),
    "SpecHub, top": Method(spechub_tree, (-1, -1), top_children),
    "best path": Method(best_path_block, TWO, independent_children),
    "best path of one token": Method(best_path_block, WIDE, independent_children),
}
SMALL = {
    "SpecHub": Method(spechub_tree, (-1, -1), hub_children),
    "k-sequential": Method(k_sequential_tree, (-1, -1)),
    "best path": Method(best_path_block, TWO),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("name", EXACT)
def test_a_step_has_the_targets_joint_distribution(name: str, kind: str) -> None:
    assert error(EXACT[name], kind) < 1e-12


def test_where_nothing_is_proposed_hierarchical_verification_is_exact_as_well() -> None:
    p, q = distribution_pair("dense", vocab=3)
    for silent in ((), (0,), (1,)):

        def drafted(context: tuple[int, ...], silent: tuple[int, ...] = silent) -> Tensor:
            return q(context) * (context != silent)

        method = EXACT["hierarchical, paper"]
        assert off(emitted_by(method, p, drafted), p, method.length) < 1e-12


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("seed", range(2))
def test_k_sequential_selection_accepts_what_its_closed_form_says(kind: str, seed: int) -> None:
    p_of, q_of = distribution_pair(kind, vocab=4, seed=seed)
    p, q = p_of(()), q_of(())

    def acceptance(k: int) -> float:
        return 1 - float(count_distribution(step_distribution(k_sequential_tree, p_of, q_of, (-1,) * k), 1)[0])

    assert acceptance(1) == pytest.approx(float(overlap(p, q)), abs=1e-12)
    of_rho = overlap(p / division_factor(p, q, 3), q)
    assert acceptance(3) == pytest.approx(float(1 - (1 - of_rho) ** 3), abs=1e-12)


@pytest.mark.parametrize("kind", ["dense", "zeros in both"])
@pytest.mark.parametrize("name", SMALL)
def test_the_cells_of_uniforms_have_the_multiplied_probabilities(name: str, kind: str) -> None:
    method, (p, q) = SMALL[name], distribution_pair(kind, vocab=2 if name == "best path" else 3)
    assert difference(integrated(method.rule, method, p, q), emitted_by(method, p, q)) < 1e-12


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("name", SMALL)
def test_a_bug_of_carrying_a_plan_out_is_found(name: str, bug: Callable[[Rule], Rule]) -> None:
    assert is_found(bug(SMALL[name].rule), SMALL[name])


def one_more_draft(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """k-sequential selection with rho and the residual of k + 1 draft tokens."""
    accept, after = k_sequential(p, torch.cat([q, q[..., :1, :]], -2), torch.cat([x, x[..., :1]], -1))
    return accept[..., :-1], after


def residual_of_tokens(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return k_sequential(p, q, x)[0], residual(p, q[..., 0, :])


def hub_takes_all(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The hub is accepted whenever the other token is not, beyond p(a)."""
    accept, after = spechub(p, q, x)
    return torch.where(x == q[..., 0, :].argmax(-1, keepdim=True), 1.0, accept), after


BUGGY = [
    *((name, changed(EXACT[name].rule.plan, from_p)) for name in SMALL),  # type: ignore[attr-defined]
    ("k-sequential", AtEachNode(one_more_draft)), ("k-sequential", AtEachNode(residual_of_tokens)),
    ("SpecHub", AtEachNode(hub_takes_all)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), BUGGY)
def test_a_plan_with_a_bug_is_not_exact(name: str, plan: Any) -> None:
    right: Any = EXACT[name].rule
    method = EXACT[name]._replace(rule=PlannedRule(plan, right.up))
    assert max(error(method, seed=seed) for seed in range(3)) > 1e-3


RULES = (best_path_block, k_sequential_tree, spechub_tree)


@pytest.mark.parametrize("scheme", [*SCHEMES, hub_children])
def test_a_rule_is_refused_for_the_schemes_that_the_enumeration_finds_it_wrong_for(scheme: Scheme) -> None:
    drafter = TreeDrafter(llama(), (-1, -1), scheme=scheme)
    for rule in RULES:
        exact = max(error(Method(rule, (-1, -1), scheme), seed=seed) for seed in range(2)) < 1e-12
        assert exact == (scheme in rule.schemes), rule
        with nullcontext() if exact else pytest.raises(ValueError, match="not exact for children sampled by"):
            Sampler(llama(), drafter, rule=rule, compile=False)
