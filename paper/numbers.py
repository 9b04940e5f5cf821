"""Every number of the paper, computed from the results.

A number comes from a table `data/results/*.csv` or from the numbers stored with a verdict. None is typed here or in the
text: a changed result changes the paper, and a missing one stops the build with its name.
"""

from __future__ import annotations

import pandas as pd

from paper.reading import (
    Results,
    count,
    interval,
    known_bugs,
    one_machine,
    per_token,
    share,
    single_runs,
    with_minus,
)
from specnb.notebook.claims import CLAIMS, VERDICTS
from specnb.notebook.findings import UNCHECKED
from specnb.theory import walltime_improvement
from studies.audit_power.bug_suite import CAP, DELTA
from studies.audit_power.false_alarms import CONTROLS
from studies.speed.pair_speeds import GAMMAS

Named = dict[str, str]
TOKENS = 5  # of the forward pass for which the cost of verifying is given
HSD_CODE = "hierarchical, authors' code"
MERGED = "recursive, merged children in random order"
LARGE = 0.02  # total variation per token that no audit should miss


def verdicts(results: Results) -> Named:
    claims = results.claims()
    counts = {verdict: int((claims.verdict == verdict).sum()) for verdict in VERDICTS}
    missing = sorted(set(claims.notebook[claims.evidence == UNCHECKED].str.zfill(2)))
    return {verdict: str(number) for verdict, number in counts.items()} | {
        "all": str(len(claims)),
        "own": str(int((pd.read_csv(CLAIMS, dtype=str).source == "beyond").sum())),
        "settled": str(len(claims) - counts["open"]),
        "open-notebooks": ", ".join(missing[:-1]) + f" and {missing[-1]}" if len(missing) > 1 else "".join(missing),
    }


def exactness(results: Results) -> Named:
    joint, wrong_rules = results.table("01_joint"), results.table("01_wrong_rules").set_index("rule")
    convergence = results.table("01_convergence").set_index("rule")
    most, few = convergence.loc["token_verification"].iloc[-1], convergence.loc["no_residual"].iloc[0]
    differing = results.estimate("same-distribution-not-same-text", "differing_share")
    passes = results.table("01_target_passes").set_index("drafter")
    real = results.table("17_rejection_sampling").set_index("distributions").loc["trained pair"]
    named = {
        "settings": count(len(joint)),
        "error": f"{joint.error.max():.0e}",
        "largest-vocab": count(joint.vocab.max()),
        "largest-gamma": count(joint.gamma.max()),
        "pairs": count(results.number("unbiasedness", "pairs")),
        "given-length": f"{results.number('algorithm-1-joint', 'tv_of_one_token_steps'):.2f}",
        "draws": count(most.n),
        "draws-tv": f"{most['mean TV']:.5f}",
        "draws-tv-exact": f"{most['expected of an exact one']:.5f}",
        "few-draws": count(few.n),
        "few-tv": f"{few['mean TV']:.3f}",
        "few-tv-exact": f"{few['expected of an exact one']:.3f}",
        "float32": f"{results.number('unbiasedness', 'float32_bound'):.0e}",
        "other-replacements": count(results.number("residual-unique", "other_exact")),
        "same-seed": f"{interval(differing, digits=3)} (n = {count(differing['n'])})",
        "uniform-runs": count(passes["target passes"]["uniform"]),
        "plain-runs": count(passes["target passes"]["none (standard decoding)"]),
        "trained-runs": count(passes["target passes"]["trained draft"]),
        "beta": f"{real['mean beta']:.2f}",
        "one-shot": f"{real['mean 1/M']:.4f}",
    }
    for rule in ("no_residual", "stale_bonus", "printed_step_7"):
        label = rule.replace("_", "-").removesuffix("-7")
        named[label] = f"{wrong_rules['joint, context'][rule]:.3f}"
        named[f"{label}-first"] = f"{wrong_rules['first token'][rule]:.3f}"
        named[f"{label}-flat"] = f"{wrong_rules['joint, no context'][rule]:.3f}"
    return named


