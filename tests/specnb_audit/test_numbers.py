"""The numbers of the audit are those of `numbers.json`: whatever changes a bet, a weight or a filter shows here.

That they are right is shown elsewhere: no bet gains from an exact sampler, and bugs are found. Where they are changed
on purpose, SPECNB_WRITE_REPORTS=1 writes the file; then read its differences.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chains import zipf_tables
from samplers import SAMPLER_BUGS, sample_row, tables

from specnb.distributions import Sampling, normalise
from specnb_audit.auditor import Auditor
from specnb_audit.bets import Row
from specnb_audit.claimed import Claimed, claimed_probs, cutoff_gap
from specnb_audit.control import gap_p_value
from specnb_audit.numerics import Numerics, crossing, given_numerics
from specnb_audit.setting_names import FILTERS

FILE = Path(__file__).parent / "numbers.json"


def audited(rows: list[Row], **settings: Any) -> dict[str, Any]:
    """The report, and the e-values of all alternatives along the way."""
    auditor = Auditor(**settings)
    for row in rows:
        auditor.add(row)
    report = auditor.report()
    running = {name: values[9::40].tolist() for name, values in report.running_by_alternative.items()}
    return report.to_dict() | {"running": report.running[9::40].tolist(), "running_by_alternative": running}


def everything() -> dict[str, Any]:
    """Rows with all that a row may have, in pieces, of repeated prompts and of batches; 150 tokens, 22 in the pools."""
    p, q = zipf_tables(vocab=150)
    generator, rows = np.random.default_rng(0), list[Row]()
    for number in range(9):
        tokens = [int(generator.integers(150))]
        for _ in range(44):
            tokens.append(int(generator.choice(150, p=p[tokens[-1]].numpy())))
        before = torch.tensor(tokens[:-1])
        own = normalise(q[before] ** 1.3)
        own[::5] = 0  # nothing was drafted there
        whole = {"p": p[before], "q": own, "raw": q[before], "suspected": normalise(p[before] ** 0.9)}
        for start, stop in ((0, 17), (17, 44)) if number % 2 else ((0, 44),):
            part: dict[str, Any] = {name: probs[start:stop] for name, probs in whole.items()}
            steps = [1, 3] * 4 + [1] if stop == 17 else [3] * 9 if start else [4] * 11
            rows.append(
                Row(tokens[1:][start:stop], **part, prompt=[number % 3, tokens[0]][: number % 4 + 1], steps=steps,
                    continues=start > 0, more=stop < 44, batch=[None, "a", "b"][number % 3])
            )  # fmt: skip
    return audited(rows, seed=3)


def broken(name: str) -> dict[str, Any]:
    rows = [sample_row(*tables(), 60, seed, **SAMPLER_BUGS[name].settings) for seed in range(12)]
    return audited(rows, eos=5, max_new_tokens=50, numerics=Numerics(4, 0.1, 0.01, 0.01, 1e-4))


def filters() -> dict[str, Any]:
    """The distribution, and how far each token is from being kept, in every order."""
    logits = torch.tensor([2.0, 1.5, 1.5, 1.0, 0.0, -1.0], dtype=torch.float64)
    found = {}
    for order in permutations(FILTERS):
        for values in ((0.6, 4, 0.8, 0.2), (2.0, 3, 0.6, 0.45), (1.0, None, 0.9, 0.0)):
            temperature, top_k, top_p, min_p = values
            claimed = Claimed(temperature, top_k, top_p, min_p, order)
            gaps = [list(cutoff_gap(logits, claimed, token)) for token in range(6)]
            found[f"{values} {order}"] = [claimed_probs(logits, claimed).tolist(), gaps]
    return found


def numerics() -> dict[str, Any]:
    log_e = np.array([3.0, 2.0, 9.0, 14.0, 11.0, 20.0])
    gaps, more = [(0.2, 0.3), (0.0, 0.1), (float("nan"), 0.0)], [(0.1, 0.2), (0.2, 0.1)]
    return {
        "crossing": [[crossing(log_e, d, nats, 7) for d in (1e-2, 1e-4, 1e-6)] for nats in (0.0, 0.02, 0.5)],
        "given": [list(given_numerics(gap, Sampling(t))[:6]) for gap in (0.0, 0.3) for t in (0.0, 0.5, 2.0)],
        "bounds": [[one.logit_gap, one.mass_gap] for one in (Numerics(1, 0.1, 0.2, 0, 0, s) for s in (0.0, 0.1))],
        "gap_p_value": [
            gap_p_value(*given) for given in ((gaps, 60, more, 90), (more * 9, 60, gaps, 90), ([], 9, gaps, 9))
        ],
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "everything": everything,
    **{name: partial(broken, name) for name in ("no residual", "one uniform", "lenience 0.5")},
    "filters": filters,
    "numerics": numerics,
}


def require_near(found: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, dict):
        assert set(found) == set(wanted), where
        for key, value in wanted.items():
            require_near(found[key], value, f"{where}: {key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for at, value in enumerate(wanted):
            require_near(found[at], value, f"{where}: {at}")
    else:
        number = isinstance(wanted, float)
        assert found == (pytest.approx(wanted, rel=1e-5, abs=1e-5, nan_ok=True) if number else wanted), where


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_as_they_were(case: str) -> None:
    found = json.loads(json.dumps(CASES[case]()))
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    if os.environ.get("SPECNB_WRITE_REPORTS"):
        known[case] = found
        FILE.write_text(json.dumps(known, separators=(",", ":"), sort_keys=True).replace("],", "],\n") + "\n")
    require_near(found, known[case], case)
