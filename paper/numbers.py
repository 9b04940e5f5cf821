"""Every number that the paper names: what it is, and from which result it is read.

A number is a formula over `data/results/*.csv`, or a phrase of the evidence for a claim. Nothing is typed here
or in the text, so a result that changes changes the paper, and one that is missing stops it by name.
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
from specnb.experiments.detection import CAP, DELTA
from specnb.report.results import CLAIMS, VERDICTS
from specnb.theory import walltime_improvement

Named = dict[str, str]
TOKENS = 5  # of the run over which the cost of verifying is told
LARGE = 0.02  # of total variation per token: what no audit should miss


def verdicts(results: Results) -> Named:
    claims = results.claims()
    counts = {verdict: int((claims.verdict == verdict).sum()) for verdict in VERDICTS}
    missing = sorted(set(claims.notebook[claims.verdict == "open"].str.zfill(2)))
    return {verdict: str(number) for verdict, number in counts.items()} | {
        "all": str(len(claims)),
        "own": str(int((pd.read_csv(CLAIMS, dtype=str).source == "beyond").sum())),
        "settled": str(len(claims) - counts["open"]),
        "open-notebooks": ", ".join(missing[:-1]) + f" and {missing[-1]}" if len(missing) > 1 else "".join(missing),
    }


def exactness(results: Results) -> Named:
    joint, mutants = results.table("01_joint"), results.table("01_mutants").set_index("rule")
    draws = results.table("01_convergence")
    most = draws[draws.rule == "token_verification"].iloc[-1]
    runs = results.table("01_target_runs").set_index("drafter")
    real = results.table("01_rejection_sampling").set_index("distributions").loc["trained pair"]
    named = {
        "settings": count(len(joint)),
        "error": f"{joint.error.max():.0e}",
        "largest-vocab": count(joint.vocab.max()),
        "largest-gamma": count(joint.gamma.max()),
        "pairs": results.quote("unbiasedness", r"([\d,]+) of [\d,]+ pairs of distributions"),
        "given-length": results.quote("algorithm-1-joint", r"\(TV ([\d.]+) in 1-token steps\)"),
        "draws": count(most.n),
        "draws-tv": f"{most['mean TV']:.5f}",
        "draws-tv-exact": f"{most['expected of an exact one']:.5f}",
        "float32": results.quote("unbiasedness", r"and (\S+) in float32"),
        "other-replacements": results.quote("residual-unique", r"is exact in ([\d,]+) of"),
        "same-seed": results.quote(
            "same-distribution-not-same-text", r"a share of ([\d.]+ \[[\d., ]+\] \(n = [\d,]+\))"
        ),
        "uniform-runs": count(runs["target runs"]["uniform"]),
        "plain-runs": count(runs["target runs"]["none (standard decoding)"]),
        "trained-runs": count(runs["target runs"]["trained draft"]),
        "beta": f"{real['mean beta']:.2f}",
        "one-shot": f"{real['mean 1/M']:.4f}",
    }
    for rule in ("no_residual", "stale_bonus", "printed_step_7"):
        label = rule.replace("_", "-").removesuffix("-7")
        named[label] = f"{mutants['joint, context'][rule]:.3f}"
        named[f"{label}-first"] = f"{mutants['first token'][rule]:.3f}"
        named[f"{label}-flat"] = f"{mutants['joint, no context'][rule]:.3f}"
    return named


def tokens(results: Results) -> Named:
    figure2, best = results.table("02_figure2"), results.table("02_best_gamma")
    inside = ((figure2.low <= figure2.equation_1) & (figure2.equation_1 <= figure2.high)).sum()
    lag = results.table("02_autocorrelation").iloc[0]
    ladder = results.table("02_ladder").set_index(["temperature", "assumptions"]).change
    lesson, footnote = "lesson-expected-tokens", "stratos-length-footnote"
    return {
        "simulations": count(len(figure2)),
        "inside": count(inside),
        "steps": count(figure2.n.max()),
        "fit-hot": results.quote("iid-assumption", r"temperature 1: fit of the count distribution p = ([\d.e-]+)"),
        "fit-cold": results.quote("iid-assumption", r"temperature 0: fit of the count distribution p = ([\d.e-]+),"),
        "lag": interval(lag),
        "off-hot": results.quote("iid-assumption", r"off by (\S+ \[[^\]]+\]); temperature 0"),
        "off-cold": results.quote("iid-assumption", r"temperature 0.*off by (\S+ \[[^\]]+\])"),
        "gained-anywhere": f"{ladder[1, 'anywhere']:.2f}",
        "lost-where-steps-begin": f"{-ladder[1, 'where steps begin']:.2f}",
        "gamma-costs": share((1 - best.there / best.at_best).max(), 1),
        "lesson-right": results.quote(lesson, r"gives ([\d.]+) tokens"),
        "lesson-wrong": results.quote(lesson, r"not ([\d.]+) and"),
        "lesson-right-speed": results.quote(lesson, r"tokens and ([\d.]+)x"),
        "lesson-wrong-speed": results.quote(lesson, r"not [\d.]+ and ([\d.]+)x"),
        "footnote-wrong": results.quote(footnote, r"footnote ([\d.]+),"),
        "footnote-right": results.quote(footnote, r"Equation 1 ([\d.]+),"),
    }


def acceptance(results: Results) -> Named:
    specnb_generate = results.table("04_table3")
    specnb_generate = specnb_generate[specnb_generate.target.str.startswith("this pair")]
    target, draft = (
        specnb_generate.target.iloc[0].split()[-1],
        specnb_generate.draft[specnb_generate.draft.str.endswith("M")].iloc[0],
    )
    specnb_generate = specnb_generate.set_index(["draft", "temperature"])
    needed = results.table("04_needed").set_index("temperature").loc[1]
    return {
        "target": target.removesuffix("M"),
        "draft": draft.removesuffix("M"),
        "hot": interval(specnb_generate.loc[draft, 1], "alpha", digits=3),
        "cold": interval(specnb_generate.loc[draft, 0], "alpha", digits=3),
        "bigram": interval(specnb_generate.loc["bigram", 1], "alpha", digits=3),
        "unigram": interval(specnb_generate.loc["unigram", 1], "alpha", digits=3),
        "unigram-cold": interval(specnb_generate.loc["unigram", 0], "alpha", digits=3),
        "n": count(specnb_generate.n.max()),
        "distributions-alone": results.quote(
            "table-3-shape", r"distributions on the text of T = 1: (-?[\d.]+ \[[^\]]+\])"
        ),
        "text-alone": results.quote("table-3-shape", r"text under the distributions of T = 1: (-?[\d.]+ \[[^\]]+\])"),
        "distributions-there": results.quote(
            "table-3-shape", r"distributions on the text of T = 0: (-?[\d.]+ \[[^\]]+\])"
        ),
        "text-there": results.quote("table-3-shape", r"text under the distributions of T = 0: (-?[\d.]+ \[[^\]]+\])"),
        "very-hot": results.quote("table-3-shape", r"at T = 8 it is (\d\.\d+)"),
        "needed": count(needed.needed),
        "needed-if-independent": count(needed["if independent"]),
    }


def speed(results: Results) -> Named:
    moves = results.table("03_optimum_moves").set_index("v")
    table4, choice, oracle = results.table("03_table4"), results.table("03_gamma_choice"), "oracle-gamma"
    variance = results.table("03_alpha").set_index("temperature").loc[1]
    return {
        "variance-token": f"{variance['variance ratio per token']:.2f}",
        "variance-mean": f"{variance['variance ratio of the mean']:.2f}",
        "smaller": share(moves.smaller["per token"]),
        "larger": share(moves.larger["in blocks"]),
        "lost": share(moves["most speed lost"].max()),
        "loses": share(moves["slower than plain"]["in blocks"]),
        "oracle": results.quote(oracle, r"at most ([\d.]+%) for alpha"),
        "oracle-limit": results.quote(oracle, r"= ([\d.]+%) if"),
        "table4-same": count(table4["same digits"].sum()),
        "table4-all": count(len(table4)),
        "table4-explained": count(table4.explained.sum()),
        "table4-least": share(table4["share of box"].min()),
        "largest-c": f"{table4.cost_ratio.max():g}",
        "gamma-optimal": count((choice.gamma == choice.optimal).sum()),
        "gamma-lost": share(choice.lost.max(), 1),
        "encoder": results.quote("encoder-bound", r"by up to ([\d.]+) times"),
        "encoder-from": count(int(results.quote("encoder-bound", r"needs (\d+) tokens"))),
    }


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
        "n": count(TOKENS),
        "cases": count(len(walltime)),
        "within-v": count(((ratio - 1).abs() <= 0.1).sum()),
        "within-printed": count(((printed - 1).abs() <= 0.1).sum()),
        "within-counted": results.quote("theory-predicts-walltime", r"really gave in (\d+)"),
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
    named = {
        "trees": count(trees.trees.sum()),
        "differ": count(trees["different: A.4"].sum()),
        "slack": count(trees["different: w - 1 suffice"].sum()),
        "penalty": count(trees["different: penalty forgotten"].sum()),
        "searches": count(same["same beams"].sum()),
        "reference": results.quote(claim, r"transformers in (\d+ of \d+) searches"),
        "apart": f"{same['scores apart'].max():.0e}",
        "narrow": results.quote(claim, r"probability ([\d.]+ to [\d.]+) for u = w"),
        "wide": results.quote(claim, r"and ([\d.]+ to [\d.]+) for u = 4w"),
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
    return named | {"cheap-u": count(cheap.u), "cheap-gamma": count(cheap.gamma)}


def batches(results: Results) -> Named:
    cuts = results.table("10_truncation").set_index("cut")["gamma 3"]
    noticed = results.table("10_noticed")
    later = noticed[noticed.step > 0].groupby("way").median()
    refill, peak = results.table("10_refill").set_index("plan")["at work"], results.table("10_peak")
    named = {
        "redrawn": f"{cuts['the same, last token drawn anew']:.3f}",
        "stays": f"{cuts['only n_max - n drafts dropped']:.3f}",
        "rows": results.quote("batch-padding", r"tokens a step at (\d+) rows"),
        "shortest": results.quote("batch-padding", r"gives ([\d.]+) tokens a step"),
        "own": results.quote("batch-padding", r"in place of ([\d.]+)"),
        "one-too-many": results.quote("cache-prune-counts", r"an accepted token, in (\d+ of \d+) cases"),
        "newest": results.quote("cache-prune-counts", r"over the newest token only, right in (\d+ of \d+)"),
        "first-run": results.quote("first-target", r"costs 1 - 1/E = ([\d.]+) target runs"),
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
        "cases": results.quote("lenience-bound", r"(\d+) enumerated steps"),
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
    kept = results.table("11_bug_suite").set_index("bug")
    in_a_step = kept["exact TV of a step"]
    greedy = results.table("11_greedy_drafts").set_index("draft_tokens")
    large = bugs[bugs.tv >= LARGE]
    alarms = results.table("false_alarms").set_index("delta")
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
        "exact-tokens": count(alarms.tokens[DELTA]),
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


PARTS = {
    "claims": verdicts,
    "exact": exactness,
    "tokens": tokens,
    "alpha": acceptance,
    "speed": speed,
    "clock": clock,
    "batch": batches,
    "beam": beam,
    "lenience": lenience,
    "audit": audit,
}


def numbers(results: Results) -> dict[str, Named]:
    """All numbers of the text, by section and name, as they are printed."""
    return {part: {name: with_minus(text) for name, text in of(results).items()} for part, of in PARTS.items()}
