"""The auditor: bets are fair under exact samplers, by enumeration; broken ones are found and diagnosed."""

from __future__ import annotations

import pickle
import re
from dataclasses import FrozenInstanceError, replace
from itertools import product

import numpy as np
import pytest
import torch
from distributions_for_tests import distribution_pair, distributions_along
from numpy.typing import NDArray
from reference_bets import ReferenceBets
from samplers import SAMPLER_BUGS, sample_row, tables
from torch import Tensor

from specnb.distributions import sample
from specnb.rules import Outcome, token_verification
from specnb_audit.alternatives import ALTERNATIVES
from specnb_audit.auditor import Auditor, _summed, end_tokens
from specnb_audit.bets import Bets, CutoffGap, Row, RowBets, _History, _ratio_at, _slice, steps_between
from specnb_audit.evidence import log_mean
from specnb_audit.numerics import Numerics
from specnb_audit.report import VIOLATIONS
from specnb_audit.uniforms import Interval

Array = NDArray[np.float64]

RANDOMISED = {"along-p", "along-q/p", "along-ids", "tail-cut"}
"""Alternatives with bets on the transform, which is randomised; `test_pit` shows that those are fair."""


def audited(rows: list[Row], **settings: object) -> Auditor:
    auditor = Auditor(**settings)  # type: ignore[arg-type]
    for row in rows:
        auditor.add(row)
    return auditor


@pytest.mark.parametrize("kind", ["dense", "zeros in p", "zeros in q", "disjoint", "equal", "one-hot q"])
@pytest.mark.parametrize("with_steps", [False, True])
def test_an_exact_sampler_gains_nothing_on_average(kind: str, with_steps: bool) -> None:
    """The expected e-value of each alternative, over all pairs of sequences of two tokens, is at most 1."""
    p, q = distribution_pair(kind, 3, seed=5)
    steps = [1, 1] if with_steps else None
    expected: dict[str, float] = {}
    whole = 0.0
    for tokens in product(range(3), repeat=4):
        rows, chance = [], 1.0
        for text in (tokens[:2], tokens[2:]):
            distributions = distributions_along(p, text, 2)
            chance *= float(distributions.gather(-1, torch.tensor(text)[:, None]).prod())
            rows.append(Row(text, distributions, distributions_along(q, text, 2), prompt=(1,), steps=steps))
        if chance > 0:
            whole += chance
            for name, value in audited(rows).report(detect=False).by_alternative.items():
                expected[name] = expected.get(name, 0.0) + chance * 10**value
    assert whole == pytest.approx(1)
    for name in expected.keys() - RANDOMISED:
        assert expected[name] <= 1 + 1e-6, name  # e-values are added up in float32
        if kind == "dense":
            assert expected[name] == pytest.approx(1), name


def test_exact_samplers_are_not_rejected() -> None:
    """Thirty audits at delta = 0.01, looked at after every token: none, or hardly any, is rejected."""
    alarms = 0
    for seed in range(30):
        p, q = tables(seed)
        auditor = audited([sample_row(p, q, 60, 10 * seed + row) for row in range(3)], delta=0.01, seed=seed)
        alarms += auditor.found_after is not None
    assert alarms <= 4  # five or more have a chance of 1e-5


def test_a_sampler_seeded_like_the_audit_is_still_exact() -> None:
    """Its uniforms and those of the randomised transform would otherwise be the same numbers."""
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).expand(2000, -1)
    u = torch.from_numpy(np.random.default_rng(0).random(2000))
    assert not audited([Row(sample(p, u).tolist(), p)], seed=0).report().rejected


@pytest.mark.parametrize("name", SAMPLER_BUGS)
def test_a_broken_sampler_is_found_and_diagnosed(name: str) -> None:
    bug = SAMPLER_BUGS[name]
    p, q = tables()
    auditor = Auditor()
    for row in range(25):
        auditor.add(sample_row(p, q, 120, row, **bug.settings))
    report = auditor.report()
    assert report.rejected
    assert report.diagnosis in bug.alternatives, report.by_alternative
    assert report.found_after is not None
    assert report.running[report.found_after - 1] >= 6 > report.running[report.found_after - 2]
    assert not report.detectable
    assert "REJECTED" in str(report)


def test_without_a_draft_broken_samplers_are_found_too() -> None:
    p, q = tables()
    rows = [sample_row(p, q, 150, row, **SAMPLER_BUGS["greedy draft"].settings) for row in range(20)]
    assert audited([replace(row, q=None, steps=None) for row in rows]).found_after is not None


def test_sequences_that_share_their_uniforms_are_found() -> None:
    """Each of the two sequences is exact; that they are equal is not."""
    p, q = tables()
    row = sample_row(p, q, 30, 0)
    report = audited([row, row]).report()
    assert report.diagnosis in {"same-tokens", "noise-of-texts"}
    assert report.by_alternative["same-tokens"] > 6
    assert report.found_after is not None
    assert 30 < report.found_after < 50
    assert audited([row, sample_row(p, q, 30, 1)]).found_after is None


def test_with_steps_the_audit_sees_where_a_step_is_wrong() -> None:
    """Only the first token after full acceptance is wrong, as when the bonus token is not in the cache."""
    p, q = tables(closeness=0.97)
    rows = [sample_row(p, q, 120, seed, AfterFullAcceptance()) for seed in range(40)]
    aware, blind = audited(rows).report(), audited([replace(row, steps=None) for row in rows]).report()
    assert aware.rejected
    assert aware.log10_e > blind.log10_e
    places = aware.breakdown["position in the step"]
    assert places[0][0] == "0"
    assert aware.diagnosis is not None
    assert places[0][2] > 0.8 * aware.by_alternative[aware.diagnosis]


class AfterFullAcceptance:
    """Algorithm 1, whose target is another one in the first position of a step that follows a full acceptance."""

    full = False

    def __call__(self, p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        if self.full:
            p = torch.cat([0.5 * (p[:1] + p[:1].roll(1, dims=-1)), p[1:]])
        outcome = token_verification(p, q, draft_tokens, accept, final)
        self.full = int(outcome.accepted) == len(draft_tokens)
        return outcome


def test_a_sequence_in_pieces_gives_the_same_e_values() -> None:
    p, q = tables()
    rows = [replace(sample_row(p, q, 50, seed), steps=None) for seed in range(3)]
    pieces = []
    for row in rows:
        for start, end in ((0, 1), (1, 20), (20, 50)):
            assert row.q is not None
            own = Row(row.tokens[start:end], row.p[start:end], row.q[start:end])
            pieces.append(replace(own, prompt=row.prompt, continues=start > 0, more=end < 50))
    whole, parts = audited(rows).report(), audited(pieces).report()
    assert parts.running == pytest.approx(whole.running)
    assert parts.sequences == whole.sequences == 3


def test_rows_without_draft_in_places_and_long_vocabularies() -> None:
    generator = np.random.default_rng(0)
    p = torch.from_numpy(generator.dirichlet(np.full(500, 0.1), size=40)).float()
    q = torch.from_numpy(generator.dirichlet(np.full(500, 0.1), size=40)).float()
    q[::3] = 0
    tokens = [int(generator.choice(500, p=probs / probs.sum())) for probs in p.double().numpy()]
    report = audited([Row(tokens, p, q)]).report()
    assert not report.rejected
    assert np.isfinite(report.running).all()


# Violations


def test_an_impossible_token_is_named() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]] * 4, dtype=torch.float64)
    report = audited([Row([0, 1, 0, 1], p), Row([0, 2, 1, 2], p, cutoff_gaps={1: CutoffGap(0.5, 0.0)})]).report()
    assert report.rejected
    assert report.diagnosis == "impossible"
    assert report.found_after == 6
    assert report.violations == {"impossible": 2}
    assert report.impossible[0] == (1, 1, 2, 0.5, 0.0)
    assert np.isinf(report.running[5:]).all()
    assert np.isfinite(report.running[:5]).all()
    assert "sequence 1, position 1: token 2 (its logit is 0.5 below the smallest one kept)" in str(report)


