"""The rules that decide the verdicts: one pure function for each claim, from what was measured to a verdict.

`RULES` has them by the claim's id. A rule named `table_1` decides the claim `table-1`; its parameters are what the
notebook measured, its thresholds stand in `data/claims.csv`, and the claim is judged as its source states it:

- `holds`: true as stated, under the conditions that the source itself states;
- `conditional`: true only under a condition that the source does not state, tested from both sides;
- `refuted`: false as stated, misprints included;
- `open`: not checked, or checked on something else than the claim is about.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

from studies.verdicts import (
    acceptance_and_beams,
    drafters,
    exactness,
    implementations,
    lenience,
    token_counts,
    verification,
    walltime_measured,
    walltime_theory,
)
from studies.verdicts.criteria import thresholds as thresholds


def _rules_in(module: ModuleType) -> dict[str, Callable[..., str]]:
    functions = inspect.getmembers(module, inspect.isfunction)
    own = {name: rule for name, rule in functions if rule.__module__ == module.__name__}
    return {name.replace("_", "-"): rule for name, rule in own.items() if not name.startswith("_")}


RULES: dict[str, Callable[..., str]] = {
    claim: rule
    for module in (
        exactness,
        token_counts,
        walltime_theory,
        walltime_measured,
        acceptance_and_beams,
        lenience,
        drafters,
        verification,
        implementations,
    )
    for claim, rule in _rules_in(module).items()
}