def tokens(results: Results) -> Named:
    figure2, best = results.table("02_figure2"), results.table("02_best_gamma")
    inside = ((figure2.low <= figure2.equation_1) & (figure2.equation_1 <= figure2.high)).sum()
    lag = results.table("02_autocorrelation").iloc[0]
    rungs = results.table("02_ladder").set_index(["temperature", "assumptions"])
    ladder, rest = rungs.change, rungs.loc[(1, "measured")]

    def error_of_equation_1(temperature: int) -> str:
        value, low, high = (
            results.number("iid-assumption", f"equation_1_error{end} at temperature {temperature}")
            for end in ("", "_low", "_high")
        )
        return f"{value:+.1%} [{low:+.1%}, {high:+.1%}]"

    def fit(temperature: int) -> str:
        return f"{results.number('iid-assumption', f'p_value at temperature {temperature}'):.2g}"

    def printed(claim: str, name: str, digits: int) -> str:
        return f"{results.number(claim, name):.{digits}f}"

    lesson, footnote = "lesson-expected-tokens", "stratos-length-footnote"
    return {
        "simulations": count(len(figure2)),
        "inside": count(inside),
        "steps": count(figure2.n.max()),
        "fit-hot": fit(1),
        "fit-cold": fit(0),
        "lag": interval(lag),
        "off-hot": error_of_equation_1(1),
        "off-cold": error_of_equation_1(0),
        "gained-anywhere": f"{ladder[1, 'anywhere']:.3f}",
        "gained-accepted": f"{ladder[1, 'accepted']:.3f}",
        "lost-where-steps-begin": f"{-ladder[1, 'where steps begin']:.3f}",
        "rest": f"{rest.change:.3f} [{rest.change_low:.3f}, {rest.change_high:.3f}]",
        "predicted-hot": f"{rungs.tokens[1, 'iid']:.3f}",
        "measured-hot": f"{rest.tokens:.3f}",
        "gamma-costs": share((1 - best.there / best.at_best).max(), 1),
        "lesson-right": printed(lesson, "tokens_right", 4),
        "lesson-wrong": printed(lesson, "tokens_printed", 4),
        "lesson-right-speed": printed(lesson, "speed_up_right", 2),
        "lesson-wrong-speed": printed(lesson, "speed_up_printed", 2),
        "footnote-wrong": printed(footnote, "tokens_footnote", 4),
        "footnote-right": printed(footnote, "tokens_equation_1", 4),
    }


def acceptance(results: Results) -> Named:
    ours = results.table("04_table3")
    ours = ours[ours.target.str.startswith("this pair")]
    target, draft = ours.target.iloc[0].split()[-1], ours.draft[ours.draft.str.endswith("M")].iloc[0]
    ours = ours.set_index(["draft", "temperature"])
    needed = results.table("04_needed").set_index("temperature").loc[1]

    def effect(name: str) -> str:
        return interval(results.estimate("table-3-shape", f"sharper {name}"), digits=3)

    return {
        "target": target.removesuffix("M"),
        "draft": draft.removesuffix("M"),
        "hot": interval(ours.loc[draft, 1], "alpha", digits=3),
        "cold": interval(ours.loc[draft, 0], "alpha", digits=3),
        "bigram": interval(ours.loc["bigram", 1], "alpha", digits=3),
        "unigram": interval(ours.loc["unigram", 1], "alpha", digits=3),
        "unigram-cold": interval(ours.loc["unigram", 0], "alpha", digits=3),
        "n": count(ours.n.max()),
        "distributions-alone": effect("distributions on the text of T = 1"),
        "text-alone": effect("text under the distributions of T = 1"),
        "distributions-there": effect("distributions on the text of T = 0"),
        "text-there": effect("text under the distributions of T = 0"),
        "very-hot": f"{results.number('table-3-shape', 'alpha at T = 8'):.2f}",
        "needed": count(needed.needed),
        "needed-if-independent": count(needed["if independent"]),
    }


def features(results: Results) -> Named:
    """Acceptance of drafts that read the target's features, along sequences of the target."""
    table = results.table("feature_drafts")
    shown = table[(table.target == "shipped") & (table.along == "samples of the target")]
    rows = shown.astype({"depth": str}).set_index(["draft", "depth"])

    found: Named = {}
    for name in ("attention", "recurrent", "parallel", "of tokens"):
        of, line = name.replace(" ", "-"), rows.loc[(name, "all")]
        found |= {of: interval(line, "alpha", "alpha_low", "alpha_high"), f"{of}-size": f"{line.parameters / 1e6:.1f}"}
    for name in ("attention", "recurrent", "parallel"):
        found |= {f"{name}-{at}": f"{rows.alpha[name, depth]:.2f}" for at, depth in (("first", "1"), ("last", "4"))}
    over = rows.loc[("attention", "all")]
    return found | {
        "over": interval(over, "over_control", "over_control_low", "over_control_high", digits=3),
        "seen": f"{over.tokens / 1e6:.1f}",
    }


