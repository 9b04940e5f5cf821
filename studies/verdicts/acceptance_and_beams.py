"""Notebooks 04 and 06: acceptance, and beam search."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specnb.notebook.findings import named
from studies.verdicts.criteria import all_of, thresholds, within_chance


def table_3_shape(
    ngram_low: ArrayLike,
    ngram_high: ArrayLike,
    model_low: ArrayLike,
    model_high: ArrayLike,
    ngram_rise_low: ArrayLike,
    model_rise_low: float,
    deviations: ArrayLike,
) -> str:
    """Intervals of alpha at temperatures 0 and 1 for n-grams and for the draft model; the lower ends of what argmax
    adds to it; accepted tokens minus alpha in the loop, in standard errors.

    `conditional` on a draft that is a model where sharper distributions raise alpha for the model only.
    """
    _, small, least, most = thresholds("table-3-shape")
    ngrams = np.all(np.asarray(ngram_low) > 0) and np.all(np.asarray(ngram_high) < small)
    models = np.all(np.asarray(model_low) >= least) and np.all(np.asarray(model_high) <= most)
    levels = bool(ngrams and models) and within_chance(deviations, "table-3-shape")
    rises = model_rise_low > 0
    return named(levels and rises and bool(np.all(np.asarray(ngram_rise_low) > 0)), holds_if=levels and rises)


def beam_identical(
    like_transformers: bool,
    different_trees: int,
    every_bug_differs: bool,
    same_beams: int,
    searches: int,
    exceed_budget: int,
    reach_budget: int,
) -> str:
    """Whether plain search equals that of transformers; trees after which the states differ, and whether each planted
    bug makes some differ; searches with the beams of plain search; settings that exceed and reach w + u gamma."""
    if not every_bug_differs:
        return "open"
    identical = like_transformers and different_trees == 0 and all_of(same_beams, searches)
    return named(identical and exceed_budget == 0 and reach_budget > 0)
