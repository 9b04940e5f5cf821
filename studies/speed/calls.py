"""Whole calls of several ways to decode, timed in turn on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from specnb.sampler import Sampler
from specnb.statistics import Estimate, bootstrap
from studies.study import columns, timed_in_turn

Way: TypeAlias = Callable[[int, list[int]], tuple[int, Sequence[int]]]
"""The number of a prompt and its tokens -> how many new tokens, and how many each target pass verified."""


def way_of(sampler: Sampler, new_tokens: int, eos: int | None = None, rows: int = 1) -> Way:
    """A call of `sampler` for `rows` copies of a prompt, whose number gives those of its random numbers."""

    def call(number: int, prompt: list[int]) -> tuple[int, Sequence[int]]:
        numbers = range(number * rows, (number + 1) * rows)
        made = sampler.generate([prompt] * rows, max_new_tokens=new_tokens, eos=eos, numbers=numbers)
        verified = 1 + (made.record.draft_tokens >= 0).sum(axis=-1)
        return sum(map(len, made.tokens)), verified[made.record.active].tolist()

    return call


def compared(
    ways: Mapping[str, Way],
    prompts: Sequence[list[int]],
    over: Mapping[str, str] | None = None,
    plain: Sequence[str] = (),
    device: str = "cpu",
) -> tuple[pd.DataFrame, dict[str, list[int]]]:
    """A line for each way, which all take turns on each prompt, and the tokens that each of its passes verified.

    `ms` is all milliseconds over all tokens; `speed_up` the time per token of the way that `over` names, by default
    the fastest of `plain` or else the first one, over this one's, and `tokens_per_step` that of ways whose passes are
    known, both with a 95% interval over prompts.
    """
    names, made = list(ways), {}

    def call(name: str, prompt: list[int], number: int) -> None:
        made[name, number] = ways[name](number, prompt)

    seconds = timed_in_turn(call, names, prompts, device)
    tokens = np.array([[made[name, number][0] for name in names] for number in range(len(prompts))])
    steps = np.array([[len(made[name, number][1]) for name in names] for number in range(len(prompts))])

    def over_sums(top: Any, below: Any) -> Any:
        """A function of the prompts that are chosen."""
        return lambda rows: top[rows].sum(axis=-1) / below[rows].sum(axis=-1)

    def estimated(statistic: Any) -> Estimate:
        return bootstrap(statistic, len(prompts), 2000, 0)

    def faster(before: Any, this: Any) -> Estimate:
        return estimated(lambda rows: before(rows) / this(rows))

    def per_token(name: str) -> Any:
        return over_sums(seconds[:, names.index(name)], tokens[:, names.index(name)])

    lines, usual = [], min(plain or names[:1], key=lambda name: per_token(name)(slice(None)))
    for at, name in enumerate(names):
        other = (over or {}).get(name, usual)
        before, this = per_token(other), per_token(name)
        line = {"way": name, "over": other, "ms": 1e3 * this(slice(None)), "tokens": tokens[:, at].sum()}
        line |= columns("speed_up", faster(before, this))
        if steps[:, at].all():
            line |= columns("tokens_per_step", estimated(over_sums(tokens[:, at], steps[:, at])))
        lines.append(line)
    numbers = range(len(prompts))
    return pd.DataFrame(lines), {name: [n for number in numbers for n in made[name, number][1]] for name in names}


def fastest(ways: Mapping[str, Way], prompts: Sequence[list[int]]) -> str:
    """The way that takes the least time per token."""
    table, _ = compared(ways, prompts)
    return str(table.way[table.ms.idxmin()])
