"""The comparison of the audit with other tests, on a few tokens of the random pair."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
import torch

from specnb.distributions import Sampling
from specnb.models.loading import Pair
from studies.audit_power import compared_samples, comparison
from studies.audit_power.compared_samples import LENGTH, ends_of, judge, rows_of, sampled
from studies.audit_power.audit_comparison import ALPHA, SUITE, block_of_tests, counted, items, measure, pieces
from studies.audit_power.audit_comparison import tokens_to_detection as detection
from studies.audit_power.random_pair import random_pair


@pytest.fixture(scope="module")
def pair() -> Pair:
    return random_pair()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "BUDGETS", (200, 1000))


def p_values(found: Sequence[tuple[str, int, float]]) -> dict[tuple[str, int], float]:
    return {(name, budget): p for name, budget, p in found}


@pytest.mark.usefixtures("few")
def test_an_exact_sampler_is_rejected_by_no_test(pair: Pair) -> None:
    found = p_values(block_of_tests(SUITE["exact"], pair, 0, 1, audit=True, tokens=1000))
    assert {name for name, _ in found} == {
        "ranks", "surprise", "marginals", "kernel", "acceptance", "same seed", "greedy", "audit", "audit, no draft",
    }  # fmt: skip
    assert min(found.values()) > ALPHA


@pytest.mark.usefixtures("few")
def test_a_gross_bug_is_found_by_the_tests_that_can(pair: Pair) -> None:
    found = p_values(block_of_tests(SUITE["always-argmax"], pair, 0, 1, audit=True, tokens=1000))
    for name in ("audit", "audit, no draft", "ranks", "surprise", "same seed", "kernel", "acceptance"):
        assert found[name, 1000] <= ALPHA, name
    assert found["greedy", 1000] == 1.0


@pytest.mark.usefixtures("few")
def test_greedy_equality_finds_a_cache_bug_and_tokens_after_the_end_are_impossible(pair: Pair) -> None:
    assert (
        p_values(block_of_tests(SUITE["rejected-stays"], pair, 0, 1, audit=False, tokens=1000))["greedy", 1000] == 0.0
    )
    late = p_values(block_of_tests(SUITE["after-the-end"], pair, 0, 1, audit=False, tokens=1000))
    assert late["ranks", 1000] == late["surprise", 1000] == late["marginals", 1000] == 0.0
    assert late["greedy", 200] in (0.0, 1.0)


def test_a_lossless_sampler_with_other_acceptance_fails_the_tests_of_its_implementation(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "BUDGETS", (2000,))
    found = p_values(block_of_tests(SUITE["exact-match"], pair, 0, 1, audit=False, tokens=2000))
    assert found["acceptance", 2000] <= ALPHA
    assert found["same seed", 2000] == 0.0
    assert found["ranks", 2000] > ALPHA


def test_each_tested_draft_token_is_at_its_place(pair: Pair) -> None:
    made = sampled(SUITE["exact"], pair, 3, 20)
    assert made.tokens.shape == made.decided.shape == (20, LENGTH)
    assert set(np.unique(made.decided)) == {-1, 0, 1}
    rate = (made.decided == 1).sum() / (made.decided >= 0).sum()
    assert abs(rate - judge(rows_of(made, pair, Sampling()), None, 0).overlap[made.decided >= 0].mean()) < 0.05


@torch.inference_mode()
def test_what_the_tests_read_agrees_with_the_distributions(pair: Pair) -> None:
    bug = SUITE["exact"]
    made = sampled(bug, pair, 4, 10)
    seen = judge(rows_of(made, pair, bug.claimed), ends_of(bug), 0)
    assert seen.judged.all()
    assert not seen.zero.any()
    own = np.take_along_axis(seen.p, made.tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.exp(seen.log_p), own, rtol=1e-12)
    assert ((seen.u >= 0) & (seen.u <= 1)).all()
    assert ((seen.overlap > 0) & (seen.overlap <= 1)).all()
    np.testing.assert_allclose(seen.entropy, -(seen.p * np.log(seen.p)).sum(-1), rtol=1e-9)


def test_pieces_are_disjoint_and_within_a_block() -> None:
    for budget in comparison.BUDGETS:
        covered = [row for at in pieces(budget, 4) for row in range(at.start, at.stop)]
        assert len(covered) == len(set(covered)) <= comparison.BUDGETS[-1] // LENGTH
        assert all((at.stop - at.start) * LENGTH == budget for at in pieces(budget, 4))


def test_lines_count_runs_and_rejections() -> None:
    lines = counted("a", [("ranks", 200, 0.5), ("ranks", 200, 0.04), ("ranks", 200, 0.001), ("ranks", 500, 0.0)])
    assert lines.set_index(["test", "budget"]).loc[
        ("ranks", 200), ["runs", "rejected", "below_5_percent"]
    ].tolist() == [3, 1, 2]


def test_tokens_to_detection_is_the_smallest_budget_with_half_of_the_runs() -> None:
    columns = ["bug", "test", "budget", "runs", "rejected"]
    table = pd.DataFrame(
        [("a", "x", 200, 4, 1), ("a", "x", 500, 4, 2), ("a", "y", 200, 4, 0), ("b", "x", 200, 4, 4)], columns=columns
    )
    found = detection(table)
    assert found.loc["a", "x"] == 500
    assert np.isnan(found.loc["a", "y"])
    assert found.loc["b", "x"] == 200


def test_all_bugs_are_items_and_others_are_refused() -> None:
    assert items(**comparison.SETTINGS) == list(SUITE)
    assert set(compared_samples.ENDING) <= set(SUITE)
    with pytest.raises(ValueError, match="no bug is called 'other'; there are exact, "):
        measure("other", **comparison.SETTINGS)
