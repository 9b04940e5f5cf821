"""Figure 1 of Leviathan et al. for any generation: one line per step, each token coloured by its
fate.

The paper's figure leaves out the draft tokens after a rejected one. They are shown here too, since
they cost time.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from notebooks.support.figures import COLOURS, PAGE
from studies.real.step_view import StepView
from studies.real.step_view import recorded_steps as recorded_steps  # for notebooks
from studies.real.step_view import step_views as step_views

STYLES: dict[str, dict[str, Any]] = {
    "accepted": {"color": COLOURS["accepted"]},
    "rejected": {"color": COLOURS["rejected"], "struck": True},
    "unused": {"color": COLOURS["muted"], "struck": True},
    "recovered": {"color": COLOURS["target"], "bold": True},
    "bonus": {"color": COLOURS["target"], "bold": True, "underlined": True},
}


def visible(text: str) -> str:
    r"""`text` with visible signs for newline and tab, and a dot for an incomplete UTF-8 character.

    >>> visible("a\tb")
    'a⇥b'
    """
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\ufffd", "·")


def plot_steps(steps: list[StepView], columns: int = 72) -> Figure:
    """One line per step in a fixed-width font, its number of tokens at the left; longer lines end
    at `columns`."""
    figure, axes = plt.subplots(figsize=(PAGE * 0.75, 0.17 * len(steps) + 0.45))
    axes.set(xlim=(-7, columns), ylim=(len(steps) - 0.5, -1.8))
    axes.axis("off")
    # DejaVu Sans Mono: every glyph is 0.602 em wide.
    size = 72 * figure.get_figwidth() * 0.97 / ((columns + 7) * 0.602)

    font: dict[str, Any] = {"family": "DejaVu Sans Mono", "size": size, "va": "center"}

    def put(at: float, line: float, text: str, fate: str) -> None:
        style = STYLES[fate]
        axes.text(at, line, text, color=style["color"], weight="bold" if style.get("bold") else "normal", **font)
        for wanted, height in (("struck", line), ("underlined", line + 0.42)):
            if style.get(wanted):
                axes.plot([at, at + len(text)], [height, height], color=style["color"], linewidth=0.6)

    axes.text(-1.5, -1.2, "tokens", color=COLOURS["muted"], ha="right", **font)
    at = 0
    for fate in STYLES:
        put(at, -1.2, fate, fate)
        at += len(fate) + 3
    axes.plot([-7, at - 3], [-0.6, -0.6], color=COLOURS["muted"], linewidth=0.4)  # the words above it are the legend
    for line, step in enumerate(steps):
        axes.text(-1.5, line, str(step.tokens), color=COLOURS["muted"], ha="right", **font)
        at, before = 0, "accepted"
        for text, fate in step.pieces:
            at += fate != before  # a space between tokens of different fates
            text, before = visible(text)[: max(columns - at, 0)], fate
            put(at, line, text, fate)
            at += len(text)
    return figure
