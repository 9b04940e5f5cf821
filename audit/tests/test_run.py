"""Audits of models and functions: what is found, what is refused, and sequences as they arrive."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny import llama
from torch import Tensor
from transformers import PreTrainedModel

from specnb.distributions import Sampling, sample
from specnb.rules import Outcome, token_verification
from specnb.sampler import generate
from specnb_audit import (
    Aim,
    Auditor,
    Engine,
    api,
    assert_exact,
    audit,
    audit_distributions,
    run,
)
from specnb_audit.bets import Row
from specnb_audit.numerics import Numerics
from specnb_audit.report import Report
from specnb_audit.run import Settings, audit_completions
from specnb_audit.teacher_forcing import Completion, Models

PROMPTS = [[1], [2, 3], [0, 1, 2]] * 20


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return llama(seed=9, layers=1)


def no_residual(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    return Outcome(accepted, sample(p.take_along_dim(accepted[..., None, None], dim=-2).squeeze(-2), final))


def test_exact_completions_of_a_model_pass(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    made = generate(target, PROMPTS, draft, gamma=2, max_new_tokens=12, progress=False)
    steps = [[size for size in row if size] for row in made.record.emitted.tolist()]
    report = assert_exact(target, made.tokens, prompts=PROMPTS, draft=draft, steps=steps)
    assert (report.tokens, report.sequences) == (sum(map(len, made.tokens)), len(PROMPTS))
    assert report.numerics is not None
    assert report.numerics.logit < 1e-4
    assert report.detectable["argmax"] > 0


def test_a_broken_sampler_is_found(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    prompts = PROMPTS * 5
    made = generate(target, prompts, draft, gamma=2, max_new_tokens=12, rule=no_residual, progress=False)
    report = audit(target, made.tokens, prompts=prompts, draft=draft, stop=True, progress=False)
    assert report.diagnosis == "no-residual"
    assert report.found_after is not None
    assert report.found_after <= report.tokens < 12 * len(prompts)
    with pytest.raises(AssertionError, match="REJECTED after 32 tokens"):
        assert_exact(coin, [[1] * 20] * 2, prompts=[[0], [1]])


def test_wrong_settings_are_found(target: PreTrainedModel) -> None:
    """Sampled at one temperature, claimed at another; drawn without top-k, claimed with it."""
    made = generate(target, PROMPTS, None, max_new_tokens=12, sampling=Sampling(0.5), progress=False)
    report = audit(target, made.tokens, prompts=PROMPTS, progress=False)
    assert report.diagnosis in {"sharper", "argmax", "tail-cut"}
    assert not audit(target, made.tokens, prompts=PROMPTS, sampling=Sampling(0.5), progress=False).rejected
    single = Engine(torch.float32)
    report = audit(target, made.tokens, prompts=PROMPTS, sampling=Sampling(0.5, top_k=2), engine=single, progress=False)
    assert report.diagnosis == "impossible"
    assert report.impossible[0].logit > 0


# What `audit` passes on, and what it refuses


def coin(prefix: tuple[int, ...]) -> list[float]:
    return [0.5, 0.5]


def test_every_argument_reaches_the_audit_of_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    array: Any = lambda rows: [np.array(row) for row in rows]  # noqa: E731
    monkeypatch.setattr(api, "audit_completions", lambda *given, **more: seen.append((*given, more)))
    sampling, other, control = Sampling(0.5), Sampling(2.0), [Completion([1], [0])]
    engine, aim = Engine(torch.float32, control=control, draft_sampling=other), Aim(("argmax",), coin)
    audit(coin, [[0, 1], [1]], prompts=[[1], [0]])
    audit(
        coin, array([[0, 1, 1]]), prompts=array([[1]]), sampling=sampling, eos=1, max_new_tokens=7, draft=coin,
        steps=array([[1, 0, 2]]), delta=0.25, seed=3, stop=True, engine=engine,
        aim=aim, progress=print,
    )  # fmt: skip
    audit(coin, [[0]], prompts=[[1]], sampling=sampling, draft=coin)
    plain = Settings(1e-6, 0, None, None, (), False, True)
    assert seen[0] == (
        Models(coin), [Completion([1], [0, 1]), Completion([0], [1])], plain, Engine(), {"expected": 3}
    )  # fmt: skip
    models, given, settings, found_engine, more = seen[1]
    assert models == Models(coin, sampling, coin, other, coin, (1,))
    assert given == [Completion([1], [0, 1, 1], [1, 2])]
    assert {type(token) for one in (*given[0].prompt, *given[0].tokens, *given[0].steps) for token in [one]} == {int}
    assert settings == Settings(0.25, 3, 1, 7, ("argmax",), True, print)
    assert (found_engine, more) == (engine, {"expected": 3})
    assert seen[2][0] == Models(coin, sampling, coin, sampling)


@pytest.mark.parametrize(
    ("completions", "given", "words"),
    [
        ([], {"prompts": []}, "there are no tokens to audit; give at least one completion with a token in it"),
        ([[]], {}, "there are no tokens to audit; give at least one sequence with a token in it"),
        ([[1]], {"prompts": [[1], [2]]}, "there are 1 completions and 2 prompts; give one for each"),
        ([[1]], {"steps": []}, "there are 1 completions and 0 steps; give one for each"),
        ([[1, 9]], {}, "sequence 0 has the token 9; the vocabulary has the tokens 0 to 3"),
        ([[1]], {"prompts": [[]]}, "sequence 0 has no prompt"),
        ([[1] * 40], {}, "sequence 0 has 41 tokens with its prompt, and the model has 16 positions"),
        ([[1]], {"draft": coin}, "vocabulary"),
        ([[1]], {"delta": 0.0}, "delta is 0"),
        ([[1]], {"eos": 4}, "eos is 4; the vocabulary has the tokens 0 to 3"),
        ([[1]], {"aim": Aim(("x",))}, "ignore has x; kinds are impossible"),
        ([[1]], {"engine": Engine(control=[Completion([0], [5])])}, "sequence 1 has the token 5"),
        ([[1]], {"engine": Engine(control=[Completion([0], [])])}, "the control has no tokens"),
    ],
)
def test_bad_input_is_refused(
    target: PreTrainedModel, completions: list[list[int]], given: dict[str, Any], words: str
) -> None:
    for ask in (partial(audit, progress=False), assert_exact):
        with pytest.raises(ValueError, match=words):
            ask(target, completions, **({"prompts": [[1]] * len(completions)} | given))


# Rows and completions as they arrive


def rows(*tokens: list[int]) -> list[Row]:
    return [Row(one, torch.full((len(one), 2), 0.5)) for one in tokens]


def test_a_stop_is_asked_for_and_comes_after_the_row() -> None:
    ones = rows([1] * 20, [1] * 20, [1] * 20)
    whole, stopped = audit_distributions(ones, progress=False), audit_distributions(ones, stop=True, progress=False)
    assert whole.found_after is not None
    assert 20 < whole.found_after <= 40
    assert stopped.found_after == whole.found_after
    assert (whole.tokens, stopped.tokens) == (60, 40)
    assert audit_distributions(ones[:1], stop=True, progress=False).tokens == 20
    given = Auditor(delta=0.25)
    assert audit_distributions(ones, given, progress=False).delta == 0.25
    assert (given.tokens, given.sequences) == (60, 3)


def interrupted(*tokens: list[int], **settings: Any) -> Report:
    """The report where Ctrl-C comes when the auditor has just begun the sequence after these."""

    class Stopped(Auditor):
        def add(self, row: Row) -> None:
            super().add(row)
            if self.sequences > len(tokens):
                raise KeyboardInterrupt

    return audit_distributions(rows(*tokens, []), Stopped(**settings), progress=False)


def test_what_was_audited_before_an_interrupt_counts() -> None:
    report = interrupted([0, 1], [1])
    assert (report.tokens, report.sequences, report.interrupted, report.notes) == (
        3, 2, True, ["interrupted after 3 tokens"]
    )  # fmt: skip
    assert interrupted([0]).notes == ["interrupted after 1 token"]
    # Of the wrong length.
    assert interrupted([], max_new_tokens=1).notes == ["interrupted after 0 tokens"]
    with pytest.raises(KeyboardInterrupt):
        interrupted([])


def completions(*tokens: list[int]) -> list[Completion]:
    return [Completion([], one) for one in tokens]


@pytest.mark.parametrize(
    ("sizes", "measured", "read"),
    [
        ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1], 4),  # four sequences
        ([1, None, 1, 1], [1], 2),  # as many as are ready
        ([0, None, None, 2, 3, None, 1], [0, 2, 3], 6),  # up to one with tokens
    ],
)
def test_numerics_are_measured_on_the_first_sequences(sizes: list[int | None], measured: list[int], read: int) -> None:
    seen: list[Any] = []

    class Known(Engine):
        def numerics(self, target: Any, completions: Any, sampling: Any) -> tuple[None, None]:
            seen.append((target, [len(one.tokens) for one in completions], sampling, self.positions, len(taken)))
            return None, None

    taken: list[Any] = []

    def stream() -> Iterator[Completion | None]:
        for size in sizes:
            taken.append(size)
            yield None if size is None else Completion([], [0] * size)

    models, settings = Models(coin, Sampling(0.5)), Settings(progress=False)
    report = run.audit_completions(models, stream(), settings, Known(positions=5))
    assert seen == [(coin, measured, Sampling(0.5), 5, read)]
    assert (report.tokens, report.sequences) == (sum(filter(None, sizes)), sum(size is not None for size in sizes))


def test_what_has_arrived_is_audited_before_more_is_waited_for() -> None:
    """Nothing is asked of the stream after None until the sequences before it have been judged."""
    judged: list[int] = []

    def target(prefix: tuple[int, ...]) -> list[float]:
        judged.append(len(prefix))
        return [0.5, 0.5]

    def stream() -> Iterator[Completion | None]:
        for _ in range(3):
            before = len(judged)
            yield Completion([], [0, 1])
            yield None
            assert len(judged) > before

    assert audit_completions(Models(target), stream(), Settings(progress=False)).tokens == 6


def test_an_interrupt_before_and_after_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise KeyboardInterrupt

    def stream() -> Iterator[Completion | None]:
        yield from completions([0, 1], [1])
        yield None
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "audited", fail)
        early = run.audit_completions(Models(coin), stream(), Settings(progress=False))
        late = run.audit_completions(Models(coin), completions([0, 1], [1]), Settings(progress=False))
    assert (early.interrupted, early.tokens, early.notes) == (True, 3, ["interrupted after 3 tokens"])
    assert (late.interrupted, late.tokens) == (True, 3)
    words = "interrupted after the last token: there is no comparison with a control, and nothing more is explained"
    assert late.notes == [words]

    def stops(prefix: tuple[int, ...]) -> list[float]:
        if len(prefix) == 3:
            raise KeyboardInterrupt
        return [0.5, 0.5]

    engine = Engine(control=completions([0, 1], [0, 0, 0, 0]))
    half = run.audit_completions(Models(stops), completions([0, 1]), Settings(progress=False), engine)
    assert (half.notes, half.control) == ([words], None)


# Explanations


ONES = ("same-tokens", "noise-of-texts")
"""Kinds to ignore where all sequences are the same."""


def sharp(prefix: tuple[int, ...]) -> list[float]:
    return [0.6, 0.3, 0.1]


def test_what_may_explain_a_finding_is_asked_only_after_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(run, "likelier_settings", lambda *given: asked.append(given[:3]) or ("cause", ["order"]))
    settings = Settings(progress=False, delta=0.01, ignore=ONES)
    fine, ones = completions([0, 1, 1, 0]), completions([0], [1] * 40)
    assert run.audit_completions(Models(coin), fine, settings).notes == []
    assert asked == []
    found = run.audit_completions(Models(coin), ones, settings)
    assert (found.cause, found.notes) == ("cause", ["order"])
    assert asked == [(Models(coin), ones, set())]
    asked.clear()
    near = Numerics(1, 10.0, 1.0, 1.0, 0.0)

    class Supposed(Engine):
        def numerics(self, *given: object) -> tuple[None, Any]:
            return None, lambda: near

    models, given = Models(sharp, Sampling(top_k=1)), completions([0], [0], [1, 0], [1])
    undecided = run.audit_completions(models, given, settings, Supposed())
    assert (undecided.cause, undecided.notes) == ("", ["order"])
    assert asked == [(models, given, {2, 3})]  # the sequences with impossible tokens
    asked.clear()
    certain = run.audit_completions(models, given, settings, Engine(torch.float32))
    assert certain.notes == ["order"]
    assert asked[0][2] == {2, 3}


def test_rows_that_share_noise_are_left_out_of_a_second_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    single = [random.integers(2, size=40).tolist() for _ in range(6)]
    given = completions(*[one for one in single for _ in range(3)])
    settings = Settings(progress=False, max_new_tokens=40, stop=False)
    report = run.audit_completions(Models(coin), given, settings)
    assert report.verdict == "dependent"
    assert report.rows_alone is not None
    assert (report.rows_alone.sequences, report.rows_alone.tokens) == (6, 240)
    assert not {"same-tokens", "noise-of-texts"} & set(report.rows_alone.by_alternative)
    assert report.notes == []
    monkeypatch.setattr("specnb_audit.explanations.REMEMBERED", 40 * 12)
    part = run.audit_completions(Models(coin), given, settings)
    assert part.notes == ["shared noise was looked for in the first 12 sequences"]
    assert part.rows_alone is not None
    assert part.rows_alone.sequences == 4
    other = run.audit_completions(Models(coin), completions(*[[1] * 40] * 13), Settings(progress=False, ignore=ONES))
    assert other.rejected
    assert (other.notes, other.rows_alone) == ([], None)  # no dependence was found


def test_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """After half a second, then every 10, and at the rejection once."""
    now, said = [100.0], list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with run.shown(said.append, 5000) as show:
        for at, given in [
            (100.4, (10, 0.0, None)),
            (100.5, (20, -0.5, None)),
            (110.4, (30, 0.0, None)),
            (110.5, (4010, 6.5, 3999)),
            (110.6, (4020, 6.5, 3999)),
            (120.5, (4040, math.inf, 3999)),
        ]:
            now[0] = at
            show(*given)
    assert said == [
        "audited 20 of 5,000 tokens, e = 10^-0.5",
        "audited 4,010 of 5,000 tokens, e = 10^6.5; rejected after 3,999",
        "audited 4,040 of 5,000 tokens, e = infinite; rejected after 3,999",
    ]