def speed(results: Results) -> Named:
    moves = results.table("18_optimum_moves").set_index("v")
    table4, choice = results.table("03_table4"), results.table("03_gamma_choice")
    variance = results.table("03_alpha").set_index("temperature").loc[1]
    return {
        "variance-token": f"{variance['variance ratio per token']:.2f}",
        "variance-mean": f"{variance['variance ratio of the mean']:.2f}",
        "smaller": share(moves.smaller["per token"]),
        "larger": share(moves.larger["in blocks"]),
        "lost": share(moves["most speed lost"].max()),
        "loses": share(moves["slower than plain"]["in blocks"]),
        "oracle": share(results.number("oracle-gamma", "gain_typical"), 1),
        "oracle-limit": share(results.number("oracle-gamma", "gain_limit"), 1),
        "table4-same": count(table4["same digits"].sum()),
        "table4-all": count(len(table4)),
        "table4-explained": count(table4.explained.sum()),
        "table4-least": share(table4["share of box"].min()),
        "largest-c": f"{table4.cost_ratio.max():g}",
        "gamma-optimal": count((choice.gamma == choice.optimal).sum()),
        "gamma-lost": share(choice.lost.max(), 1),
        "encoder": f"{results.number('encoder-bound', 'most_times_encoder'):.2f}",
        "encoder-from": count(results.number("encoder-bound", "tokens_needed")),
    }


def drafted(results: Results) -> Named:
    """Speed-ups of whole calls with three drafters, by target, compilation, temperature and prompts."""
    table = results.table("pair_speeds")
    hows, temperatures = {False: "eager", True: "compiled"}, {0: "zero", 1: "one"}
    found = {
        f"{row.target}-{hows[row.compiled]}-{temperatures[row.temperature]}-{row.prompts}-{name}": interval(
            table.loc[row.Index], "speed_up", "speed_up_low", "speed_up_high"
        )
        for name in ("draft-model", "distilled-draft-model", "attention-head")
        for row in table[table.drafter == name.replace("-", " ")].itertuples()
    }
    compiled, eager = table.gamma[table.compiled].max(), [str(gamma) for gamma in GAMMAS]
    tried = f"{', '.join(eager[:-1])} and {eager[-1]}"
    return found | {"prompts": count(table.sequences.max()), "gamma": count(compiled), "gammas": tried}


def clock(results: Results) -> Named:
    walltime, runs = one_machine(results.table("bench_walltime")), single_runs(results)
    free = walltime_improvement(walltime.alpha.to_numpy(), walltime.gamma.to_numpy(), walltime.c.to_numpy())
    ratio, printed = walltime.measured / walltime.predicted, walltime.measured / free
    way = ["pair", "dtype", "compiled"]
    best = walltime.loc[walltime[walltime.temperature == 1].groupby(way).measured.idxmax()].set_index(way)
    best = best.apply(interval, axis=1, args=("measured", "measured_low", "measured_high"))
    ms = per_token(results, "synthetic")
    gains = {
        f"compiled-{pair}-{kind.split()[0]}": f"{times[kind] / times[f'{kind}, compiled']:.2f}"
        for pair, times in ((pair, per_token(results, pair)) for pair in ("synthetic", "trained"))
        for kind in ("target only", "speculative")
    }
    cells = [(pair, layout) for pair in ("synthetic", "trained") for layout in ("plain", "packed", "compiled")]
    return gains | {
        "machine": str(walltime.machine.iloc[0]),
        "threads": count(walltime.threads.iloc[0]),
        "n": count(TOKENS),
        "cases": count(len(walltime)),
        "within-v": count(((ratio - 1).abs() <= 0.1).sum()),
        "within-printed": count(((printed - 1).abs() <= 0.1).sum()),
        "within-counted": count(results.number("theory-predicts-walltime", "within_counted")),
        "printed-worst": f"{1 / printed.min():.1f}",
        "ratio": f"{ratio.median():.2f}",
        "ratio-low": f"{ratio.min():.2f}",
        "ratio-high": f"{ratio.max():.2f}",
        "worst-pair": walltime.pair[(ratio - 1).abs().idxmax()],
        "layout-plain": f"{ms['target only, plain weights'] / ms['target only']:.2f}",
        "layout-speculative": f"{ms['speculative, plain weights'] / ms['speculative']:.2f}",
        "peer-plain": f"{ms['transformers assisted']:.2f}",
        "peer": f"{ms['transformers assisted, packed']:.2f}",
        "ours": f"{ms['speculative']:.2f}",
        "best-synthetic": best["synthetic", "float32", False],
        "best-synthetic-compiled": best["synthetic", "float32", True],
        "best-synthetic-half": best["synthetic", "bfloat16", False],
        "best-trained": best["trained", "float32", False],
        "best-trained-compiled": best["trained", "float32", True],
        "best-trained-half": best["trained", "bfloat16", False],
    } | {f"ms-{pair}-{layout}": f"{runs[pair, layout, 1]:.1f}" for pair, layout in cells} | {
        f"v-{pair}-{layout}": f"{runs[pair, layout, TOKENS] / runs[pair, layout, 1]:.2f}" for pair, layout in cells
    }  # fmt: skip


