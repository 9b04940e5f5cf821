from notebooks.support.step_figure import plot_steps
from studies.real.step_view import StepView


def test_the_figure_has_a_line_per_step_with_all_draft_tokens() -> None:
    figure = plot_steps([StepView(["a"], "\n", "x", unused=["never"])])
    assert [label.get_text() for label in figure.axes[0].texts][-4:] == ["a", "⏎", "never", "x"]
