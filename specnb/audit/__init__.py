"""Is a sampler lossless? Its tokens against the distributions of the target, at a stated rate of false alarms.

Rooms, from the ground up; each imports only from those before it:

    bugs            what implementations get wrong in a step, as data
    bug suite             every known bug in the real loop
    cells, alternatives    the audit's view of a distribution; the distributions that known bugs give
    pit, noise         the randomised transform; noise that is used twice
    evidence, witness  many bets, one wealth; how far from the target's distribution a sampler is
    bets, forced       all bets on a text; the distributions a target gives to texts that exist
    numerics, report   a target against itself; what an audit found
    auditor            judges text by text, and can be stopped
    judge, joint       the audit of any generator; of small vocabularies by enumeration
    checks, detection  how engines test themselves; how many tokens the audit needs
    wild, alarms       transformers as installed; how often the audit is wrong about an exact sampler
    throughput         what an audit costs
    token_file         reads generated sequences from JSON lines
"""

from specnb.audit.api import assert_exact, audit, audit_distributions
from specnb.audit.auditor import Auditor
from specnb.audit.bets import Row
from specnb.audit.report import Report

__all__ = ["Auditor", "Report", "Row", "assert_exact", "audit", "audit_distributions"]