def beam(results: Results) -> Named:
    trees, same = results.table("06_every_tree"), results.table("06_identical")
    speedup, free = results.table("06_speedup"), results.table("06_elaborate_to_end")
    four = speedup[speedup.w == 4]
    best = {v: rows.loc[rows["speed-up"].idxmax()] for v, rows in four.groupby("v")}
    first = results.table("06_acceptance")
    first = first[(first.depth == 1) & (first.w == 4)].set_index("u")
    levels = results.table("06_levels_per_step")
    claim = "beam-identical"
    same_as_reference, searches, narrow_least, narrow_most, wide_least, wide_most = (
        results.number(claim, name)
        for name in (
            "searches_as_transformers",
            "searches_of_transformers",
            "first_level_u_w_least",
            "first_level_u_w_most",
            "first_level_u_4w_least",
            "first_level_u_4w_most",
        )
    )
    named = {
        "trees": count(trees.trees.sum()),
        "differ": count(trees["different: A.4"].sum()),
        "slack": count(trees["different: w - 1 suffice"].sum()),
        "penalty": count(trees["different: penalty forgotten"].sum()),
        "searches": count(same["same beams"].sum()),
        "reference": f"{same_as_reference:.0f} of {searches:.0f}",
        "apart": f"{same['scores apart'].max():.0e}",
        "narrow": f"{narrow_least:.2f} to {narrow_most:.2f}",
        "wide": f"{wide_least:.2f} to {wide_most:.2f}",
        "four-four": interval(first.loc[4]),
        "four-sixteen": interval(first.loc[16]),
        "too-many": share(levels["too much by"].max()),
        "elaborate-better": count(free.better.sum()),
        "elaborate-worse": count(free.worse.sum()),
        "elaborate-searches": count(free.searches.sum()),
    }
    for v, label in (("free", "free"), ("twice at 129", "cheap"), ("twice at 17", "dear")):
        row = best[v]
        named[label] = f"{row['speed-up']:.2f}"
        if label != "free":
            named[f"{label}-at"] = v.removeprefix("twice at ")
    cheap = best["twice at 129"]
    return named | {"cheap-u": count(cheap.u), "cheap-gamma": count(cheap.gamma)} | timed_beams(results)


def timed_beams(results: Results) -> Named:
    """Whole beam searches by the clock: the setting with the best prediction, and the one with u = w."""
    timed = results.table("beam_speeds")
    best, narrow = timed.loc[timed.predicted.idxmax()], timed[timed.u == timed.w].iloc[0]
    inside = timed.predicted.between(timed.measured_low, timed.measured_high)
    return {
        "timed-machine": best.machine,
        "timed-dtype": best["dtype"],
        "timed-threads": count(best.threads),
        "timed-prompts": count(best.prompts),
        "timed-w": count(best.w),
        "timed-u": count(best.u),
        "timed-gamma": count(best.gamma),
        "timed-free": f"{best.tokens_free:.2f}",
        "timed-predicted": f"{best.predicted:.2f}",
        "timed": interval(best, "measured", "measured_low", "measured_high"),
        "timed-narrow-predicted": f"{narrow.predicted:.2f}",
        "timed-narrow": interval(narrow, "measured", "measured_low", "measured_high"),
        "timed-inside": f"{inside.sum()} of {len(timed)}",
        "timed-gains": f"{(timed.measured_low > 1).sum()} of {len(timed)}",
    }


