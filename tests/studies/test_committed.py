"""A small part of the tables of which that takes seconds, computed again and compared with the
committed rows; those of the audit are in its own tests.

Columns of times are not compared. Counts of decoding in float32 have a tolerance: another processor
rounds in other ways.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from specnb.beam import beam_search
from specnb.distributions import Sampling
from specnb.loading import Pair, load_pair
from specnb.rules import token_verification
from specnb.sampler import Sampler
from studies.beams import beam_speeds
from studies.drafters import drafters, released_formats
from studies.drafters.tables import UniformDrafter
from studies.files import ROOT
from studies.rules import rules_in_the_loop
from studies.rules.rules_in_the_loop import Method
from studies.speed import pair_speeds, t5_passes
from studies.speed.calls import way_of
from studies.speed.pairs import prompts_of
from studies.study import find


def rounded(value: float) -> Any:
    """A count of decoding in float32."""
    return pytest.approx(value, rel=0.02, abs=0.02)


def committed(name: str, **values: Any) -> pd.DataFrame:
    """The rows of a committed table that have these values."""
    table = pd.read_csv(ROOT / "data" / "results" / f"{name}.csv", dtype={"depth": str})
    for column, value in values.items():
        table = table[table[column] == value]
    assert len(table), f"{name} has no such rows"
    return table.reset_index(drop=True)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair()


def test_drafters(pair: Pair) -> None:
    text, size = "repetitive", find("drafters").settings
    entry = drafters.Entry(lambda _: UniformDrafter(pair.target.config.vocab_size), 1)
    prompts = drafters.prompts_of(pair, text, size["sequences"])
    counts = drafters.counts_of(drafters.record_of(pair.target, prompts, entry, Sampling(), size["new_tokens"]))
    (row,) = committed("drafters", text=text, drafter="random").to_dict("records")
    for name, estimate in counts.items():
        assert estimate.value == rounded(row[name]), name


def test_rules_in_the_loop(pair: Pair) -> None:
    size = find("rules_in_the_loop").settings
    n = size["sequences"]
    prompts = prompts_of(pair, "held-out", 2 * n)[n:]
    made = rules_in_the_loop.run_method(pair, Sampling(0.0), size["new_tokens"], Method(token_verification), prompts)
    (row,) = committed("rules_in_the_loop", temperature=0, method="token, chain").to_dict("records")
    active = made.record.active
    assert int(active.sum()) == pytest.approx(row["steps"], rel=0.02)
    emitted = ((made.record.accepted + 1) * active).sum()
    assert emitted / active.sum() == rounded(row["tokens_per_step"])


def test_pair_speeds(pair: Pair) -> None:
    """Tokens per step of the EAGLE-3 head at temperature 0."""
    name, size, greedy = "EAGLE-3 head", find("pair_speeds").settings, Sampling(0.0)
    (row,) = committed("pair_speeds", drafter=name, temperature=0, prompts="held-out").to_dict("records")
    drafter = pair_speeds.drafters_of(pair, greedy, False)[name]
    sampler = Sampler(pair.target, drafter, gamma=int(row["gamma"]), sampling=greedy, compile=False, check=False)
    way = way_of(sampler, size["new_tokens"])
    prompts = prompts_of(pair, "held-out", size["prompts"], size["prompt_tokens"])
    passes = sum(len(way(number, prompt)[1]) for number, prompt in enumerate(prompts))
    assert len(prompts) * size["new_tokens"] / passes == rounded(row["tokens_per_step"])


def test_t5_passes() -> None:
    """The steps of its trace with the longest draft, which are the fewest."""
    size = find("t5_passes").settings
    (gamma, tokens), table = (size["gammas"][-1], size["new_tokens"]), committed("t5_passes")
    assert t5_passes.steps_of(gamma, tokens) == table.steps[table.n == gamma + 1].item()


def test_beam_speeds(pair: Pair) -> None:
    """Levels per step of the first choice of draft width and gamma."""
    size, (u, gamma) = find("beam_speeds").settings, beam_speeds.CHOICES[0]
    prompts = prompts_of(pair, "held-out", size["prompts"], size["prompt_tokens"])
    levels = [
        beam_search(
            pair.target, prompt, pair.draft, width=beam_speeds.WIDTH, max_new_tokens=size["new_tokens"],
            draft_width=u, gamma=gamma, progress=False,
        ).record.levels
        for prompt in prompts
    ]  # fmt: skip
    (row,) = committed("beam_speeds", u=u, gamma=gamma).to_dict("records")
    assert sum(map(sum, levels)) / sum(map(len, levels)) == rounded(row["levels_per_step"])


def test_released_formats() -> None:
    """All draft tokens and completions are the same; here those of one text are drafted again."""
    table = committed("released_formats")
    assert set(table.comparison) == {"transformers", "speculators 0.9.0"}
    again = pd.DataFrame(released_formats.rows("transformers", texts=1, new_tokens=4, places=0))
    for made in (table, again):
        assert (made.equal == made.places).all()
        assert (made.difference.dropna() < 1e-5).all()
        assert (made.generated_equal.dropna() == made.texts.dropna()).all()
    assert list(again.format) == list(table.format[: len(again)])
