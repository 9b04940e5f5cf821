"""The auditor: exact samplers gain nothing, by enumeration; violations, lengths and pieces; the
report."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from distributions_for_tests import distribution_pair
from samplers import sample_row, tables

from specnb.distributions import sample
from specnb_audit.alternatives import ALTERNATIVES
from specnb_audit.auditor import Auditor, end_tokens
from specnb_audit.bets import Bets, CutoffGap, Row, steps_between
from specnb_audit.numerics import Numerics


def audited(rows: list[Row], **settings: object) -> Auditor:
    auditor = Auditor(**settings)  # type: ignore[arg-type]
    for row in rows:
        auditor.add(row)
    return auditor


# Exact samplers


@pytest.mark.parametrize("steps", [[1, 1], [2], None])
@pytest.mark.parametrize("kind", ["dense", "zeros in p", "disjoint"])
def test_an_exact_sampler_gains_nothing_on_average(
    kind: str, steps: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected e-value of each alternative, over all pairs of sequences of two tokens, is at
    most 1.

    Without the bets on the transform, which is randomised; `test_bets` shows that those are fair.
    """
    monkeypatch.setattr(Bets, "_on_transforms", lambda *given: [])
    p, q = distribution_pair(kind, 3, seed=5)
    expected: dict[str, float] = {}
    whole = 0.0
    for tokens in product(range(3), repeat=4):
        rows, chance = [], 1.0
        for text in (tokens[:2], tokens[2:]):
            distributions, drafts = (torch.stack([of(text[:known]) for known in range(2)]) for of in (p, q))
            chance *= float(distributions.gather(-1, torch.tensor(text)[:, None]).prod())
            faults = {"rounded-logits": drafts.gather(-1, torch.tensor(text)[:, None]).T}
            rows.append(Row(text, distributions, drafts, prompt=(1,), steps=steps, faults=faults))
        if chance > 0:
            whole += chance
            for name, value in audited(rows).report(detect=False).by_alternative.items():
                expected[name] = expected.get(name, 0.0) + chance * 10**value
    assert whole == pytest.approx(1)
    assert {"first-token", "whole-sequences", "noise-of-steps", "noise-of-texts"} <= expected.keys()
    for name in expected:
        assert expected[name] <= 1 + 1e-6, name  # e-values are added up in float32
        if kind == "dense":
            assert expected[name] == pytest.approx(1), name


def test_a_sampler_seeded_like_the_audit_is_still_exact() -> None:
    """Its uniforms and those of the randomised transform would otherwise be the same numbers."""
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).expand(2000, -1)
    u = torch.from_numpy(np.random.default_rng(0).random(2000))
    assert not audited([Row(sample(p, u).tolist(), p)], seed=0).report().rejected


def test_exactness_is_rejected_from_an_e_value_of_1_over_delta_on() -> None:
    """By default at one in a million; the e-value is the mean of those of the alternatives."""
    assert Auditor().delta == 1e-6
    p = torch.full((60, 2), 0.5, dtype=torch.float64)
    for delta in (1e-6, 1e-3, 0.3):
        report = audited([Row([1] * 60, p)], delta=delta).report()
        passed = report.running >= -np.log10(delta)
        assert report.found_after == passed.argmax() + 1
        each = np.stack(list(report.running_by_alternative.values()))
        assert 10**report.running == pytest.approx((10**each).mean(axis=0))


# Ends, lengths, and impossible tokens


@pytest.mark.parametrize(
    ("pieces", "eos", "most", "violations", "found_after", "audited_tokens"),
    [
        # Without a setting nothing is checked.
        ([[0, 1, 2]], None, None, {}, None, 3),
        # Ends
        ([[0, 3]], 3, None, {}, None, 2),
        ([[3, 3, 3]], 3, None, {"after-the-end": 2}, 2, 1),
        ([[0, 3], [], [1], [2]], 3, None, {"after-the-end": 2}, 3, 2),
        ([[0], [1, 3, 0]], 3, None, {"after-the-end": 1}, 4, 3),
        # Lengths
        ([[0, 1, 2, 0]], None, 2, {"wrong-length": 1}, 3, 4),
        ([[0]], None, 2, {"wrong-length": 1}, 1, 1),
        ([[]], None, 2, {"wrong-length": 1}, 0, 0),
        # Both: an end token may end a sequence early, and no later than its length
        ([[0, 3]], 3, 4, {}, None, 2),
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
) -> None:
    """Of one sequence in pieces, after three flawless ones."""
    prefix = 3
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
        # a violation may follow the last token.
        first = min(first, auditor.tokens - 1) if violations else first
        assert np.isinf(auditor.report().running).tolist() == [at >= first for at in range(auditor.tokens)]


def test_what_follows_the_end_is_cut_from_everything_that_comes_with_a_row() -> None:
    p, q = tables()
    row = sample_row(p, q, 12, 0)
    tokens = [token % 23 for token in row.tokens]
    faults = {"rounded-logits": torch.linspace(0, 0.5, 24).reshape(2, 12)}
    row = replace(row, raw=row.q, suspected=row.p.flip(0), tokens=tokens, faults=faults)
    row.tokens[6] = 23  # type: ignore[index]
    assert row.q is not None
    assert row.raw is not None
    assert row.suspected is not None
    assert row.steps is not None
    steps = steps_between(row.steps, 0, 7)
    cut = Row(
        row.tokens[:7], row.p[:7], row.q[:7], row.raw[:7], row.suspected[:7], row.prompt, steps,
        faults={name: probs[:, :7] for name, probs in faults.items()},
    )  # fmt: skip
    whole, short = audited([row, row], eos=23), audited([cut, cut], eos=23)
    assert whole.violations == {"after-the-end": 10}
    assert np.concatenate(whole.logs) == pytest.approx(np.concatenate(short.logs))
    assert np.concatenate(whole.places, axis=1).tolist() == np.concatenate(short.places, axis=1).tolist()


def test_impossible_tokens_are_listed_where_they_are() -> None:
    """The second sequence is in two pieces; each of the gaps belongs to a position of the whole
    sequence."""
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


def test_nothing_is_bet_on_an_impossible_token() -> None:
    p, q = tables()
    rows = [sample_row(p, q, 40, seed) for seed in range(2)]
    changed = rows[1].p.clone()
    changed[20, rows[1].tokens[20]] = 0
    logs = np.concatenate(audited([rows[0], replace(rows[1], p=changed / changed.sum(dim=-1, keepdim=True))]).logs)
    assert logs[60] == pytest.approx(logs[59], abs=1e-5)
    assert np.abs(logs[59] - logs[58]).max() > 0.01


@pytest.mark.parametrize("at", [0, 10, 30, 31, 32, 40])
def test_in_one_row_whichever_comes_first_counts_a_violation_or_enough_evidence(at: int) -> None:
    """A fair coin that always returns 1 is rejected after 31 tokens; token `at` is impossible."""
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).expand(50, -1)
    tokens = [1] * 50
    assert audited([Row(tokens, p)]).found_after == 31
    tokens[at] = 2
    assert audited([Row(tokens, p)]).found_after == min(31, at + 1)


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
    assert auditor.found_after == audited([impossible, constant], ignore=["impossible"]).found_after == 33


