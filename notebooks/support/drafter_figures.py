"""The figures of drafters: tokens per step against the cost of a step, and draft lengths that adapt."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from notebooks.support.figures import AS_GIVEN, COLOURS, COLUMN, PAGE, POINTS, spread, with_ends

KINDS = {
    "tables and copies": COLOURS["muted"],
    "draft model": COLOURS["target"],
    "hidden states": COLOURS["accepted"],
    "the target's pass": COLOURS["rejected"],
}
LONGEST = 2.4  # target passes
LEADER = {"arrowstyle": "-", "color": "0.8", "linewidth": 0.5, "shrinkB": 3, "relpos": (0, 0.5)}


def plot_costs(table: pd.DataFrame) -> Figure:
    """Tokens per step of each drafter in `table` between its cost if verifying is free and its cost
    with v, a panel for each temperature."""
    drawn = table.assign(free=1 + table.draft_cost, cost=table.v + table.draft_cost)
    figure, axes = plt.subplots(1, 2, figsize=(PAGE, 3.6), sharey=True, layout="constrained")
    top = 1.06 * drawn.tokens_per_step.max()
    for axis, (temperature, rows) in zip(axes, drawn.groupby("temperature", sort=False), strict=True):
        for speed in (1, 1.5, 2):
            end = min(LONGEST, top / speed)
            axis.plot([1, end], [speed, speed * end], color="0.85", linewidth=0.8, zorder=0)
            axis.annotate(f"{speed:g}x", (end, speed * end), (-4, -1), textcoords="offset points", ha="right", va="top",
                          fontsize=7, color=COLOURS["muted"])  # fmt: skip
        spans = rows.melt(["drafter", "kind", "tokens_per_step"], ["free", "cost"], value_name="passes")
        sns.lineplot(spans, x="passes", y="tokens_per_step", hue="kind", units="drafter", estimator=None, palette=KINDS,
                     linewidth=1, legend=False, ax=axis)  # fmt: skip
        sns.scatterplot(rows, x="cost", y="tokens_per_step", hue="kind", palette=KINDS, s=18, legend=False, ax=axis)
        _label(axis, rows, top)
        axis.set(xlim=(0.95, LONGEST + 1.15), ylim=(0.9, top), xticks=[1, 1.5, 2])
        axis.set(xlabel="cost of a step, in target passes", ylabel="tokens per step")
        axis.set_title(f"temperature {temperature:g}")
    handles = [Line2D([], [], color=colour, marker="o", markersize=4, label=kind) for kind, colour in KINDS.items()]
    figure.legend(handles=handles, ncols=4, loc="outside lower center")
    figure.suptitle("Extra tokens in the target's pass are not free; copies cost almost nothing", fontsize=8)
    return figure


def _label(axis: Axes, rows: pd.DataFrame, top: float) -> None:
    """The names of the drafters in a column on the right, in the order of their points."""
    ordered = rows.sort_values("tokens_per_step")
    places = spread(ordered.tokens_per_step.tolist(), 0.043 * top, 0.95)
    for row, place in zip(ordered.itertuples(), places, strict=True):
        axis.annotate(
            row.drafter, (row.cost, row.tokens_per_step), (LONGEST + 0.1, place), fontsize=7, va="center",
            color=KINDS[row.kind], arrowprops=LEADER,
        )  # fmt: skip


def plot_lengths(lengths: pd.DataFrame) -> Figure:
    """The speed of each rule of length over the best fixed one, with intervals."""
    drawn = with_ends(lengths, "over_best", "over_best_low", "over_best_high")
    figure, axis = plt.subplots(figsize=(COLUMN, 2.6), layout="constrained")
    axis.axvline(1, color=COLOURS["muted"], linewidth=0.8)
    sns.pointplot(drawn, x="over_best", y="rule", color=COLOURS["measured"], ax=axis, **POINTS, **AS_GIVEN)
    axis.set(xlabel="speed over the best fixed length", ylabel="")
    figure.suptitle("If passes with drafts cost the same: of the usable rules, only stopping at cλ gains", fontsize=8)
    return figure


def plot_tree(tree: Mapping[tuple[int, ...], float], names: Mapping[tuple[int, ...], str], root: str) -> Figure:
    """The nodes of `tree`, paths of tokens, at their depths, with their `names` and values."""
    order = sorted(tree)  # children after their parents, side by side
    order.sort(key=lambda path: [-tree[path[: depth + 1]] for depth in range(len(path))])
    places = {path: (len(path), -row) for row, path in enumerate(order)} | {(): (0, 0)}
    figure, axis = plt.subplots(figsize=(PAGE, 0.22 * len(order) + 0.5), layout="constrained")
    for path in order:
        (x, y), (before, above) = places[path], places[path[:-1]]
        axis.plot([before, before, x], [above, y, y], color="0.8", linewidth=0.8, zorder=0)
    for path, (x, y) in places.items():
        shown = repr(names[path])[1:-1] if path else repr(root)[1:-1]
        said = f"{shown}  {tree[path]:.2f}" if path else shown
        box = {
            "facecolor": "white",
            "edgecolor": COLOURS["accepted" if path else "target"],
            "boxstyle": "round,pad=0.25",
        }
        axis.text(x, y, said, fontsize=7, va="center", bbox=box | {"linewidth": 0.6})
    axis.set(xlim=(-0.1, max(map(len, order)) + 0.9), ylim=(0.7 - len(order), 0.6))
    axis.set_axis_off()
    figure.suptitle("The tree is deep where the head is sure, and wide where it is not", fontsize=8)
    return figure
