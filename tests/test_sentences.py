"""Sentences of README and notebooks that quote numbers of tables: each stands there as the
committed tables have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from studies.files import located

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "data" / "results"


def _table(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / located("data/results", f"{name}.csv"))


def _sentences() -> Iterator[tuple[str, str]]:
    packed = _table("12_verify_cost").query("layout == 'packed'").groupby("dtype")["v(5)"].agg(["min", "max"])
    single = "{min:.2f} to {max:.2f}".format(**packed.loc["float32"].to_dict())
    yield "12", f"five tokens cost {single} of one in float32, and at most {packed['max']['bfloat16']:.2f} in bfloat16"
    every = _table("12_tables").set_index("table")
    costed, free = (every[every.free.notna()].drop("all")[name].sum() for name in ("rows", "free"))
    said = f"Of {every.rows['all']} recorded speed-ups {every.within['all']} are within ten per cent of the prediction"
    yield "12", f"{said}; if verifying is taken to be free, {free:.0f} of {costed}"
    groups = (["drafters", "drafter_choice"], ["bench_walltime", "recommendation"])
    here, elsewhere = ("{within} of {rows}".format(**every.loc[names, ["within", "rows"]].sum()) for names in groups)
    yield "12", f"{here} predictions are within ten per cent; where $\\alpha$ and the costs"
    yield "12", f"and the costs were measured apart (chains), {elsewhere}"
    over = _table("pair_speeds").query("compiled and drafter != 'none' and prompts == 'held-out'").speed_up - 1
    yield "12", f"gain {100 * over.min():.0f} to {over.max():.0%} on text like its training text"
    lengths = _table("adaptive_lengths").set_index("rule")
    ends = ["over_best", "over_best_low", "over_best_high"]
    best, egag, auto, informed, most = (
        "{:.2f} [{:.2f}, {:.2f}]".format(*lengths.loc[name, ends])
        for name in ("calibrated", "EGAG", "auto", "auto, measured costs", "oracle")
    )
    yield "09", f"`calibrated`, with {best} of its speed"
    yield "09", f"EGAG reaches {egag} of it, the bandit"
    yield "09", f"and `auto` {auto}, with the measured costs {informed}; the oracle has {most}"
    exits = _table("early_exits")
    assert (exits.alpha_high < exits.c).all()
    least, most = exits.min(numeric_only=True), exits.max(numeric_only=True)
    shares = f"{least.c:.2f} to {most.c:.2f}, in all {len(exits)} rows"
    yield "09", rf"$\alpha$, {least.alpha:.2f} to {most.alpha:.2f}, is below $c$, {shares}"
    reached = f"the nested draft reaches {least.nested:.2f} to {most.nested:.2f} of plain decoding"
    yield "09", f"{least.passes:.2f} to {most.passes:.2f} remain of 3, and {reached}"
    eager = _table("gpu").query("kind == 'call' and way == 'plain, eager'").set_index("models").speed_up
    large, real = eager["6b"], eager["smollm2"]
    gains = f"for a target of 6 billion weights, and {1 / real.max():.1f} to {1 / real.min():.1f} times for SmolLM2"
    yield "docs/decode.md", f"is then {1 / large:.1f} times as fast as without {gains}"
    real = _table("workloads").set_index(["way", "kind", "temperature", "top_p"]).sort_index()
    both, lookup = real.loc["copies or head 1, compiled"], real.loc["transformers, prompt lookup"].ms_per_token
    gains = f"{both.speed_up.min():.2f} to {both.speed_up.max():.2f}"
    assert (both.over == "plain, compiled").all()
    yield "13", f"are {gains} times as fast as compiled plain decoding"
    yield "13", f"both together are {gains} times as fast as compiled plain decoding"
    yield "13", f"and {(both.speed_up_low > 1).sum()} of {len(both)} intervals lie above 1"
    ahead = lookup / both.ms_per_token
    yield "13", f"compiled, {ahead.min():.2f} to {ahead.max():.2f} times in all {len(both)}"
    ahead = real.loc["llama.cpp, n-grams"].ms_per_token / both.ms_per_token
    said = f"above 1 in {(ahead > 1).sum()} of {len(ahead)}"
    yield "13", f"it is {ahead.min():.2f} to {ahead.max():.2f} times as fast: {said}"
    chosen = real.loc[["auto", "auto, compiled"]]
    above, below = (chosen.speed_up_low >= 0.97).sum(), (chosen.speed_up_high < 0.97).sum()
    yield "13", f"Of the {len(chosen)} intervals, eager and compiled, {above} lie above 0.97 entirely and {below} below"
    held_out = _table("audit/04_held_out")
    fit, nearer = ((held_out[way] / held_out.measured - 1).abs().median() for way in ("fit", "nearer line"))
    yield (
        "audit/docs/speed.md",
        f"is off by {nearer:.0%} in the median, where two lines that are fitted are off by {fit:.0%}",
    )
    first = _table("audit/04_sets").set_index("cases")["median error"]
    said = f"the constant does as well: {first['first set, one constant']:.0%}, where the prediction has "
    yield "audit/docs/speed.md", f"{said}{first['first set, today']:.0%}"
    bugs = _table("audit/03_detection").query("group != 'lossless'").set_index("bug")
    others = bugs.filter(regex=", draft$|kernel").notna().any(axis=1)
    assert list(bugs.index[bugs.audit.notna() & ~others]) == ["tail-truncated"]
    assert list(bugs.index[bugs.audit.isna() & others]) == ["unverified"]
    yield "audit/03", f"of {len(bugs)} bugs, one that no other test of the distribution with q finds"


def _source(number: str, kind: str) -> str:
    (path,) = ROOT.glob(located("notebooks", f"{number}_*.ipynb"))
    return "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind)


@pytest.mark.parametrize(("page", "sentence"), list(_sentences()))
def test_a_sentence_says_what_the_tables_say(page: str, sentence: str) -> None:
    text = (ROOT / page).read_text() if page.endswith(".md") else _source(page, "markdown")
    assert " ".join(sentence.split()) in " ".join(text.split())
