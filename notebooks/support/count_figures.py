"""The figures of token counts: counts of a real pair, Figure 2 of the paper, and two printed
formulas."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from notebooks.support.figures import AS_GIVEN, COLOURS, COLUMN, PAGE, family, with_ends
from specnb import theory

ALPHA = r"acceptance probability $\alpha$"


def plot_counts(counts: pd.DataFrame) -> Figure:
    """The share of steps with each number of tokens beside the capped geometric distribution, a
    panel for each temperature."""
    panels = counts.temperature.nunique()
    figure, axes = plt.subplots(1, panels, figsize=(PAGE, 2.5), sharey=True, squeeze=False, layout="constrained")
    for axis, (temperature, rows) in zip(axes.flat, counts.groupby("temperature", sort=False), strict=True):
        drawn = with_ends(rows, "share", "low", "high")
        sns.barplot(drawn, x="tokens", y="share", color=COLOURS["measured"], err_kws={"linewidth": 0.9}, ax=axis,
                    **AS_GIVEN)  # fmt: skip
        at = np.arange(len(rows))
        axis.hlines(rows.independent, at - 0.4, at + 0.4, COLOURS["theory"], linewidth=1.2, zorder=3)
        axis.set(title=f"Temperature {temperature}: {rows.finding.iloc[0]}", xlabel="tokens of a step")
        axis.set_ylabel("fraction of the steps")
    first = counts.iloc[0]
    axes[0, 0].annotate("capped geometric", (0.4, first.independent), (4, 0), textcoords="offset points", va="center",
                        fontsize=7)  # fmt: skip
    return figure


def plot_dependence(memories: pd.DataFrame, thirds: pd.DataFrame, titles: tuple[str, str]) -> Figure:
    """Left the autocorrelation of beta within sequences, a row for each temperature and lag, dashed
    if shuffled; right the mean beta of each sequence's `first` and `last` third."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 2.6), width_ratios=[1.4, 1], layout="constrained")
    colours = {"1": COLOURS["measured"], "0": COLOURS["target"]}
    for name, rows in memories.groupby("temperature", sort=False):
        shuffled, colour = str(name).endswith("shuffled"), colours[str(name).partition(",")[0]]
        left.plot(rows.lag, rows.value, "--" if shuffled else "-", color=colour, linewidth=0.8 if shuffled else 1.5)
        if not shuffled:
            left.fill_between(rows.lag, rows.low, rows.high, color=colour, alpha=0.2, linewidth=0)
    for place, (name, colour) in enumerate(colours.items()):
        left.text(0.97, 0.92 - 0.1 * place, f"temperature {name}", color=colour, ha="right", transform=left.transAxes)
    left.axhline(0, color=COLOURS["muted"], linewidth=0.6, zorder=0)
    left.set(xlabel="distance in tokens", ylabel=r"autocorrelation of $\beta$", title=titles[0])
    sns.scatterplot(thirds, x="first", y="last", hue="temperature", palette=colours, s=14, legend=False, ax=right)
    right.plot([0, 1], [0, 1], color=COLOURS["muted"], linewidth=0.6, zorder=0)
    right.set(xlabel=r"mean $\beta$ of the first third", ylabel="of the last third", aspect="equal", title=titles[1])
    return figure


def plot_figure2(simulated: pd.DataFrame) -> Figure:
    """Equation 1 for each gamma of the `simulated` steps, and their means."""
    figure, axis = plt.subplots(figsize=(COLUMN, 2.8), layout="constrained")
    alphas = np.linspace(0, 0.995, 200)
    gammas = sorted(simulated.gamma.unique())
    for gamma, colour in zip(gammas, family(len(gammas)), strict=True):
        points = simulated[simulated.gamma == gamma]
        axis.plot(alphas, theory.expected_tokens(alphas, gamma), color=colour)
        axis.plot(points.alpha, points.value, "o", color=colour, markersize=3)
        end = float(theory.expected_tokens(1, gamma))
        axis.annotate(rf"$\gamma$ = {gamma}", (1, end), (3, 0), textcoords="offset points", color=colour, va="center",
                      fontsize=7, annotation_clip=False)  # fmt: skip
    axis.plot(alphas, 1 / (1 - alphas), "--", color=COLOURS["muted"])
    axis.annotate(r"$\gamma=\infty$", (0.88, 1 / 0.12), (-6, 0), textcoords="offset points", color=COLOURS["muted"],
                  ha="right", fontsize=7)  # fmt: skip
    axis.set(xlabel=ALPHA, ylabel="tokens per step", xlim=(0, 1), ylim=(1, 11.3))
    axis.set_title(r"More draft tokens add many tokens only if $\alpha$ is high")
    return figure


def plot_wrong_formulas(simulated: pd.DataFrame, example: tuple[float, float]) -> Figure:
    """The lesson's formula and the footnote's beside Equation 1 and `simulated` steps; `example` is
    the footnote's, alpha and tokens."""
    alphas = np.linspace(0, 0.995, 200)
    lesson, footnote = (1 - alphas**5) / (1 - alphas) + 1, theory.expected_tokens(alphas, 10) - 11 * alphas**11
    figure, axes = plt.subplots(1, 2, figsize=(PAGE, 2.5), layout="constrained")
    titles = ("The lesson's formula is too large", "The footnote's formula is too small")
    where: Sequence[tuple[float, float]] = ((0.25, 3.0), (0.7, 1.2))
    for axis, gamma, wrong, title, at in zip(axes, (5, 10), (lesson, footnote), titles, where, strict=True):
        axis.plot(alphas, theory.expected_tokens(alphas, gamma), color=COLOURS["theory"])
        axis.plot(alphas, wrong, "--", color=COLOURS["rejected"])
        points = simulated[simulated.gamma == gamma]
        axis.plot(points.alpha, points.value, "o", color=COLOURS["measured"], markersize=4)
        axis.text(*at, "as printed", color=COLOURS["rejected"], fontsize=7)
        axis.text(0.02, 0.93, "line: Equation 1; points: simulated steps", fontsize=7, transform=axis.transAxes)
        axis.set(
            xlabel=rf"{ALPHA}, $\gamma$ = {gamma}", ylabel="tokens per step", xlim=(0, 1), ylim=(0, None), title=title
        )
    axes[1].plot(*example, "X", color=COLOURS["rejected"], markersize=6)
    return figure
