"""Samplers that are wrong are found, within a stated number of tokens, and exact ones pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from samplers import VOCAB, audit_of, sample_row, sampled_rows, tables, zipf_tables
from tiny import llama
from torch import Tensor

from audit_studies.bugs.step import argmax_distribution, inverted_residual, no_residual, one_uniform
from audit_studies.bugs.verification import biased, suppressed
from specnb.distributions import Sampling, normalise, sample, standardise
from specnb.rules import Outcome, lenient_verification, token_verification
from specnb_audit import audit
from specnb_audit.bets import Row
from specnb_audit.claimed import Claimed, claimed_probs
from specnb_audit.logit_faults import ROUNDINGS, newest_counted
from specnb_audit.penalties import Penalties
from specnb_audit.report import Report

P, _ = zipf_tables()
TABLES = tables()


def constant_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """All acceptance tests use one constant."""
    return token_verification(p, q, draft_tokens, torch.full_like(accept, 0.3), final)


Sampler = tuple[dict[str, Any], set[str], int]
SAMPLERS: dict[str, Sampler] = {
    "no residual": ({"rule": no_residual}, {"no-residual"}, 1943),
    "inverted residual": ({"rule": inverted_residual}, {"draft-leak"}, 38),
    "greedy draft": ({"sampled": argmax_distribution}, {"greedy-draft"}, 17),
    "colder draft": ({"sampled": lambda q: normalise(q**2)}, {"wrong-q"}, 276),
    "one uniform": ({"rule": one_uniform}, {"one-uniform"}, 1311),
    "constant uniform": ({"rule": constant_uniform}, {"constant-uniform", "lenience"}, 422),
    "lenience 0.5": ({"rule": lenient_verification(0.5)}, {"lenience"}, 429),
}
"""What is wrong, the kinds that may explain it, and after how many tokens it is found: a bet or a
weight that changes shows there."""


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_broken_sampler_is_found_after_its_tokens_and_diagnosed(name: str) -> None:
    bug, kinds, after = SAMPLERS[name]
    report = audit_of([sample_row(*TABLES, 100, row, **bug) for row in range(after // 100 + 1)])
    print(name, report.found_after, report.diagnosis)
    assert report.found_after == pytest.approx(after, abs=3)
    assert report.diagnosis in kinds, report.by_alternative


@pytest.mark.parametrize(
    ("actual", "kind", "rows", "after"),
    [
        pytest.param(suppressed(P), "never-occurs", 8, 1041, id="suppressed token"),
        pytest.param(biased(P), "token-bias", 24, 2452, id="logit bias"),
        pytest.param(standardise(P.log(), Sampling(top_p=0.98)), "tail-cut", 10, 1277, id="top-p 0.98"),
        pytest.param(claimed_probs(P.log(), Claimed(min_p=0.02)), "tail-cut", 10, 491, id="min-p 0.02"),
        pytest.param(standardise(P.log(), Sampling(top_k=40)), "tail-cut", 24, 1277, id="top-k 40"),
    ],
)
def test_what_nobody_claimed_is_found(actual: Tensor, kind: str, rows: int, after: int) -> None:
    report = audit_of(sampled_rows(actual, P, None, rows, 250, seed=1)[: after // 250 + 1])
    print(report.found_after, list(report.by_alternative.items())[:3])
    assert report.found_after == pytest.approx(after, abs=3)
    assert report.diagnosis == kind


class AfterFullAcceptance:
    """Algorithm 1, whose target is another one in the first position of a step that follows a full
    acceptance."""

    full = False

    def __call__(self, p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        if self.full:
            p = torch.cat([0.5 * (p[:1] + p[:1].roll(1, dims=-1)), p[1:]])
        outcome = token_verification(p, q, draft_tokens, accept, final)
        self.full = int(outcome.accepted) == len(draft_tokens)
        return outcome


def test_with_steps_the_audit_sees_where_a_step_is_wrong() -> None:
    """Only the first token after full acceptance is wrong, as when the bonus token is not in the
    cache."""
    p, q = tables(closeness=0.97)
    rows = [sample_row(p, q, 120, seed, AfterFullAcceptance()) for seed in range(40)]
    aware, blind = audit_of(rows), audit_of([replace(row, steps=None) for row in rows])
    assert aware.rejected
    assert aware.log10_e > blind.log10_e
    places = aware.breakdown["position in the step"]
    assert places[0][0] == "0"
    assert aware.diagnosis is not None
    assert places[0][2] > 0.8 * aware.by_alternative[aware.diagnosis]


@pytest.mark.parametrize("lag", [1, 6])
def test_a_uniform_used_again_some_positions_later_is_found(lag: int) -> None:
    """Each uniform serves two tokens, `lag` places apart."""
    p = TABLES[0]
    rows = []
    for number in range(10):
        fresh = torch.from_numpy(np.random.default_rng([lag, number]).random(200))
        again = torch.arange(200) // lag % 2 == 1
        uniforms = fresh.where(~again, fresh.roll(lag))
        tokens = [0]
        for u in uniforms:
            tokens.append(int(sample(p[tokens[-1]], u)))
        rows.append(Row(tokens[1:], p[tokens[:-1]], prompt=[0]))
    report = audit_of(rows)
    assert report.rejected
    assert report.diagnosis == "noise-of-steps"


CARRIED: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "tests a draft token at the same position": lambda old, fresh: (fresh[0], old[1], fresh[2]),
    "samples a draft token at the same position": lambda old, fresh: (old[0], fresh[1], fresh[2]),
    "sampled the last token, tests the first": lambda old, fresh: (
        fresh[0], torch.cat([old[2][None], fresh[1][1:]]), fresh[2]
    ),
    "sampled the last token, samples the first": lambda old, fresh: (
        torch.cat([old[2][None], fresh[0][1:]]), fresh[1], fresh[2]
    ),
}  # fmt: skip
"""The uniforms of a step (draft, tests, last token) from those of the step before and fresh
ones."""


@pytest.mark.parametrize("name", CARRIED)
def test_a_uniform_carried_from_one_step_to_the_next_is_found(name: str) -> None:
    """Every second step reuses a uniform of the step before."""
    p, q = TABLES
    rows = []
    for number in range(30):
        random, text, steps, old = np.random.default_rng([7, number]), [0], list[int](), None
        while len(text) <= 120:
            fresh = tuple(torch.from_numpy(random.random(size))[()] for size in (3, 3, ()))
            draft, accept, final = CARRIED[name](old, fresh) if old and len(steps) % 2 else fresh
            drafted = [text[-1]]
            for u in draft:
                drafted.append(int(sample(q[drafted[-1]], u)))
            given = (p[drafted], q[drafted[:-1]], torch.tensor(drafted[1:]), accept, final)
            accepted, token, _ = token_verification(*given)
            text += [*drafted[1 : 1 + int(accepted)], int(token)]
            steps.append(int(accepted) + 1)
            old = fresh
        before = torch.tensor(text[:-1])
        rows.append(Row(text[1:], p[before], q[before], prompt=[0], steps=steps))
    report = audit_of(rows)
    print(name, report.found_after, list(report.by_alternative.items())[:3])
    assert next(iter(report.by_alternative)) == "noise-of-steps"
    # Which needs some 10,000 tokens.
    assert report.rejected == ("same position" not in name or "samples" in name)


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_one_uniform_for_all_tests_of_a_step_is_found(same: bool, steps: bool) -> None:
    """Each token alone has the right distribution."""

    def rule(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, accept[:1].expand_as(accept) if same else accept, final)

    rows = [sample_row(*tables(closeness=0.7), 100, row, rule=rule) for row in range(50 if same else 10)]
    report = audit_of(rows if steps else [replace(row, steps=None) for row in rows])
    print(report.found_after, list(report.by_alternative.items())[:3])
    assert (report.by_alternative["constant-uniform"] > 3) == same
    assert report.rejected == (same and steps)


@pytest.mark.parametrize("raced", [True, False])
@pytest.mark.parametrize("lag", [2, 40, None])
def test_noise_that_returns_many_sequences_later_is_found(raced: bool, lag: int | None) -> None:
    """Seeds repeat after `lag` lines; prompts do not."""
    p, rows = TABLES[0], list[Row]()
    for number in range(60):
        random, text = np.random.default_rng([3, number % (lag or 100)]), [number % VOCAB]
        for _ in range(30):
            mass = p[text[-1]].numpy()
            noise = random.exponential(size=len(mass)) if raced else None
            text.append(
                int((mass / noise).argmax() if noise is not None else mass.cumsum().searchsorted(random.random()))
            )
        rows.append(Row(text[1:], p[text[:-1]], prompt=[number // VOCAB, text[0]]))
    report = audit_of(rows)
    print(report.found_after, list(report.by_alternative.items())[:3])
    assert report.diagnosis == (None if lag is None else "noise-of-texts")


@pytest.mark.parametrize("same", [True, False])
def test_a_race_with_the_noise_of_the_sequence_before_is_found(same: bool) -> None:
    """As `torch.multinomial` samples, seeded anew for each sequence; each from a start of its
    own."""
    p, rows = TABLES[0], list[Row]()
    for number in range(12):
        random, text = np.random.default_rng(3 if same else [3, number]), [2 * number]
        for _ in range(40):
            text.append(int((p[text[-1]].numpy() / random.exponential(size=p.shape[1])).argmax()))
        rows.append(Row(text[1:], p[text[:-1]], prompt=[text[0]]))
    report = audit_of(rows)
    assert report.rejected == same
    assert (report.by_alternative["noise-of-texts"] > 6) == same
    assert report.diagnosis in (("noise-of-texts", "same-tokens") if same else (None,))


def test_first_tokens_and_whole_sequences_that_deviate_are_found() -> None:
    """The first token is the argmax; every fifth sequence is at another temperature; and a token is
    left out."""
    cold = torch.softmax(P.log() * 1.6, dim=-1)
    exact, other = (sampled_rows(table, P, None, 160, 60, seed=4) for table in (P, cold))
    starts = torch.tensor([row.tokens[0] for row in exact])
    argmax = [replace(row, tokens=[int(P[0].argmax()), *row.tokens[1:]]) for row in exact]
    mixed = [other[at] if at % 5 == 0 else row for at, row in enumerate(exact)]
    left_out = [replace(row, tokens=row.tokens[1:], p=torch.cat([P[:1], row.p[2:]])) for row in exact]
    assert len(starts.unique()) > 1
    for rows, kind, within in ((argmax, "first-token", 3000), (mixed, "whole-sequences", 9600),
                               (left_out, "first-token", 9600)):  # fmt: skip
        report = audit_of(rows)
        print(kind, report.found_after, list(report.by_alternative.items())[:3])
        assert (report.diagnosis, (report.found_after or 10**9) <= within) == (kind, True)


def rows_of_two_samplers(batch: tuple[str | None, str | None]) -> list[Row]:
    """Eight times two rows of either sampler in turn; the two of a sampler have the same tokens,
    two lines apart."""
    p = torch.full((12, 4), 0.25, dtype=torch.float64)
    rows = []
    for seed in range(8):
        generator = np.random.default_rng(seed)
        first, second = (generator.integers(4, size=12).tolist() for _ in range(2))
        rows += [Row(first, p, prompt=(seed, 0), batch=batch[0]), Row(second, p, prompt=(seed, 1), batch=batch[1])]
        rows += [Row(first, p, prompt=(seed, 2), batch=batch[0]), Row(second, p, prompt=(seed, 3), batch=batch[1])]
    return rows


def test_shared_noise_of_a_batch_is_found_wherever_its_rows_are() -> None:
    declared, unknown = (audit_of(rows_of_two_samplers(batch)) for batch in (("a", "b"), (None, None)))
    assert declared.diagnosis in {"same-tokens", "noise-of-texts"}
    assert unknown.diagnosis == "noise-of-texts"


def test_a_suspected_model_is_found_sooner_than_by_any_other_bet() -> None:
    """Noise in the logits without direction: only the likelihood ratio against the noisy model
    knows it."""
    p, _ = TABLES
    generator = torch.Generator().manual_seed(0)
    noisy = torch.softmax(p.log() + 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64), dim=-1)
    rows = sampled_rows(noisy, p, None, 15, 120, seed=0)
    known = audit_of([replace(row, suspected=noisy[[0, *row.tokens[:-1]]]) for row in rows])
    assert known.diagnosis == "suspected-model"
    assert known.found_after is not None
    assert known.found_after < (audit_of(rows).found_after or known.tokens)


@pytest.mark.parametrize("factor", [0.3, 1.0])
def test_a_penalty_that_counts_the_last_token_twice_within_a_step_is_found(factor: float) -> None:
    """In steps of three tokens, of which the later ones have the token before less often."""
    random, rows, likely = np.random.default_rng(3), list[Row](), P.clone()
    likely[torch.arange(len(P)), torch.arange(len(P))] += 0.1  # else a token hardly comes twice
    likely = normalise(likely)
    for _ in range(25 if factor < 1 else 8):
        text = [0]
        for at in range(120):
            p = likely[text[-1]].numpy().copy()
            p[text[-1]] *= factor if at % 3 else 1
            text.append(int(random.choice(len(p), p=p / p.sum())))
        rows.append(Row(text[1:], likely[text[:-1]], prompt=[0], steps=[3] * 40))
    report = audit_of(rows)
    print(report.found_after, list(report.by_alternative.items())[:3])
    assert report.rejected == (factor < 1)
    assert factor == 1 or report.diagnosis == "last-token"


def logits_rounded(name: str | None) -> Report:
    """The report on tokens of a model whose logits were rounded, of as many as the test needs."""
    model = llama(24)
    model.lm_head.weight.mul_(3)
    rows, random = [[number % 24] for number in range(240)], torch.Generator().manual_seed(0)
    for _ in range(10):
        logits = model(torch.tensor(rows)).logits[:, -1]
        probs = (logits if name is None else ROUNDINGS[name](logits)).softmax(dim=-1)
        rows = [[*row, int(x)] for row, x in zip(rows, torch.multinomial(probs, 1, generator=random), strict=True)]
    return audit(model, [row[1:] for row in rows], prompts=[row[:1] for row in rows], progress=False)


@pytest.mark.parametrize("name", ["fp8 (e5m2)", None])
@torch.no_grad()
def test_rounded_logits_are_found(name: str | None) -> None:
    report = logits_rounded(name)
    print(name, report.found_after, list(report.by_alternative.items())[:3])
    assert report.diagnosis == (None if name is None else "rounded-logits")


@pytest.mark.parametrize("times", [0, 2, None])
@torch.no_grad()
def test_a_penalty_that_counts_the_newest_token_wrongly_is_found(times: int | None) -> None:
    penalties = Penalties(repetition_penalty=0.7, presence_penalty=-1.0)
    model, random = llama(24), torch.Generator().manual_seed(0)
    rows = [[number % 24] for number in range(160)]
    for at in range(10):
        logits = model(torch.tensor(rows)).logits[:, -1:]
        changed = [
            newest_counted(own, penalties, row[:1], [*row[1:], 0], at, 1 if times is None else times)
            for own, row in zip(logits, rows, strict=True)
        ]
        tokens = torch.multinomial(torch.cat(changed).softmax(dim=-1), 1, generator=random)
        rows = [[*row, int(x)] for row, x in zip(rows, tokens, strict=True)]
    settings: dict[str, Any] = {"sampling": Claimed(penalties=penalties), "progress": False}
    report = audit(model, [row[1:] for row in rows], prompts=[row[:1] for row in rows], **settings)
    print(times, report.found_after, list(report.by_alternative.items())[:3])
    assert report.diagnosis == (None if times is None else "last-token")
