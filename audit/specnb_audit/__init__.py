"""Is a sampler lossless? Compares its tokens with the target's distributions, at a stated
false-alarm rate.

From the bottom up; each module imports only from those before it:

    setting_names, penalties, claimed   the settings claimed, and what is refused
    constraints                         forced tokens, `min_tokens`, allowed tokens
    alternatives, uniforms, absences    what is bet on: distributions of known bugs, the uniform
                                        behind a token, what never occurs
    shared_tests, distant_noise         one uniform for all tests of a step; noise that returns
    logit_faults                        rounded logits, penalties that miss the newest token
    bets, evidence                      all bets on a sequence; test martingales
    teacher_forcing, numerics           the target's distributions; what rounding explains
    engine, report, auditor             what is known of an engine; the report; the audit
    control, fitted_settings, explanations, step_sizes, logprobs
                                        what may explain a finding
    run, api                            audits of sequences as they arrive; `audit`
    token_file                          files of tokens
    predict_numbers, predict_devices, predict_speed, explain_speed
                                        speed-ups from reported figures, without torch
    draft_replay, draft_mistakes, low_acceptance
                                        which mistake in serving a draft explains low acceptance
    kernels                             acceptance functions of released engines, enumerated
    cli                                 the command `specnb-audit`

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
    from specnb_audit.constraints import Constraints
    from specnb_audit.engine import Aim, Engine
    from specnb_audit.explain_speed import explain, fit_steps
    from specnb_audit.low_acceptance import explain_acceptance
    from specnb_audit.predict_speed import predict
    from specnb_audit.report import Report
    from specnb_audit.token_file import save_tokens

__version__ = "2.0.0"  # of the distribution, too: pyproject.toml reads it here

# Imported when first used: tokens are collected in an engine's own environment, which may be
# without torch.
_HOMES = {
    **dict.fromkeys(("assert_exact", "audit", "audit_distributions"), "api"),
    **{
        "Auditor": "auditor",
        "Row": "bets",
        "Claimed": "claimed",
        "Constraints": "constraints",
        "Aim": "engine",
        "Engine": "engine",
    },
    **{"Report": "report", "save_tokens": "token_file"},
    **{"predict": "predict_speed", "explain": "explain_speed", "fit_steps": "explain_speed"},
    "explain_acceptance": "low_acceptance",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its public names are {sorted(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
