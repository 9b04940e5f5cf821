"""Step views: every emitted token is shown once, with the fate that the record gives it."""

import numpy as np

from specnb.decoding.record import StepRecord
from specnb.report import step_view


class _Letters:
    """A tokenizer whose token 1 is 'b', 2 is 'c', ..."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def _record(draft_tokens: list[list[int]], accepted: list[int], token: list[int], emitted: list[int]) -> StepRecord:
    beta = np.ones((1, len(draft_tokens), len(draft_tokens[0])))
    return StepRecord(np.array([draft_tokens]), np.array([accepted]), np.array([token]), np.array([emitted]), beta)


def test_accepted_rejected_recovered_and_bonus() -> None:
    record = _record([[1, 2], [3, 4]], accepted=[1, 2], token=[5, 6], emitted=[2, 3])
    first, second = step_view.step_views(record, 0, _Letters())  # type: ignore[arg-type]
    assert first.pieces == [("b", "accepted"), ("c", "rejected"), ("f", "sampled")]
    assert second.pieces == [("d", "accepted"), ("e", "accepted"), ("g", "sampled")]
    assert [first.tokens, second.tokens] == [2, 3]


def test_what_was_cut_off_is_not_shown() -> None:
    record = _record([[1, 2], [3, 4], [0, 0]], accepted=[2, 1, 0], token=[5, 6, 0], emitted=[3, 1, 0])
    shown = step_view.step_views(record, 0, _Letters())  # type: ignore[arg-type]
    assert [view.tokens for view in shown] == [3, 1]
    assert shown[1].pieces == [("d", "accepted")]


def test_html_escapes_and_figure_has_a_line_per_step() -> None:
    shown = [step_view.StepView(["<b>"], "\n", "x")]
    text = step_view.html(shown, "&")
    assert "&lt;b&gt;" in text
    assert "<pre" in text
    assert "&amp;" in text
    figure = step_view.plot_steps(shown)
    assert [label.get_text() for label in figure.axes[0].texts][-3:] == ["<b>", "⏎", "x"]
