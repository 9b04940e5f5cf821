"""The two bars of every token: accepted and recovered mass make p, accepted and rejected mass make
q."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from notebooks.support.figures import COLOURS, COLUMN


def plot_masses(p: ArrayLike, q: ArrayLike, tokens: Sequence[str]) -> Figure:
    """The bars of p and q `(vocab,)`, a pair for each of `tokens`."""
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
