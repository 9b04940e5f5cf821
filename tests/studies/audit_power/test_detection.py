"""How many tokens the audit requires, and the summary of it."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from tiny import llama, near_copy, without_tokenizer

from specnb.models.loading import Pair
from specnb_audit.bugs.bug import Bug
from studies.audit_power import detection
from studies.audit_power.bug_suite import BUG_SUITE, CAP, GROUP, SETTINGS, Audited, audited, items, measure, summary


def runs(name: str, found: Sequence[int | None], tokens: int = 100) -> pd.DataFrame:
    rows = [(name, seed, tokens, after, "draft-leak" if after else None, 0.1, 0.05, 0.15, 1000 + seed // GROUP)
            for seed, after in enumerate(found)]  # fmt: skip
    return pd.DataFrame(rows, columns=list(Audited._fields))


def test_the_summary_counts_what_was_not_found_as_more_than_the_cap() -> None:
    line = summary(runs("a", [10, 20, 30, 40, None])).iloc[0]
    assert (line.audits, line.found, line["median"]) == (5, 4, 30)
    assert np.isnan(line["90%"])
    assert line["looks like"] == "draft-leak"
    assert line.tv == pytest.approx(0.1)


def test_a_bug_that_no_audit_found_has_no_median() -> None:
    line = summary(runs("a", [None] * 5)).iloc[0]
    assert line.found == 0
    assert np.isnan(line["median"])
    assert line["looks like"] == "-"


@pytest.mark.parametrize(("detected", "audits"), [(False, GROUP), (True, 3 * GROUP)])
def test_without_a_detection_in_the_first_group_the_others_are_left_out(
    monkeypatch: pytest.MonkeyPatch, detected: bool, audits: int
) -> None:
    def group(bug: Bug, pair: Pair, seeds: Sequence[int], chunks: object) -> list[Audited]:
        return [Audited(bug.name, seed, 100, 7 if detected else None, None, 0.1, 0.0, 0.2, 500) for seed in seeds]

    monkeypatch.setattr(detection, "load_pair", lambda packed: None)
    monkeypatch.setattr(detection, "audited", group)
    made = measure("no-residual", seeds=3 * GROUP, chunks=1)
    assert made.seed.tolist() == list(range(audits))
    assert list(made.columns) == list(Audited._fields)


def test_all_bugs_are_items_and_others_are_refused() -> None:
    assert items(**SETTINGS) == list(BUG_SUITE)
    with pytest.raises(ValueError, match="no bug is called 'other'; there are exact, "):
        measure("other", **SETTINGS)


@pytest.fixture
def tiny_pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    target = llama()
    monkeypatch.setattr(detection, "prompts_of", lambda pair: [[0], [1, 2], [3]])
    monkeypatch.setattr(detection, "line_breaks", lambda pair: [3])
    monkeypatch.setattr(detection, "CHUNKS", [(4, 12), (8, 12), (16, 12)])
    return without_tokenizer(target, near_copy(target, noise=1.0))


def test_audits_of_a_gross_bug_find_it_and_those_of_an_exact_sampler_do_not(tiny_pair: Pair) -> None:
    wrong = audited(BUG_SUITE["inverted-residual"], tiny_pair, [0, 1])
    assert all(one.found_after is not None and one.found_after <= one.tokens for one in wrong)
    right = audited(BUG_SUITE["exact"], tiny_pair, [0, 1])
    assert [one.found_after for one in right] == [None, None]
    assert all(one.tokens == (4 + 8 + 16) * 12 <= CAP for one in right)


def test_tokens_after_the_end_are_detected_at_once(tiny_pair: Pair) -> None:
    assert {one.kind for one in audited(BUG_SUITE["after-the-end"], tiny_pair, [0])} == {"after-the-end"}
