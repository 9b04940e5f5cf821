"""The one list of all known bugs: those of the package, and those that only tests use."""

from __future__ import annotations

from beam_bugs import BEAM_BUGS
from samplers import SAMPLER_BUGS
from tree_bugs import TREE_BUGS

from specnb_audit.bugs.bug import KnownBug
from specnb_audit.known_bugs import KNOWN_BUGS, MORE_BUGS
from studies.batching.layout_bugs import LAYOUT_BUGS

GROUPS = (KNOWN_BUGS, MORE_BUGS, LAYOUT_BUGS, BEAM_BUGS, TREE_BUGS, SAMPLER_BUGS)
ALL_KNOWN_BUGS: list[KnownBug] = [bug for group in GROUPS for bug in group.values()]
