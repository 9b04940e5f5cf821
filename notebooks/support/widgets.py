"""Figures that a reader moves, in JupyterLab and in the book; `widgets.js` has all of them, and
what they compute."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import anywidget
import traitlets

# What a figure shows, for those who do not see it, and for pages that run no script.
TEXT = {
    "residual": "choose p and q of four tokens, and run steps with one draft token. It shows accepted, residual and "
    "rejected mass of each token, and how the sampled tokens approach p; with a wrong rule they do not.",
    "step": "the recorded steps of an answer of the real model, test by test, with their uniforms.",
    "audit": "tokens of a right or wrong rule, their distribution beside the target's, and the audit's evidence.",
    "heatmap": "the speed-up of Theorem 3.8 over alpha and gamma for the c that you set, with a marker at your choice.",
    "landscape": "the speed-up against gamma for any alpha, cost c of a draft token, batch and device; and the best "
    "gamma for each alpha and batch, or 'off' where plain decoding is faster.",
}


class Widget(anywidget.AnyWidget):
    """The figure of `widgets.js` that `figure` names; `recorded` are its data as JSON, if it shows
    any.

    Beside the widget the output has its text and the place for the script of the book, which need
    no kernel.

    >>> bundle, _ = Widget(figure="residual")._repr_mimebundle_()
    >>> bundle["text/html"][:28], bundle["text/plain"]
    ('<div data-widget="residual">', '<a figure to move: residual>')
    """

    _esm = Path(__file__).with_name("widgets.js")
    figure = traitlets.Enum(list(TEXT)).tag(sync=True)
    recorded = traitlets.Unicode().tag(sync=True)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        recorded = f' data-recorded="{escape(self.recorded)}"' if self.recorded else ""
        html = f'<div data-widget="{self.figure}"{recorded}>A figure to move: {TEXT[self.figure]}</div>'
        return bundle | {"text/plain": f"<a figure to move: {self.figure}>", "text/html": html}, metadata