def test_an_impossible_token_within_the_numerics_is_no_violation() -> None:
    numerics = Numerics(positions=8, logit=0.01, tv=0.001, tv_mean=0.001, nats=0.0)
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    near, far = Row([2], p, cutoff_gaps={0: CutoffGap(0.015, 0.0)}), Row([2], p, cutoff_gaps={0: CutoffGap(0.03, 0.0)})
    report = audited([near], numerics=numerics).report()
    assert not report.rejected
    assert len(report.borderline) == 1
    assert "no more than the numerics explain" in str(report)
    assert audited([far], numerics=numerics).report().violations == {"impossible": 1}
    assert audited([near]).report().violations == {"impossible": 1}


def test_tokens_after_eos_are_a_violation_and_are_not_bet_on() -> None:
    p = torch.full((5, 4), 0.25, dtype=torch.float64)
    report = audited([Row([0, 3, 1, 1, 2], p)], eos=3).report()
    assert report.violations == {"after-the-end": 3}
    assert report.tokens == 2
    assert report.found_after == 3
    assert np.isinf(report.running).tolist() == [False, True]
    assert not audited([Row([0, 3], p[:2])], eos=[3, 2]).report().rejected
    assert audited([Row([0, 3], p[:2]), Row([1], p[:1], continues=True)], eos=3).report().rejected


def test_wrong_lengths_are_found() -> None:
    p = torch.full((5, 4), 0.25, dtype=torch.float64)
    whole, long, ended = Row([0, 1, 2], p[:3]), Row([0, 1, 2, 0], p[:4]), Row([0, 3], p[:2])
    short = Row([0, 1], p[:2])
    assert audited([long, ended], eos=3, max_new_tokens=3).report().violations == {"wrong-length": 1}
    assert not audited([whole, ended], eos=3, max_new_tokens=3).report().rejected
    assert audited([short, whole], eos=3, max_new_tokens=3).report().violations == {"wrong-length": 1}


def test_evidence_that_numerics_account_for_is_no_rejection() -> None:
    """The target differs from itself by 0.05 nats a token; evidence up to that is no rejection."""
    generator = np.random.default_rng(0)
    p, r = torch.tensor([0.5, 0.5], dtype=torch.float64), np.array([0.65, 0.35])
    row = Row(generator.choice(2, p=r, size=900).tolist(), p.expand(900, -1))
    nats = float((r * np.log(r / 0.5)).sum())
    numerics = Numerics(positions=8, logit=0.6, tv=0.15, tv_mean=0.15, nats=nats)
    assert audited([row]).report().verdict == "rejected"
    report = audited([row], numerics=numerics).report()
    assert report.verdict == "numerics"
    assert not report.rejected
    assert "NUMERICS" in str(report)


# Bad input


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row([0, 1], torch.full((3, 2), 0.5)), "one distribution per token"),
        (Row([0], torch.full((1, 2), 0.5), torch.full((1, 3), 1 / 3)), "same vocabulary"),
        (Row([2], torch.full((1, 2), 0.5)), "vocabulary of 2"),
        (Row([-1], torch.full((1, 2), 0.5)), "vocabulary of 2"),
        (Row([0], torch.tensor([[2.0, -1.5]])), "sum to 1"),
        (Row([0], torch.tensor([[1.5, -0.5]])), "negative"),
        (Row([0], torch.tensor([[float("nan"), 1.0]])), "sum to 1"),
        (Row([0, 1], torch.full((2, 2), 0.5), steps=[1]), "steps add up to 1"),
        (Row([0, 1], torch.full((2, 2), 0.5), steps=[2, 0]), "steps"),
    ],
)
def test_inconsistent_rows_are_refused(row: Row, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Auditor().add(row)


def test_bad_settings_are_refused() -> None:
    p = torch.full((1, 2), 0.5)
    with pytest.raises(ValueError, match="delta is 2"):
        Auditor(delta=2)
    with pytest.raises(ValueError, match="no tokens"):
        Auditor().report()
    auditor = audited([Row([0], p, p)])
    with pytest.raises(ValueError, match="give them for all"):
        auditor.add(Row([0], p))
    auditor = Auditor(eos=2)
    with pytest.raises(ValueError, match="eos is 2; the vocabulary has the tokens 0 to 1"):
        auditor.add(Row([0], p))
    with pytest.raises(ValueError, match="eos is -1"):
        Auditor(eos=[0, -1])
    with pytest.raises(ValueError, match="seed is -1"):
        Auditor(seed=-1)
    for length in (0, -3):
        with pytest.raises(ValueError, match=f"max_new_tokens is {length}"):
            Auditor(max_new_tokens=length)


# State between sequences


def test_eos_ends_only_its_own_sequence() -> None:
    """That one sequence ended says nothing about the next: two exact ones, each with its end, are not rejected."""
    p = torch.full((3, 4), 0.25, dtype=torch.float64)
    report = audited([Row([0, 1, 3], p), Row([1, 3], p[:2]), Row([3], p[:1])], eos=3).report()
    assert not report.rejected
    assert report.tokens == 6


def test_the_length_is_checked_at_the_end_of_a_sequence() -> None:
    """A sequence in pieces is short only if its last piece ends early."""
    p = torch.full((2, 4), 0.25, dtype=torch.float64)
    first, second = Row([0, 1], p, more=True), Row([2], p[:1], continues=True)
    assert not audited([first, second, first, second], max_new_tokens=3).report().rejected
    assert audited([first, second], max_new_tokens=4).report().found_after == 3
    assert audited([first, second], max_new_tokens=2).report().found_after == 3


def test_empty_sequences_are_checked_for_their_length() -> None:
    p = torch.full((2, 4), 0.25, dtype=torch.float64)
    empty, whole = Row([], p[:0]), Row([0, 1], p)
    assert not audited([empty, whole]).report().rejected
    assert audited([empty, whole]).report().sequences == 2
    report = audited([whole, empty, whole], max_new_tokens=2).report()
    assert report.violations == {"wrong-length": 1}
    assert (report.found_after, report.tokens, report.sequences) == (2, 4, 3)
    assert np.isinf(report.running).tolist() == [False, True, True, True]


def test_a_violation_without_tokens_is_reported() -> None:
    p = torch.empty(0, 4)
    report = audited([Row([], p), Row([], p)], max_new_tokens=2).report()
    assert report.rejected
    assert report.diagnosis == "wrong-length"
    assert report.violations == {"wrong-length": 2}
    assert (report.found_after, report.tokens, report.sequences) == (0, 0, 2)
    assert report.log10_e == report.log10_e_peak == float("inf")
    assert "REJECTED" in str(report)
    assert "rejected" in report.to_html()


def test_a_sequence_may_begin_with_an_empty_piece() -> None:
    """The prompt and the noise of the pieces that follow are then still those of the new sequence."""
    p, q = tables()
    row = replace(sample_row(p, q, 30, 0), steps=None)
    other = replace(sample_row(p, q, 30, 1), steps=None)
    assert other.q is not None
    nothing = replace(other, tokens=[], p=other.p[:0], q=other.q[:0], more=True)
    whole = audited([row, other]).report()
    pieces = audited([row, nothing, replace(other, continues=True)]).report()
    assert pieces.running == pytest.approx(whole.running)


def test_the_first_of_two_violations_counts() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]] * 4, dtype=torch.float64)
    assert audited([Row([0, 2, 1, 0], p)], max_new_tokens=9).report().found_after == 2


