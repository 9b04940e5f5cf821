"""Figure 1 of Leviathan et al. for any generation: one line per step, tokens coloured by what became of them."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from specnb.decoding.record import StepRecord
from specnb.report.figures import COLOURS, COLUMN

FATES = ("accepted", "rejected", "sampled")  # sampled from the target: a recovered or a bonus token


@dataclass(frozen=True)
class StepView:
    """One step of one row, each token decoded to a string.

    `accepted` are the accepted draft tokens, `rejected` the first rejected one, if any, and `sampled` the recovered or
    bonus token, `None` if the sequence ended before it.
    """

    accepted: list[str]
    rejected: str | None
    sampled: str | None

    @property
    def tokens(self) -> int:
        """How many tokens the step emitted."""
        return len(self.accepted) + (self.sampled is not None)

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """Pairs (string, fate) in reading order, the rejected token before the recovered one.

        >>> StepView(["a", "b"], "c", "d").pieces
        [('a', 'accepted'), ('b', 'accepted'), ('c', 'rejected'), ('d', 'sampled')]
        """
        rejected = [] if self.rejected is None else [(self.rejected, "rejected")]
        sampled = [] if self.sampled is None else [(self.sampled, "sampled")]
        return [*((token, "accepted") for token in self.accepted), *rejected, *sampled]


def step_views(record: StepRecord, row: int, tokenizer: PreTrainedTokenizerBase) -> list[StepView]:
    """The steps of one row of a batch, in order.

    Draft tokens after a rejected one are left out, since they were never verified; so are tokens that the end of the
    sequence cut off.
    """
    views = []
    for step in range(int(record.active[row].sum())):
        draft_tokens = [str(tokenizer.decode([token])) for token in record.draft_tokens[row, step] if token >= 0]
        accepted, emitted = int(record.accepted[row, step]), int(record.emitted[row, step])
        whole = emitted == accepted + 1
        views.append(
            StepView(
                accepted=draft_tokens[: min(accepted, emitted)],
                rejected=draft_tokens[accepted] if whole and accepted < len(draft_tokens) else None,
                sampled=str(tokenizer.decode([int(record.token[row, step])])) if whole else None,
            )
        )
    return views


def visible(text: str) -> str:
    r"""`text` with visible signs for newline and tab, and a dot for an incomplete UTF-8 character.

    >>> visible("a\tb")
    'a⇥b'
    """
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\ufffd", "·")


def html(steps: list[StepView], prompt: str) -> str:
    """Prompt and completion as HTML, tokens coloured by fate; for `IPython.display.HTML`."""
    style = {
        "accepted": f"color:{COLOURS['accepted']}",
        "rejected": f"color:{COLOURS['rejected']};text-decoration:line-through",
        "sampled": f"color:{COLOURS['target']};font-weight:bold",
    }
    spans = [
        f'<span style="{style[fate]}">{escape(visible(text) if fate == "rejected" else text)}</span>'
        for step in steps
        for text, fate in step.pieces
    ]
    return f'<pre style="line-height:1.35;font-family:monospace">{escape(prompt)}{"".join(spans)}</pre>'


def plot_steps(steps: list[StepView], columns: int = 60) -> Figure:
    """One line per step in a fixed-width font, its number of tokens at the left; longer lines end at `columns`."""
    colours = {"accepted": COLOURS["accepted"], "rejected": COLOURS["rejected"], "sampled": COLOURS["target"]}
    figure, axes = plt.subplots(figsize=(COLUMN, 0.13 * len(steps) + 0.3))
    axes.set(xlim=(-4, columns), ylim=(len(steps) - 0.5, -1.6))
    axes.axis("off")
    # DejaVu Sans Mono: every glyph is 0.602 em wide.
    size = 72 * figure.get_figwidth() * 0.97 / ((columns + 4) * 0.602)
    font: dict[str, Any] = {"family": "DejaVu Sans Mono", "fontsize": size, "va": "center"}
    for at, fate in zip((0, 12, 24), FATES, strict=True):
        axes.text(at, -1.1, fate, color=colours[fate], weight="bold" if fate == "sampled" else "normal", **font)
    for line, step in enumerate(steps):
        axes.text(-1.5, line, str(step.tokens), color=COLOURS["muted"], ha="right", **font)
        at = 0
        for text, fate in step.pieces:
            text = visible(text)[: max(columns - at, 0)]
            weight = "bold" if fate == "sampled" else "normal"
            axes.text(at, line, text, color=colours[fate], weight=weight, **font)
            if fate == "rejected":
                axes.plot([at, at + len(text)], [line, line], color=colours[fate], linewidth=0.6)
            at += len(text) + (fate != "accepted")
    return figure
