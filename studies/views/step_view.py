"""Figure 1 of Leviathan et al. for any generation: one line per step, each token coloured by its fate.

The paper's figure leaves out the draft tokens after a rejected one. They are shown here too, since they cost time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from specnb.decoding.record import StepRecord
from specnb.notebook.figures import COLOURS, PAGE

STYLES: dict[str, dict[str, Any]] = {
    "accepted": {"color": COLOURS["accepted"]},
    "rejected": {"color": COLOURS["rejected"], "struck": True},
    "unused": {"color": COLOURS["muted"], "struck": True},
    "recovered": {"color": COLOURS["target"], "bold": True},
    "bonus": {"color": COLOURS["target"], "bold": True, "underlined": True},
}


@dataclass(frozen=True)
class StepView:
    """One step of one row, each token decoded to a string.

    `accepted` are the accepted draft tokens, `rejected` the first rejected one, if any, and `unused` the draft tokens
    after it, which were never tested. `sampled` is the recovered or bonus token, `None` if the sequence ended before.
    """

    accepted: list[str]
    rejected: str | None
    sampled: str | None
    unused: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many tokens the step emitted."""
        return len(self.accepted) + (self.sampled is not None)

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """Pairs (string, fate): all draft tokens in order, then the recovered or bonus token.

        >>> StepView(["a", "b"], "c", "d", unused=["e"]).pieces
        [('a', 'accepted'), ('b', 'accepted'), ('c', 'rejected'), ('e', 'unused'), ('d', 'recovered')]
        >>> StepView(["a", "b"], None, "d").pieces
        [('a', 'accepted'), ('b', 'accepted'), ('d', 'bonus')]
        """
        rejected = [] if self.rejected is None else [(self.rejected, "rejected")]
        unused = [(token, "unused") for token in self.unused]
        fate = "bonus" if self.rejected is None else "recovered"
        sampled = [] if self.sampled is None else [(self.sampled, fate)]
        return [*((token, "accepted") for token in self.accepted), *rejected, *unused, *sampled]


def step_views(record: StepRecord, row: int, tokenizer: PreTrainedTokenizerBase) -> list[StepView]:
    """The steps of one row of a batch, in order.

    Tokens that the end of the sequence cut off are left out.
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
                unused=draft_tokens[accepted + 1 :] if whole else [],
            )
        )
    return views


def visible(text: str) -> str:
    r"""`text` with visible signs for newline and tab, and a dot for an incomplete UTF-8 character.

    >>> visible("a\tb")
    'a⇥b'
    """
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\ufffd", "·")


def plot_steps(steps: list[StepView], columns: int = 72) -> Figure:
    """One line per step in a fixed-width font, its number of tokens at the left; longer lines end at `columns`."""
    figure, axes = plt.subplots(figsize=(PAGE * 0.75, 0.17 * len(steps) + 0.45))
    axes.set(xlim=(-7, columns), ylim=(len(steps) - 0.5, -1.8))
    axes.axis("off")
    # DejaVu Sans Mono: every glyph is 0.602 em wide.
    size = 72 * figure.get_figwidth() * 0.97 / ((columns + 7) * 0.602)

    font: dict[str, Any] = {"family": "DejaVu Sans Mono", "size": size, "va": "center"}

    def put(at: float, line: float, text: str, fate: str) -> None:
        style = STYLES[fate]
        axes.text(at, line, text, color=style["color"], weight="bold" if style.get("bold") else "normal", **font)
        for wanted, height in (("struck", line), ("underlined", line + 0.42)):
            if style.get(wanted):
                axes.plot([at, at + len(text)], [height, height], color=style["color"], linewidth=0.6)

    axes.text(-1.5, -1.2, "tokens", color=COLOURS["muted"], ha="right", **font)
    at = 0
    for fate in STYLES:
        put(at, -1.2, fate, fate)
        at += len(fate) + 3
    for line, step in enumerate(steps):
        axes.text(-1.5, line, str(step.tokens), color=COLOURS["muted"], ha="right", **font)
        at, before = 0, "accepted"
        for text, fate in step.pieces:
            at += fate != before  # a space between tokens of different fates
            text, before = visible(text)[: max(columns - at, 0)], fate
            put(at, line, text, fate)
            at += len(text)
    return figure