@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_e_value_is_infinite_from_a_violation_on(at: int) -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]] * 4, dtype=torch.float64)
    tokens = [0, 1, 0, 1]
    tokens[at] = 2
    report = audited([Row(tokens, p)]).report()
    assert report.found_after == at + 1
    assert np.isinf(report.running).tolist() == [number >= at for number in range(4)]


def test_a_sampler_one_position_late_is_diagnosed() -> None:
    """It samples each token from the distribution before the last token, as if the cache lagged by one."""
    p, _ = tables()
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(10):
        tokens = [0]
        for at in range(100):
            tokens.append(int(generator.choice(len(p), p=p[tokens[max(at - 1, 0)]].numpy())))
        rows.append(Row(tokens[1:], p[tokens[:-1]], prompt=[0]))
    report = audited(rows).report()
    assert report.rejected
    assert report.diagnosis == "shifted"


@pytest.mark.parametrize("lag", [1, 2, 6])
def test_a_uniform_used_again_some_positions_later_is_found(lag: int) -> None:
    """Each uniform serves two tokens, `lag` places apart."""
    p, _ = tables()
    rows = []
    for number in range(10):
        fresh = torch.from_numpy(np.random.default_rng([lag, number]).random(200))
        again = torch.arange(200) // lag % 2 == 1
        uniforms = fresh.where(~again, fresh.roll(lag))
        tokens = [0]
        for u in uniforms:
            tokens.append(int(sample(p[tokens[-1]], u)))
        rows.append(Row(tokens[1:], p[tokens[:-1]], prompt=[0]))
    report = audited(rows).report()
    assert report.rejected
    assert report.diagnosis == "noise-of-steps"


def test_memory_of_earlier_sequences_does_not_grow_with_the_vocabulary() -> None:
    """Of each prompt the audit remembers numbers per token, and no distribution."""
    vocab, p = 50_000, torch.full((2, 50_000), 1 / 50_000)
    auditor = Auditor()
    for prompt in range(4):
        auditor.add(Row([prompt, 1], p, prompt=[prompt]))
    kept = [vars(text) for text in auditor.bets.last_with_prompt.values()]
    assert len(kept) == 4
    assert len(pickle.dumps(kept)) < vocab


def test_steps_divide_tokens_into_first_inner_and_last_ones() -> None:
    """Steps of 1, 2, 3, 3 and 1 tokens; a step is as long as possible if none before it was longer."""
    bets, steps = Bets(), [1, 2, 3, 3, 1]
    bets.begin([0])
    p = torch.full((sum(steps), 2), 0.5, dtype=torch.float64)
    found = bets.bets_on(Row([0] * sum(steps), p, prompt=[0], steps=steps))
    assert found.step_positions.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 0]
    first, inner, last, after_a_full_step = (mask.nonzero()[0].tolist() for mask in found.masks.T[2:])
    assert first == [0, 1, 3, 6, 9]
    assert (inner, last) == ([7], [4, 8])  # of a step as long as the longest one before
    assert after_a_full_step == [6, 9]


def test_the_total_variation_is_estimated_from_every_token() -> None:
    """Of two equally likely tokens only the first comes: that is a total variation of 1/2."""
    n = 400
    report = audited([Row([0] * n, torch.full((n, 2), 0.5, dtype=torch.float64))] * 2).report()
    assert report.tv.n == 2 * n
    assert 0 < report.tv.low <= 0.5


def test_a_breakdown_has_the_twenty_groups_with_the_most_evidence() -> None:
    """Of two equally likely tokens only the first comes, in each of 25 sequences; sequence n has n + 1 tokens."""
    rows = [Row([0] * n, torch.full((n, 2), 0.5, dtype=torch.float64)) for n in range(1, 26)]
    groups = audited(rows).report().breakdown["sequence"]
    assert {name: count for name, count, _ in groups} == {str(n): n + 1 for n in range(5, 25)}


# Settings and state


