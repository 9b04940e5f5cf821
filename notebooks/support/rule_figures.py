"""The figures of verification rules: what both rules accept of a draft, a tree with its mask, and
predicted beside measured speed-ups."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from notebooks.support.figures import AS_GIVEN, COLOURS, PAGE, POINTS, with_ends
from notebooks.support.step_figure import visible


def plot_acceptance(example: pd.DataFrame, drafts: pd.DataFrame) -> Figure:
    """How likely each prefix of one draft is accepted by token and by block verification, and the
    expected accepted tokens of both for many drafts.

    example  a row for each draft token: its text, `ratio` p/q, `token` and `block`
    drafts   a row for each draft: the sums `token` and `block`
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 2.6), width_ratios=[1.25, 1], layout="constrained")
    names = {
        "token": r"token verification, $\prod\min(1, p/q)$",
        "block": "block verification, $w$",
    }
    bars = example.rename(columns=names).melt(value_vars=list(names.values()), var_name="rule", ignore_index=False)
    palette = dict(zip(names.values(), (COLOURS["rejected"], COLOURS["target"]), strict=True))
    sns.barplot(bars.reset_index(), x="index", y="value", hue="rule", palette=palette, saturation=1, ax=left)
    ticks = [f"{visible(row.text).strip() or '␣'}\np/q = {row.ratio:.2g}" for row in example.itertuples()]
    left.set(xticks=range(len(ticks)), xticklabels=ticks, ylim=(0, 1.35), yticks=np.linspace(0, 1, 6))
    left.set(
        xlabel="draft tokens, one after another", ylabel="probability that the prefix is\naccepted, given it is drafted"
    )
    left.legend(title=None, loc="upper left", ncols=1)
    left.set_title("Block verification recovers from an unlikely token")
    sns.scatterplot(drafts, x="token", y="block", color=COLOURS["target"], s=8, alpha=0.4, linewidth=0, ax=right)
    most = len(example)
    right.plot([0, most], [0, most], color=COLOURS["muted"], linewidth=0.8)
    right.set(xlabel="sum over the prefixes,\ntoken verification", ylabel="block verification")
    right.set(xlim=(0, most), ylim=(0, most), xticks=range(most + 1), yticks=range(most + 1), aspect="equal")
    right.set_title("No draft has a smaller sum")
    return figure


def plot_tree_mask(paths: Sequence[str], sees: Sequence[Sequence[bool]]) -> Figure:
    """The tree whose nodes are at the end of `paths`, numbered in their order, and beside it which
    token sees which."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 2.7), width_ratios=[1.2, 1], layout="constrained")
    leaves = [path for path in paths if not any(other != path and other.startswith(path) for other in paths)]

    def place(path: str) -> tuple[int, float]:
        below = [number for number, leaf in enumerate(leaves) if leaf.startswith(path)]
        return len(path), -sum(below) / len(below)

    looks = {"boxstyle": "circle,pad=0.35", "edgecolor": COLOURS["target"], "facecolor": "white"}
    for number, path in enumerate(paths):
        x, y = place(path)
        if number:
            parent = place(path[:-1])
            left.plot([parent[0], x], [parent[1], y], color=COLOURS["muted"], linewidth=0.8, zorder=1)
        left.text(x, y, path[-1], ha="center", va="center", fontsize=9, bbox=looks)
        left.text(x, y - 0.42, str(number), ha="center", va="center", fontsize=7, color="0.35")
    left.set(xlim=(0.7, max(map(len, paths)) + 0.3), ylim=(0.4 - len(leaves), 0.4))
    left.set_title("Four drafts in one tree, in depth-first order")
    left.axis("off")
    letters = [path[-1] for path in paths]
    shown = pd.DataFrame(np.array(sees, dtype=float), index=letters, columns=letters)
    sns.heatmap(shown, cmap=ListedColormap(["white", COLOURS["target"]]), cbar=False, square=True, linewidths=0.5,
                linecolor="0.85", ax=right)  # fmt: skip
    right.set(xlabel="sees", ylabel="token", title="A token sees only the path to it")
    right.tick_params(labelrotation=0, length=0)
    return figure


def plot_in_the_loop(rows: pd.DataFrame, title: str) -> Figure:
    """The predicted and the measured speed-up of each method, the measured one with its interval."""
    figure, axis = plt.subplots(figsize=(0.75 * PAGE, 2.8), layout="constrained")
    drawn = with_ends(rows, "measured", "measured_low", "measured_high")
    axis.axvline(1, color=COLOURS["muted"], linewidth=0.8)
    sns.pointplot(
        drawn, x="measured", y="method", color=COLOURS["measured"], label="measured", ax=axis, **POINTS, **AS_GIVEN
    )
    sns.scatterplot(
        rows, x="predicted", y="method", color=COLOURS["predicted"], marker="D", s=14, label="predicted", ax=axis
    )
    axis.set(xlabel="speed-up over plain decoding", ylabel="", title=title)
    axis.legend(loc="center right")
    return figure
