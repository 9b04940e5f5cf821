"""Every part of every step of one generation of the trained pair, for the trace in notebook 05.

The line of the target part has the tokens that the step emitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specnb.decoding.generate import Study, generate
from specnb.decoding.record import PARTS
from specnb.models.loading import load_pair
from studies import study
from studies.speed.pairs import prompts_of
from studies.study import conditions

GAMMAS = (7, 3, 0)


def measure(item: str, new_tokens: int) -> Iterator[dict[str, Any]]:
    """A line for each gamma, step and part."""
    pair = load_pair()
    (prompt,) = prompts_of(pair, "held-out", 1)
    for gamma in GAMMAS:
        for _ in range(2):  # the first warms up
            made = generate(
                pair.target, [prompt], pair.draft, gamma=gamma, max_new_tokens=new_tokens, progress=False,
                study=Study(timed=True),
            ).record  # fmt: skip
        for step in range(made.emitted.shape[1]):
            for part in PARTS:
                emitted = int(made.emitted[0, step]) if part == "target" else 0
                line = {"gamma": gamma, "step": step, "part": part, "seconds": made.seconds[part][step]}
                yield line | {"emitted": emitted} | conditions(pair)


STUDY = study.Study(measure, settings={"new_tokens": 40}, small={"new_tokens": 4})