def test_a_new_auditor_has_seen_nothing() -> None:
    auditor = Auditor()
    assert (auditor.delta, auditor.ends, auditor.max_new_tokens, auditor.numerics) == (1e-6, set(), None, None)
    assert auditor.ignored == frozenset()
    assert (auditor.tokens, auditor.sequences, auditor.offset) == (0, 0, 0)
    assert (auditor.ended, auditor.wrong_length, auditor.numerics_only) == (False, False, False)
    assert (auditor.found_after, auditor.first_violation, auditor.violations) == (None, None, {})
    assert auditor.log10_e == 0
    assert auditor.bets.random.random() == Auditor(seed=0).bets.random.random() == Bets().random.random()
    assert Auditor(seed=1).bets.random.random() != Auditor(seed=0).bets.random.random()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delta": 0}, "delta is 0; a false-alarm rate lies between 0 and 1"),
        ({"delta": 1}, "delta is 1; a false-alarm rate lies between 0 and 1"),
        ({"delta": float("nan")}, "delta is nan; a false-alarm rate lies between 0 and 1"),
        ({"seed": -1}, "seed is -1; it must be a non-negative integer"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a positive integer, or None for no check"),
        ({"eos": -1}, "eos is -1; token ids are 0 or more"),
        (
            {"ignore": ["shifted", "z", "y"]},
            f"ignore has y; kinds are {', '.join(VIOLATIONS)}, {', '.join(ALTERNATIVES)}",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        audited([], **settings)


def test_settings_at_the_ends_of_their_ranges_are_accepted() -> None:
    for delta in (1e-300, 0.5, 0.999):
        assert Auditor(delta=delta).delta == delta
    assert Auditor(max_new_tokens=1).max_new_tokens == 1
    assert Auditor(ignore=iter(["shifted", "impossible"])).ignored == {"shifted", "impossible"}


def test_end_tokens_are_one_several_or_none() -> None:
    assert (end_tokens(None), end_tokens(3), end_tokens([3, 2, 3]), end_tokens(iter([0]))) == (set(), {3}, {2, 3}, {0})
    assert end_tokens([0, 3], vocab=4) == {0, 3}
    with pytest.raises(ValueError, match=r"^eos is 4; the vocabulary has the tokens 0 to 3$"):
        end_tokens([5, 4, 3], vocab=4)
    with pytest.raises(ValueError, match=r"^eos is -2; token ids are 0 or more$"):
        end_tokens([-1, -2])


HALF = torch.full((2, 2), 0.5, dtype=torch.float64)
SHAPES = "for 2 tokens and p (2, 2); each needs one distribution per token, all over the same vocabulary"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row([0, 1], HALF[0]), f"p has shape (2,) {SHAPES.replace('(2, 2)', '(2,)')}"),
        (Row([0, 1], HALF[None]), f"p has shape (1, 2, 2) {SHAPES.replace('(2, 2)', '(1, 2, 2)')}"),
        (Row([0, 1], HALF, HALF[0]), f"q has shape (2,) {SHAPES}"),
        (Row([0, 1], HALF, torch.ones(2, 2, 1)), f"q has shape (2, 2, 1) {SHAPES}"),
        (Row([0, 1], HALF, HALF[:1]), f"q has shape (1, 2) {SHAPES}"),
        (Row([0, 1], HALF, HALF, HALF[:1]), f"raw has shape (1, 2) {SHAPES}"),
        (Row([0, 1], HALF, suspected=HALF[:, :1]), f"suspected has shape (2, 1) {SHAPES}"),
        (
            Row([0, 1], HALF * 1.002),
            "a row of p does not sum to 1; give probabilities after standardisation, not logits",
        ),
        (
            Row([0, 1], HALF * torch.tensor([[1.0], [0.998]])),
            "a row of p does not sum to 1; give probabilities after standardisation, not logits",
        ),
        (Row([0, 0], torch.tensor([[1.5, -0.5]] * 2)), "p has a negative entry; give probabilities"),
        (Row([0, 2], HALF), "tokens go from 0 to 2 in a vocabulary of 2"),
        (Row([-1, 1], HALF), "tokens go from -1 to 1 in a vocabulary of 2"),
        (Row([0, 1], HALF, steps=[1]), "steps add up to 1 for 2 tokens; give the tokens emitted by each step"),
        (Row([0, 1], HALF, steps=[2, 1]), "steps add up to 3 for 2 tokens; give the tokens emitted by each step"),
        (Row([0, 1], HALF, steps=[3, -1]), "steps add up to 2 for 2 tokens; give the tokens emitted by each step"),
        (Row([0, 1], HALF, steps=[]), "steps add up to 0 for 2 tokens; give the tokens emitted by each step"),
    ],
)
def test_a_row_that_does_not_fit_together_is_refused_in_these_words(row: Row, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Auditor().add(row)


def test_rows_at_the_edge_of_what_fits_are_accepted() -> None:
    for row in (
        Row([0, 1], HALF * 1.0009, steps=[1, 1]),
        Row([0, 1], HALF * 0.9991, steps=[2]),
        Row([], HALF[:0], steps=[]),
        Row([1, 0], torch.eye(2).flip(0), torch.zeros(2, 2), torch.full((2, 2), 3.0), torch.zeros(2, 2)),
    ):
        assert audited([row]).tokens == len(row.tokens)


@pytest.mark.parametrize("missing", ["q", "raw", "suspected", "steps"])
def test_what_comes_with_one_sequence_must_come_with_all(missing: str) -> None:
    p = torch.full((2, 2), 0.5)
    whole = Row([0, 1], p, p, p, p, steps=[1, 1])
    part = replace(whole, **{missing: None})  # type: ignore[arg-type]
    for first, second in ((whole, part), (part, whole)):
        with pytest.raises(ValueError, match=r"^some sequences come with a draft's distributions or with steps and"):
            audited([first, second])


# Lengths and ends


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize(
    ("pieces", "eos", "most", "violations", "found_after", "audited_tokens"),
    [
        # Without a setting nothing is checked.
        ([[0, 1, 2]], None, None, {}, None, 3),
        # Ends
        ([[0, 3]], 3, None, {}, None, 2),
        ([[3]], 3, None, {}, None, 1),
        ([[0, 3, 1]], 3, None, {"after-the-end": 1}, 3, 2),
        ([[3, 3, 3]], 3, None, {"after-the-end": 2}, 2, 1),
        ([[0, 2, 3, 1]], [3, 2], None, {"after-the-end": 2}, 3, 2),
        ([[0, 3], [1, 2]], 3, None, {"after-the-end": 2}, 3, 2),
        ([[0, 3], [], [1], [2]], 3, None, {"after-the-end": 2}, 3, 2),
        ([[0], [1, 3, 0]], 3, None, {"after-the-end": 1}, 4, 3),
        # Lengths
        ([[0, 1]], None, 2, {}, None, 2),
        ([[0, 1, 2]], None, 2, {"wrong-length": 1}, 3, 3),
        ([[0, 1, 2, 0]], None, 2, {"wrong-length": 1}, 3, 4),
        ([[0]], None, 2, {"wrong-length": 1}, 1, 1),
        ([[]], None, 2, {"wrong-length": 1}, 0, 0),
        ([[0], [1]], None, 2, {}, None, 2),
        ([[0, 1], [2]], None, 2, {"wrong-length": 1}, 3, 3),
        ([[0], [1, 2, 0], [1, 2]], None, 2, {"wrong-length": 1}, 3, 6),
        ([[0], [1], []], None, 3, {"wrong-length": 1}, 2, 2),
        # Both: an end token may end a sequence early, and no later than its length
        ([[0, 3]], 3, 4, {}, None, 2),
        ([[0, 1, 3]], 3, 3, {}, None, 3),
        ([[0, 1, 3]], 3, 2, {"wrong-length": 1}, 3, 3),
        ([[0, 3, 1]], 3, 2, {"after-the-end": 1}, 3, 2),
        ([[0, 1, 2, 3, 1]], 3, 2, {"after-the-end": 1, "wrong-length": 1}, 3, 4),
        ([[0, 3], [1, 1, 1]], 3, 3, {"after-the-end": 3}, 3, 2),
    ],
)
def test_ends_and_lengths(
    pieces: list[list[int]],
    eos: int | list[int] | None,
    most: int | None,
    violations: dict[str, int],
    found_after: int | None,
    audited_tokens: int,
    prefix: int,
) -> None:
    """Of one sequence in pieces, alone or after `prefix` flawless sequences."""
    p = torch.full((9, 4), 0.25, dtype=torch.float64)
    flawless = [0] * ((most or 2) - 1) + [3 if eos else 0]
    rows = [Row(flawless, p[: len(flawless)])] * prefix
    for at, piece in enumerate(pieces):
        rows.append(Row(piece, p[: len(piece)], continues=at > 0, more=at + 1 < len(pieces)))
    before = prefix * len(flawless)
    auditor = audited(rows, eos=eos, max_new_tokens=most)
    assert auditor.violations == violations
    assert auditor.found_after == (None if found_after is None else before + found_after)
    assert auditor.tokens == before + audited_tokens
    assert auditor.sequences == prefix + 1
    assert auditor.log10_e == (float("inf") if violations else pytest.approx(auditor.report().running[-1]))
    if auditor.tokens:
        first = before + max((found_after or 0) - 1, 0) if violations else auditor.tokens
        first = min(first, auditor.tokens - 1) if violations else first  # a violation may follow the last token
        assert np.isinf(auditor.report().running).tolist() == [at >= first for at in range(auditor.tokens)]


def test_what_follows_the_end_is_cut_from_everything_that_comes_with_a_row() -> None:
    p, q = tables()
    row = sample_row(p, q, 12, 0)
    row = replace(row, raw=row.q, suspected=row.p.flip(0), tokens=[token % 23 for token in row.tokens])
    row.tokens[6] = 23  # type: ignore[index]
    assert row.q is not None
    assert row.raw is not None
    assert row.suspected is not None
    assert row.steps is not None
    cut = Row(
        row.tokens[:7], row.p[:7], row.q[:7], row.raw[:7], row.suspected[:7], row.prompt, steps_between(row.steps, 0, 7)
    )
    whole, short = audited([row, row], eos=23), audited([cut, cut])
    assert whole.violations == {"after-the-end": 10}
    assert np.concatenate(whole.logs) == pytest.approx(np.concatenate(short.logs))
    assert np.concatenate(whole.places, axis=1).tolist() == np.concatenate(short.places, axis=1).tolist()


# Impossible tokens


def test_nothing_is_bet_on_an_impossible_token() -> None:
    p, q = tables()
    rows = [sample_row(p, q, 40, seed) for seed in range(2)]
    changed = rows[1].p.clone()
    changed[20, rows[1].tokens[20]] = 0
    logs = np.concatenate(audited([rows[0], replace(rows[1], p=changed / changed.sum(dim=-1, keepdim=True))]).logs)
    assert logs[60] == pytest.approx(logs[59], abs=1e-5)
    assert np.abs(logs[59] - logs[58]).max() > 0.01


def test_impossible_tokens_are_listed_where_they_are() -> None:
    """The second sequence is in two pieces; each of the gaps belongs to a position of the whole sequence."""
    p = torch.tensor([[0.5, 0.5, 0.0]] * 4, dtype=torch.float64)
    gaps = {1: CutoffGap(0.25, 0.0), 4: CutoffGap(0.0, 0.125)}
    rows = [
        Row([0, 1, 0], p[:3]),
        Row([1, 2, 0], p[:3], cutoff_gaps=gaps, more=True),
        Row([0, 2, 2], p[:3], cutoff_gaps=gaps, continues=True),
    ]
    auditor = audited(rows)
    report = auditor.report()
    assert report.violations == {"impossible": 3}
    assert report.impossible[:2] == [(1, 1, 2, 0.25, 0.0), (1, 4, 2, 0.0, 0.125)]
    assert report.impossible[2][:3] == (1, 5, 2)
    assert np.isnan(report.impossible[2][3:]).all()
    assert (auditor.found_after, auditor.first_violation) == (5, 4)
    assert report.impossible_summary == "3 of 9 tokens are impossible (33%), by up to 0.25 in a logit and 0.12 in top-p"
    places = np.concatenate(auditor.places, axis=1)
    assert places.tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 1, 1],
        [0, 1, 2, 0, 1, 2, 3, 4, 5],
        [0, 1, 0, 1, 2, 0, 0, 2, 2],
        [-1] * 9,
    ]


