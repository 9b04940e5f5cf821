"""Figures are the same bytes when they are made again, and their colours are told apart in grey."""

from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import seaborn as sns
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.legend import Legend

from notebooks.support import figures

TABLE = pd.DataFrame({"x": [0, 1], "y": [1.0, 2.0], "low": [0.9, 1.0], "high": [1.5, 2.0], "kind": ["a", "b"]})


mpl.use("agg")
pytestmark = pytest.mark.usefixtures("own_results")


def _make(folder: Path) -> dict[str, bytes]:
    figures.use_style()
    axes = sns.lineplot(
        figures.with_ends(TABLE, "y", "low", "high"), x="x", y="y", err_style="bars", **figures.AS_GIVEN
    )
    axes.set(xlabel=r"$\alpha$", ylabel="tokens")
    figures.save(axes, "again", height=2)
    plt.close("all")
    return {kind: (folder / "figures" / f"again.{kind}").read_bytes() for kind in ("svg", "pdf")}


def test_a_figure_is_the_same_bytes_when_made_again(tmp_path: Path) -> None:
    assert _make(tmp_path) == _make(tmp_path)


def test_lines_have_the_intervals_that_were_computed() -> None:
    axes = sns.lineplot(
        figures.with_ends(TABLE, "y", "low", "high"), x="x", y="y", err_style="bars", **figures.AS_GIVEN
    )
    assert axes.lines[0].get_ydata().tolist() == [1, 2]
    (bars,) = (drawn for drawn in axes.collections if isinstance(drawn, LineCollection))
    assert [line[:, 1].tolist() for line in bars.get_segments()] == [[0.9, 1.5], [1.0, 2.0]]
    plt.close("all")


def test_each_dot_has_its_own_interval_also_where_two_are_at_one_place() -> None:
    axes = figures.dots(TABLE.assign(x=0), ("low", "high"), "y", x="x", y="y", hue="kind")
    ends = [list(np.asarray(line.get_ydata())) for line in axes.lines]
    assert [end for end in ends if end] == [[0.9, 1.5], [1.0, 2.0]]
    plt.close("all")


def test_one_legend_has_each_label_once() -> None:
    figure, axes = figures.panels(2)
    for axis in axes:
        sns.scatterplot(TABLE, x="x", y="y", hue="kind", ax=axis)
    figures.save(figure, "legends", height=2, legend=2)
    (legend,) = figure.findobj(Legend)
    assert isinstance(legend, Legend)
    assert [text.get_text() for text in legend.texts] == ["a", "b"]
    plt.close("all")


def test_places_are_thousandths_of_a_point_and_scales_are_kept() -> None:
    near, drawn = (
        b'<use transform="translate(%s -3.0004) scale(0.015625 -0.07)"/>' % at for at in (b"1.234567", b"1.235")
    )
    assert figures.stable(near, "a") == drawn.replace(b"-3.0004", b"-3")
    assert figures.stable(near.replace(b"567", b"568"), "a") == figures.stable(near, "a")
    assert figures.stable(b"L 0.0004999 -0.0012 503.99951 2.125", "a") == b"L 0 -0.001 504 2.125"


def _luminance(colour: object) -> float:
    red, green, blue = to_rgb(colour)  # type: ignore[arg-type]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_target_and_draft_differ_in_grey() -> None:
    for one, other in combinations(("target", "draft", "theory"), 2):
        assert abs(_luminance(figures.COLOURS[one]) - _luminance(figures.COLOURS[other])) > 0.1