def batches(results: Results) -> Named:
    cuts = results.table("10_truncation").set_index("cut")["gamma 3"]
    noticed = results.table("10_noticed")
    later = noticed[noticed.step > 0].groupby("way").median()
    refill, peak = results.table("10_refill").set_index("plan")["at work"], results.table("10_peak")

    def of_cases(name: str) -> str:
        right, cases = (results.number("cache-prune-counts", key) for key in (name, "cases"))
        return f"{right:.0f} of {cases:.0f}"

    named = {
        "redrawn": f"{cuts['the same, last token sampled again']:.3f}",
        "stays": f"{cuts['only n_max - n draft tokens dropped']:.3f}",
        "rows": count(results.number("batch-padding", "rows")),
        "shortest": f"{results.number('batch-padding', 'tokens_shortest'):.2f}",
        "own": f"{results.number('batch-padding', 'tokens_own'):.2f}",
        "one-too-many": of_cases("one_too_many"),
        "newest": of_cases("newest_right"),
        "first-run": f"{results.number('first-target', 'passes_lost'):.2f}",
        "refilled": share(refill["refilled"]),
        "in-groups": share(refill["in groups"]),
        "memory-low": f"{peak['predicted / measured'].min():.2f}",
        "memory-high": f"{peak['predicted / measured'].max():.2f}",
    }
    for way, row in later.iterrows():
        named |= {f"{way}-shapes": f"{row['new shapes']:.0f}", f"{way}-waits": f"{row['waits']:.0f}"}
    return named


def lenience(results: Results) -> Named:
    quoted = results.table("07_quoted")
    hot = quoted[quoted.temperature == 1]
    readings = results.table("07_readings").set_index("reading")
    front = results.table("07_front").set_index("l")
    diversity = results.table("07_diversity").set_index(["draft", "l", "quality"])
    argmax = results.table("07_argmax").set_index("l")
    text = results.table("07_texts").astype(str)
    longest = text[(text.l.astype(float) == 0.5) & (text.tokens.astype(int) == text.tokens.astype(int).max())]
    return {
        "cases": count(results.number("lenience-bound", "cases")),
        "breaks": f"{readings.breaks_bound['no residual']:.0f} of {readings.cases['no residual']:.0f}",
        "over": f"{readings.most_over_bound['no residual']:.2f}",
        "half-alpha": f"{front.alpha[0.5] - front.alpha[1]:.3f}",
        "half-tv": f"{front['TV, comparison only'][0.5]:.3f}",
        "half-text": longest["from the target's texts"].iloc[0],
        "text-tokens": longest.tokens.iloc[0],
        "quoted": ", ".join(f"{value:g}" for value in hot.quoted),
        "best": ", ".join(f"{value:.2f}" for value in hot["best speed-up"]),
        "within-rounding": ", ".join(f"{value:.2f}" for value in hot["most within rounding"]),
        "reachable": f"{hot.reachable.sum()} of {len(hot)}",
        "printed": f"{argmax['<= as printed, same prefixes'][1]:.2f}",
        "printed-low": f"{argmax['<= as printed, same prefixes'][0.1]:.2f}",
        "narrow": interval(diversity.loc["narrow", 0.1, "entropy"]),
        "own": interval(diversity.loc["own", 0.1, "entropy"]),
    }