@pytest.mark.parametrize(("tokens", "first"), [([2, 3, 1], 1), ([0, 3, 2], 3), ([1, 2, 3, 0, 0], 2)])
def test_the_earliest_violation_counts_whichever_is_noticed_first(tokens: list[int], first: int) -> None:
    """Token 2 is impossible and token 3 ends a sequence. What follows the end is noticed before, and is not judged."""
    p = torch.tensor([[0.4, 0.4, 0.0, 0.2]], dtype=torch.float64).expand(len(tokens), -1)
    flawless = Row([0, 3], p[:2])
    auditor = audited([flawless, Row(tokens, p)], eos=3)
    assert (auditor.found_after, auditor.first_violation) == (2 + first, 1 + first)


@pytest.mark.parametrize("at", [0, 10, 30, 31, 32, 40])
def test_in_one_row_whichever_comes_first_counts_a_violation_or_enough_evidence(at: int) -> None:
    """A fair coin that always returns 1 is rejected after 32 tokens; token `at` is impossible."""
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).expand(50, -1)
    tokens = [1] * 50
    assert audited([Row(tokens, p)]).found_after == 32
    tokens[at] = 2
    assert audited([Row(tokens, p)]).found_after == min(32, at + 1)


def test_a_verdict_stays_as_it_was_first_reached() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).expand(50, -1)
    constant, impossible = Row([1] * 50, p), Row([0, 2], p[:2])
    auditor = audited([constant])
    found = auditor.found_after
    for row in (impossible, constant):
        auditor.add(row)
        assert auditor.found_after == found
    assert audited([impossible, constant]).found_after == 2


def test_the_row_in_which_the_verdict_falls_makes_no_difference() -> None:
    p = torch.full((60, 2), 0.5, dtype=torch.float64)
    pieces = [Row([1] * 7, p[:7], continues=at > 0, more=True) for at in range(8)]
    assert audited(pieces).found_after == audited([Row([1] * 56, p[:56])]).found_after


def test_excused_tokens_leave_the_verdict_to_the_other_evidence() -> None:
    """A control has as many impossible tokens."""
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).expand(50, -1)
    constant, impossible, balanced = Row([1] * 50, p), Row([2, 1], p[:2]), Row([0, 1], p[:2])
    auditor = audited([impossible, balanced])
    assert auditor.found_after == 1
    auditor.excuse_impossible()
    outcome: tuple[object, ...] = (auditor.found_after, auditor.first_violation, auditor.violations)
    assert outcome == (None, None, {})
    assert np.isfinite(auditor.log10_e)
    report = auditor.report()
    assert (report.verdict, report.impossible, len(report.undeclared)) == ("numerics", [], 1)
    assert np.isfinite(report.running).all()
    auditor = audited([impossible, constant])
    auditor.excuse_impossible()
    assert auditor.found_after == audited([impossible, constant], ignore=["impossible"]).found_after == 34
    auditor = audited([impossible, constant, Row([1], p[:1])], max_new_tokens=50)
    auditor.excuse_impossible()
    assert (auditor.found_after, auditor.violations) == (2, {"wrong-length": 2})
    auditor = audited([Row([2, *[1] * 49], p), Row([1], p[:1])], max_new_tokens=50)
    assert (auditor.found_after, auditor.first_violation) == (1, 0)
    auditor.excuse_impossible()
    assert (auditor.found_after, auditor.first_violation, auditor.violations) == (33, 50, {"wrong-length": 1})


def test_excused_tokens_excuse_no_other_violation() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).expand(3, -1)
    auditor = audited([Row([0, 1, 0], p), Row([1, 2, 0], p)], max_new_tokens=2)
    auditor.excuse_impossible()
    assert auditor.violations == {"wrong-length": 2}
    assert (auditor.found_after, auditor.first_violation) == (3, 2)
    auditor = audited([Row([2, 1], p[:2]), Row([0, 1], p[:2]), Row([0], p[:1])], max_new_tokens=2)
    assert (auditor.found_after, auditor.first_violation) == (1, 0)
    auditor.excuse_impossible()
    assert auditor.violations == {"wrong-length": 1}
    assert (auditor.found_after, auditor.first_violation) == (5, 4)
    assert np.isinf(auditor.report().running).tolist() == [False] * 4 + [True]
    untouched = audited([Row([0, 1], p[:2])])
    untouched.excuse_impossible()
    assert (untouched.found_after, untouched.first_violation, untouched.violations) == (None, None, {})
    assert untouched.report().verdict == "not rejected"


