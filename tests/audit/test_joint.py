"""The exact mode: its evidence has expectation 1, enumerated, and finds what the joint distribution alone shows."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from distributions_for_tests import distribution_pair

from specnb.audit.joint import audit_joint
from specnb.sampling.enumeration import joint_distribution


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
