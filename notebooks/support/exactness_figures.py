"""The figures of exactness: the masses of one pair of distributions, p under M q, and sampled steps
that approach the target's distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from notebooks.support.figures import COLOURS, COLUMN, PAGE


def plot_masses(p: ArrayLike, q: ArrayLike, tokens: Sequence[str]) -> Figure:
    """The bars of p and q `(vocab,)`, a pair for each of `tokens`: accepted and recovered mass make
    p, accepted and rejected mass make q."""
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    figure, axis = plt.subplots(figsize=(COLUMN, 2.6), layout="constrained")
    both, at = np.minimum(p, q), np.arange(len(p))
    for name, whole, part, place in (("p", p, "recovered", at - 0.2), ("q", q, "rejected", at + 0.2)):
        axis.bar(place, both, 0.36, color=COLOURS["accepted"], label="accepted" if name == "p" else None)
        axis.bar(place, whole - both, 0.36, bottom=both, color=COLOURS[part], label=part)
        for x, height in zip(place, whole, strict=True):
            axis.text(x, height, f"${name}$", ha="center", va="bottom")
    axis.set(xticks=at, xticklabels=tokens, xlabel="token", ylabel="probability", ylim=(0, 1.3 * max(p.max(), q.max())))
    axis.grid(visible=False, axis="x")
    axis.legend(loc="upper center", ncols=3, handlelength=1, columnspacing=1)
    axis.set_title("Accepted and recovered mass add up to $p$")
    return figure


def plot_rejection_sampling(p: ArrayLike, q: ArrayLike, tokens: Sequence[str]) -> Figure:
    """Of the mass q that is proposed, what rejection sampling and what speculative sampling
    accepts."""
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    m, at = (p / q).max(), np.arange(len(p))
    figure, axes = plt.subplots(1, 2, figsize=(PAGE, 2.4), layout="constrained", sharey=True)
    drawn = (
        (p / m, f"Rejection sampling accepts $1/M$ = {1 / m:.0%}", "$p/M$: accepted"),
        (np.minimum(p, q), rf"Speculative sampling accepts $\beta$ = {np.minimum(p, q).sum():.0%}",
         r"$\min(p, q)$: accepted"),
    )  # fmt: skip
    for axis, (kept, title, inside) in zip(axes, drawn, strict=True):
        axis.bar(at, q, 0.7, color=COLOURS["rejected"], alpha=0.35, label="$q$: proposed")
        axis.bar(at, kept, 0.7, color=COLOURS["accepted"], label=inside)
        axis.set(xticks=at, xticklabels=tokens, xlabel="token", title=title)
        axis.grid(visible=False, axis="x")
        axis.legend(loc="upper left")
    axes[0].set_ylabel("probability")
    return figure


def plot_convergence(curves: pd.DataFrame, names: Mapping[str, str], exact: Mapping[str, float]) -> Figure:
    """The total variation of sampled steps against their number, for each rule in `names` its
    label; rules in `exact` stop there."""
    figure, axis = plt.subplots(figsize=(COLUMN, 2.6), layout="constrained")
    colours = dict(zip(names, (COLOURS[name] for name in ("measured", "rejected", "muted")), strict=True))
    chance = curves[curves.rule == next(iter(names))]
    sns.lineplot(chance, x="n", y="expected of an exact one", color=COLOURS["theory"], zorder=1, ax=axis)
    expected, width = chance["expected of an exact one"], 1.96 * chance["standard error"]
    axis.fill_between(chance.n, expected - width, expected + width, color=COLOURS["theory"], alpha=0.25, linewidth=0)
    for rule, rows in curves.groupby("rule", sort=False):
        axis.plot(rows.n, rows["mean TV"], "o", color=colours[rule], markersize=3.5)
        if rule in exact:
            axis.hlines(exact[rule], rows.n.min(), rows.n.max(), colours[rule], ":")
        last, (right, up, side) = rows.iloc[-1], (5, 0, "left") if rule in exact else (-7, -2, "right")
        axis.annotate(names[rule], (last.n, last["mean TV"]), (right, up), textcoords="offset points", ha=side,
                      va="center", fontsize=7, color=colours[rule])  # fmt: skip
    middle = chance.iloc[len(chance) // 2]
    axis.annotate("an exact sampler,\nby chance alone", (middle.n, middle["expected of an exact one"]), (-6, -6),
                  textcoords="offset points", ha="right", va="top", fontsize=7)  # fmt: skip
    axis.set(xscale="log", yscale="log", xlim=(60, 2 * curves.n.max()))
    axis.set(title="Only the exact rule approaches the target")
    axis.set(xlabel="sampled steps (log scale)", ylabel="total variation from the\ntarget's joint distribution")
    axis.tick_params(which="minor", length=0)
    return figure
