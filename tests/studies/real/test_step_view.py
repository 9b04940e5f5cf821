"""Step views: every emitted token is shown once, with the fate that the record gives it."""

import numpy as np

from specnb.record import StepRecord
from studies.real.step_view import step_views


class _Letters:
    """A tokenizer whose token 1 is 'b', 2 is 'c', ..."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def _record(draft_tokens: list[list[int]], accepted: list[int], token: list[int], emitted: list[int]) -> StepRecord:
    beta = np.ones((1, len(draft_tokens), len(draft_tokens[0])))
    return StepRecord(np.array([draft_tokens]), np.array([accepted]), np.array([token]), np.array([emitted]), beta)


def test_accepted_rejected_recovered_and_bonus() -> None:
    record = _record([[1, 2], [3, 4]], accepted=[1, 2], token=[5, 6], emitted=[2, 3])
    first, second = step_views(record, 0, _Letters())  # type: ignore[arg-type]
    assert first.pieces == [("b", "accepted"), ("c", "rejected"), ("f", "recovered")]
    assert second.pieces == [("d", "accepted"), ("e", "accepted"), ("g", "bonus")]
    assert [first.tokens, second.tokens] == [2, 3]


def test_draft_tokens_after_a_rejection_are_unused() -> None:
    record = _record([[1, 2, 3]], accepted=[0], token=[5], emitted=[1])
    (only,) = step_views(record, 0, _Letters())  # type: ignore[arg-type]
    assert only.pieces == [("b", "rejected"), ("c", "unused"), ("d", "unused"), ("f", "recovered")]
    assert only.tokens == 1


def test_what_was_cut_off_is_not_shown() -> None:
    record = _record([[1, 2], [3, 4], [0, 0]], accepted=[2, 1, 0], token=[5, 6, 0], emitted=[3, 1, 0])
    shown = step_views(record, 0, _Letters())  # type: ignore[arg-type]
    assert [view.tokens for view in shown] == [3, 1]
    assert shown[1].pieces == [("d", "accepted")]
