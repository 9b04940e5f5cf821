"""Every rule comes out otherwise in a world in which its claim is false, and where it can in one with a condition.

`WORLDS` has for each claim a world with its verdict, and changes to that world with the verdicts after them.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from specnb.notebook.findings import all_claims
from studies.verdicts import RULES
from studies.verdicts.criteria import compared, share, thresholds, under_a_condition, within_chance

World = dict[str, Any]
FITS, MISSES = [0.3, -1.2, 2.0], [0.3, -1.2, 9.0]  # standard errors

WORLDS: dict[str, tuple[str, World, list[tuple[str, World]]]] = {
    "standardized-sampling": (
        "holds",
        {"error": 1e-15, "error_to_transformers": 1e-15, "same_support": True, "own_cell": [True, True]},
        [
            ("refuted", {"error": 0.01}),
            ("refuted", {"error_to_transformers": 0.01}),
            ("refuted", {"same_support": False}),
            ("refuted", {"own_cell": [True, False]}),
        ],
    ),
    "mass-identities": (
        "holds",
        {"proven": True, "give_p": 8, "give_q": 8, "tokens": 8},
        [("refuted", {"give_p": 7}), ("refuted", {"give_q": 7}), ("refuted", {"proven": False})],
    ),
    "residual-normaliser": (
        "holds",
        {"proven": True, "right": 8, "pairs": 8},
        [("refuted", {"right": 7}), ("refuted", {"right": 0, "pairs": 0})],
    ),
    "residual-unique": (
        "holds",
        {"full_rank": [True, True], "moved_exactly": 5, "different": 5},
        [("refuted", {"full_rank": [True, False]}), ("refuted", {"moved_exactly": 4})],
    ),
    "algorithm-1-joint": (
        "holds",
        {
            "errors": [1e-15, 0],
            "fewest": [1, 1],
            "most": [2, 4],
            "gamma": [1, 3],
            "sampled_fits": True,
            "transcribed": True,
        },
        [
            ("refuted", {"errors": [1e-15, 0.1]}),
            ("refuted", {"fewest": [0, 1]}),
            ("refuted", {"most": [3, 4]}),
            ("refuted", {"sampled_fits": False}),
            ("refuted", {"transcribed": False}),
        ],
    ),
    "unbiasedness": (
        "holds",
        {"proven": True, "exact": 9, "pairs": 9, "sampled_fits": True, "float64_error": 1e-15},
        [("refuted", {"exact": 8}), ("refuted", {"sampled_fits": False}), ("refuted", {"float64_error": 1e-4})],
    ),
    "rejection-sampling-weaker": (
        "holds",
        {"weaker": 9, "exact": 9, "pairs": 9, "never_above": [True, True], "rule_error": 1e-15},
        [("refuted", {"weaker": 8}), ("refuted", {"never_above": [True, False]}), ("refuted", {"rule_error": 0.1})],
    ),
    "same-distribution-not-same-text": (
        "holds",
        {"both_fit": [True, True], "bug_fits": False, "differing_low": 0.9},
        [
            ("refuted", {"differing_low": 0.0}),
            ("refuted", {"both_fit": [True, False]}),
            ("open", {"bug_fits": True}),
        ],
    ),
    "stochastic-speculation": (
        "holds",
        {"residual_fits": True, "bug_fits": False, "times_agree": True, "saves_time": True},
        [
            ("refuted", {"residual_fits": False}),
            ("refuted", {"saves_time": False}),
            ("refuted", {"times_agree": False}),
            ("open", {"bug_fits": True}),
        ],
    ),
    "capped-geometric": (
        "holds",
        {"error": 1e-15, "p_values": [0.3, 0.9], "wrong_rule_p_value": 1e-30, "with_context": 0.07},
        [
            ("refuted", {"error": 0.01}),
            ("refuted", {"p_values": [0.3, 1e-20]}),
            ("open", {"wrong_rule_p_value": 0.4}),
            ("open", {"with_context": 1e-6}),
        ],
    ),
    "expected-tokens": (
        "holds",
        {"identity": True, "limits_right": True, "error": 1e-15, "deviations": FITS},
        [
            ("refuted", {"deviations": MISSES}),
            ("refuted", {"identity": False}),
            ("refuted", {"error": 0.01}),
            ("refuted", {"limits_right": False}),
        ],
    ),
    "iid-assumption": (
        "holds",
        {"p_values": [1e-12], "lag_1_low": [-0.1], "lag_1_high": [0.1], "error_low": [0.01], "error_high": [0.05]},
        [
            ("holds", {"p_values": [0.5], "lag_1_low": [0.05]}),
            ("open", {"p_values": [0.5]}),
            ("refuted", {"p_values": [0.5], "error_low": [-0.004], "error_high": [0.006]}),
        ],
    ),
    "lesson-expected-tokens": (
        "refuted",
        {"identity": False, "printed": 3.7731, "low": 2.926, "high": 2.948},
        [("holds", {"identity": True, "printed": 2.94})],
    ),
    "stratos-length-footnote": (
        "refuted",
        {"identity": False, "printed": 3.6256, "low": 4.56, "high": 4.602},
        [("holds", {"identity": True, "printed": 4.57})],
    ),
    "stratos-beta-08": (
        "holds",
        {"by_formula": 4.57, "simulated_low": 4.56},
        [("refuted", {"by_formula": 3.6}), ("refuted", {"simulated_low": 3.9})],
    ),
    "dlk-overlap": (
        "holds",
        {"derived": True, "as_overlap": 9, "as_event": 9, "pairs": 9},
        [("refuted", {"as_overlap": 8}), ("refuted", {"as_event": 8}), ("refuted", {"derived": False})],
    ),
    "dlk-divergence": ("holds", {"properties": [True] * 4}, [("refuted", {"properties": [True, True, True, False]})]),
    "beta-is-one-minus-dlk": (
        "holds",
        {"error": 1e-15, "deviations": FITS},
        [("refuted", {"error": 0.6}), ("refuted", {"deviations": MISSES})],
    ),
    "alpha-estimator": (
        "holds",
        {"right_variance": 300, "worlds": 300, "deviation": -0.7, "greedy_difference": 0.0},
        [
            ("refuted", {"deviation": 8.0}),
            ("refuted", {"greedy_difference": 0.1}),
            ("refuted", {"right_variance": 299}),
        ],
    ),
    "walltime": (
        "holds",
        {"deviations": FITS, "by_length": [0.3, 0.97, 0.998]},
        [
            ("refuted", {"deviations": MISSES}),
            ("refuted", {"by_length": [0.3, 0.8, 0.9]}),
            ("refuted", {"by_length": [0.3, 0.9995, 0.998]}),
        ],
    ),
    "walltime-verify-cost": (
        "holds",
        {
            "deviations": FITS,
            "with_v_error": [0.01, -0.05, 0.08, 0.2],
            "free_error": [0.2, 0.3, 0.4, 0.2],
            "best_moves": [True, False],
        },
        [
            ("refuted", {"deviations": MISSES}),
            ("refuted", {"with_v_error": [0.2, 0.3, 0.05, 0.05]}),
            ("refuted", {"free_error": [0.0, 0.0, 0.0, 0.0]}),
            ("refuted", {"best_moves": [False, False]}),
        ],
    ),
    "improvement-condition": (
        "holds",
        {"derived": True, "improves": [True, False], "exceeds": [True, False], "at_least": [True]},
        [
            ("refuted", {"improves": [True, True]}),
            ("refuted", {"at_least": [False]}),
            ("refuted", {"derived": False}),
        ],
    ),
    "optimal-gamma": (
        "holds",
        {"derived": True, "differing": 0, "monotone": True},
        [("refuted", {"differing": 1}), ("refuted", {"monotone": False}), ("refuted", {"derived": False})],
    ),
    "operations": (
        "conditional",
        {
            "deviations": FITS,
            "gamma": [0, 4],
            "steps": [64, 29],
            "target_passes": [64, 29],
            "draft_passes": [0, 116],
            "target_tokens": [64, 145],
            "draft_tokens": [0, 145],
        },
        [
            ("holds", {"draft_tokens": [0, 116]}),
            ("refuted", {"draft_tokens": [0, 290]}),
            ("refuted", {"target_tokens": [64, 174]}),
            ("refuted", {"deviations": MISSES}),
        ],
    ),
    "memory-accesses": (
        "conditional",
        {
            "passes_over_equation": [0.9996],
            "as_counted": True,
            "equation": 2.39,
            "weights": (2.17, 2.43),
            "cache": (2.09, 2.34),
            "short_here": 0.034,
            "short_by": [0.002, 0.0002, 0.00002],
        },
        [
            ("holds", {"short_here": 0.0, "cache": (2.3, 2.5)}),
            ("refuted", {"cache": (2.5, 2.7)}),
            ("refuted", {"weights": (1.9, 2.1)}),
            ("refuted", {"short_by": [0.002, 0.002, 0.002]}),
            ("refuted", {"as_counted": False}),
            ("refuted", {"passes_over_equation": [1.2]}),
        ],
    ),
    "encoder-bound": ("holds", {"bounded": [True, True]}, [("refuted", {"bounded": [True, False]})]),
    "table-1": (
        "holds",
        {"computed": [1.5306, 1.96], "printed": [1.53, 1.96]},
        [("refuted", {"printed": [1.53, 1.97]})],
    ),
    "tradeoff-figure": (
        "holds",
        {"rises": True, "falls": True, "ends_right": True, "deviations": FITS, "printed_on_curve": True},
        [
            ("refuted", {"printed_on_curve": False}),
            ("refuted", {"deviations": MISSES}),
            ("refuted", {"rises": False}),
            ("refuted", {"falls": False}),
            ("refuted", {"ends_right": False}),
        ],
    ),
    "oracle-gamma": (
        "holds",
        {"deviations": FITS, "supremum": 0.582, "reached": 0.575},
        [
            ("refuted", {"supremum": 0.75}),
            ("refuted", {"supremum": 0.4, "reached": 0.39}),
            ("refuted", {"reached": 0.64}),
            ("refuted", {"deviations": MISSES}),
        ],
    ),
    "trace-diagram": (
        "holds",
        {"tokens_per_pass": [2.2, 3.8], "speed_up_low": [1.3, 1.1]},
        [("conditional", {"speed_up_low": [1.3, 0.9]}), ("refuted", {"tokens_per_pass": [1.0, 3.8]})],
    ),
    "table-4-expected": (
        "conditional",
        {"same_digits": [True, False, True, True], "explained": [True] * 4, "shifted": [0, 0], "one_c": True},
        [
            ("holds", {"same_digits": [True] * 4}),
            ("refuted", {"explained": [True, True, True, False]}),
            ("refuted", {"shifted": [4, 0]}),
            ("refuted", {"one_c": False}),
        ],
    ),
    "table-3-shape": (
        "conditional",
        {
            "ngram_low": [0.03, 0.1],
            "ngram_high": [0.3, 0.3],
            "model_low": [0.54, 0.66],
            "model_high": [0.57, 0.72],
            "ngram_rise_low": [-0.08, -0.02],
            "model_rise_low": 0.11,
            "deviations": FITS,
        },
        [
            ("holds", {"ngram_rise_low": [0.01, 0.02]}),
            ("refuted", {"model_rise_low": -0.1}),
            ("refuted", {"ngram_high": [0.3, 0.6]}),
            ("refuted", {"ngram_low": [0.0, 0.1]}),
            ("refuted", {"model_low": [0.4, 0.66]}),
            ("refuted", {"model_high": [0.57, 0.95]}),
            ("refuted", {"deviations": MISSES}),
        ],
    ),
    "two-orders-smaller": (
        "open",
        {"orders": [1.0], "speed_up": [1.5]},
        [
            ("holds", {"orders": [0.5, 1.2, 2.0, 3.0], "speed_up": [1.1, 1.5, 2.0, 1.7]}),
            ("refuted", {"orders": [0.5, 1.2, 2.0, 3.0], "speed_up": [1.1, 2.0, 1.5, 1.2]}),
            ("open", {"orders": [1.6, 1.8, 2.0, 2.2], "speed_up": [1.1, 1.5, 2.0, 1.7]}),
        ],
    ),
    "table-2-shape": (
        "open",
        {"colder": [2.0], "warmer": [1.5], "sizes": [1e6]},
        [
            ("holds", {"colder": [2.9, 2.0, 1.5], "warmer": [2.2, 1.9, 1.4], "sizes": [1, 3, 9]}),
            ("refuted", {"colder": [2.0, 2.9, 1.5], "warmer": [1.9, 2.2, 1.4], "sizes": [1, 3, 9]}),
            ("refuted", {"colder": [2.9, 2.0, 1.5], "warmer": [1.2, 1.1, 1.0], "sizes": [1, 3, 9]}),
        ],
    ),
    "theory-predicts-walltime": (
        "conditional",
        {"measured": [2.0, 2.0, 1.5, 1.4], "predicted": [2.0, 2.1, 2.0, 2.0], "verify_cost": [1.0, 1.0, 1.4, 1.5]},
        [
            ("holds", {"predicted": [2.0, 2.1, 1.5, 1.4]}),
            ("refuted", {"predicted": [3.0, 3.0, 3.0, 3.0]}),
            ("refuted", {"verify_cost": [1.4, 1.4, 1.0, 1.0]}),
        ],
    ),
    "verify-is-free": (
        "conditional",
        {"cost": [1.0, 1.05, 1.2, 1.7], "half_precision": [True, True, False, False]},
        [("holds", {"cost": [1.0, 1.0, 1.0, 1.7]}), ("refuted", {"cost": [1.5, 1.6, 1.2, 1.7]})],
    ),
    "gamma-about-5": (
        "refuted",
        {"lost": [0.0, 0.02, 0.11, 0.18]},
        [("holds", {"lost": [0.0, 0.02, 0.03, 0.18]})],
    ),
    "latency-vs-temperature": (
        "conditional",
        {"low": [1.75, 1.69, 1.11], "high": [2.33, 2.24, 1.32], "alpha": [0.63, 0.57, 0.53, 0.87]},
        [
            ("holds", {"alpha": [0.63, 0.57, 0.53, 0.4]}),
            ("refuted", {"high": [2.33, 2.24, 1.9]}),
        ],
    ),
    "three-losing-regimes": (
        "holds",
        {"worst_high": [0.73, 0.89, 0.64]},
        [("conditional", {"worst_high": [0.73, 1.2, 0.64]}), ("refuted", {"worst_high": [1.1, 1.2, 1.3]})],
    ),
    "beam-identical": (
        "holds",
        {
            "like_transformers": True,
            "different_trees": 0,
            "every_bug_differs": True,
            "same_beams": 50,
            "searches": 50,
            "exceed_budget": 0,
            "reach_budget": 5,
        },
        [
            ("refuted", {"different_trees": 1}),
            ("refuted", {"same_beams": 49}),
            ("refuted", {"exceed_budget": 1}),
            ("refuted", {"reach_budget": 0}),
            ("refuted", {"like_transformers": False}),
            ("open", {"every_bug_differs": False}),
        ],
    ),
    "lenience-bound": (
        "holds",
        {"off_formula": 1e-15, "over_bound": [1.0, 0.4], "where_p_is_0": 0.0},
        [
            ("refuted", {"over_bound": [1.77, 0.4]}),
            ("refuted", {"where_p_is_0": 0.1}),
            ("refuted", {"off_formula": 0.1}),
        ],
    ),
    "lenience-alpha": (
        "holds",
        {"equal": 9, "cases": 9, "error": 1e-15, "deviations": FITS},
        [("refuted", {"equal": 8}), ("refuted", {"error": 0.1}), ("refuted", {"deviations": MISSES})],
    ),
    "lenience-walltime": (
        "refuted",
        {"reachable": [False] * 4, "by_one_gamma": 0},
        [
            ("holds", {"reachable": [True] * 4, "by_one_gamma": 4}),
            ("conditional", {"reachable": [True] * 4, "by_one_gamma": 3}),
        ],
    ),
    "table-5-shape": (
        "holds",
        {"same_prefixes": [[0.1, 0.2]], "own_prefixes": [[0.1, 0.2]], "printed": [[0.1, 0.2]]},
        [("refuted", {name: [[0.2, 0.1]]}) for name in ("same_prefixes", "own_prefixes", "printed")],
    ),
    "lenience-argmax": (
        "refuted",
        {"accepted_at_1": 1.0, "greedy_alpha": 0.75, "by_lenience": [1.0, 0.4, 0.1], "same_digits": [True]},
        [
            ("holds", {"accepted_at_1": 0.75, "by_lenience": [0.75, 0.81, 0.92]}),
            ("refuted", {"accepted_at_1": 0.75, "by_lenience": [0.75, 0.81, 0.92], "same_digits": [False]}),
        ],
    ),
    "lenience-diversity": (
        "holds",
        {"least_probability": 0.0, "entropy_change_high": [0.9, -0.93]},
        [("refuted", {"least_probability": 0.01}), ("refuted", {"entropy_change_high": [0.9, 0.1]})],
    ),
    "cache-prune-counts": (
        "refuted",
        {"must_leave": [3, 2, 4], "printed": [4, 3, 5]},
        [("holds", {"printed": [3, 2, 4]}), ("conditional", {"printed": [3, 2, 5]})],
    ),
    "cache-prune-dynamic": (
        "open",
        {"as_written": False, "on_its_own_release": None},
        [
            ("holds", {"as_written": True, "on_its_own_release": True}),
            ("conditional", {"on_its_own_release": True}),
            ("refuted", {"on_its_own_release": False}),
        ],
    ),
    "first-target": (
        "open",
        {"fills": True, "gain_low": -0.037, "gain_high": 0.024},
        [
            ("holds", {"gain_low": 0.01}),
            ("refuted", {"gain_low": -0.05, "gain_high": -0.01}),
            ("refuted", {"fills": False}),
        ],
    ),
    "batch-padding": (
        "refuted",
        {"off_as_printed": 0.197, "exact_with_all_cut": True, "bugs_differ": True},
        [("holds", {"off_as_printed": 0.0}), ("open", {"bugs_differ": False})],
    ),
    "sequence-packing": (
        "holds",
        {"same_logits": True, "same_rows": 8, "rows": 8, "bugs_differ": True},
        [("refuted", {"same_logits": False}), ("refuted", {"same_rows": 7}), ("open", {"bugs_differ": False})],
    ),
    "processors-greedy": (
        "refuted",
        {"off": [0.1, 0.4], "same_sequences": False},
        [("holds", {"off": [0.0, 1e-15], "same_sequences": True}), ("refuted", {"off": [0.0, 0.0]})],
    ),
    "assistant-greedy": (
        "refuted",
        {"accepted": 0.87, "accepted_if_sampled": 0.67, "off": [0.3]},
        [("holds", {"off": [1e-15]}), ("refuted", {"off": [1e-15], "accepted": 0.5})],
    ),
    "reseeding": (
        "holds",
        {"seeded": [800, 800], "tests": [800, 800], "different_numbers": [1, 1]},
        [
            ("conditional", {"seeded": [800, 0], "different_numbers": [1, 790]}),
            ("refuted", {"seeded": [0, 0], "different_numbers": [790, 790]}),
        ],
    ),
    "exact-match-rule": (
        "holds",
        {"errors": [1e-15, 0], "acceptance_errors": [1e-15]},
        [("refuted", {"errors": [1e-15, 0.1]}), ("refuted", {"acceptance_errors": [0.1]})],
    ),
    "ngram-assisted": ("holds", {"errors": [1e-15, 0]}, [("refuted", {"errors": [1e-15, 1e-6]})]),
    "negligible-cost-bound": (
        "holds",
        {"limits": [True, True], "grows": True, "gap": 0},
        [("refuted", {"limits": [True, False]}), ("refuted", {"grows": False}), ("refuted", {"gap": 0.1})],
    ),
    "bigram-speedup": ("holds", {"factor": 1.248, "printed": 1.25}, [("refuted", {"factor": 1.27})]),
    "random-drafts": (
        "holds",
        {"passes": [24, 23], "tokens": 24, "accepted": [0.05, 0.01]},
        [("refuted", {"passes": [24, 25]}), ("refuted", {"accepted": [0.05, 0]})],
    ),
    "copy-drafts": (
        "holds",
        {"repetitive_low": 0.6, "new_high": 0.4, "repeats": None},
        [
            ("open", {"repetitive_low": 0.4}),
            ("open", {"new_high": 0.7}),
            ("refuted", {"repetitive_low": 0.4, "repeats": True}),
            ("open", {"repetitive_low": 0.4, "repeats": False}),
        ],
    ),
    "nonautoregressive-drafts": (
        "holds",
        {"one_call": True, "tokens_per_step_low": 1.2},
        [("refuted", {"one_call": False}), ("refuted", {"tokens_per_step_low": 1.0})],
    ),
    "draft-standardisation": (
        "holds",
        {"errors": [1e-15, 0], "gain_low": 0.01, "gain_high": 0.05},
        [
            ("refuted", {"errors": [1e-15, 1e-6]}),
            ("open", {"gain_low": -0.01}),
            ("refuted", {"gain_low": -0.05, "gain_high": -0.01}),
        ],
    ),
    "iterative-speculative-sampling": ("holds", {"errors": [1e-15, 0]}, [("refuted", {"errors": [1e-15, 0.01]})]),
    "specinfer-tree": ("refuted", {"errors": [0.042, 0.06]}, [("holds", {"errors": [1e-15, 0]})]),
    "tree-attention-equal": (
        "holds",
        {"difference": 1e-14, "in_tree": 8, "batched": 14},
        [("refuted", {"difference": 1e-5}), ("refuted", {"in_tree": 14})],
    ),
    "greedy-distribution": (
        "refuted",
        {"printed_wrong": 156, "drafts": 162},
        [("holds", {"printed_wrong": 0}), ("refuted", {"printed_wrong": 0, "drafts": 0})],
    ),
    "greedy-tree": (
        "holds",
        {"two_match": 0, "shorter": 0, "trees": 1296},
        [("refuted", {"two_match": 1}), ("refuted", {"shorter": 1}), ("refuted", {"trees": 0})],
    ),
    "hierarchical": (
        "holds",
        {"exact": True, "speed_up_low": [1.1, 0.8], "drafting": [0.8, 1.1]},
        [
            ("refuted", {"exact": False}),
            ("open", {"speed_up_low": [0.9, 0.8]}),
            ("refuted", {"speed_up_low": [0.6, 0.5], "drafting": [1.5, 1.2]}),
        ],
    ),
    "vary-gamma": (
        "holds",
        {"speed_low": [0.7, 1.1], "speed_high": [0.9, 1.3]},
        [("open", {"speed_low": [0.7, 0.9]}), ("refuted", {"speed_low": [0.7, 0.8], "speed_high": [0.9, 0.95]})],
    ),
    "optimise-alpha": (
        "holds",
        {
            "over_shipped_low": [0.01, 0.02],
            "over_shipped_high": [0.02, 0.04],
            "over_control_low": [0.02, 0.01],
            "over_control_high": [0.04, 0.03],
        },
        [
            ("conditional", {"over_control_low": [0.01, -0.01]}),
            ("conditional", {"over_shipped_low": [-0.01, 0.01]}),
            ("open", {"over_shipped_low": [-0.02, -0.02]}),
            ("refuted", {"over_shipped_low": [-0.02, -0.02], "over_shipped_high": [-0.01, -0.01]}),
            ("refuted", {"over_control_low": [-0.02, -0.02], "over_control_high": [-0.01, 0.0]}),
        ],
    ),
    "medusa-heads": (
        "holds",
        {"exact": True, "tokens_per_step_low": [1.3, 1.2], "speed_up_low": [1.1, 1.05]},
        [
            ("conditional", {"speed_up_low": [1.1, 0.9]}),
            ("open", {"speed_up_low": [0.9, 1.0]}),
            ("refuted", {"tokens_per_step_low": [1.3, 1.0]}),
            ("refuted", {"exact": False}),
        ],
    ),
    "eagle-features": (
        "holds",
        {"over_control_low": [0.02, 0.01], "over_control_high": [0.04, 0.03]},
        [
            ("conditional", {"over_control_low": [0.02, -0.01]}),
            ("open", {"over_control_low": [-0.02, 0.0]}),
            ("refuted", {"over_control_low": [-0.05, -0.04], "over_control_high": [-0.01, 0.0]}),
        ],
    ),
}

CASES = [
    pytest.param(claim, world | changes, verdict, id=f"{claim}: {number}, {verdict}")
    for claim, (first, world, others) in WORLDS.items()
    for number, (verdict, changes) in enumerate([(first, {}), *others])
]


@pytest.mark.parametrize(("claim", "world", "verdict"), CASES)
def test_a_rule_decides_by_what_was_measured(claim: str, world: World, verdict: str) -> None:
    assert RULES[claim](**world) == verdict


def test_every_claim_with_a_rule_has_a_world_in_which_its_verdict_is_another() -> None:
    assert set(WORLDS) == set(RULES)
    planned = all_claims().notebook == "15"  # not written yet
    assert set(RULES) == set(all_claims().id[~planned])
    for claim, (first, _, others) in WORLDS.items():
        found = {first, *(verdict for verdict, _ in others)}
        assert "refuted" in found, claim
        assert found & {"holds", "conditional"}, claim
        if "holds_if" in inspect.getsource(RULES[claim]):
            assert "conditional" in found, f"{claim} has no world with its condition"


def test_every_claim_says_what_it_needs_and_what_would_refute_it() -> None:
    claims = all_claims()
    assert not claims.isna().any(axis=None)
    for kinds in claims.kind:
        assert set(kinds.split(", ")) <= {"derived", "enumerated", "measured"}


def test_thresholds_are_read_from_the_words() -> None:
    assert compared("one of >= 4 drafts; alpha < 1e-06, v(5) <= 110% at gamma = 5") == (4.0, 1e-06, 1.1)
    assert compared("equal in exact fractions") == ()
    with pytest.raises(KeyError, match="no-such-claim"):
        thresholds("no-such-claim")


def test_a_condition_counts_only_if_the_other_side_fails() -> None:
    inside = np.array([True] * 4 + [False] * 4)
    assert under_a_condition(inside, inside, 0.75) == "conditional"
    assert under_a_condition(~inside, inside, 0.75) == "refuted"
    assert under_a_condition([True] * 8, inside, 0.75) == "holds"
    assert under_a_condition([True] * 3 + [False] * 5, inside, 0.75) == "conditional"
    assert share([]) == 0


def test_more_deviations_leave_more_room_for_the_largest() -> None:
    assert not within_chance([5.0], "walltime")
    assert within_chance([5.0] + [0.0] * 99, "walltime")
