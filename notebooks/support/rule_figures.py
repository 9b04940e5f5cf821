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

from notebooks.support.figures import COLOURS, PAGE, spread
from notebooks.support.step_figure import visible


def plot_acceptance(example: pd.DataFrame, drafts: pd.DataFrame) -> Figure:
    """How likely each prefix of one draft is accepted by token and by block verification, and the
    expected accepted tokens of both for many drafts.

    example  a row for each draft token: its text, `ratio` p/q, `token` and `block`
    drafts   a row for each draft: the sums `token` and `block`
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 2.6), width_ratios=[1.25, 1], layout="constrained")
    at, widest = np.arange(len(example) + 1), 1 + int((example.block - example.token).argmax())
    for rule, colour, marker in (("token", COLOURS["rejected"], "s"), ("block", COLOURS["target"], "o")):
        heights = [1.0, *example[rule]]
        left.plot(at, heights, color=colour, marker=marker, linewidth=1.5)
        left.annotate(f"{rule} verification", (at[widest], heights[widest]), (0, 7), textcoords="offset points",
                      ha="center", fontsize=7, color=colour)  # fmt: skip
    names = [f"{visible(row.text).strip() or '␣'}\np/q = {row.ratio:.2g}" for row in example.itertuples()]
    left.set(xticks=at, xticklabels=["", *names], ylim=(0, 1.15), xlabel="draft tokens, one after another")
    left.set(ylabel="acceptance probability of the\nprefix, over its continuations")
    left.set_title("Block verification recovers from an unlikely token")
    sns.scatterplot(drafts, x="token", y="block", color=COLOURS["target"], s=8, alpha=0.4, linewidth=0, ax=right)
    most = len(example)
    right.plot([0, most], [0, most], color=COLOURS["muted"], linewidth=0.8)
    right.set(xlabel="sum over the prefixes,\ntoken verification", ylabel="block verification")
    right.set(xlim=(0, most), ylim=(0, most), xticks=range(most + 1), yticks=range(most + 1), aspect="equal")
    right.set_title("No prefix is accepted less often")
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


def plot_slopes(rows: pd.DataFrame, title: str) -> Figure:
    """A line for each method from its predicted to its measured speed-up, labelled where it ends;
    `kind` colours it."""
    figure, axis = plt.subplots(figsize=(0.75 * PAGE, 3.2), layout="constrained")
    colours = dict(zip(rows.kind.unique(), (COLOURS[name] for name in ("target", "accepted", "rejected")), strict=True))
    ordered = rows.sort_values("measured")
    labels = spread(ordered.measured.tolist(), 0.062)
    for row, height in zip(ordered.itertuples(), labels, strict=True):
        colour = colours[row.kind]
        axis.plot([0, 1], [row.predicted, row.measured], color=colour, marker="o", markersize=3)
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.4, "relpos": (0, 0.5)}
        axis.annotate(f"{row.method}: {row.measured:.2f}", (1, row.measured), (1.08, height), va="center", fontsize=7,
                      color=colour, arrowprops=leader)  # fmt: skip
    axis.plot([-0.55, 1], [1, 1], color="0.35", linewidth=0.8, zorder=0)
    axis.text(-0.5, 1, "plain decoding", va="bottom", fontsize=7, color="0.35")
    axis.set(xticks=[0, 1], xticklabels=["predicted", "measured"], xlim=(-0.55, 2.3), ylabel="speed-up", title=title)
    axis.set(ylim=(labels[0] - 0.05, None))
    axis.grid(visible=False)
    return figure
