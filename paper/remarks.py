"""Statements of the paper without a number, each with the check over the results that it rests on.

"The advantage shrinks" is a result too, and a new result may contradict it. A check that fails stops the build and
quotes the words that have to change.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from paper.reading import Missing, Results, known_bugs, one_machine, per_token, single_runs
from specnb.theory import walltime_improvement

Check = Callable[[Results], bool]
REMARKS: dict[str, Check] = {}


def remark(words: str) -> Callable[[Check], Check]:
    """Ties a check to the `words` of `paper.typ` that it guards."""

    def keep(check: Check) -> Check:
        if words in REMARKS:
            raise ValueError(f"two checks for {words!r}; one remark has one check")
        REMARKS[words] = check
        return check

    return keep


def require_true(results: Results) -> None:
    """Raises `Missing` with the words of every remark that `results` no longer support."""
    untrue = [f"“{words}” ({check.__name__})" for words, check in REMARKS.items() if not check(results)]
    if untrue:
        raise Missing(f"no longer true: {'; '.join(untrue)}; correct paper/paper.typ and paper/remarks.py")


def _verdicts(results: Results, *claims: str) -> set[str]:
    return set(results.claims().verdict[list(claims)])


@remark("two formulas for the tokens per step")
def formulas_are_wrong(results: Results) -> bool:
    return _verdicts(results, "lesson-expected-tokens", "stratos-length-footnote") == {"refuted"}


@remark("quoted speed-ups that no draft length can reach")
def quoted_speed_is_out_of_reach(results: Results) -> bool:
    quoted = results.table("07_quoted")
    return not quoted[quoted.temperature == 1].reachable.any()


@remark("its cost makes the best draft length smaller or larger")
def gamma_moves_both_ways(results: Results) -> bool:
    moves = results.table("18_optimum_moves")
    return bool(moves.smaller.max() > 0.1 and moves.larger.max() > 0.1)


@remark("computed in fractions, the rule gives $p$ exactly")
def every_pair_gives_p(results: Results) -> bool:
    return results.number("unbiasedness", "exact_pairs") == results.number("unbiasedness", "pairs")


@remark("The stale bonus passes a check of the first token")
def one_wrong_rule_hides(results: Results) -> bool:
    stale = results.table("01_wrong_rules").set_index("rule").loc["stale_bonus"]
    return bool(stale[["first token", "joint, no context"]].max() < 1e-12 and stale["joint, context"] > 0.01)


@remark("sampled steps are consistent with the enumerated distribution")
def sampled_steps_agree(results: Results) -> bool:
    return _verdicts(results, "algorithm-1-joint") == {"holds"}


@remark("_Never more target passes_: true")
def never_more_runs(results: Results) -> bool:
    return _verdicts(results, "never-more-target-runs") == {"holds"}


@remark("_wrong_ rule it stops falling at the distance of that rule")
def wrong_rules_are_told_apart(results: Results) -> bool:
    """Of every wrong rule the mean distance is above an exact sampler's at every number of samples."""
    wrong = results.table("01_convergence").query("rule != 'token_verification'")
    excess = wrong["mean TV"] - wrong["expected of an exact one"]
    return bool((excess > 5 * wrong["standard error"]).all())


@remark("is rejected at temperature zero")
def counts_are_not_geometric(results: Results) -> bool:
    """The threshold is notebook 02's: p below 0.001 at temperature zero, and not at one."""
    hot, cold = (results.number("iid-assumption", f"p_value at temperature {t}") for t in (1, 0))
    return cold < 0.001 <= hot


@remark("effects of both signs nearly cancel")
def effects_cancel(results: Results) -> bool:
    """Gains and losses are there at both temperatures; at temperature one less than half of the first is left."""
    ladder = results.table("02_ladder").set_index(["assumptions", "temperature"])
    gained, lost = ladder.loc["anywhere"], ladder.loc["where steps begin"]
    rest = abs(ladder.tokens["measured"][1] - ladder.tokens["iid"][1])
    return bool((gained.change_low > 0).all() and (lost.change_high < 0).all() and rest < gained.change[1] / 2)


@remark("For the mean over all tokens, with whole sequences as the independent units, it is")
def overlaps_help_less_over_texts(results: Results) -> bool:
    ratio = results.table("03_alpha").set_index("temperature").loc[1]
    return bool(ratio["variance ratio per token"] < 0.5 < ratio["variance ratio of the mean"] < 1)


