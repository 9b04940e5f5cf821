"""Progress of an audit: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

FIRST, EVERY = 0.5, 10.0  # seconds until the first line, and between lines

Progress = bool | Callable[[str], None]
"""True: a bar on stderr. False: nothing. A function: gets a line now and then, and one at a rejection."""
Show = Callable[[int, float, int | None], None]
"""Called after each row with: tokens in all, decimal logarithm of the e-value, tokens at the rejection or None."""


@contextmanager
def shown(progress: Progress, expected: int | None) -> Iterator[Show]:
    """What to call after each row.

    >>> said = []
    >>> with shown(said.append, None) as show:
    ...     show(40, 7.5, 29)
    >>> said
    ['audited 40 tokens, e = 10^7.5; rejected after 29']
    """
    if callable(progress):
        yield _lines(progress, expected)
        return
    with tqdm(total=expected, desc="audit", unit="token", delay=FIRST, leave=False, disable=not progress) as bar:

        def show(tokens: int, log10_e: float, found_after: int | None) -> None:
            bar.update(tokens - bar.n)
            bar.set_postfix_str(f"e = 10^{log10_e:.1f}", refresh=False)

        yield show


def _lines(say: Callable[[str], None], expected: int | None) -> Show:
    next_at, announced = time.monotonic() + FIRST, False
    total = "" if expected is None else f" of {expected:,}"

    def show(tokens: int, log10_e: float, found_after: int | None) -> None:
        nonlocal next_at, announced
        rejected = found_after is not None and not announced
        if not rejected and time.monotonic() < next_at:
            return
        verdict = "" if found_after is None else f"; rejected after {found_after:,}"
        e_value = f"10^{log10_e:.1f}" if math.isfinite(log10_e) else "infinite"
        say(f"audited {tokens:,}{total} tokens, e = {e_value}{verdict}")
        next_at, announced = time.monotonic() + EVERY, found_after is not None

    return show