def audit(results: Results) -> Named:
    bugs, wild = known_bugs(results), results.table("transformers_audit")
    unseen = bugs[bugs["median"].isna()]
    kept = results.table("16_bug_suite").set_index("bug")
    in_a_step = kept["exact TV of a step"]
    greedy = results.table("11_greedy_drafts").set_index("draft_tokens")
    large = bugs[bugs.tv >= LARGE]
    false_alarms = results.table("false_alarms")
    by_setting = false_alarms[false_alarms.delta == DELTA].set_index("setting")
    of_the_pair = by_setting.drop(index=["all", CONTROLS])
    alarms = false_alarms[false_alarms.setting == "all"].set_index("delta")
    engines = {"vLLM V1": "vllm-one", "vLLM V2": "vllm-two", "TensorRT-LLM": "tensorrt", "transformers": "transformers"}
    return {
        "bugs": count(len(bugs)),
        "found": count(bugs["median"].notna().sum()),
        "seen": count((~kept["seen in"][bugs.index].str.startswith("-")).sum()),
        "unseen": count(len(unseen)),
        "unseen-by-enumeration": count((in_a_step[unseen.index] > 1e-6).sum()),
        "cap": count(CAP),
        "delta": f"{DELTA:g}",
        "large": count(len(large)),
        "large-from": f"{LARGE:g}",
        "large-audits": count(large.audits.sum()),
        "large-found": count(large.found.sum()),
        "large-median": count(large["median"].median()),
        "exact-audits": count(alarms.audits[DELTA]),
        "exact-tokens": count(of_the_pair.tokens.sum() / of_the_pair.audits.sum()),
        "exact-settings": count(len(of_the_pair)),
        "exact-rounded": count(of_the_pair.index.str.contains("bfloat16").sum()),
        "exact-engines": count(by_setting.audits[CONTROLS]),
        "exact-found": count(alarms.alarms[DELTA]),
        "exact-often": f"{alarms.alarms.index.max():g}",
        "exact-often-found": count(alarms.alarms.iloc[0]),
        "exact-often-allowed": count(alarms.alarms_allowed.iloc[0]),
        "greedy-drafts": f"{greedy['total variation']['argmax of q, tested with q']:.3f}",
        "wild": count(len(wild)),
        "wild-rejected": count((wild.verdict != "not rejected").sum()),
        "wild-tokens": count(wild.tokens.sum()),
        "wild-leak": share(wild["a leak of q shows from"].max()),
        "version": str(wild.transformers.iloc[0]),
    } | {f"missed-{label}": count((bugs[name].fillna(1) >= 0.5).sum()) for name, label in engines.items()}


def prediction(results: Results) -> Named:
    """Published speed-ups predicted, and what the decision guide's tables rest on."""
    cases, predictors = results.table("14_predictions"), results.table("14_predictors").set_index("predictor")
    errors, selection = predictors["median error"], results.table("13_selection")
    short, long = selection.iloc[0], selection.iloc[-1]
    own = predictors.loc["specnb.predict"]
    sets = results.table("14_sets").set_index("cases")
    later, third = sets.loc["second set, as first predicted"], sets.loc["third set"]
    return {
        "cases": count(len(cases)),
        "later": count(later.n),
        "later-median": share(later["median error"]),
        "later-worst": share(later["worst error"]),
        "later-inside": count(later["inside the range"]),
        "third": count(third.n),
        "third-median": share(third["median error"]),
        "third-inside": count(third["inside the range"]),
        "inside": count(cases.inside.sum()),
        "median": f"{own['median error']:.0%} [{own.low:.0%}, {own.high:.0%}]",
        "worst": share(own["worst error"]),
        "alone": share(errors["tokens per step alone"]),
        "constant": share(errors["one constant"]),
        "along": f"{short['acceptance along the text']:.2f}",
        "first-short": f"{short['of the first draft token']:.2f}",
        "first-long": f"{long['of the first draft token']:.2f}",
        "short": count(short.gamma),
        "long": count(long.gamma),
        "reading-gamma": count(results.table("13_readings").gamma.iloc[0]),
        "printed": f"{results.table('13_readings').printed.iloc[0]:g}",
    }


def verification_rules(results: Results) -> Named:
    """The verification rules compared by enumeration."""
    table = results.table("09_rules")
    rules = table.set_index("rule")
    fractions = rules["fraction of the optimum"]
    return {
        "all": count(len(table)),
        "exact": count(table.exact.sum()),
        "token": f"{fractions['token verification']:.3f}",
        "token-least": f"{rules['smallest fraction']['token verification']:.2f}",
        "hsd-code": f"{rules['largest TV'][HSD_CODE]:.2f}",
        "merged": f"{rules['largest TV'][MERGED]:.2f}",
        "recursive": f"{fractions['recursive, independent drafts']:.3f}",
    }