@remark("the same order as in Table 3 of the original")
def drafts_are_in_order(results: Results) -> bool:
    ours = results.table("04_table3")
    ours = ours[ours.target.str.startswith("this pair")].pivot_table("alpha", "temperature", "draft")
    model = next(name for name in ours if name.endswith("M"))
    return bool((ours.unigram < ours.bigram).all() and (ours.bigram < ours[model]).all())


@remark("It does not hold for the unigram")
def sharper_is_worse_for_the_unigram(results: Results) -> bool:
    ours = results.table("04_table3").query("draft == 'unigram'").iloc[:2].set_index("temperature")
    return bool(ours.high[0] < ours.low[1])


@remark("lowering the temperature of both distributions changes $alpha$ by")
def distributions_alone_do_not_help(results: Results) -> bool:
    return results.estimate("table-3-shape", "sharper distributions on the text of T = 1")["high"] <= 0.01


@remark("Most of the change comes from the _sequences_")
def text_helps_more_than_distributions(results: Results) -> bool:
    hot, cold, distributions = (
        results.estimate("table-3-shape", f"sharper {name}")
        for name in (
            "text under the distributions of T = 1",
            "text under the distributions of T = 0",
            "distributions on the text of T = 0",
        )
    )
    return min(hot["low"], cold["low"]) > 0 and min(hot["value"], cold["value"]) > distributions["value"]


@remark("As a function of $gamma$ it has one maximum. The rest of the original's Section 3 follows")
def the_rest_of_section_3_holds(results: Results) -> bool:
    rest = ("walltime", "improvement-condition", "optimal-gamma", "table-1")
    counted = _verdicts(results, "operations") <= {"holds", "conditional"}  # up to the draft's last accepted token
    return counted and _verdicts(results, *rest, "tradeoff-figure") == {"holds"}


@remark("less than Equation 1")
def cache_reads_shrink_less(results: Results) -> bool:
    cache, expected = results.estimate("memory-accesses", "cache"), results.number("memory-accesses", "equation_1")
    return cache["high"] < expected and _verdicts(results, "memory-accesses") == {"conditional"}


@remark("one draft token may then be slower than plain decoding while four are faster")
def one_loses_where_four_win(results: Results) -> bool:
    return results.number("walltime-verify-cost", "gamma_1_loses_where_4_wins") == 1


@remark("the layout of the weights decides whether more tokens cost more")
def layout_decides(results: Results) -> bool:
    runs = single_runs(results)
    dear, cheap = (runs["synthetic", layout, 5] / runs["synthetic", layout, 1] for layout in ("plain", "packed"))
    return bool(dear - 1 > 2 * (cheap - 1))


@remark("the second and third token of the synthetic pair cost more than the next ten")
def the_second_token_is_dear(results: Results) -> bool:
    ms = single_runs(results)["synthetic", "plain"]
    return bool(ms[3] - ms[1] > ms[13] - ms[3])


@remark("is closer to the prediction with the measured $v$")
def measured_costs_predict_better(results: Results) -> bool:
    walltime = one_machine(results.table("bench_walltime"))
    free = walltime_improvement(walltime.alpha.to_numpy(), walltime.gamma.to_numpy(), walltime.c.to_numpy())
    return bool(
        (walltime.measured / walltime.predicted - 1).abs().median() < (walltime.measured / free - 1).abs().median()
    )


@remark("most of the difference comes from the layout and not from the loops")
def loops_differ_little(results: Results) -> bool:
    ms = per_token(results, "synthetic")
    gap, rest = (ms[name] - ms["speculative"] for name in ("transformers assisted", "transformers assisted, packed"))
    return bool(abs(rest) < gap / 2)


@remark("because acceptance differs between the few timed sequences")
def texts_explain_what_strays(results: Results) -> bool:
    walltime = one_machine(results.table("bench_walltime"))
    ratio = walltime.measured / walltime.predicted
    counted = results.number("theory-predicts-walltime", "within_counted")
    return bool(counted > ((ratio - 1).abs() <= 0.1).sum())


