"""Shapes and sanity of measured costs; no test asserts a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import roomy_pair

from specnb import theory
from specnb.measure.cost import DRAFT_PASSES, Costs, measure_costs
from specnb.models.loading import Pair


@pytest.fixture(scope="module")
def pair() -> Pair:
    return roomy_pair()


def test_costs_have_one_positive_time_per_repetition_and_length(pair: Pair) -> None:
    costs = measure_costs(pair, context=5, largest=4, repetitions=6, progress=False)
    assert costs.draft.shape == (6, 1)
    assert costs.target.shape == (6, 4)
    assert (costs.draft > 0).all()
    assert (costs.target > 0).all()
    assert costs.cost_ratio.n == 6
    assert len(costs.verify_costs) == 4
    assert costs.verify_costs[0] == (1.0, 1.0, 1.0, 6)


def test_forward_passes_see_the_right_tokens(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []

    def count(module: Any, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        ids, positions = kwargs["input_ids"], kwargs["position_ids"]
        seen.append((module.role, ids.shape[1], int(positions[0, 0])))

    hooks = []
    models: list[tuple[str, Any]] = [("target", pair.target), ("draft", pair.draft)]
    for role, model in models:
        model.role = role
        hooks.append(model.register_forward_pre_hook(count, with_kwargs=True))
    measure_costs(pair, context=7, largest=3, repetitions=4, progress=False)
    for hook in hooks:
        hook.remove()
    runs_each = 4 + 3  # repetitions and warm-up
    assert seen[:4] == [("target", 7, 0)] * 3 + [("draft", 7, 0)]  # a cache for each length
    verifying = [("target", n, 7) for n in (2, 3)] * 2 + [("draft", 1, 7)] * 2 * DRAFT_PASSES
    each = [("target", 1, 7)] * 2 + verifying + [("target", 1, 7)] + [("draft", 1, 7)] * DRAFT_PASSES
    assert sorted(seen[4:]) == sorted(each * runs_each)


def test_a_batch_has_all_its_rows(pair: Pair) -> None:
    seen: set[tuple[int, ...]] = set()
    hook = pair.target.register_forward_pre_hook(
        lambda module, args, kwargs: seen.add(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    costs = measure_costs(pair, context=7, lengths=(1, 3), rows=4, repetitions=3, progress=False)
    hook.remove()
    assert seen == {(4, 7), (4, 1), (4, 3)}  # prompts, and the runs that are timed
    assert costs.target.shape == (3, 2)


def test_forward_passes_attend_to_all_slots(pair: Pair) -> None:
    seen: set[int] = set()
    hook = pair.target.register_forward_pre_hook(
        lambda module, args, kwargs: seen.add(kwargs["attention_mask"].shape[-1]), with_kwargs=True
    )
    measure_costs(pair, context=7, slots=24, largest=2, repetitions=3, progress=False)
    hook.remove()
    assert seen == {24}
    with pytest.raises(ValueError, match="8 slots are too few"):
        measure_costs(pair, context=7, slots=8, largest=2, progress=False)


@pytest.mark.parametrize("wrong", [{"context": 0}, {"largest": 0}, {"repetitions": 2}, {"rows": 0}])
def test_empty_measurements_are_refused(pair: Pair, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        measure_costs(pair, progress=False, **wrong)


@pytest.mark.parametrize("lengths", [(2, 3), (1, 3, 2), (1, 1)])
def test_lengths_begin_with_the_unit_of_cost_and_grow(pair: Pair, lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must begin with 1"):
        measure_costs(pair, lengths=lengths, progress=False)


def test_only_the_given_lengths_are_measured(pair: Pair) -> None:
    costs = measure_costs(pair, context=3, lengths=(1, 4), repetitions=3, progress=False)
    assert costs.target.shape == (3, 2)
    assert costs.verify_cost(4) > 0
    assert costs.draft.shape == (3, 1)


def test_draft_passes_over_several_tokens_are_measured_on_request(pair: Pair) -> None:
    costs = measure_costs(pair, context=3, lengths=(1, 4), draft_lengths=(1, 2, 6), repetitions=3, progress=False)
    assert costs.draft.shape == (3, 3)
    assert costs.draft_cost(6) > 0
    with pytest.raises(ValueError, match="must begin with 1"):
        measure_costs(pair, draft_lengths=(2,), progress=False)


def test_costs_are_linear_between_measured_lengths() -> None:
    costs = Costs(np.array([[0.1, 0.1]] * 3), np.array([[1.0, 3.0]] * 3), (1, 5), (1, 5))
    assert costs.verify_cost(3) == pytest.approx(2.0)
    assert costs.draft_cost(4) == pytest.approx(1.0)
    assert costs.cost_ratio.value == pytest.approx(0.1)
    with pytest.raises(ValueError, match="passes over 1 to 5 tokens were measured, not over 6"):
        costs.verify_cost(6)


def test_costs_are_ratios_of_medians() -> None:
    target = np.array([[2.0, 3.0], [2.0, 3.0], [200.0, 300.0]])
    costs = Costs(draft=np.array([[0.5], [0.5], [50.0]]), target=target, lengths=(1, 2))
    assert costs.cost_ratio.value == 0.25
    assert costs.verify_cost([1, 2]).tolist() == [1.0, 1.5]
    with pytest.raises(ValueError, match="passes over 1 to 2 tokens were measured, not over 3"):
        costs.verify_cost(3)
    with pytest.raises(ValueError, match="not over 0"):
        costs.verify_cost(0)
    assert theory.walltime_improvement(0.5, 1, 0.25, costs.verify_cost) == pytest.approx(1.5 / 1.75)
