"""The record of a generation: every property on arrays small enough to count by hand."""

import dataclasses
import time

import numpy as np
import pytest
import torch

from specnb.decoding.record import PARTS, CompletedRow, StepRecord, StepTimer, merge_rows, now

# Two rows, three steps, two drafts a step. Row 0 emits 3, 1 and 2 tokens. Row 1 is cut in its first
# step (3 could have been emitted, 2 were) and has ended.
RECORD = StepRecord(
    draft_tokens=np.array([[[5, 6], [7, 8], [9, -1]], [[1, 2], [3, 4], [3, 4]]]),
    accepted=np.array([[2, 0, 1], [2, 1, 0]]),
    token=np.array([[10, 11, 12], [13, 14, 15]]),
    emitted=np.array([[3, 1, 2], [2, 0, 0]]),
    beta=np.array([[[0.9, 0.8], [0.2, 0.5], [0.7, 0.0]], [[0.6, 0.6], [0.1, 0.1], [0.1, 0.1]]]),
)


def test_gamma_is_the_number_of_draft_tokens_per_step() -> None:
    assert RECORD.gamma == 2


def test_rows_that_have_ended_are_not_active() -> None:
    assert RECORD.active.tolist() == [[True, True, True], [True, False, False]]
    assert RECORD.target_passes.tolist() == [3, 1]


def test_steps_that_were_cut_are_not_whole() -> None:
    assert RECORD.whole.tolist() == [[True, True, True], [False, False, False]]


def test_draft_tokens_up_to_the_first_rejected_one_were_tested() -> None:
    expected = [[[True, True], [True, False], [True, False]], [[True, True], [False, False], [False, False]]]
    assert RECORD.tested.tolist() == expected


def test_means_count_a_cut_step_with_what_the_rule_accepted() -> None:
    assert RECORD.tokens_per_step == pytest.approx((3 + 1 + 2 + 3) / 4)
    assert RECORD.acceptance_rate == pytest.approx((2 + 0 + 1 + 2) / (2 + 2 + 1 + 2))


def test_without_draft_tokens_there_is_no_acceptance_rate() -> None:
    one = np.ones((1, 3), dtype=np.int64)
    alone = StepRecord(np.zeros((1, 3, 0), dtype=np.int64), 0 * one, one, one, np.zeros((1, 3, 0)))
    assert np.isnan(alone.acceptance_rate)
    assert alone.tokens_per_step == 1


def test_cut_steps_do_not_bias_the_mean() -> None:
    """alpha = 0.8, gamma = 4, texts of 12: over whole steps alone the mean is far below Equation 1's 3.36.

    The standard error is about 0.01; a step emits a geometric number of tokens, capped at gamma + 1.
    """
    alpha, gamma, length, rows = 0.8, 4, 12, 4_000
    accepted = np.minimum(np.random.default_rng(0).geometric(1 - alpha, (rows, length)) - 1, gamma)
    before = np.cumsum(accepted + 1, axis=1) - (accepted + 1)
    emitted = np.clip(length - before, 0, accepted + 1)
    nothing = np.zeros((rows, length, gamma))
    record = StepRecord(nothing.astype(np.int64), accepted, emitted, emitted, nothing)
    expected = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert abs(record.tokens_per_step - expected) < 0.06
    assert expected - emitted[record.whole].mean() > 0.2


def test_a_record_is_as_long_as_the_longest_row() -> None:
    def of_steps(steps: int) -> CompletedRow:
        record = np.arange(steps * 5).reshape(steps, 5)  # two drafts, accepted, token, emitted
        return CompletedRow([7] * steps, record, np.full((steps, 2), 0.5))

    record = merge_rows([of_steps(3), of_steps(1)], {})
    assert record.draft_tokens[0].tolist() == [[0, 1], [5, 6], [10, 11]]
    assert record.accepted[0].tolist() == [2, 7, 12]
    assert record.token[0].tolist() == [3, 8, 13]
    assert record.emitted.tolist() == [[4, 9, 14], [4, 0, 0]]
    assert record.draft_tokens[1].tolist() == [[0, 1], [-1, -1], [-1, -1]]
    assert record.beta[1].tolist() == [[0.5, 0.5], [0, 0], [0, 0]]
    assert record.seconds == {}


