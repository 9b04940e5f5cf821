"""Speculative decoding: an exact sampler and the analysis behind it.

A draft model proposes `gamma` tokens, one forward pass of the target verifies them, and a
verification rule keeps a prefix of them so that the output distribution is exactly the target's.
The names listed below are the public interface. The files, each of which imports only from those
before it:

    reference.py       Algorithm 1 for one row, written to be read
    number_checks.py   checks of whole numbers and intervals that several functions share
    nucleus.py         top-p; on a CPU without sorting a large vocabulary
    distributions.py   from logits to probabilities; overlap, residual, sampling; independent random
                       streams
    trees.py           trees of draft tokens, and how the children of a node are sampled
    rules.py           verification rules: which draft tokens are kept, and which token follows them
    theory.py          closed forms: expected tokens per step, speed-up, the best gamma, lenience
    statistics.py      intervals by bootstrap, goodness of fit, timing in turn
    support.py         which models can be decoded; vocabularies of a target and a draft model
    loading.py         `load_model`, `load_pair`, the pair that ships
    shapes.py          models of given sizes, for examples
    cache.py           the cache of the loop and its mask, a model with its cache, `crop`
    fast.py            a private copy of a model: packed products, compiled layers, captured steps
    check.py           what was done, compared with the model's own forward pass
    record.py          what each step drafted, accepted and emitted
    drafters.py        the interface; a draft model, chains and trees, mixtures
    ngram.py           n-gram tables, copies of the text so far
    heads.py           heads on the target's hidden states, alone or where nothing is copied
    enumeration.py     the exact distribution of everything that a step emits
    exactness.py       `judge_rule`, `judge_drafter`: exact or not, and by how much
    step.py            one step: draft, verify, emit
    sampler.py         `Sampler` and `generate`: prompts in, rows refilled, completions out
    beam.py            beam search and its speculative version
    acceptance.py      beta at every position, and alpha, its mean
    cost.py            time of draft and target passes: c and v(n)
    speedup.py         speed-ups measured, and the gamma that measured costs recommend

>>> import specnb
>>> sampler = specnb.Sampler(specnb.load_pair(), gamma=4, compile=False)
>>> made = sampler.generate("def area(", max_new_tokens=8, seed=1)
>>> len(made.tokens[0])
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
    from specnb.check import check_model
    from specnb.distributions import Sampling, overlap, residual, standardise, total_variation
    from specnb.drafters import Drafter, MixtureDrafter, ModelDrafter, Proposal
    from specnb.enumeration import joint_distribution, step_distribution
    from specnb.exactness import judge_drafter, judge_rule
    from specnb.loading import Pair, load_model, load_pair
    from specnb.ngram import NgramDrafter, NgramModel, PromptLookupDrafter
    from specnb.record import StepRecord
    from specnb.rules import exact_match, greedy_verification, lenient_verification, token_verification
    from specnb.sampler import Generation, Hooks, Sampler, generate
    from specnb.speedup import measure_speedup, recommend_gamma

__version__ = _version("specnb")

# Imported when first used: torch takes seconds, and closed forms do without it.
_HOMES = {
    "acceptance": "measure_acceptance",
    "beam": "beam_search",
    "cache": "crop",
    "check": "check_model",
    "distributions": "Sampling overlap residual standardise total_variation",
    "drafters": "Drafter MixtureDrafter ModelDrafter Proposal",
    "enumeration": "joint_distribution step_distribution",
    "exactness": "judge_drafter judge_rule",
    "loading": "Pair load_model load_pair",
    "ngram": "NgramDrafter NgramModel PromptLookupDrafter",
    "record": "StepRecord",
    "rules": "exact_match greedy_verification lenient_verification token_verification",
    "sampler": "Generation Hooks Sampler generate",
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