@pytest.mark.parametrize("ignored", ["impossible", "after-the-end", "wrong-length"])
def test_an_ignored_violation_is_none(ignored: str) -> None:
    p = torch.tensor([[0.4, 0.4, 0.0, 0.2]] * 4, dtype=torch.float64)
    row = Row([0, 2, 3, 1], p)
    every = {"impossible": 1, "after-the-end": 1, "wrong-length": 1}
    found = audited([row, Row([0], p[:1])], eos=3, max_new_tokens=9)
    assert found.violations == every
    left = audited([row, Row([0], p[:1])], eos=3, max_new_tokens=9, ignore=[ignored]).report()
    assert left.violations == {name: count for name, count in every.items() if name != ignored}
    alone = audited([row, Row([0], p[:1])], eos=3, max_new_tokens=9, ignore=every).report()
    assert (alone.found_after, alone.violations, alone.rejected) == (None, {}, False)


def test_ignored_alternatives_are_not_bet_on() -> None:
    p = torch.full((60, 2), 0.5, dtype=torch.float64)
    row = Row([1] * 60, p)
    names = set(audited([row]).alternatives)
    report = audited([row], ignore=["along-ids", "repeats"]).report()
    assert set(report.running_by_alternative) == names - {"along-ids", "repeats"}
    with pytest.raises(
        ValueError, match=r"^ignore leaves no kind of deviation to test for; leave out one of its names$"
    ):
        audited([row], ignore=ALTERNATIVES)


# The report


def numerics_of(nats: float) -> Numerics:
    return Numerics(positions=8, logit=0.6, tv=0.15, tv_mean=0.15, nats=nats)


def test_the_e_value_is_the_mean_of_those_of_the_alternatives() -> None:
    p, q = tables()
    auditor = audited([sample_row(p, q, 30, seed) for seed in range(3)])
    report = auditor.report(detect=False)
    assert report.detectable == {}
    assert list(report.running_by_alternative) == list(dict.fromkeys(auditor.alternatives))
    each = np.stack(list(report.running_by_alternative.values()))
    assert each.shape == (len(report.running_by_alternative), 90)
    assert 10**report.running == pytest.approx((10**each).mean(axis=0))
    assert auditor.log10_e == pytest.approx(report.running[-1])
    assert report.running[-1] != pytest.approx(report.running[-2], abs=1e-3)


def test_a_report_without_a_finding() -> None:
    p, q = tables()
    numerics = numerics_of(nats=0.001)
    auditor = audited([sample_row(p, q, 50, seed) for seed in range(2)], delta=0.01, numerics=numerics)
    report = auditor.report()
    assert (report.delta, report.tokens, report.sequences) == (0.01, 100, 2)
    assert (report.found_after, report.numerics_only, report.violations) == (None, False, {})
    assert (report.impossible, report.borderline, report.undeclared, report.impossible_summary) == ([], [], [], "")
    assert report.breakdown == {}
    assert report.numerics is numerics
    assert report.tv == auditor.distance.estimate()
    assert report.tv.n == 100
    assert auditor.evidence is not None
    each = auditor.evidence.detectable(0.01)
    del each["token-bias"]
    assert report.detectable.pop("impossible") == pytest.approx(1 - 0.1 ** (1 / 100))
    assert report.detectable == pytest.approx(each, nan_ok=True)
    ignoring = audited([sample_row(p, q, 50, seed) for seed in range(2)], ignore=["impossible", "sharper"]).report()
    assert set(ignoring.detectable) == set(each) - {"impossible", "sharper"}


def test_a_report_without_tokens_has_every_other_field() -> None:
    numerics = numerics_of(nats=0.0)
    auditor = audited([Row([], torch.empty(0, 4))] * 3, max_new_tokens=2, delta=0.05, numerics=numerics)
    report = auditor.report()
    assert (report.delta, report.tokens, report.sequences, report.found_after) == (0.05, 0, 3, 0)
    assert (report.numerics_only, report.violations) == (False, {"wrong-length": 3})
    assert (report.running.tolist(), report.running_by_alternative) == ([], {})
    assert report.tv == (0.0, 0.0, 1.0, 0)
    assert report.numerics is numerics
    assert auditor.log10_e == float("inf")
    with pytest.raises(ValueError, match=r"^there are no tokens to audit; give at least one sequence with a"):
        audited([Row([], torch.empty(0, 4))]).report()


def test_a_sequence_without_tokens_that_is_too_short_counts_from_the_first_token_on() -> None:
    p = torch.full((2, 4), 0.25, dtype=torch.float64)
    report = audited([Row([], p[:0]), Row([0, 1], p)], max_new_tokens=2).report()
    assert report.found_after == 0
    assert np.isinf(report.running).all()


def test_evidence_within_the_numerics_is_remembered() -> None:
    """After 100 tokens that deviate by no more than the numerics, 900 that deviate the other way."""
    generator = np.random.default_rng(0)
    p = torch.full((900, 2), 0.5, dtype=torch.float64)
    first, second = (generator.choice(2, p=[one, 1 - one], size=900).tolist() for one in (0.65, 0.35))
    numerics = numerics_of(nats=0.65 * np.log(1.3) + 0.35 * np.log(0.7))
    for rows in ([Row(first, p)], [Row(first, p), Row(second, p)]):
        auditor = audited(rows, numerics=numerics)
        report = auditor.report()
        assert (report.verdict, report.found_after, report.numerics_only) == ("numerics", None, True)
        assert report.detectable == {}
    rejected = audited([Row(first, p)]).report()
    assert (rejected.verdict, rejected.numerics_only) == ("rejected", False)


def test_tokens_that_bfloat16_would_explain_are_numerics() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    row = Row([2], p, cutoff_gaps={0: CutoffGap(0.5, 0.0)})
    report = audited([row], undeclared=lambda: numerics_of(0.0)).report()
    assert (report.verdict, report.numerics_only, len(report.undeclared)) == ("numerics", True, 1)
    assert "impossible" in report.detectable
    explained = audited([row], numerics=numerics_of(0.0)).report()
    assert (explained.verdict, explained.numerics_only, len(explained.borderline)) == ("not rejected", False, 1)
    known = audited([row]).report()
    assert (known.verdict, known.numerics_only, len(known.impossible)) == ("rejected", False, 1)


def test_the_groups_of_a_breakdown_add_up_to_the_evidence_of_the_leading_alternative() -> None:
    """Of two equally likely tokens only the second comes, 1,100 times in one sequence and twice in another."""
    p = torch.full((1100, 2), 0.5, dtype=torch.float64)
    rows = [Row([1] * 1100, p, steps=[1, 2, 1] * 275), Row([1, 1], p[:2], steps=[2])]
    report = audited(rows).report()
    assert report.diagnosis is not None
    whole = report.by_alternative[report.diagnosis]
    assert whole > 6
    counts = {kind: {name: count for name, count, _ in groups} for kind, groups in report.breakdown.items()}
    assert counts == {
        "position in the sequence": {
            "0": 2, "1 to 3": 4, "4 to 15": 12, "16 to 63": 48, "64 to 255": 192, "256 to 1023": 768,
            "1024 and later": 76,
        },
        "token": {"1": 1102},
        "sequence": {"0": 1100, "1": 2},
        "position in the step": {"0": 826, "1": 276},
    }  # fmt: skip
    for groups in report.breakdown.values():
        assert sum(gain for _, _, gain in groups) == pytest.approx(whole, rel=1e-4)
        gains = [gain for _, _, gain in groups]
        assert gains == sorted(gains, reverse=True)


