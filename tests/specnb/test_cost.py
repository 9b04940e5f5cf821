"""Which forward passes are timed, and what follows from the times; no test asserts a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny import roomy_pair

from specnb import theory
from specnb.cost import DRAFT_PASSES, WARM_UP, Costs, measure_costs
from specnb.loading import Pair


@pytest.fixture(scope="module")
def pair() -> Pair:
    return roomy_pair()


def test_forward_passes_see_the_right_tokens_slots_and_rows(pair: Pair) -> None:
    seen: list[tuple[str, tuple[int, ...], int, int]] = []

    def count(module: Any, args: object, kwargs: dict[str, Any]) -> None:
        shape, slots = tuple(kwargs["input_ids"].shape), kwargs["attention_mask"].shape[-1]
        seen.append((module.role, shape, int(kwargs["position_ids"][0, 0]), slots))

    models: list[tuple[str, Any]] = [("target", pair.target), ("draft", pair.draft)]
    for role, model in models:
        model.role = role
    hooks = [model.register_forward_pre_hook(count, with_kwargs=True) for _, model in models]
    costs = measure_costs(pair, context=7, lengths=(1, 3), rows=4, slots=24, repetitions=5)
    for hook in hooks:
        hook.remove()
    assert (costs.target.shape, costs.draft.shape, costs.cost_ratio.n) == ((5, 2), (5,), 5)
    assert costs.verify_costs[0] == (1.0, 1.0, 1.0, 5)
    assert min(costs.target.min(), costs.draft.min()) > 0
    # The prompt, for each length.
    caches = [("target", (4, 7), 0, 24)] * 2 + [("draft", (4, 7), 0, 24)]
    assert seen[:3] == caches
    plain, verify, draft = (("target", (4, 1), 7, 24), ("target", (4, 3), 7, 24), ("draft", (4, 1), 7, 24))
    # Each after what precedes it in a loop: plain after plain, verification after its like and
    # drafts, drafts after it.
    drafts = [draft] * DRAFT_PASSES
    each = [plain, plain, verify, *drafts, verify, plain, *drafts]
    assert sorted(seen[3:]) == sorted(each * (5 + WARM_UP))


@pytest.mark.parametrize("lengths", [(2, 3), (1, 3, 2), (1, 1)])
def test_lengths_without_a_unit_or_an_order_are_refused(pair: Pair, lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must"):
        measure_costs(pair, lengths=lengths)


def test_costs_are_ratios_of_medians_and_linear_between_measured_lengths() -> None:
    target = np.array([[2.0, 6.0], [2.0, 6.0], [200.0, 300.0]])
    costs = Costs(np.array([0.5, 0.5, 50.0]), target, (1, 5))
    assert costs.cost_ratio.value == 0.25
    assert costs.verify_cost([1, 3, 5]).tolist() == [1.0, 2.0, 3.0]
    assert theory.walltime_improvement(0.5, 2, 0.25, costs.verify_cost) == pytest.approx(1.75 / 2.5)
    for n in (0, 6):
        with pytest.raises(ValueError, match=f"not over {n}"):
            costs.verify_cost(n)