def rules_in_the_loop(results: Results) -> Named:
    """The verification rules on the trained pair at temperature 1: tokens per step, cost of verifying and speed."""
    table = results.table("rules_in_the_loop")
    table = table[table.temperature == 1].set_index("method")
    named = {"token": "token, chain", "block": "block, chain", "tree": "traversal, tree"}
    chain, tree = table.loc[named["token"]], table.loc[named["tree"]]
    clock = results.table("block_against_token").set_index("temperature").loc[1]
    return {
        **{f"{name}-tokens": interval(table.loc[method], "tokens_per_step") for name, method in named.items()},
        **{
            f"{name}-speed": interval(table.loc[method], "measured", "measured_low", "measured_high")
            for name, method in named.items()
        },
        "processor": results.record("rules_in_the_loop")["processor"],
        "prompts": count(chain.timed_prompts),
        "depth": count(chain.depth),
        "nodes": count(tree.nodes),
        "chain-v": f"{chain.verify_cost:.2f}",
        "tree-v": f"{tree.verify_cost:.2f}",
        "drafts": count(chain.drafts),
        "block-worse": count(chain.block_worse),
        "block-by-clock": interval(clock, "speed_ratio", "speed_ratio_low", "speed_ratio_high"),
        "block-completions": count(clock.sequences),
        "block-calls": count(clock.calls),
    }


def engines(results: Results) -> Named:
    """What the audit says of released engines."""
    table = results.table("engines").set_index("row")
    controls = table[table.speculation == "none"]
    draft, filtered = table.loc["openvino-draft-t1"], table.loc["openvino-draft-t07-k40"]
    vllm = table.loc["vllm-draft-t1"]
    sound = controls.index[controls.verdict != "rejected"]
    sampling = table[(table.speculation != "none") & (table.temperature > 0) & table.control.isin(sound)]
    found = {
        "rows": count(len(table)),
        "tokens": f"{table.tokens.sum():,}",
        "controls": count(len(controls)),
        "controls-rejected": count((controls.verdict == "rejected").sum()),
        "openvino-after": count(draft.found_after),
        "openvino-tv": interval(draft, "tv", "tv_low", "tv_high"),
        "openvino-impossible": count(filtered.impossible),
        "openvino-filtered-tokens": f"{filtered.tokens:,}",
        "vllm-after": count(vllm.found_after),
        "vllm-tv": interval(vllm, "tv", "tv_low", "tv_high"),
    }
    for engine, rows in sampling.groupby("engine"):
        name = str(engine).replace("_", "-")
        found |= {f"{name}-rows": count(len(rows)), f"{name}-rejected": count((rows.verdict == "rejected").sum())}
        if engine != "vllm_mended":  # which has the version of vllm
            found[f"{name}-version"] = str(rows.version.iloc[0])
    unaffected = sampling[sampling.engine.isin(["llama_cpp", "mlx_lm", "onnxruntime", "transformers", "vllm_mended"])]
    return found | {
        "passing-tokens": f"{unaffected.tokens.min():,}",
        "passing-leak": f"{unaffected.draft_leak_shows_from.max():.3f}",
    }


def relatives(results: Results) -> Named:
    """How many bugs the audit and other tests of the same tokens find, at one false-alarm rate."""
    table = results.table("16_detection").set_index("bug")
    harmful, held_out = table[table.group != "lossless"], table[table.group == "held out"]
    tests = ("audit", "surprise", "ranks", "marginals", "kernel", "acceptance", "greedy", "same seed")
    found = {name.replace(" ", "-"): count(harmful[name].notna().sum()) for name in tests}
    lossless = table[table.group == "lossless"]
    return found | {
        "bugs": count(len(harmful)),
        "held-out": count(len(held_out)),
        "audit-held-out": count(held_out["audit"].notna().sum()),
        "lossless": count(len(lossless)),
        "same-seed-lossless": count(lossless["same seed"].notna().sum()),
    }


PARTS = {
    "relatives": relatives,
    "rules": verification_rules,
    "loop": rules_in_the_loop,
    "engines": engines,
    "predict": prediction,
    "claims": verdicts,
    "exact": exactness,
    "tokens": tokens,
    "alpha": acceptance,
    "features": features,
    "speed": speed,
    "clock": clock,
    "drafted": drafted,
    "batch": batches,
    "beam": beam,
    "lenience": lenience,
    "audit": audit,
}


def numbers(results: Results) -> dict[str, Named]:
    """All numbers of the text by section and name, formatted as printed."""
    return {part: {name: with_minus(text) for name, text in of(results).items()} for part, of in PARTS.items()}
