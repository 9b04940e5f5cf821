"""Speculative decoding: an exact sampler, the distributions behind it, and an audit that shows losslessness.

A draft model proposes `gamma` tokens, one forward pass of the target verifies them, and a verification rule keeps a
prefix of them so that the output distribution is exactly the target's. The names below are the public interface. They
are imported when first used, so that `import specnb` itself loads neither torch nor transformers.

Folders, each of which imports only from those listed before it:

    sampling/      pure functions of tensors: distributions, verification rules, exact enumeration, random streams
    theory.py      closed forms: expected tokens per step, speed-up, the best gamma
    lazy.py        public names that are imported when first used
    arguments.py   checks of whole numbers and other arguments
    machine.py     the processor's name, which every measured speed is stated with
    models/        everything that knows transformers: loading, caches, forward passes, weight layouts
    drafting/      drafters: models, n-grams, copies of the text so far, mixtures, stopping rules
    decoding/      `generate`, the batched step, the scheduler of batch rows, records, beam search
    measure/       statistics, acceptance, cost, speed-up, the recommended gamma
    audit/         is a sampler lossless? Its tokens against the target's distributions, and the known bugs
    report/        results, figures and views of a step
    cli/           the command `specnb`
    experiments/   long runs whose tables are committed; not part of the installed package

>>> import specnb
>>> pair = specnb.load_pair()
>>> generation = specnb.generate(pair.target, [pair.encode("def area(")], pair.draft, gamma=4, max_new_tokens=8, seed=1)
>>> len(generation.tokens[0])
8
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specnb.lazy import lazy

if TYPE_CHECKING:
    from specnb import audit, theory
    from specnb.decoding.beam import beam_search
    from specnb.decoding.loop import Generation, generate
    from specnb.decoding.record import StepRecord
    from specnb.decoding.study import Study
    from specnb.drafting.base import Drafter, Proposal
    from specnb.drafting.mixture import MixtureDrafter
    from specnb.drafting.model import ModelDrafter
    from specnb.drafting.ngram import NgramDrafter, NgramModel
    from specnb.drafting.prompt_lookup import PromptLookupDrafter
    from specnb.measure.acceptance import measure_acceptance
    from specnb.measure.predict import predict
    from specnb.measure.recommend import recommend_gamma
    from specnb.models.loading import Pair, load_model, load_pair
    from specnb.models.synthetic import synthetic_pair
    from specnb.sampling.distributions import Sampling, overlap, residual, standardise, total_variation
    from specnb.sampling.enumeration import joint_distribution, step_distribution
    from specnb.sampling.verification import (
        exact_match,
        greedy_verification,
        lenient_verification,
        token_verification,
    )

# Where each public name is defined. tests/test_api.py compares this with the imports above.
_PUBLIC = {
    "Drafter": "specnb.drafting.base",
    "Generation": "specnb.decoding.loop",
    "MixtureDrafter": "specnb.drafting.mixture",
    "ModelDrafter": "specnb.drafting.model",
    "NgramDrafter": "specnb.drafting.ngram",
    "NgramModel": "specnb.drafting.ngram",
    "Pair": "specnb.models.loading",
    "PromptLookupDrafter": "specnb.drafting.prompt_lookup",
    "Proposal": "specnb.drafting.base",
    "Sampling": "specnb.sampling.distributions",
    "StepRecord": "specnb.decoding.record",
    "Study": "specnb.decoding.study",
    "audit": "specnb.audit",
    "beam_search": "specnb.decoding.beam",
    "exact_match": "specnb.sampling.verification",
    "generate": "specnb.decoding.loop",
    "greedy_verification": "specnb.sampling.verification",
    "joint_distribution": "specnb.sampling.enumeration",
    "lenient_verification": "specnb.sampling.verification",
    "load_model": "specnb.models.loading",
    "load_pair": "specnb.models.loading",
    "measure_acceptance": "specnb.measure.acceptance",
    "overlap": "specnb.sampling.distributions",
    "predict": "specnb.measure.predict",
    "recommend_gamma": "specnb.measure.recommend",
    "residual": "specnb.sampling.distributions",
    "standardise": "specnb.sampling.distributions",
    "step_distribution": "specnb.sampling.enumeration",
    "synthetic_pair": "specnb.models.synthetic",
    "theory": "specnb.theory",
    "token_verification": "specnb.sampling.verification",
    "total_variation": "specnb.sampling.distributions",
}

__all__ = [
    "Drafter",
    "Generation",
    "MixtureDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NgramModel",
    "Pair",
    "PromptLookupDrafter",
    "Proposal",
    "Sampling",
    "StepRecord",
    "Study",
    "audit",
    "beam_search",
    "exact_match",
    "generate",
    "greedy_verification",
    "joint_distribution",
    "lenient_verification",
    "load_model",
    "load_pair",
    "measure_acceptance",
    "overlap",
    "predict",
    "recommend_gamma",
    "residual",
    "standardise",
    "step_distribution",
    "synthetic_pair",
    "theory",
    "token_verification",
    "total_variation",
]


__getattr__, __dir__ = lazy(__name__, _PUBLIC)
