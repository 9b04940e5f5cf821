"""Sentences of README and notebooks that quote numbers of tables: each stands there as the
committed tables have it."""

from __future__ import annotations

import json
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


def _stored(number: str, claim: str, name: str) -> float:
    return json.loads((RESULTS / f"{number}.numbers.json").read_text())[claim][name]  # type: ignore[no-any-return]


def _sentences() -> Iterator[tuple[str, str]]:
    gain = _table("distillation").set_index(["temperature", "draft", "along"]).over_shipped[1]
    names = ("total variation", "reverse KL", "forward KL")
    text, own = ([f"{gain[name][along]:.3f}" for name in names] for along in ("held-out text", "samples of the target"))
    yield "10", f"total variation adds {text[0]} along text and {own[0]} along samples, reverse KL {text[1]}"
    yield "10", f"reverse KL {text[1]} and {own[1]}, forward KL {text[2]} and {own[2]}, and more text nothing"
    heads = _table("feature_drafts").query("along == 'held-out text'").set_index(["draft", "depth"]).alpha
    drafts = (("attention", "all"), ("without states", "all"), ("of tokens", "all"), ("parallel", "1"))
    told = "reaches {:.2f}, the same head without them {:.2f}, a small model of tokens {:.2f}, and a drafter of one "
    yield "10", (told + "call at most {:.2f}").format(*(heads[draft] for draft in drafts))
    alone = _table("feature_drafts").query("draft == 'without states' and depth == 'all'")
    added = ["{:.3f} [{:.3f}, {:.3f}]".format(*row) for row in alone.filter(like="states_add").itertuples(index=False)]
    yield "10", f"The states add {added[0]} to $\\alpha$ along text and {added[1]} along samples of the target"
    first = _table("10_lookahead_vectors").set_index("depth").loc[1]
    told = "of {:.2f} at the first vector, the trained ones reach {:.2f}, and three vectors of zeros {:.2f}"
    yield "10", told.format(*first[["mean embedding", "trained", "zero"]])
    three = _table("10_several_drafts").set_index("drafts").loc[3]
    told = "greedy token at {:.2f} of the positions, three of thirds at {:.2f}"
    yield "10", told.format(*three[["in sequence", "of thirds"]])
    t5 = _table("encoder_decoder_speeds").query("gamma > 0")
    c = {at: "{min:.2f} to {max:.2f}".format(**rows.agg(["min", "max"])) for at, rows in t5.groupby("drafter").c}
    small = t5[t5.drafter.isin(["small", "tiny"])].c.agg(["min", "max"])
    yield "10", f"{c['large']} for `large`, {c['base']} for `base`, and then stays at"
    yield "10", "and then stays at {min:.2f} to {max:.2f}".format(**small)
    yield "10", f"in {(t5.speed_up < t5.predicted).sum()} of {len(t5)} rows smaller than predicted"
    cut = [_stored("11", "batch-padding", f"tokens_{name}") for name in ("shortest", "own")]
    yield "11", "eight rows together then emit {:.2f} tokens per step instead of {:.2f}".format(*cut)
    gpu = _table("gpu")
    audits = gpu[gpu.kind == "audit"]
    assert (audits.verdict == "not rejected").all()
    yield "11", f"the total variation of a token is at most {audits.tv_high.max():.3f}"
    timed = gpu[gpu.speed_up.notna()].replace({"prompts": {"random": ""}})
    timed = timed.set_index(["kind", "models", "prompts", "temperature", "rows", "way"]).sort_index()
    ends = timed[["speed_up", "speed_up_low", "speed_up_high"]]
    said = ends.apply(lambda row: "{:.2f} [{:.2f}, {:.2f}]".format(*row), axis=1)
    six = {1: said["call", "6b", "", 1, 1, "model 4, graph"], 16: said["graph", "6b", "", 1, 16, "model 4, graph"]}
    yield "11", f"give {six[1]} with the large target and {six[16]} with 16 rows"
    copies = said.loc["graph", "smollm2", :, :, 1, "copies 8, graph"]
    yield "11", f"give {copies['summary', 0]} for summaries and {copies['edit', 0]} for edited text at temperature 0"
    yield "11", f"they give {copies['chat', 0]} at temperature 0 and {copies['chat', 1]} at 1"
    heads = timed.loc["graph", "smollm2", :, 1, 1, "head 2, graph"]
    assert (heads.speed_up_low > 1).all()
    assert len(heads) == 3
    yield "11", f"on all three texts, {heads.speed_up.min():.2f} to {heads.speed_up.max():.2f}"
    pair = timed.loc["graph", "pair", "text", 1, 1, "model 4, graph"]
    yield "11", f"The shipped pair gains nothing, {said[pair.name]} with four tokens"
    cost = pair.tokens_per_step / pair.predicted
    yield "11", f"gives {pair.tokens_per_step:.2f} tokens and, by the passes, costs {cost:.2f} plain"
    chosen = timed.loc["graph", "smollm2", "chat", :, 1, "copies auto, graph"].speed_up.min()
    yield "11", f"(`auto`) lost up to {1 - chosen:.2f} on chat"
    yield "11", f"a draft model `auto` reached {timed.speed_up['graph', '6b', '', 1, 16, 'model auto, graph']:.2f}, "
    eager = timed.loc["call", :, :, :, 1, "plain, eager"].speed_up
    large, real = eager["6b"].item(), eager["smollm2"]
    yield "11", f"{large:.2f} of the time of an eager one with 6 billion weights, and {real.max():.2f} with 135 million"
    assert f"{real.min():.2f}" == f"{real.max():.2f}"
    told = "With acceptance set to 0.8 and the best of three gammas, replayed speculation is"
    yield "11", f"takes {large:.2f} of the time of an eager one. {told} {six[1][:4]}"
    expected = timed.predicted["call", "6b", "", 1, 1, "model 4, graph"]
    yield "11", f"The prediction for the large target, {expected:.2f}, is too high"
    off = timed[timed.predicted.notna()].query("way.str.startswith('copies')").eval("predicted / speed_up - 1")
    high = off[off > 0.1]
    assert high.index.isin([0], level="temperature").all()
    yield "11", f"within a tenth in {(off.abs() <= 0.1).sum()} of {len(off)} rows; in the other four"
    yield "11", f"it is {high.min():.0%} to {high.max():.0%} too high"
    passes = _table("gpu").query("kind == 'pass' and model == 'target' and models == '6b' and way == 'graph'")
    costs = passes.set_index(["rows", "n"]).cost
    one, sixteen = (costs[size, 17] - costs[size, 2] for size in (1, 16))
    yield "11", f"adds {one:.2f} with one row, and {sixteen:.2f} with 16 rows"
    first = gpu.query("kind == 'pass' and model == 'target' and way == 'graph' and n == 2").cost - 1
    yield "11", f"Captured, the first adds {first.min():.2f} to {first.max():.2f}"
    gains = f"for a target of 6 billion weights, and {1 / real.max():.1f} to {1 / real.min():.1f} times for SmolLM2"
    yield "docs/decode.md", f"is then {1 / large:.1f} times as fast as without {gains}"
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
