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
    models/            models of transformers: loading, caches, forward passes, a probe
                       of each model
    drafting/          drafters: models, heads, n-grams, copies of the text so far, mixtures
    enumeration.py     the exact distribution of everything that a step emits
    judging.py         is a rule of one's own exact, and how many tokens do its steps emit
    decoding/          `generate`: the request, the batched step, the scheduler of batch rows, the
                       record
    beam.py            beam search and its speculative version
    measure/           statistics, timing, acceptance, cost; speed-ups measured and recommended
    demo.py            `specnb demo`: a real model with and without speculation

>>> import specnb
>>> pair = specnb.load_pair()
>>> generation = specnb.generate(pair.target, [pair.encode("def area(")], pair.draft, gamma=4, max_new_tokens=8, seed=1)
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
    from specnb.check import check_model
    from specnb.distributions import Sampling, overlap, residual, standardise, total_variation
    from specnb.drafters import Drafter, MixtureDrafter, ModelDrafter, Proposal
    from specnb.enumeration import joint_distribution, step_distribution
    from specnb.exactness import judge_drafter, judge_rule
    from specnb.loading import Pair, load_model, load_pair
    from specnb.ngram import NgramDrafter, NgramModel, PromptLookupDrafter
    from specnb.record import StepRecord
    from specnb.rules import exact_match, greedy_verification, lenient_verification, token_verification
    from specnb.sampler import Generation, Hooks, generate
    from specnb.speedup import measure_speedup, recommend_gamma

__version__ = _version("specnb")

# Imported when first used: torch takes seconds, and closed forms do without it.
_HOMES = {
    "beam": "beam_search",
    "decoding.generate": "Generation Hooks generate",
    "decoding.record": "StepRecord",
    "distributions": "Sampling overlap residual standardise total_variation",
    "drafting.base": "Drafter Proposal",
    "drafting.model": "MixtureDrafter ModelDrafter",
    "drafting.ngram": "NgramDrafter NgramModel PromptLookupDrafter",
    "enumeration": "joint_distribution step_distribution",
    "judging": "judge_drafter judge_rule",
    "measure.acceptance": "measure_acceptance",
    "measure.recommend": "recommend_gamma",
    "measure.speedup": "measure_speedup",
    "models.loading": "Pair load_model load_pair",
    "models.probe": "check_model",
    "rules": "exact_match greedy_verification lenient_verification token_verification",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = ["theory", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "theory":
        return import_module("specnb.theory")
    if name not in _HOME:
        raise AttributeError(f"module 'specnb' has no attribute {name!r}; its public names are {sorted(__all__)}")
    return getattr(import_module(f"specnb.{_HOME[name]}"), name)
