"""Figure 1 of Leviathan et al. for any generation: one line per step, each token coloured by its
fate.

The paper's figure leaves out the draft tokens after a rejected one. They are shown here too, since
they cost time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.colors import ListedColormap
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
            if at and fate == before:  # a tick between tokens of the same fate
                axes.plot([at, at], [line + 0.2, line + 0.5], color=COLOURS["muted"], linewidth=0.5)
            text, before = visible(text)[: max(columns - at, 0)], fate
            put(at, line, text, fate)
            at += len(text)
    return figure


def plot_one_pass(known: Sequence[str], draft: Sequence[str], tokens: Sequence[int], c: float, v: float) -> Figure:
    """Left which token attends to which in the pass over the last tokens `known` and the `draft`;
    right a time line.

    The time line has a plain pass for each token, and below it steps that emit `tokens` each: a
    draft pass costs `c` plain passes, and the target's pass over all draft tokens `v`.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 2.5), width_ratios=[1, 2.1], layout="constrained")
    names = [visible(text).strip() or "␣" for text in (*known, *draft)]
    kinds = np.tri(len(names)) * np.where(np.arange(len(names)) < len(known), 1, 2)
    shades = ListedColormap(["white", COLOURS["target"], COLOURS["draft"]])
    sns.heatmap(kinds, cmap=shades, vmin=0, vmax=2, cbar=False, square=True, linewidths=0.5, linecolor="0.85",
                xticklabels=names, yticklabels=names, ax=left)  # fmt: skip
    left.tick_params(length=0, labelsize=6)
    left.tick_params(axis="x", labelrotation=90)
    for number in range(len(draft) + 1):  # the distribution after this token
        left.text(len(names) + 0.2, len(known) + number - 0.5, f"$p_{{{number + 1}}}$", va="center", fontsize=7)
    left.set(ylabel="token", xlabel="attends to", title="The causal mask")

    step = len(draft) * c + v
    plain, whole = float(sum(tokens)), step * len(tokens)
    right.broken_barh([(at, 1) for at in range(sum(tokens))], (1.2, 0.7), color=COLOURS["target"], ec="white", lw=0.6)
    for number, emitted in enumerate(tokens):
        start = step * number
        drafting = [(start + c * place, c) for place in range(len(draft))]
        right.broken_barh(drafting, (0.2, 0.7), color=COLOURS["draft"], ec="white", lw=0.3)
        right.broken_barh([(start + step - v, v)], (0.2, 0.7), color=COLOURS["target"], ec="white", lw=0.6)
        right.text(start + step - v / 2, 0.55, str(emitted), ha="center", va="center", color="white", fontsize=7)
    right.set(yticks=[1.55, 0.55], yticklabels=["plain", "speculative"], ylim=(0, 2.1), xlim=(0, max(plain, whole)))
    right.set(xlabel="time in plain passes of the target")
    right.set_title(f"{sum(tokens)} tokens in the time of {whole:.1f} plain passes")
    right.grid(visible=False)
    right.spines["left"].set_visible(False)
    right.tick_params(axis="y", length=0)
    return figure