def test_a_breakdown_has_positions_in_steps_where_steps_are_known() -> None:
    p = torch.full((60, 2), 0.5, dtype=torch.float64)
    stepwise = audited([Row([1] * 60, p, steps=[1] * 60)]).report().breakdown
    assert [group[:2] for group in stepwise["position in the step"]] == [("0", 60)]
    assert set(audited([Row([1] * 60, p)]).report().breakdown) == {"position in the sequence", "token", "sequence"}


def test_groups_with_equal_evidence_keep_their_order() -> None:
    index = np.arange(200).repeat(2)
    gains = np.where(np.arange(400) < 300, 0.5, 1.0)
    names = [name for name, count, gain in _summed(index, gains, str) if (count, gain) == (2, 2.0)]
    assert names == [str(number) for number in range(150, 170)]
    gains = np.where(index == 120, 1.0, -np.ones(400))
    assert _summed(index, gains, "group {}".format)[:2] == [("group 120", 2, 2.0), ("group 0", 2, -2.0)]


# The bets on a row, one by one


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(("vocab", "seed"), [(7, 0), (7, 5), (200, 0)])
def test_all_bets_are_those_of_the_reference(drafted: bool, vocab: int, seed: int) -> None:
    """Sequences of several lengths, in pieces and whole, whose prompts come again; nothing is drafted in places.

    Of 200 tokens 72 have no cell of their own.
    """
    generator = np.random.default_rng(3)

    def random_probs(n: int) -> Tensor:
        return torch.from_numpy(generator.dirichlet(np.full(vocab, 0.8), size=n))

    def piece(n: int, continues: bool) -> Row:
        p, q = random_probs(n), random_probs(n)
        q[1::3] = 0
        p[0, 5] = p[0, 4]  # a tie
        p[0] /= p[0].sum()
        tokens = [int(sample(probs, torch.tensor(u))) for probs, u in zip(p, generator.random(n), strict=True)]
        if not drafted:
            return Row(tokens, p, continues=continues)
        return Row(tokens, p, q, random_probs(n), random_probs(n), continues=continues)

    bets, reference = Bets(seed), ReferenceBets(seed)
    texts = [([3], [5, 1, 4]), ([], [9]), ([3], [12]), ([3], [2, 6]), ([6, 0], [1]), ([], [10])]
    for prompt, sizes in texts:
        bets.begin(tuple(prompt))
        reference.begin(prompt)
        for number, n in enumerate(sizes):
            row = piece(n, continues=number > 0)
            found = bets.bets_on(row)
            expected, deviations = reference.bets_on(row)
            assert set(found.alternatives) == set(expected)
            for name, ratios in expected.items():
                columns = [at for at, own in enumerate(found.alternatives) if own == name]
                assert len(columns) == len(ratios), name
                for at, ratio in zip(columns, ratios, strict=True):
                    assert found.ratios[:, at] == pytest.approx(ratio, rel=1e-7, abs=1e-9), name
            assert found.deviations.shape == (n, len(deviations))
            assert found.deviations == pytest.approx(np.stack(deviations, axis=1), abs=1e-9)
            assert found.ratios.dtype == found.deviations.dtype == np.float64


