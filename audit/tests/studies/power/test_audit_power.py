"""The studies of the audit's power on small samples: what each test finds, and what their tables
count."""

import numpy as np
import pytest
import torch
from tiny import llama, near_copy, without_tokenizer

from audit_studies.bugs.known_bugs import EXACT, KNOWN_BUGS
from audit_studies.power import audit_comparison, bug_suite
from audit_studies.power.audit_comparison import counted, pieces, tokens_to_detection
from audit_studies.power.bug_suite import BUG_SUITE, audited
from audit_studies.power.compared_samples import LENGTH
from audit_studies.power.engine_checks import CHECKS, emitted, exercised, greedy_passes
from specnb.loading import Pair
from specnb.statistics import goodness_of_fit

P, Q = (torch.tensor(probs, dtype=torch.float64) for probs in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))


@pytest.fixture
def tiny_pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    target = llama()
    monkeypatch.setattr(bug_suite, "prompts_of", lambda pair: [[0], [1, 2], [3]])
    monkeypatch.setattr(bug_suite, "line_breaks", lambda pair: [3])
    monkeypatch.setattr(bug_suite, "CHUNKS", [(4, 12), (8, 12), (16, 12)])
    return without_tokenizer(target, near_copy(target, noise=1.0))


# The audit beside other tests


def test_runs_are_counted_on_disjoint_pieces() -> None:
    for budget in audit_comparison.BUDGETS:
        covered = [row for at in pieces(budget, 4) for row in range(at.start, at.stop)]
        assert len(covered) == len(set(covered)) == min(4, 20_000 // budget) * budget // LENGTH
    found = [("x", 200, 0.5), ("x", 200, 0.04), ("x", 200, 0.001), ("x", 500, 0.001), ("x", 500, 0.0), ("y", 200, 0.5)]
    lines = counted("a", found)
    assert lines[["runs", "rejected", "below_5_percent"]].to_numpy().tolist() == [[3, 1, 2], [2, 2, 2], [1, 0, 0]]
    assert tokens_to_detection(lines).loc["a"].tolist() == pytest.approx([500, np.nan], nan_ok=True)


# Bugs in the trained pair


def test_audits_of_a_gross_bug_find_it_and_those_of_an_exact_sampler_do_not(tiny_pair: Pair) -> None:
    assert all(one.found_after is not None for one in audited(BUG_SUITE["inverted-residual"], tiny_pair, [0, 1]))
    right = audited(BUG_SUITE["exact"], tiny_pair, [0, 1])
    assert [(one.found_after, one.tokens) for one in right] == [(None, (4 + 8 + 16) * 12)] * 2
    assert {one.kind for one in audited(BUG_SUITE["after-the-end"], tiny_pair, [0])} == {"after-the-end"}


# The engines' own checks


def test_steps_of_an_exact_sampler_have_the_target_s_distribution_at_every_position() -> None:
    blocks = emitted(EXACT, P, Q, 2, 60_000, np.random.default_rng(0))
    for column in blocks.T:
        counts = torch.bincount(column[column >= 0], minlength=3)
        assert goodness_of_fit(counts.numpy(), P.numpy()).p_value > 1e-6
    # Nothing stands behind the last token.
    assert ((blocks[:, 1:] >= 0) <= (blocks[:, :-1] >= 0)).all()
    argmax = emitted(KNOWN_BUGS["always-argmax"], P, Q, 1, 100, np.random.default_rng(0))[:, 0]
    assert argmax.unique().tolist() == [0]


@pytest.mark.parametrize("check", ["vLLM V1", "TensorRT-LLM"])
def test_a_check_of_one_rule_finds_that_rule_s_bugs_only(check: str) -> None:
    bugs = {"exact": EXACT} | KNOWN_BUGS
    passes = {
        name: CHECKS[check][0](bugs[name], np.random.default_rng(1))
        for name in ("exact", "wrong-slice", "inverted-residual", "always-accepting")
    }
    assert passes == {"exact": True, "wrong-slice": True, "inverted-residual": False, "always-accepting": False}
    unseen = {name for name, bug in KNOWN_BUGS.items() if not exercised(bug)}
    assert {"raw-q", "filter-order", "soft-greedy", "bonus-cache", "eos-inside"} <= unseen
    assert not {"no-residual", "reseeded", "greedy-draft-soft-q", "always-accepting"} & unseen


def test_greedy_equality_sees_caches_and_no_sampling_bug(tiny_pair: Pair) -> None:
    prompts = [[0], [1, 2], [3, 3, 1], [2]]
    passes = {name: greedy_passes(BUG_SUITE[name], tiny_pair, prompts, 12) for name in ("exact", "no-residual")}
    assert passes == {"exact": True, "no-residual": True}
    assert not greedy_passes(KNOWN_BUGS["rejected-stays"], tiny_pair, prompts, 12)
