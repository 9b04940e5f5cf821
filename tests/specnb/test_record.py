"""The record of a generation: every property on arrays small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specnb.record import CompletedRow, Generation, StepRecord, merge_rows, write_lines

# Two rows, three steps, two draft tokens a step. Row 0 emits 3, 1 and 2 tokens. Row 1 is cut in its
# first step (3 could have been emitted, 2 were) and has ended. Token 0 is one; -1 is none.
RECORD = StepRecord(
    draft_tokens=np.array([[[5, 0], [7, 8], [9, -1]], [[1, 2], [3, 4], [3, 4]]]),
    accepted=np.array([[2, 0, 1], [2, 1, 0]]),
    token=np.array([[10, 11, 12], [13, 14, 15]]),
    emitted=np.array([[3, 1, 2], [2, 0, 0]]),
    beta=np.array([[[0.9, 0.8], [0.2, 0.5], [0.7, 0.0]], [[0.6, 0.6], [0.1, 0.1], [0.1, 0.1]]]),
)


def test_what_a_record_of_a_chain_says() -> None:
    assert RECORD.gamma == 2
    assert RECORD.active.tolist() == [[True, True, True], [True, False, False]]
    assert RECORD.target_passes.tolist() == [3, 1]
    tested = [[[1, 1], [1, 0], [1, 0]], [[1, 1], [0, 0], [0, 0]]]
    assert RECORD.tested.astype(int).tolist() == tested, "draft tokens up to the first rejected one"
    accepted = [[[1, 1], [0, 0], [1, 0]], [[1, 1], [1, 0], [0, 0]]]
    assert RECORD.accepted_nodes.astype(int).tolist() == accepted


def test_means_count_a_cut_step_with_what_the_rule_accepted() -> None:
    assert RECORD.tokens_per_step == pytest.approx((3 + 1 + 2 + 3) / 4)
    assert RECORD.acceptance_rate == pytest.approx((2 + 0 + 1 + 2) / (2 + 2 + 1 + 2))


def test_in_a_tree_a_node_is_tested_if_its_parent_was_accepted_and_no_sibling_before_it() -> None:
    """Against the rule's own order: down from the root, the children of each accepted node up to
    the accepted one."""
    parents = (-1, -1, 0, 0, 1, -1, 4)
    paths = [[-1, -1, -1], [0, -1, -1], [0, 2, -1], [0, 3, -1], [1, -1, -1], [1, 4, -1], [1, 4, 6], [5, -1, -1]]
    counts = np.array([[sum(node >= 0 for node in path) for path in paths]])
    drafted = np.full((1, len(paths), len(parents)), 7)
    beta = np.zeros(drafted.shape)
    record = StepRecord(drafted, counts, counts, counts + 1, beta, parents=parents, path=np.array([paths]))
    for step, path in enumerate(paths):
        assert set(np.flatnonzero(record.accepted_nodes[0, step])) == set(path) - {-1}
        expected, at = set(), -1
        for node in (*path, -1):
            children = [child for child, parent in enumerate(parents) if parent == at]
            expected |= set(children[: children.index(node) + 1] if node >= 0 else children)
            if node < 0:
                break
            at = node
        assert set(np.flatnonzero(record.tested[0, step])) == expected
    drafted[..., 2] = -1
    assert not record.tested[..., 2].any(), "where nothing was proposed"
    record.emitted[0, 3] = 0
    assert not record.tested[0, 3].any(), "of a row that has ended"


def test_a_record_is_as_long_as_the_longest_row_and_says_nothing_of_steps_that_were_not_made() -> None:
    parents, seconds = (-1, 0, -1), {"draft": np.array([1.0, 2.0])}

    def of_steps(steps: int, first: int) -> CompletedRow:
        # Three draft tokens, accepted, token, emitted.
        record = np.arange(steps * 6).reshape(steps, 6) + first
        return CompletedRow([7], record, np.full((steps, 3), 0.5), np.arange(steps * 2).reshape(steps, 2) + first)

    record = merge_rows([of_steps(1, 10), of_steps(2, 50)], seconds, parents)
    assert (record.parents, record.seconds) == (parents, seconds)
    assert record.path is not None
    assert record.path.tolist() == [[[10, 11], [-1, -1]], [[50, 51], [52, 53]]]
    assert record.draft_tokens.tolist() == [[[10, 11, 12], [-1] * 3], [[50, 51, 52], [56, 57, 58]]]
    assert record.accepted.tolist() == [[13, 0], [53, 59]]
    assert record.token.tolist() == [[14, 0], [54, 60]]
    assert record.emitted.tolist() == [[15, 0], [55, 61]]
    assert record.beta.tolist() == [[[0.5] * 3, [0.0] * 3], [[0.5] * 3] * 2]
    assert merge_rows([of_steps(1, 10)], {}).path is None, "a chain has none"


def test_a_step_is_printed_as_it_went() -> None:
    assert RECORD.show(0, 0, begin=4).splitlines() == [
        "position 4, gamma 2, accepted 2", "  [5] 5  accepted", "  [6] 0  accepted", "  [7] 10: bonus",
    ]  # fmt: skip
    second = RECORD.show(0, 1, begin=4).splitlines()
    assert second[1:] == ["  [8] 7  rejected", "  [9] 8  not tested", "  [8] 11: recovered"]
    assert RECORD.show(0, 2).splitlines()[1:] == ["  [5] 9  accepted", "  [6] 12: bonus"], "where one was proposed"
    assert RECORD.show(1, 0, text="<{}>".format).splitlines()[-2:] == [
        "  [3] <13>: bonus", "  the sequence ended: 1 of these not emitted",
    ]  # fmt: skip
    for step in (1, 99, -1):
        with pytest.raises(IndexError, match=f"row 1 made 1 steps, and step {step} is not one of them"):
            RECORD.show(1, step)


def test_a_file_stays_if_another_cannot_take_its_place(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    for lines in ([1], [2, 3]):
        write_lines(file, lines)
    with pytest.raises(TypeError):
        write_lines(file, [4, object()])
    assert file.read_text() == "2\n3\n"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("texts", [None, ["one\ntwo", "ü"]])
def test_a_file_has_tokens_steps_and_texts(tmp_path: Path, texts: list[str] | None) -> None:
    made = Generation([[5, 0, 10, 11, 9, 12], [1, 2]], RECORD, prompts=[[1], [2, 3]], texts=texts)
    made.to_jsonl(tmp_path / "made.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line.pop("text") for line in lines if "text" in line] == (texts or [])
    assert lines == [
        {"prompt": [1], "tokens": [5, 0, 10, 11, 9, 12], "steps": [3, 1, 2]},
        {"prompt": [2, 3], "tokens": [1, 2], "steps": [2]},
    ]
