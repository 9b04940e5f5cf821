"""Figure 1 of the paper for any generation: one lane per target run, its tokens coloured by their fate."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from specnb.decoding.record import StepRecord
from specnb.report.figures import COLOURS, COLUMN

FATES = ("accepted", "rejected", "corrected")


@dataclass(frozen=True)
class StepView:
    """One step of one row, as texts: drafts accepted, the draft rejected (or none), the target's token."""

    accepted: list[str]
    rejected: str | None
    corrected: str | None

    @property
    def tokens(self) -> int:
        """How many tokens the step emitted."""
        return len(self.accepted) + (self.corrected is not None)

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """(text, fate) in reading order; the rejected draft stands before its correction."""
        rejected = [] if self.rejected is None else [(self.rejected, "rejected")]
        corrected = [] if self.corrected is None else [(self.corrected, "corrected")]
        return [*((text, "accepted") for text in self.accepted), *rejected, *corrected]


def step_views(record: StepRecord, row: int, tokenizer: PreTrainedTokenizerBase) -> list[StepView]:
    """The steps of one row. Drafts behind a rejected one were never judged and are left out; so is
    what was cut off at the end of the text."""
    made = []
    for step in range(int(record.active[row].sum())):
        draft_tokens = [str(tokenizer.decode([token])) for token in record.draft_tokens[row, step] if token >= 0]
        accepted, emitted = int(record.accepted[row, step]), int(record.emitted[row, step])
        whole = emitted == accepted + 1
        made.append(
            StepView(
                accepted=draft_tokens[: min(accepted, emitted)],
                rejected=draft_tokens[accepted] if whole and accepted < len(draft_tokens) else None,
                corrected=str(tokenizer.decode([int(record.token[row, step])])) if whole else None,
            )
        )
    return made


def visible(text: str) -> str:
    """`text` with a sign for each character that would move the pen; a broken UTF-8 piece is a dot."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\ufffd", "·")


def html(shown: list[StepView], prompt: str) -> str:
    """The text as it grew, with colours by fate; to be wrapped in `IPython.display.HTML`."""
    style = {
        "accepted": f"color:{COLOURS['accepted']}",
        "rejected": f"color:{COLOURS['rejected']};text-decoration:line-through",
        "corrected": f"color:{COLOURS['target']};font-weight:bold",
    }
    spans = [
        f'<span style="{style[fate]}">{escape(visible(text) if fate == "rejected" else text)}</span>'
        for step in shown
        for text, fate in step.pieces
    ]
    return f'<pre style="line-height:1.35;font-family:monospace">{escape(prompt)}{"".join(spans)}</pre>'


def plot_steps(shown: list[StepView], columns: int = 60) -> Figure:
    """One line per target run, in a fixed-width font, as wide as a column; lines longer than `columns` are cut."""
    colours = {"accepted": COLOURS["accepted"], "rejected": COLOURS["rejected"], "corrected": COLOURS["target"]}
    figure, axes = plt.subplots(figsize=(COLUMN, 0.13 * len(shown) + 0.3))
    axes.set(xlim=(-4, columns), ylim=(len(shown) - 0.5, -1.6))
    axes.axis("off")
    # DejaVu Sans Mono: every glyph is 0.602 em wide.
    size = 72 * figure.get_figwidth() * 0.97 / ((columns + 4) * 0.602)
    font: dict[str, Any] = {"family": "DejaVu Sans Mono", "fontsize": size, "va": "center"}
    for at, fate in zip((0, 12, 24), FATES, strict=True):
        axes.text(at, -1.1, fate, color=colours[fate], weight="bold" if fate == "corrected" else "normal", **font)
    for line, step in enumerate(shown):
        axes.text(-1.5, line, str(step.tokens), color=COLOURS["muted"], ha="right", **font)
        at = 0
        for text, fate in step.pieces:
            text = visible(text)[: max(columns - at, 0)]
            weight = "bold" if fate == "corrected" else "normal"
            axes.text(at, line, text, color=colours[fate], weight=weight, **font)
            if fate == "rejected":
                axes.plot([at, at + len(text)], [line, line], color=colours[fate], linewidth=0.6)
            at += len(text) + (fate != "accepted")
    return figure