def test_tokens_are_first_inner_and_last_of_a_step_early_and_late() -> None:
    """Steps of 3 tokens, in a sequence in pieces of 30 and 9 tokens and in one of its own."""
    p, bets = torch.full((30, 2), 0.5), Bets()
    bets.begin([])
    rows = [Row([0] * n, p[:n], steps=[3] * (n // 3)) for n in (30, 9)]
    found = [bets.bets_on(row) for row in rows]
    bets.begin([])
    found.append(bets.bets_on(rows[1]))
    masks = np.concatenate([one.masks for one in found])
    assert masks.dtype == bool
    offsets = np.array([*range(39), *range(9)])
    assert masks[:, 0].tolist() == (offsets < 4).tolist()
    assert masks[:, 1].tolist() == (offsets >= 32).tolist()
    places = np.array([0, 1, 2] * 16)
    assert np.concatenate([one.step_positions for one in found]).tolist() == places.tolist()
    assert masks[:, 2].tolist() == (places == 0).tolist()
    # In the first step it is not known yet that steps have more than one token.
    assert masks[:, 3].tolist() == [at > 2 and place == 1 for at, place in enumerate(places)]
    assert masks[:, 4].tolist() == [at > 2 and place == 2 for at, place in enumerate(places)]
    # Nor that the second comes after one of full length; of the first in a row, the step before is not known.
    assert masks[:, 5].tolist() == [at not in (0, 3, 30, 39) and place == 0 for at, place in enumerate(places.tolist())]
    bets.begin([])
    blind = bets.bets_on(replace(rows[1], steps=None))
    assert blind.masks.shape == (9, 2)
    assert blind.step_positions.tolist() == [-1] * 9


def test_bets_in_float32_are_those_in_float64() -> None:
    p, q = tables()
    row = sample_row(p, q, 30, 0)
    assert row.q is not None
    found = []
    for dtype in (torch.float32, torch.float64):
        bets = Bets()
        bets.begin(row.prompt)
        found.append(
            bets.bets_on(replace(row, p=row.p.to(dtype), q=row.q.to(dtype), suspected=row.p.flip(1).to(dtype)))
        )
    assert found[0].ratios.dtype == np.float64
    assert np.median(np.abs(found[0].ratios / np.maximum(found[1].ratios, 1e-12) - 1)) < 1e-5
    assert np.mean(np.abs(found[0].ratios - found[1].ratios) > 1e-3) < 0.01  # edges may fall on either side


def test_a_token_that_float32_hardly_holds_is_no_overflow() -> None:
    """1 / 1e-45 is more than the largest float32."""
    p = torch.tensor([[1.0, 1e-45]])
    bets = Bets()
    bets.begin([])
    found = bets.bets_on(Row([1], p, p.flip(1), suspected=p.flip(1)))
    for name in ("suspected-model", "draft-leak"):
        assert found.ratios[0, found.alternatives.index(name)] == pytest.approx(1 / float(p[0, 1]), rel=1e-5)
    assert np.isfinite(found.ratios).all()


def test_where_p_is_zero_bets_on_distributions_stay_at_one() -> None:
    p, q = torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64), torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    bets = Bets()
    bets.begin([])
    found = bets.bets_on(Row([2], p, q, q.sqrt(), q))
    kept = {"argmax", "sharper", "draft-leak", "wrong-q", "suspected-model", "noise-of-steps", "one-uniform"}
    assert {found.ratios[0, at] for at, name in enumerate(found.alternatives) if name in kept} == {1.0}
    assert np.isfinite(found.ratios).all()
    bets.begin([])
    again = bets.bets_on(Row([2], p, q, q.sqrt(), q))
    kept |= {"noise-of-texts", "same-tokens"}
    assert {again.ratios[0, at] for at, name in enumerate(again.alternatives) if name in kept} == {1.0}


def test_where_nothing_is_drafted_q_is_p() -> None:
    """In all positions or in some: no bet is on a draft's distribution there."""
    p, q = tables()
    row = sample_row(p, q, 6, 0)
    assert row.q is not None
    for drafted in ([], [1, 4]):
        given, meant = torch.zeros_like(row.q), row.p.clone()
        given[drafted], meant[drafted] = row.q[drafted], row.q[drafted]
        found = []
        for q_of_row in (given, meant):
            bets = Bets()
            bets.begin(row.prompt)
            found.append(bets.bets_on(replace(row, q=q_of_row)).ratios)
        assert found[0].tolist() == found[1].tolist()


def test_bets_without_some_alternatives() -> None:
    ratios = np.arange(8.0).reshape(2, 4)
    bets = RowBets(["a", "b", "a", "c"], ratios, ratios + 1, ratios > 3, np.array([0, 1]))
    assert bets.without([]) is bets.without({"z"}) is bets
    left = bets.without({"a", "z"})
    assert left.alternatives == ["b", "c"]
    assert left.ratios.tolist() == [[1, 3], [5, 7]]
    assert left.deviations is bets.deviations
    assert left.masks is bets.masks
    assert left.step_positions is bets.step_positions


@pytest.mark.parametrize(
    ("steps", "start", "stop", "parts"),
    [
        ([3, 1, 4], 0, 8, [3, 1, 4]),
        ([3, 1, 4], 2, 6, [1, 1, 2]),
        ([3, 1, 4], 3, 4, [1]),
        ([3, 1, 4], 4, 7, [3]),
        ([3, 1, 4], 1, 2, [1]),
        ([3, 1, 4], 5, 5, []),
        ([], 0, 0, []),
    ],
)
def test_steps_between_two_tokens(steps: list[int], start: int, stop: int, parts: list[int]) -> None:
    found = steps_between(steps, start, stop)
    assert found == parts
    assert all(type(size) is int for size in found)


def test_a_row_has_nothing_but_tokens_and_distributions_by_default() -> None:
    row = Row([0], HALF[:1])
    assert (row.q, row.raw, row.suspected, row.prompt, row.steps, row.batch) == (None, None, None, (), None, None)
    assert (dict(row.cutoff_gaps), row.continues, row.more) == ({}, False, False)
    assert Row([0], HALF[:1]).cutoff_gaps is not row.cutoff_gaps
    with pytest.raises(FrozenInstanceError):
        row.more = True  # type: ignore[misc]


def test_the_prompts_seen_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specnb_audit.bets.KEPT", 3)
    bets, kept = Bets(), []
    for prompt in (0, 1, 2, 0, 3, 4, 0):
        last = bets.sequence
        bets.begin([prompt])
        kept.append([one for (one,) in bets.last_with_prompt])
        assert bets.references[0] is last
        assert bets.references[1] is not bets.sequence
        assert bets.last_with_prompt[(prompt,)] is bets.sequence
    assert kept == [[0], [0, 1], [0, 1, 2], [1, 2, 0], [2, 0, 3], [0, 3, 4], [3, 4, 0]]


def test_a_sequence_is_compared_with_the_last_one_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specnb_audit.bets.KEPT", 2)
    bets = Bets()
    made = [bets.sequence]
    for batch, expected in (("a", 0), ("b", 1), ("a", 1), ("b", 2), (None, 4), ("c", 5), ("a", 6)):
        bets.begin([len(made)], batch)
        assert bets.references[0] is made[expected]  # of a batch seen long ago: the one before
        made.append(bets.sequence)


def rows_of_two_samplers(batch: tuple[str | None, str | None]) -> list[Row]:
    """Eight times two rows of either sampler in turn; the two of a sampler have the same tokens, two lines apart."""
    p = torch.full((12, 4), 0.25, dtype=torch.float64)
    rows = []
    for seed in range(8):
        generator = np.random.default_rng(seed)
        first, second = (generator.integers(4, size=12).tolist() for _ in range(2))
        rows += [Row(first, p, prompt=(seed, 0), batch=batch[0]), Row(second, p, prompt=(seed, 1), batch=batch[1])]
        rows += [Row(first, p, prompt=(seed, 2), batch=batch[0]), Row(second, p, prompt=(seed, 3), batch=batch[1])]
    return rows


def test_shared_noise_of_a_batch_is_found_wherever_its_rows_are() -> None:
    declared, unknown = (audited(rows_of_two_samplers(batch)) for batch in (("a", "b"), (None, None)))
    assert declared.report().diagnosis in {"same-tokens", "noise-of-texts"}
    assert unknown.found_after is None


def test_the_tokens_that_occurred_before_each_token() -> None:
    """Of the prompt, of the sequence so far, and of those that come now, the ones before; few ids of many are asked."""
    generator = np.random.default_rng(0)
    for vocab, prompt in ((6, []), (300, [299, 5]), (300, [1])):
        history = _History(prompt=prompt)
        history.tokens = [2, 3]
        ids = torch.from_numpy(generator.integers(6, size=(8, 5)))
        tokens = torch.from_numpy(generator.integers(6, size=8))
        tokens[3] = vocab - 1
        known = [*prompt, 2, 3]
        expected = [[int(one) in [*known, *tokens[:at].tolist()] for one in line] for at, line in enumerate(ids)]
        assert history.occurred(ids, tokens).tolist() == expected
    assert _History().occurred(torch.tensor([[4, 9]]), torch.tensor([4])).tolist() == [[False, False]]


def test_a_mixture_is_weighted_by_what_its_bets_have_gained() -> None:
    """The product of the mixtures is the mean product of the bets with a twentieth kept back, in pieces too."""
    ratios = np.random.default_rng(0).exponential(size=(400, 6)) * np.array([1, 2, 0.1, 1, 1, 3])
    history = _History()
    parts = [history.adaptive_mixture(part) for part in np.split(ratios, [1, 60])]
    gained = np.log(0.05 + 0.95 * ratios).cumsum(axis=0)
    assert np.log(np.concatenate(parts)).cumsum() == pytest.approx(log_mean(gained))
    assert history.log_weight == pytest.approx(gained[-1])
    # Bets that have all gained e^2000 are mixed as they are at the start.
    both = np.tile([3.0, 2.0], (3000, 1))
    mixed = _History().adaptive_mixture(both)
    assert (mixed[0], mixed[-1]) == pytest.approx((0.05 + 0.95 * 2.5, 0.05 + 0.95 * 3))
    assert _History().adaptive_mixture(np.full((3000, 2), 3.0)) == pytest.approx(np.full(3000, 2.9))


@pytest.mark.parametrize(
    ("start", "n", "low", "high"),
    [
        (0, 3, [0.1, 0.2, 0.3], [0.2, 0.4, 0.9]),
        (-2, 3, [0.1, 0.1, 0.1], [0.1, 0.1, 0.2]),
        (2, 3, [0.3, 0.1, 0.1], [0.9, 0.1, 0.1]),
        (3, 1, [0.1], [0.1]),
        (1, 0, [], []),
    ],
)
def test_a_slice_of_intervals_is_empty_outside(start: int, n: int, low: list[float], high: list[float]) -> None:
    found = _slice(Interval(np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.4, 0.9])), start, n)
    assert (found.low.tolist(), found.high.tolist()) == (low, high)
    nothing = _slice(Interval(np.empty(0), np.empty(0)), start, n)
    assert nothing.width.tolist() == [0.0] * n


def test_probabilities_that_carry_gradients_have_the_same_ratios() -> None:
    p = torch.tensor([[0.5, 0.5], [0.0, 1.0]], requires_grad=True)
    r = torch.tensor([[0.25, 0.75], [1.0, 0.0]], requires_grad=True)
    assert _ratio_at(r, p, torch.tensor([1, 0])).tolist() == [1.5, 1.0]
    assert _ratio_at(r, p, torch.tensor([0, 1])).tolist() == [0.5, 0.0]