def test_ignored_alternatives_are_not_bet_on() -> None:
    p = torch.full((60, 2), 0.5, dtype=torch.float64)
    row = Row([1] * 60, p)
    names = set(audited([row]).alternatives)
    report = audited([row], ignore=["along-ids", "repeats"]).report()
    assert set(report.running_by_alternative) == names - {"along-ids", "repeats"}
    exact = Row(np.random.default_rng(0).integers(2, size=60).tolist(), p)
    quiet, without = (audited([exact], ignore=kinds).report().detectable for kinds in ((), ("impossible", "sharper")))
    assert {"impossible", "sharper"} <= set(quiet)
    assert set(without) == set(quiet) - {"impossible", "sharper"}
    with pytest.raises(
        ValueError, match=r"^ignore leaves no kind of deviation to test for; leave out one of its names$"
    ):
        audited([row], ignore=ALTERNATIVES)


# The report


def numerics_of(nats: float) -> Numerics:
    return Numerics(positions=8, logit=0.6, tv=0.15, tv_mean=0.15, nats=nats)


def test_evidence_within_the_numerics_is_remembered() -> None:
    """After 100 tokens that deviate by no more than the numerics, 900 that deviate the other
    way."""
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


# Bad input


def test_a_token_of_nearly_no_probability_leaves_the_evidence_a_number() -> None:
    auditor = Auditor()
    auditor.add(Row([1], torch.tensor([[1 - 1e-315, 1e-315]], dtype=torch.float64)))
    for _ in range(60):
        auditor.add(Row([1], torch.tensor([[0.5, 0.5]])))
    assert np.isfinite(auditor.report().log10_e)
    assert auditor.report().rejected


HALF = torch.full((2, 2), 0.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row([0, 1], HALF, HALF[:1]), "q has shape (1, 2) for 2 tokens"),
        (Row([0, 1], HALF, suspected=HALF[:, :1]), "suspected has shape (2, 1) for 2 tokens"),
        (Row([0, 1], HALF * 1.002), "a row of p does not sum to 1"),
        (Row([0, 1], HALF, HALF * 1.5), "a row of q does not sum to 1"),
        (Row([0, 1], HALF, suspected=HALF * 1.0001), "a row of suspected does not sum to 1"),
        (Row([0, 0], torch.tensor([[1.5, -0.5]] * 2)), "p has a negative entry"),
        (Row([0, 0], torch.tensor([[0.5, 0.5]] * 2), torch.tensor([[1.5, -0.5]] * 2)), "q has a negative entry"),
        (Row([0, 2], HALF), "tokens go from 0 to 2 in a vocabulary of 2"),
        (Row([0, 1], HALF, steps=[1]), "steps add up to 1 for 2 tokens"),
    ],
)
def test_a_row_that_does_not_fit_together_is_refused(row: Row, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Auditor().add(row)


@pytest.mark.parametrize("missing", ["q", "raw", "suspected", "steps"])
def test_what_comes_with_one_sequence_must_come_with_all(missing: str) -> None:
    p = torch.full((2, 2), 0.5)
    whole = Row([0, 1], p, p, p, p, steps=[1, 1])
    part = replace(whole, **{missing: None})  # type: ignore[arg-type]
    for first, second in ((whole, part), (part, whole)):
        with pytest.raises(ValueError, match=r"^some sequences come with a draft's distributions or with steps and"):
            audited([first, second])


def test_an_end_token_must_be_in_the_vocabulary() -> None:
    assert (end_tokens(None), end_tokens(3), end_tokens(iter([0, 3]), vocab=4)) == (set(), {3}, {0, 3})
    with pytest.raises(ValueError, match=r"^eos is 2; the vocabulary has the tokens 0 to 1$"):
        Auditor(eos=[0, 2]).add(Row([0], HALF[:1]))
