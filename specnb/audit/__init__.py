"""Is a sampler lossless? Its tokens against the target's distributions, at a stated rate of false alarms.

The audit takes tokens from any generator and the target's distributions, and nothing else. `audit` judges completions
that exist, `assert_exact` does so in a test, and an `Auditor` is given them one at a time. The names below are imported
when first used.

>>> import specnb, torch
>>> uniform = lambda context: torch.full((4,), 0.25, dtype=torch.float64)
>>> completions = torch.randint(4, (100, 8), generator=torch.Generator().manual_seed(1)).tolist()
>>> specnb.audit.assert_exact(uniform, completions, prompts=[[0]] * 100).rejected
False
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specnb.lazy import lazy

if TYPE_CHECKING:
    from specnb.audit.api import assert_exact, audit, audit_distributions
    from specnb.audit.auditor import Auditor
    from specnb.audit.bets import Row
    from specnb.audit.report import Report

_PUBLIC = {
    "Auditor": "specnb.audit.auditor",
    "Report": "specnb.audit.report",
    "Row": "specnb.audit.bets",
    "assert_exact": "specnb.audit.api",
    "audit": "specnb.audit.api",
    "audit_distributions": "specnb.audit.api",
}

__all__ = ["Auditor", "Report", "Row", "assert_exact", "audit", "audit_distributions"]


__getattr__, __dir__ = lazy(__name__, _PUBLIC)
