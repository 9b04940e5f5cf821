"""The style of every figure: widths of a paper's columns, one colour for each meaning, reproducible files.

Figures are saved as SVG and PDF without dates or random identifiers, so the same figure gives the same bytes. Layouts
differ in their last digits between processors, so places in SVG are rounded.
"""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.files import located, out, write

COLUMN = 3.4  # inches: the width of one column of a two-column paper
PAGE = 7.0  # and of both

# Okabe and Ito's palette, which colour-blind readers can distinguish; each colour has one meaning everywhere.
COLOURS = {
    "target": "#0072B2",  # p, the target, plain decoding
    "draft": "#E69F00",  # q, the draft model
    "accepted": "#009E73",
    "rejected": "#D55E00",
    "recovered": "#56B4E9",  # recovered and bonus tokens
    "theory": "#000000",
    "measured": "#CC79A7",
    "muted": "#8A8A8A",
}
SEQUENCE = "viridis"  # for an ordered family of curves (gamma, c): dark to light, readable in grey

STYLE: dict[Any, Any] = {
    "figure.figsize": (COLUMN, 2.4),
    "figure.dpi": 144,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "svg.hashsalt": "specnb",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}


def use_style() -> None:
    """Sets the style of all later figures; every notebook calls it in its first cell."""
    mpl.rcdefaults()
    mpl.rcParams.update(STYLE)


def family(count: int) -> list[tuple[float, float, float, float]]:
    """`count` RGBA colours from dark to light, for an ordered family of curves.

    >>> len(family(3))
    3
    """
    cmap = mpl.colormaps[SEQUENCE]
    return [cmap(0.85 * i / max(count - 1, 1)) for i in range(count)]


def panels(columns: int, rows: int = 1, height: float = 2.4) -> tuple[Figure, list[Axes]]:
    """A figure and the list of its axes, one column wide for one panel and page-wide for more; `height` in inches."""
    width = COLUMN if columns == 1 else PAGE
    figure, axes = plt.subplots(rows, columns, figsize=(width, height * rows), squeeze=False)
    return figure, list(axes.flat)


def save(figure: Figure, name: str) -> None:
    """Writes `figures/<name>.svg` and `.pdf` (`located`) under `studies.files.out()`, without a date in them."""
    for kind, metadata in (("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=metadata)
        content = buffer.getvalue()
        path = out() / located("figures", f"{name}.{kind}")
        write(path, stable(content, path.stem) if kind == "svg" else content)


def stable(svg: bytes, name: str) -> bytes:
    """`svg` without what differs between processors, whose layouts differ in their last digits.

    Identifiers of clip paths and markers, which Matplotlib makes from all digits of what they describe, are numbered in
    their order, after the name of the figure. Places are rounded to thousandths of a point; scales are kept.

    >>> stable(b'<path id="m0123456789" d="M 1.234567 2.5"/><use xlink:href="#m0123456789"/>', "a")
    b'<path id="a-1" d="M 1.235 2.5"/><use xlink:href="#a-1"/>'
    """
    found = dict.fromkeys(re.findall(rb'id="([a-z][0-9a-f]{10})"', svg))
    new = {old: f"{name}-{number}".encode() for number, old in enumerate(found, start=1)}
    named = re.sub(rb'(?<=["#])([a-z][0-9a-f]{10})(?=["\)])', lambda match: new.get(match[1], match[1]), svg)
    return re.sub(rb"scale\([^)]*\)|-?\d+\.\d{4,}", lambda match: _thousandths(match[0]), named)


def _thousandths(number: bytes) -> bytes:
    return number if number.startswith(b"scale") else b"%g" % round(float(number), 3)
