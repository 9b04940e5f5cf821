"""Figures with sliders, for a notebook that somebody has open; without sliders they are ordinary figures."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from specnb.distributions import residual
from specnb.notebook.figures import COLOURS, COLUMN


def plot_one_token(p: Tensor, q: Tensor, names: Sequence[str], drafted: str, uniform: float) -> Figure:
    """What becomes of the draft token `drafted` if its acceptance uniform in [0, 1) is `uniform`.

    A bar for each token of `p` and `q` `(vocab,)`, as high as the token's q; green as far as uniforms accept it. So
    the green area is beta, and the orange area the probability of a rejection.
    """
    figure, axis = plt.subplots(figsize=(COLUMN, 2.0))
    accepted = (p / q).nan_to_num(0.0).clamp_max(1).tolist()
    heights, centres = q.tolist(), (q.cumsum(0) - q / 2).tolist()
    axis.barh(centres, accepted, heights, color=COLOURS["accepted"], ec="white")
    axis.barh(
        centres, [1 - length for length in accepted], heights, left=accepted, color=COLOURS["rejected"], ec="white"
    )
    row = list(names).index(drafted)
    axis.plot(uniform, centres[row], "o", color="black", mec="white", ms=7)
    instead = residual(p, q).tolist()
    recovered = ", ".join(f"{name} ({chance:.0%})" for name, chance in zip(names, instead, strict=True) if chance > 0)
    fate = "accepted" if uniform < accepted[row] else f"rejected; recovered: {recovered}"
    axis.set(
        title=f"draft token {drafted}, u = {uniform:.2f}: {fate}", xlabel="acceptance uniform u", ylabel="draft token"
    )
    axis.set(xlim=(0, 1), ylim=(1, 0), yticks=centres, yticklabels=names)
    axis.grid(visible=False)
    return figure


def one_token(p: Tensor, q: Tensor, names: Sequence[str], drafted: str, uniform: float, sliders: bool = False) -> None:
    """Shows `plot_one_token`; with `sliders`, in Jupyter, the reader chooses the draft token and moves the uniform."""
    if not sliders:
        plot_one_token(p, q, names, drafted, uniform)
        return
    from ipywidgets import FloatSlider, ToggleButtons, interact

    def show(drafted: str, u: float) -> None:
        plot_one_token(p, q, names, drafted, u)
        plt.show()

    interact(
        show, drafted=ToggleButtons(options=names, value=drafted), u=FloatSlider(uniform, min=0, max=0.99, step=0.01)
    )
