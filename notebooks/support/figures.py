"""How every figure looks: seaborn's theme for a paper's columns, one colour for each meaning,
reproducible files.

Notebooks draw with seaborn, from tidy tables; Matplotlib alone draws only what seaborn has nothing
for. Figures are saved as SVG and PDF without dates or random identifiers, so the same figure gives
the same bytes. Layouts differ in their last digits between processors, so places in SVG are
rounded.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from studies.files import located, out, write

COLUMN = 3.4  # inches: the width of one column of a two-column paper
PAGE = 7.0  # and of both

# Okabe and Ito's palette, which colour-blind readers can distinguish; each colour has one meaning
# everywhere. It is a `palette` of seaborn for a `hue` with these values.
COLOURS = {
    "target": "#0072B2",  # p, the target, plain decoding
    "draft": "#E69F00",  # q, the draft model
    "accepted": "#009E73",
    "rejected": "#D55E00",
    "recovered": "#56B4E9",  # recovered and bonus tokens
    "theory": "#000000",
    "predicted": "#000000",
    "measured": "#CC79A7",
    "muted": "#8A8A8A",
}
SEQUENCE = "viridis"  # for an ordered family of curves (gamma, c): dark to light, readable in grey
# How seaborn draws the rows of `with_ends`: the value, and the interval as it was computed, not one
# of its own.
AS_GIVEN: dict[str, Any] = {"estimator": "median", "errorbar": ("pi", 100)}
# Of `pointplot`
POINTS: dict[str, Any] = {"linestyle": "none", "markersize": 3.5, "err_kws": {"linewidth": 0.9}}

STYLE: dict[Any, Any] = {
    "figure.figsize": (COLUMN, 2.4),
    "figure.dpi": 144,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.linewidth": 0.8,
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "svg.hashsalt": "specnb",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}
TICKS = {"labelsize": 7, "major.width": 0.8, "major.size": 3, "minor.size": 2}
STYLE |= {f"{axis}tick.{name}": value for axis in "xy" for name, value in TICKS.items()}


def use_style() -> None:
    """Sets the theme of all later figures; every notebook calls it in its first cell."""
    mpl.rcdefaults()
    sns.set_theme(style="ticks", palette=list(COLOURS.values()), rc=STYLE)


def family(count: int) -> list[tuple[float, float, float]]:
    """`count` RGB colours from dark to light, for an ordered family of curves.

    >>> len(family(3))
    3
    """
    cmap = mpl.colormaps[SEQUENCE]
    return [cmap(0.85 * i / max(count - 1, 1))[:3] for i in range(count)]


def with_ends(table: pd.DataFrame, value: str, low: str, high: str) -> pd.DataFrame:
    """`table` with three rows for each of its own, whose `value` is the value and both ends of its
    interval.

    Seaborn computes intervals from the rows that share a place; from these rows `**AS_GIVEN` makes
    the interval given.

    >>> with_ends(pd.DataFrame({"x": [1], "mean": [2.0], "low": [1.5], "high": [3.0]}), "mean", "low", "high")
       x  mean  low  high
    0  1   2.0  1.5   3.0
    1  1   1.5  1.5   3.0
    2  1   3.0  1.5   3.0
    """
    return pd.concat([table, *(table.assign(**{value: table[end]}) for end in (low, high))], ignore_index=True)


def dots(table: pd.DataFrame, ends: tuple[str, str], along: str = "x", ax: Axes | None = None, **how: Any) -> Axes:
    """A scatter plot in which each row of `table` has its own interval, between the columns `ends`,
    along x or y.

    `how` is that of `seaborn.scatterplot`, with at least x, y and hue.
    """
    spans = pd.concat([table.assign(**{how[along]: table[end]}, row=range(len(table))) for end in ends])
    of_both = {key: how[key] for key in ("x", "y", "hue", "hue_order", "palette") if key in how}
    line = {"estimator": None, "units": "row", "linewidth": 0.7, "alpha": 0.7, "legend": False}
    axis: Axes = sns.lineplot(spans.reset_index(drop=True), ax=ax, **of_both, **line)
    sns.scatterplot(table, ax=axis, zorder=3, **how)
    return axis


def spread(values: Sequence[float], gap: float, least: float = -math.inf) -> list[float]:
    """Places for labels near the ascending `values`, at least `gap` apart and none below `least`.

    >>> spread([0.0, 1.0, 1.0, 3.0], 0.5), spread([1.0, 1.0, 3.0], 0.5, least=0.9)
    ([0.0, 0.75, 1.25, 3.0], [0.9, 1.4, 3.0])
    """

    def first(group: Sequence[float]) -> float:
        return max(sum(group) / len(group) - gap * (len(group) - 1) / 2, least)

    groups: list[list[float]] = []  # each: values whose labels touch
    for value in values:
        groups.append([value])
        while len(groups) > 1 and first(groups[-1]) < first(groups[-2]) + gap * len(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    return [first(group) + gap * number for group in groups for number in range(len(group))]


def panels(columns: int, rows: int = 1, **how: Any) -> tuple[Figure, list[Axes]]:
    """A figure and the list of its axes, for panels that are not facets of one table; `how` is that
    of `subplots`."""
    figure, axes = plt.subplots(rows, columns, squeeze=False, **how)
    return figure, list(axes.flat)


def save(drawn: Figure | Axes | sns.FacetGrid, name: str, height: float = 0, width: float = 0, legend: int = 0) -> None:
    """Writes `figures/<name>.svg` and `.pdf` (`located`) under `studies.files.out()`, without a
    date in them.

    `height` and `width` are in inches, 0 leaves the size as it is; by default one panel is a column
    wide, and more are as wide as the page. With `legend`, the legends of all panels become one
    outside of them, with so many columns.
    """
    figure = drawn.figure
    assert isinstance(figure, Figure)
    if height:
        figure.set_size_inches(width or (COLUMN if len(figure.axes) == 1 else PAGE), height)
    figure.set_layout_engine("constrained")
    if legend:
        _one_legend(figure, legend)
    for kind, metadata in (("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=metadata)
        content = buffer.getvalue()
        path = out() / located("figures", f"{name}.{kind}")
        write(path, stable(content, path.stem) if kind == "svg" else content)


def _one_legend(figure: Figure, columns: int) -> None:
    entries: dict[str, Any] = {}
    for old in figure.findobj(Legend):
        assert isinstance(old, Legend)
        entries |= {text.get_text(): handle for handle, text in zip(old.legend_handles, old.texts, strict=True)}
        old.remove()
    place: Any = "outside lower center"
    figure.legend([*entries.values()], [*entries], ncols=columns, loc=place)


def stable(svg: bytes, name: str) -> bytes:
    """`svg` without what differs between processors, whose layouts differ in their last digits.

    Identifiers of clip paths and markers, which Matplotlib makes from all digits of what they
    describe, are numbered in their order, after the name of the figure. Places are rounded to
    thousandths of a point; scales are kept.

    >>> stable(b'<path id="m0123456789" d="M 1.234567 2.5"/><use xlink:href="#m0123456789"/>', "a")
    b'<path id="a-1" d="M 1.235 2.5"/><use xlink:href="#a-1"/>'
    """
    found = dict.fromkeys(re.findall(rb'id="([a-z][0-9a-f]{10})"', svg))
    new = {old: f"{name}-{number}".encode() for number, old in enumerate(found, start=1)}
    named = re.sub(rb'(?<=["#])([a-z][0-9a-f]{10})(?=["\)])', lambda match: new.get(match[1], match[1]), svg)
    return re.sub(rb"scale\([^)]*\)|-?\d+\.\d{4,}", lambda match: _thousandths(match[0]), named)


def _thousandths(number: bytes) -> bytes:
    return number if number.startswith(b"scale") else b"%g" % round(float(number), 3)
