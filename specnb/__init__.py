"""Speculative decoding: an exact sampler and the analysis behind it.

A draft model proposes `gamma` tokens, one forward pass of the target verifies them, and a
verification rule keeps a prefix of them so that the output distribution is exactly the target's. To
read the source begin with `reference`, `distributions`, `rules`, `drafters`, `cache`, `step` and `sampler`.

>>> import specnb
>>> sampler = specnb.Sampler(specnb.load_pair(), gamma=4, compile=False)
>>> generation = sampler.generate("def area(", max_new_tokens=8, seed=1)
>>> len(generation.tokens[0])
8
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specnb import theory
    from specnb.acceptance import measure_acceptance
    from specnb.beam import beam_search
    from specnb.cache import crop
    from specnb.copies import PromptLookupDrafter
    from specnb.distributions import Sampling, overlap, residual, standardise, total_variation
    from specnb.drafters import Drafter, ModelDrafter, Proposal
    from specnb.enumeration import joint_distribution, step_distribution
    from specnb.exactness import judge_drafter, judge_rule
    from specnb.loading import Pair, load_model, load_pair
    from specnb.record import Generation, StepRecord
    from specnb.released import load_drafter
    from specnb.rules import exact_match, greedy_verification, lenient_verification, token_verification
    from specnb.sampler import Instruments, Sampler, generate
    from specnb.speedup import measure_speedup, recommend_gamma

__version__ = _version("specnb")

# Imported when first used: torch takes seconds, and closed forms do without it.
_HOMES = {
    "acceptance": "measure_acceptance",
    "beam": "beam_search",
    "cache": "crop",
    "copies": "PromptLookupDrafter",
    "distributions": "Sampling overlap residual standardise total_variation",
    "drafters": "Drafter ModelDrafter Proposal",
    "enumeration": "joint_distribution step_distribution",
    "exactness": "judge_drafter judge_rule",
    "loading": "Pair load_model load_pair",
    "record": "Generation StepRecord",
    "released": "load_drafter",
    "rules": "exact_match greedy_verification lenient_verification token_verification",
    "sampler": "Instruments Sampler generate",
    "speedup": "measure_speedup recommend_gamma",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = ["theory", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "theory":
        return import_module("specnb.theory")
    if name not in _HOME:
        raise AttributeError(f"module 'specnb' has no attribute {name!r}; its public names are {sorted(__all__)}")
    return getattr(import_module(f"specnb.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