@remark("speculation gains less over the faster baseline; for the synthetic pair")
def a_faster_baseline_gains_less(results: Results) -> bool:
    """For the trained pair; for the synthetic pair both are made faster alike, within a twentieth."""
    pairs = {pair: per_token(results, pair) for pair in ("synthetic", "trained")}
    more = {
        pair: (ms["speculative"] / ms["speculative, compiled"]) / (ms["target only"] / ms["target only, compiled"])
        for pair, ms in pairs.items()
    }
    return bool(more["trained"] < 0.95 < more["synthetic"] < 1.05)


@remark("two plausible bugs")
def bugs_of_beam_search_show(results: Results) -> bool:
    trees = results.table("06_every_tree")
    bugs = trees[["different: w - 1 suffice", "different: penalty forgotten"]].sum()
    return bool(trees["different: A.4"].sum() == 0 and (bugs > 0).all())


@remark("falling with $w$")
def wider_beams_are_harder(results: Results) -> bool:
    first = results.table("06_acceptance").query("depth == 1 and u == w").sort_values("w")
    return bool(first.value.is_monotonic_decreasing)


@remark("with the largest tree tried")
def free_length_wants_the_largest_tree(results: Results) -> bool:
    four = results.table("06_speedup").query("w == 4 and v == 'free'")
    best = four.loc[four["speed-up"].idxmax()]
    return bool(best.u == four.u.max() and best.gamma == four.gamma.max())


@remark("Its gain is a wider search and not speed")
def elaborate_is_not_faster(results: Results) -> bool:
    free = results.table("06_elaborate_to_end")
    return bool(free.better.sum() > free.worse.sum() and (free["levels per step"] < 1.1 * free["A.4"]).all())


@remark("both keep every token below $p\\/l$")
def both_readings_keep_the_bound(results: Results) -> bool:
    readings = results.table("07_readings").set_index("reading").breaks_bound
    return bool(readings.drop("no residual").max() == 0 and readings["no residual"] > 0)


@remark("If the inequality is reversed, the speed-ups quoted there follow to the printed digit")
def turned_round_it_follows(results: Results) -> bool:
    cold = results.table("07_quoted").query("temperature == 0")
    return bool("holds" not in _verdicts(results, "lenience-argmax") and cold.reachable.all())


@remark("All three keep every row's distribution")
def ragged_ways_are_exact(results: Results) -> bool:
    distributions = results.table("10_distributions")
    return (
        bool((distributions.same == (distributions["what is wrong"] == "-")).all())
        and (distributions["what is wrong"] == "-").sum() == 3
    )


@remark("no change of acceptance was seen")
def first_run_helps_nothing(results: Results) -> bool:
    change = results.estimate("first-target", "overlap_change")
    return change["low"] < 0 < change["high"]


@remark("exact if the last draft token that a row keeps is not sampled again")
def the_shortest_may_decide(results: Results) -> bool:
    cuts = results.table("10_truncation").set_index("cut")
    return bool((cuts.loc["all keep the shortest's, draft tokens included"] == 0).all())


@remark("whether sequences become less diverse depends on the draft model")
def narrowing_depends_on_the_draft(results: Results) -> bool:
    change = results.table("07_diversity").query("l == 0.1 and quality == 'entropy'").set_index("draft")
    return bool(change.high["narrow"] < 0 < change.high["own"])


@remark("the audit misses fewer bugs than any of these tests")
def the_audit_sees_more(results: Results) -> bool:
    bugs = known_bugs(results)
    tests = ("vLLM V1", "vLLM V2", "TensorRT-LLM", "transformers")
    return bool(bugs["median"].isna().sum() < min((bugs[test].fillna(1) >= 0.5).sum() for test in tests))


@remark("does not return the greedy sequence")
def soft_greedy_is_not_greedy(results: Results) -> bool:
    return _verdicts(results, "processors-greedy") == {"refuted"}


@remark("true of the distribution, and of the sequence only at temperature zero")
def only_greedy_text_is_the_same(results: Results) -> bool:
    return results.number("same-distribution-not-same-text", "greedy_differing") == 0


@remark("Nothing here ran on a GPU")
def no_accelerator(results: Results) -> bool:
    tables = [pd.read_csv(file) for file in results.folder.glob("*.csv")]
    named = [str(entry) for table in tables for column in ("machine", "device") for entry in table.get(column, [])]
    return not list(results.folder.glob("*gpu*")) and not any("NVIDIA" in name or "cuda" in name for name in named)
