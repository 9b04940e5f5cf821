"""The auditor: bets are fair under exact samplers, by enumeration; broken ones are found and diagnosed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from distributions_for_tests import distribution_pair, distributions_along
from samplers import SAMPLER_BUGS, sample_row, tables
from torch import Tensor

from specnb.audit.auditor import Auditor
from specnb.audit.bets import Bets, CutoffGap, Row
from specnb.audit.numerics import Numerics
from specnb.sampling.distributions import sample
from specnb.sampling.verification import Outcome, token_verification

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