def test_the_timer_has_the_seconds_of_each_part_of_each_step() -> None:
    timer = StepTimer(torch.device("cpu"))
    assert timer.seconds == {}
    for _ in range(2):
        timer.start()
        for part in (*PARTS, "rest"):
            timer.mark(part)
    seconds = timer.seconds
    assert list(seconds) == list(PARTS)
    assert all(times.shape == (2,) and (times > 0).all() for times in seconds.values())


def test_in_a_tree_the_children_of_accepted_nodes_are_tested_up_to_the_accepted_one() -> None:
    """Two steps: nodes 0 and then 3 are accepted; node 1, and no child of it."""
    parents, path = (-1, -1, 0, 0, 1), [[0, 3], [1, -1]]
    counts = np.array([[2, 1]])
    draft_tokens = np.full((1, 2, 5), 7)
    record = StepRecord(
        draft_tokens, counts, counts, counts + 1, np.zeros((1, 2, 5)), parents=parents, path=np.array([path])
    )
    assert record.tested.tolist() == [[[True, False, True, True, False], [True, True, False, False, True]]]
    draft_tokens[..., 2] = -1
    assert not record.tested[..., 2].any()


def test_the_timer_counts_the_time_since_the_last_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is read; the minute between two steps counts for nothing."""
    readings = iter([0.0, 1.0, 2.0, 3.0, 60.0, 61.0])
    monkeypatch.setattr("specnb.decoding.record.now", lambda _: next(readings))
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    for part in ("draft", "target", "draft"):
        timer.mark(part)
    timer.start()
    timer.mark("target")
    assert {part: seconds.tolist() for part, seconds in timer.seconds.items()} == {
        "draft": [2.0, 0.0],
        "target": [1.0, 1.0],
        "rest": [0.0, 0.0],
    }


def test_a_record_of_arrays_alone_is_that_of_an_untimed_chain() -> None:
    assert (RECORD.seconds, RECORD.parents, RECORD.path) == ({}, None, None)
    assert CompletedRow([1], RECORD.accepted, RECORD.beta)[3:] == (None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECORD.parents = (-1,)  # type: ignore[misc]


def test_the_accepted_nodes_of_a_chain_are_the_first_ones() -> None:
    expected = [[[True, True], [False, False], [True, False]], [[True, True], [True, False], [False, False]]]
    assert RECORD.accepted_nodes.tolist() == expected


def of_a_tree(path: list[list[int]], parents: tuple[int, ...], emitted: list[int]) -> StepRecord:
    """One row; every node has a draft token."""
    counts = np.array([[sum(node >= 0 for node in nodes) for nodes in path]])
    drafted = np.full((1, len(path), len(parents)), 7)
    beta = np.zeros(drafted.shape)
    return StepRecord(drafted, counts, counts, np.array([emitted]), beta, parents=parents, path=np.array([path]))


def test_the_accepted_nodes_of_a_tree_are_those_of_its_path() -> None:
    record = of_a_tree([[1, 4], [0, -1], [-1, -1]], (-1, -1, 0, 0, 1), [3, 2, 1])
    assert record.gamma == 5
    assert record.accepted_nodes.astype(int).tolist() == [[[0, 1, 0, 0, 1], [1, 0, 0, 0, 0], [0] * 5]]


def test_in_a_tree_a_node_is_tested_if_its_parent_was_accepted_and_no_sibling_before_it() -> None:
    """Against the rule's own order: down from the root, the children of each accepted node up to the accepted one."""
    parents = (-1, -1, 0, 0, 1, -1, 4)
    children = {node: [child for child, parent in enumerate(parents) if parent == node] for node in range(-1, 7)}
    paths = [[-1, -1, -1], [0, -1, -1], [0, 2, -1], [0, 3, -1], [1, -1, -1], [1, 4, -1], [1, 4, 6], [5, -1, -1]]
    record = of_a_tree(paths, parents, [1] * len(paths))
    for step, path in enumerate(paths):
        expected, at = set(), -1
        for node in path:
            siblings = children[at]
            expected |= set(siblings[: siblings.index(node) + 1] if node >= 0 else siblings)
            at = node
            if node < 0:
                break
        else:
            expected |= set(children[at])
        assert set(np.flatnonzero(record.tested[0, step])) == expected
    ended = of_a_tree([[0, 2, -1]] * 2, parents, [3, 0])
    assert ended.tested.any(axis=2).tolist() == [[True, False]]


