"""Interactive figures, in JupyterLab and in the book; `widgets.js` has all of them, and what they
compute."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import matplotlib.pyplot as plt
import traitlets
from matplotlib.figure import Figure

# What a figure shows, for those who do not see it, and for pages that run no script.
TEXT = {
    "residual": "choose p and q of a few tokens, and run steps with one draft token. It shows accepted, residual and "
    "rejected mass of each token, and how the sampled tokens approach p; with a wrong rule they do not.",
    "step": "the recorded steps of an answer of the real model, test by test, with their uniforms.",
    "audit": "tokens of a right or wrong rule, their distribution beside the target's, and the audit's evidence.",
    "heatmap": "the speed-up of Theorem 3.8 over alpha and gamma for the c that you set, with a marker at your choice.",
    "landscape": "the speed-up against gamma for any alpha, cost c of a draft token, batch and device; and the best "
    "gamma for each alpha and batch, or 'off' where plain decoding is faster.",
}


# What the book makes a moving figure of (docs/book.py).
PLACE = "application/vnd.specnb.figure+json"


class Widget(anywidget.AnyWidget):
    """The figure of `widgets.js` that `figure` names; `recorded` are its data as JSON, if it shows
    any.

    With `still`, a drawn figure, the output has its picture for pages that run no script, such as
    GitHub's; without it, a line of text.

    >>> bundle, _ = Widget(figure="residual")._repr_mimebundle_()
    >>> bundle["text/html"][:28], bundle["text/plain"]
    ('<div data-widget="residual">', '<interactive figure: residual>')
    """

    _esm = Path(__file__).with_name("widgets.js")
    figure = traitlets.Enum(list(TEXT)).tag(sync=True)
    recorded = traitlets.Unicode().tag(sync=True)

    def __init__(self, still: Figure | None = None, **traits: Any):
        super().__init__(**traits)
        self.still = still

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        bundle |= {"text/plain": f"<interactive figure: {self.figure}>"}
        if self.still is None:
            return bundle | {"text/html": place(self.figure, self.recorded)}, metadata
        picture = io.BytesIO()
        self.still.savefig(picture, format="png")
        plt.close(self.still)  # otherwise it is shown a second time, below
        bundle |= {"image/png": base64.b64encode(picture.getvalue()).decode()}
        return bundle | {PLACE: {"figure": self.figure, "recorded": self.recorded}}, metadata


def place(figure: str, recorded: str = "") -> str:
    """Where the script of the book draws `figure`, with its description for those who do not see
    it."""
    data = f' data-recorded="{escape(recorded)}"' if recorded else ""
    return f'<div data-widget="{figure}"{data}>Interactive figure: {TEXT[figure]}</div>'
