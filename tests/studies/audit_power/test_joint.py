"""The exact mode: its evidence has expectation 1, enumerated, and finds what the joint distribution alone shows."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from itertools import product

import numpy as np
import pytest
import torch
from distributions_for_tests import distribution_pair
from scipy import special, stats

from specnb.enumeration import joint_distribution
from specnb.measure.statistics import detectable_total_variation, merge_rare_cells
from studies.audit_power.joint import JointReport, audit_joint


def sampled(joint: np.ndarray, n: int, seed: int = 0) -> list[list[int]]:
    flat = np.random.default_rng(seed).choice(joint.size, p=joint.ravel() / joint.sum(), size=n)
    return [[int(token) for token in text] for text in zip(*np.unravel_index(flat, joint.shape), strict=True)]


@pytest.mark.parametrize("kind", ["dense", "zeros in p", "one-hot p"])
def test_the_expected_evidence_is_one(kind: str) -> None:
    """Over all outcomes of three sequences of two tokens."""
    p, _ = distribution_pair(kind, 2, seed=3)
    chances = {text: float(joint_distribution(p, 2)[text]) for text in product(range(2), repeat=2)}
    expected = 0.0
    for completions in product(chances, repeat=3):
        chance = float(np.prod([chances[text] for text in completions]))
        if chance > 0:
            expected += chance * 10 ** audit_joint(p, completions, 2).log10_e
    assert expected == pytest.approx(1)


def test_exact_sequences_pass_and_others_do_not() -> None:
    p, q = distribution_pair("dense", 4, seed=1)
    right = joint_distribution(p, 3).numpy()
    report = audit_joint(p, sampled(right, 5000), 3)
    assert not report.rejected
    assert report.p_value > 1e-3
    assert report.cells == 64
    assert 0 < report.detectable < 0.2
    wrong = 0.9 * right + 0.1 * joint_distribution(q, 3).numpy()
    report = audit_joint(p, sampled(wrong, 5000), 3)
    assert report.rejected
    assert report.p_value < 1e-6
    assert "REJECTED" in str(report)


def test_a_deviation_that_only_the_joint_distribution_shows() -> None:
    """The first token and the second have the right distributions; that they are equal is wrong."""
    p = lambda context: distribution_pair("dense", 2)[0](()) * 0 + 0.5  # noqa: E731
    completions = [[0, 0], [1, 1]] * 40
    assert audit_joint(p, completions, 2).rejected
    assert not audit_joint(p, completions, 1).rejected


def test_sequences_that_end_early_are_counted() -> None:
    p, _ = distribution_pair("dense", 3, seed=2)
    joint = joint_distribution(p, 2).numpy()
    completions = [text[:1] if text[0] == 1 else text for text in sampled(joint, 3000)]
    report = audit_joint(p, completions, 2, eos=1)
    assert report.cells == 7
    assert not report.rejected
    assert Counter(map(len, completions))[1] > 0


def test_impossible_sequences_are_counted() -> None:
    p, _ = distribution_pair("one-hot p", 3, seed=0)
    certain = int(p(()).argmax())
    report = audit_joint(p, [[(certain + 1) % 3]] * 2, 1)
    assert report.rejected
    assert report.impossible == {((certain + 1) % 3,): 2}
    assert report.p_value == 0


@pytest.mark.parametrize(
    ("completions", "length", "words"),
    [
        ([], 2, "no completions"),
        ([[0]], 2, "completion 0 has 1 tokens"),
        ([[0, 1], [0, 7]], 2, "completion 1 begins with"),
        ([[0] * 40], 40, "sequences of length 40"),
    ],
)
def test_bad_input_is_refused(completions: list[list[int]], length: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        audit_joint(distribution_pair("dense", 3)[0], completions, length)


# Against calculations of their own


def test_every_number_of_a_report_is_that_of_its_definition() -> None:
    """Three tokens, two at most per sequence; one of them ends it."""
    p, _ = distribution_pair("dense", 3, seed=2)
    completions = [[0, 0], [0, 1, 2], [0, 2], [1], [1, 0], [2, 2], [0, 0], [2, 1]] * 60
    report = audit_joint(p, completions, 2, eos=1)
    texts = {(0, 0): 120, (0, 1): 60, (0, 2): 60, (1,): 120, (2, 0): 0, (2, 1): 60, (2, 2): 60}
    counts = np.array(list(texts.values()))
    probs = np.array([np.prod([float(p(text[:at])[token]) for at, token in enumerate(text)]) for text in texts])
    assert probs.sum() == pytest.approx(1)
    likelihood = stats.multinomial.logpmf(counts, 480, probs)
    mixed = [stats.dirichlet_multinomial.logpmf(counts, 10.0**power * probs, 480) for power in range(1, 7)]
    assert report.log10_e == pytest.approx((special.logsumexp(mixed) - np.log(6) - likelihood) / np.log(10))
    cells_seen, cells_expected = merge_rare_cells(counts.astype(float), 480 * probs)
    chi2 = ((cells_seen - cells_expected) ** 2 / cells_expected).sum()
    assert report.p_value == pytest.approx(stats.chi2.sf(chi2, len(cells_seen) - 1))
    assert report.total_variation == pytest.approx(np.abs(counts / 480 - probs).sum() / 2)
    assert report.detectable == pytest.approx(detectable_total_variation(len(cells_seen), 480, 1e-6))
    assert (report.delta, report.n, report.cells, report.impossible) == (1e-6, 480, 7, {})
    assert audit_joint(p, completions, 2, eos=1, delta=0.01).detectable < report.detectable
    assert audit_joint(p, completions, 2, eos=1, delta=0.01).delta == 0.01


def test_impossible_sequences_are_counted_apart() -> None:
    """Of three tokens one is impossible; it is no cell, and all other numbers are finite or as certain as can be."""
    probs = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64)
    report = audit_joint(lambda _: probs, [[0], [1], [2], [2], [1]] * 20, 1)
    assert (report.cells, report.n, report.impossible) == (2, 100, {(2,): 40})
    assert (report.log10_e, report.p_value) == (math.inf, 0)
    assert report.total_variation == pytest.approx((0.05 + 0.35 + 0.4) / 2)
    assert report.detectable == pytest.approx(detectable_total_variation(2, 100, 1e-6))
    assert report.rejected


def test_with_one_cell_nothing_can_be_detected() -> None:
    """Too few sequences for two cells that expect 25 each; a certain token; no tokens at all."""
    p, _ = distribution_pair("dense", 4, seed=1)
    assert audit_joint(p, [[0]] * 3, 1).detectable == math.inf
    certain = torch.tensor([0.0, 1.0], dtype=torch.float64)
    report = audit_joint(lambda _: certain, [[1, 1]] * 9, 2)
    assert (report.cells, report.total_variation, report.detectable) == (1, 0, math.inf)
    assert report.log10_e == pytest.approx(0)
    assert audit_joint(lambda _: certain, [[], [0]], 0).cells == 1


@pytest.mark.parametrize(("log10_e", "delta", "rejected"), [(2.0, 0.01, True), (1.99, 0.01, False), (6.0, 1e-6, True)])
def test_a_deviation_is_rejected_from_an_e_value_of_1_over_delta_on(
    log10_e: float, delta: float, rejected: bool
) -> None:
    assert JointReport(delta, 9, 2, log10_e, 0.5, 0.1, 0.2, {}).rejected == rejected


def test_the_report_in_words() -> None:
    report = JointReport(0.01, 12_345, 6789, 1.26, 0.034567, 0.12345, 0.23456, {})
    rest = "12,345 sequences over 6,789 possible ones; 0.2346 would have been detected"
    assert str(report) == (
        f"no deviation was found: e = 10^1.3, Pearson's p = 0.035, total variation 0.1235 in {rest}; "
        "0 sequences are impossible"
    )
    found = replace(report, log10_e=math.inf, impossible={(0, 1): 3, (2,): 4})
    assert str(found) == (
        f"REJECTED: e = 10^inf, Pearson's p = 0.035, total variation 0.1235 in {rest}; 7 sequences are impossible"
    )
    with pytest.raises(FrozenInstanceError):
        report.n = 1  # type: ignore[misc]


def test_as_many_sequences_as_can_be_enumerated_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.audit_power.joint.MAX_SEQUENCES", 8)
    p, _ = distribution_pair("dense", 2)
    assert audit_joint(p, [[0, 1, 0]], 3).cells == 8
    with pytest.raises(
        ValueError,
        match=r"^2 tokens form 16 sequences of length 4; at most 8 are enumerated: give a smaller length$",
    ):
        audit_joint(p, [[0, 1, 0, 1]], 4)


def test_200_000_sequences_are_the_most() -> None:
    n = 200_001
    with pytest.raises(ValueError, match=r"^200001 tokens form 200,001 sequences of length 1; at most 200,000 are"):
        audit_joint(lambda _: torch.full((n,), 1 / n, dtype=torch.float64), [[0]], 1)


@pytest.mark.parametrize(
    ("completions", "eos", "message"),
    [
        ([], None, "there are no completions to audit; give at least one"),
        ([[0, 1], [0]], None, "completion 1 has 1 tokens and no eos; it needs 2"),
        ([[0]], 1, "completion 0 has 1 tokens and no eos; it needs 2"),
        ([[0, 3]], None, "completion 0 begins with (0, 3); the vocabulary has the tokens 0 to 2"),
        ([[-1, 0]], None, "completion 0 begins with (-1, 0); the vocabulary has the tokens 0 to 2"),
        ([[4]], 4, "completion 0 begins with (4,); the vocabulary has the tokens 0 to 2"),
    ],
)
def test_completions_that_do_not_fit_are_refused_in_these_words(
    completions: list[list[int]], eos: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        audit_joint(distribution_pair("dense", 3)[0], completions, 2, eos=eos)


def test_completions_are_read_up_to_their_length_or_their_end() -> None:
    """What comes later is not looked at, whatever it is."""
    p, _ = distribution_pair("dense", 3)
    plain = audit_joint(p, [[0, 2], [1], [0, 1]], 2, eos=1)
    assert audit_joint(p, [[0, 2, 9], [1, 9, 9], [0, 1, -5, 9]], 2, eos=1) == plain
    assert audit_joint(p, [[0, 2, 1], [2, 1, 1]], 2, eos=1).cells == 7
