"""One draft token and its uniform: the figure says what the acceptance rule does, with and without sliders."""

from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch

from specnb import token_verification
from studies.views import widgets

P, Q, NAMES = torch.tensor([0.6, 0.3, 0.1, 0.0]), torch.tensor([0.3, 0.3, 0.4, 0.0]), ("a", "b", "c", "d")


@pytest.mark.parametrize(("drafted", "uniform"), [("a", 0.99), ("c", 0.24), ("c", 0.26), ("b", 0.5)])
def test_the_title_says_what_the_rule_does(drafted: str, uniform: float) -> None:
    figure = widgets.plot_one_token(P, Q, NAMES, drafted, uniform)
    tokens = torch.tensor([NAMES.index(drafted)])
    p = torch.stack([P, P])
    kept = token_verification(p, Q[None], tokens, torch.tensor([uniform]), torch.tensor(0.5)).accepted
    title = figure.axes[0].get_title()
    assert title.endswith("accepted" if kept else "rejected; recovered: a (100%)")
    plt.close(figure)


def test_areas_are_probabilities() -> None:
    figure = widgets.plot_one_token(P, Q, NAMES, "a", 0.5)
    green, orange = (sum(bar.get_width() * bar.get_height() for bar in bars) for bars in figure.axes[0].containers)
    assert green == pytest.approx(0.7)
    assert orange == pytest.approx(0.3)
    plt.close(figure)


def test_moving_a_slider_makes_another_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real widgets, driven through their values, as Jupyter does when a reader moves them."""
    import ipywidgets

    controls: dict[str, Any] = {}
    interact, titles = ipywidgets.interact, list[str]()

    def keep(show: Any, **given: Any) -> None:
        controls.update(given)
        interact(show, **given)

    monkeypatch.setattr(ipywidgets, "interact", keep)
    monkeypatch.setattr(plt, "show", lambda: titles.append(plt.gcf().axes[0].get_title()))
    widgets.one_token(P, Q, NAMES, "c", 0.5, sliders=True)
    controls["u"].value = 0.2
    controls["drafted"].value = "a"
    controls["u"].value = 7  # the slider ends below 1, as uniforms do
    assert titles == [
        "draft token c, u = 0.50: rejected; recovered: a (100%)",
        "draft token c, u = 0.20: accepted",
        "draft token a, u = 0.20: accepted",
        "draft token a, u = 0.99: accepted",
    ]
    plt.close("all")
