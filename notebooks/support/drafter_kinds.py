"""A diagram of the kinds of drafters: what is evaluated for three draft tokens, and what reads
what."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from notebooks.support.figures import COLOURS, panels

# A place is (position in the sequence, height): tokens at height 0, states of the target's pass
# and guesses in it at 1, networks of the drafter at 2. The newest token is at position 3.
PLACES = {"text": [(0, 0), (1, 0), (2, 0)], "newest token": [(3, 0)], "draft token": [(4, 0), (5, 0), (6, 0)]}
PLACES["target's pass"] = [(0, 1), (1, 1), (2, 1)]
EACH_CALL, AT_ONCE, GUESSES = ([(x + at, y) for x in (0, 1, 2)] for at, y in ((3, 2), (4, 2), (3, 1)))
# A draft token is sampled from what a network says, and read by the next call.
TURNS = [((x, 2), (x + 1, 0)) for x in (3, 4, 5)] + [((x, 0), (x, 2)) for x in (4, 5)]
ALONG = [((3, 0), (3, 2)), ((3, 2), (4, 2)), ((4, 2), (5, 2))]  # each call reads the one before, too
CHAIN = [((x, 1), (x + 1, 1)) for x in (2, 3, 4)]
# What is evaluated for the draft tokens, what reads what, and in how many calls.
KINDS = {
    "draft model": (EACH_CALL, [((x, 0), (3, 2)) for x in range(4)] + TURNS, "3 passes of a small model"),
    "recurrent head": (EACH_CALL, [((2, 1), (3, 2)), *ALONG, *TURNS], "3 calls"),
    "attention head": (EACH_CALL, [((x, 1), (3, 2)) for x in range(3)] + ALONG + TURNS, "3 calls"),
    "parallel heads": (AT_ONCE, [arrow for net in AT_ONCE for arrow in (((2, 1), net), (net, (net[0], 0)))], "1 call"),
    "look-ahead embeddings": (GUESSES, CHAIN + [((x, 1), (x + 1, 0)) for x in (3, 4, 5)], "the target's own pass"),
    "lookahead": (GUESSES + AT_ONCE, CHAIN + [((x, 1), (x + 1, 2)) for x in (3, 4, 5)], "the target's own pass"),
    "prompt lookup": ([], [((x, 0), (x + 4, 0)) for x in range(3)], "no network"),
}
ARROW = {"arrowstyle": "-|>", "color": COLOURS["muted"], "shrinkA": 4, "shrinkB": 4, "lw": 0.7, "mutation_scale": 6}


def _mark(marker: str, colour: str, edge: str = "") -> dict[str, Any]:
    return {"marker": marker, "color": COLOURS[colour], "ms": 7, "ls": "", "mec": COLOURS[edge or colour]}


MARKS = {
    "text": _mark("s", "muted"), "newest token": _mark("s", "recovered"), "draft token": _mark("s", "draft"),
    "target's pass": _mark("o", "target"), "drafter's network": _mark("o", "draft"),
    "guess in the target's pass": _mark("D", "draft", "target"),
}  # fmt: skip


def draw_kinds() -> Figure:
    """A panel for each of `KINDS`; the last one has the legend."""
    figure, axes = panels(4, 2)
    for axis, (name, (made, arrows, calls)) in zip(axes, KINDS.items(), strict=False):
        for start, end in arrows:
            bend = -0.35 if start[1] == end[1] == 0 else 0
            axis.annotate("", end, start, arrowprops=ARROW | {"connectionstyle": f"arc3,rad={bend}"})
        places = PLACES | {"guess in the target's pass" if name.startswith("look") else "drafter's network": made}
        for what, mark in MARKS.items():
            axis.plot([x for x, _ in places.get(what, [])], [y for _, y in places.get(what, [])], **mark)
        axis.set(title=f"{name}\n{calls}", xlim=(-0.6, 6.6), ylim=(-0.5, 2.5))
    for axis in axes:
        axis.set_axis_off()
    axes[-1].legend([Line2D([], [], **mark) for mark in MARKS.values()], [*MARKS], loc="center")
    return figure
