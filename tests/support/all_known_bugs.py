"""The one list of all known bugs: those of the package, and those that only tests use."""

from __future__ import annotations

from beam_bugs import BEAM_BUGS
from samplers import SAMPLER_BUGS
from tree_bugs import TREE_BUGS

from specnb.audit.bugs.bug import KnownBug
from specnb.audit.known_bugs import registry

ALL_KNOWN_BUGS: list[KnownBug] = [*registry(), *BEAM_BUGS.values(), *TREE_BUGS.values(), *SAMPLER_BUGS.values()]