def test_only_proposed_draft_tokens_of_rows_that_go_on_are_counted_as_drafted() -> None:
    """Token 0 is one; -1 is none."""
    record = StepRecord(
        draft_tokens=np.array([[[0, -1], [0, 0]], [[-1, -1], [5, 5]]]),
        accepted=np.array([[1, 0], [0, 2]]),
        token=np.zeros((2, 2), dtype=np.int64),
        emitted=np.array([[2, 1], [1, 0]]),
        beta=np.zeros((2, 2, 2)),
    )
    assert record.acceptance_rate == 1 / 3
    assert record.tokens_per_step == pytest.approx(1 + 1 / 3)
    assert isinstance(record.acceptance_rate, float)
    assert isinstance(record.tokens_per_step, float)
    assert record.tested.astype(int).tolist() == [[[1, 0], [1, 0]], [[0, 0], [0, 0]]]


def test_merged_rows_of_a_tree_have_paths_filled_with_no_node() -> None:
    parents, seconds = (-1, 0, -1), {"draft": np.array([1.0, 2.0])}

    def of_steps(steps: int, first: int) -> CompletedRow:
        record = np.arange(steps * 6).reshape(steps, 6) + first  # three draft tokens, accepted, token, emitted
        return CompletedRow([7], record, np.full((steps, 3), 0.5), np.arange(steps * 2).reshape(steps, 2) + first)

    record = merge_rows([of_steps(1, 10), of_steps(2, 50)], seconds, parents)
    assert record.parents == parents
    assert record.seconds is seconds
    assert record.path is not None
    assert record.path.tolist() == [[[10, 11], [-1, -1]], [[50, 51], [52, 53]]]
    assert record.draft_tokens.tolist() == [[[10, 11, 12], [-1] * 3], [[50, 51, 52], [56, 57, 58]]]
    assert record.accepted.tolist() == [[13, 0], [53, 59]]
    assert record.token.tolist() == [[14, 0], [54, 60]]
    assert record.emitted.tolist() == [[15, 0], [55, 61]]
    assert record.beta.tolist() == [[[0.5] * 3, [0.0] * 3], [[0.5] * 3] * 2]
    kinds = [one.dtype.kind for one in (record.draft_tokens, record.accepted, record.path, record.beta)]
    assert kinds == ["i", "i", "i", "f"]
    assert merge_rows([of_steps(1, 10)], {}).path is None, "a chain has none"


def test_the_clock_waits_for_a_gpu_and_for_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    monkeypatch.setattr(time, "perf_counter", lambda: seen.append("read") or 4.5)
    for device in ("cuda", "cpu"):
        assert now(torch.device(device)) == 4.5
    assert seen == [torch.device("cuda"), "read", "read"]


def test_the_timer_reads_the_clock_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr("specnb.decoding.record.now", lambda device: devices.append(device) or 0.0)
    timer = StepTimer(torch.device("meta"))
    timer.start()
    timer.mark("rest")
    assert devices == [torch.device("meta")] * 2
    assert PARTS == ("draft", "target", "rest")
