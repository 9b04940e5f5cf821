"""Is a sampler lossless? Compares its tokens with the target's distributions, at a stated false-alarm rate.

From the bottom up; each module imports only from those before it:

    condensed                  distributions on a few cells
    pit, shared_uniforms       the probability integral transform; uniforms that are used twice
    frequencies                how often each token came, and should have come
    alternatives               the distributions that known bugs of a sampler give (alternative hypotheses)
    bets, evidence, distance   the bets on one sequence; test martingales; a lower bound on the total variation
    teacher_forcing, numerics  a target's distributions along existing sequences; its numerical error
    engine, impossible         what is known of an engine's rounding errors; tokens of probability zero, and their cause
    setting_names, claimed     the settings claimed: filters in any order, min-p, what is refused
    report, auditor            the report; the audit sequence by sequence
    control, explanations      the comparison with the engine without speculation; what may explain a finding
    progress, run, api         the progress shown; the audit of sequences as they arrive; `audit` and `assert_exact`
    joint                      the audit by enumeration, for small vocabularies
    cost                       the time of an audit
    token_file, token_stream   sequences in files of JSON lines, and from a pipe
    two_samples                two files of samples against each other, without a model; `compare_command` runs it
    bugs, known_bugs           implementations of known bugs; the bug suite, and `generate` with one of them

`studies` measures the audit itself: tokens until each bug is found, false alarms, engines' own checks.

>>> import specnb_audit, torch
>>> uniform = lambda context: torch.full((4,), 0.25, dtype=torch.float64)
>>> completions = torch.randint(4, (100, 8), generator=torch.Generator().manual_seed(1)).tolist()
>>> specnb_audit.assert_exact(uniform, completions, prompts=[[0]] * 100).rejected
False
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specnb_audit.api import assert_exact, audit, audit_distributions
    from specnb_audit.auditor import Auditor
    from specnb_audit.bets import Row
    from specnb_audit.claimed import Claimed
    from specnb_audit.engine import Aim, Engine
    from specnb_audit.report import Report

# Imported when first used: tokens are collected in an engine's own environment, which may be without torch.
_HOMES = {
    "api": ("assert_exact", "audit", "audit_distributions"),
    "auditor": ("Auditor",),
    "bets": ("Row",),
    "claimed": ("Claimed",),
    "engine": ("Aim", "Engine"),
    "report": ("Report",),
}
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its public names are {sorted(__all__)}")
