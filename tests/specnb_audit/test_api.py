"""`audit` on models and functions: input, findings and errors."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from reports import report
from tiny import llama
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.generate import generate
from specnb.distributions import Sampling, sample
from specnb.rules import Outcome, token_verification
from specnb_audit import Aim, Auditor, Engine, api, assert_exact, audit, audit_distributions, progress, run
from specnb_audit.bets import Row
from specnb_audit.numerics import Numerics
from specnb_audit.report import Report
from specnb_audit.run import Settings
from specnb_audit.teacher_forcing import Completion, Models

PROMPTS = [[1], [2, 3], [0, 1, 2]] * 40


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
    for aim in ({}, {"draft": draft}, {"draft": draft, "steps": steps}):
        report = assert_exact(target, made.tokens, prompts=PROMPTS, **aim)
        assert report.tokens == sum(map(len, made.tokens))
        assert report.sequences == len(PROMPTS)
        assert len(report.running) == report.tokens
        assert report.numerics is not None
        assert report.numerics.logit < 1e-4
        assert report.detectable["argmax"] > 0
        assert "no deviation was found" in str(report)


def test_a_broken_sampler_is_found(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    prompts = PROMPTS * 3
    made = generate(target, prompts, draft, gamma=2, max_new_tokens=12, rule=no_residual, progress=False)
    report = audit(target, made.tokens, prompts=prompts, draft=draft, progress=False)
    assert report.rejected
    assert report.diagnosis == "no-residual"
    with pytest.raises(AssertionError, match="REJECTED"):
        assert_exact(target, made.tokens, prompts=prompts, draft=draft)
    stopped = audit(target, made.tokens, prompts=prompts, draft=draft, stop=True, progress=False)
    assert report.found_after is not None
    assert stopped.found_after == report.found_after <= stopped.tokens < report.tokens


def test_wrong_settings_are_found(target: PreTrainedModel) -> None:
    """Sampled at one temperature, claimed at another; drawn without top-k, claimed with it."""
    made = generate(target, PROMPTS, max_new_tokens=12, sampling=Sampling(0.5), progress=False)
    report = audit(target, made.tokens, prompts=PROMPTS, progress=False)
    assert report.diagnosis in {"sharper", "argmax", "tail-cut"}
    assert not audit(target, made.tokens, prompts=PROMPTS, sampling=Sampling(0.5), progress=False).rejected
    single = Engine(torch.float32)
    report = audit(target, made.tokens, prompts=PROMPTS, sampling=Sampling(0.5, top_k=2), engine=single, progress=False)
    assert report.diagnosis == "impossible"
    assert report.impossible[0].logit > 0


def test_greedy_sequences_show_the_first_difference_and_its_logit_gap(target: PreTrainedModel) -> None:
    made = generate(target, PROMPTS[:3], max_new_tokens=6, sampling=Sampling(0), progress=False)
    greedy: dict[str, Any] = {
        "prompts": PROMPTS[:3],
        "sampling": Sampling(0),
        "engine": Engine(torch.float32),
        "progress": False,
    }
    assert not audit(target, made.tokens, **greedy).rejected
    completions = [list(text) for text in made.tokens]
    with torch.inference_mode():
        logits = target(input_ids=torch.tensor([[*PROMPTS[1], *completions[1][:2]]])).logits[0, -1]
    completions[1][2] = int(logits.topk(2).indices[1])
    report = audit(target, completions, **greedy)
    first = report.impossible[0]
    assert (first.sequence, first.position, first.token) == (1, 2, completions[1][2])
    top = logits.topk(2).values
    assert first.logit == pytest.approx(float(top[0] - top[1]), abs=1e-4)


def test_functions_are_targets_too() -> None:
    generator = np.random.default_rng(3)
    table = generator.dirichlet(np.ones(5), size=6)

    def probs(prefix: tuple[int, ...]) -> np.ndarray:
        return np.asarray(table[prefix[-1] if prefix else 5])

    completions = []
    for _ in range(30):
        text: list[int] = []
        for _ in range(20):
            text.append(int(generator.choice(5, p=probs(tuple(text)))))
        completions.append(text)
    assert_exact(probs, completions, prompts=[[]] * 30)
    assert_exact(probs, completions, prompts=[[]] * 30, draft=lambda prefix: np.full(5, 0.2))
    turned = [[(token + 1) % 5 for token in text] for text in completions]
    assert audit(probs, turned, prompts=[[]] * 30, progress=False).rejected


def test_sequences_that_continue_after_eos_are_mentioned(target: PreTrainedModel) -> None:
    target.config.eos_token_id = 2
    try:
        noted = audit(target, [[0, 2, 1], [1, 2]], prompts=[[1], [1]], progress=False)
        ended = audit(target, [[0, 2, 1], [1, 2]], prompts=[[1], [1]], eos=2, progress=False)
    finally:
        target.config.eos_token_id = None
    assert noted.notes == ["1 sequence continues after the end token [2]; give eos if it ends them"]
    assert ended.diagnosis == "after-the-end"


def test_an_interrupt_still_gives_a_report(target: PreTrainedModel) -> None:
    def rows() -> Iterator[Row]:
        yield Row([0, 1], torch.full((2, 4), 0.25))
        raise KeyboardInterrupt

    report = audit_distributions(rows(), progress=False)
    assert report.tokens == 2
    assert "interrupted after 2 tokens" in str(report)


def test_the_report_is_json(target: PreTrainedModel) -> None:
    report = audit(target, [[0, 1, 2]], prompts=[[1]], sampling=Sampling(top_k=1), progress=False)
    read = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert read["verdict"] == "rejected"
    assert read["log10_e"] == "inf"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"completions": []}, "no tokens"),
        ({"completions": [[]], "prompts": [[1]]}, "no tokens"),
        ({"completions": [[1]], "prompts": [[1], [2]]}, "1 completions and 2 prompts"),
        ({"completions": [[1, 9]], "prompts": [[1]]}, "has the token 9"),
        ({"completions": [[1]], "prompts": [[]]}, "no prompt"),
        ({"completions": [[1]], "prompts": [[1]], "steps": [[2]]}, "steps add up to 2"),
        ({"completions": [[1] * 40], "prompts": [[1]]}, "16 positions"),
        ({"completions": [[1]], "prompts": [[1]], "draft": llama(vocab=5)}, "same vocabulary"),
        ({"completions": [[1]], "prompts": [[1]], "delta": 0.0}, "delta is 0"),
    ],
)
def test_bad_input_is_refused(target: PreTrainedModel, given: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"prompts": []} | given if not given["completions"] else given
    with pytest.raises(ValueError, match=words):
        audit(target, settings.pop("completions"), progress=False, **settings)


def test_a_certain_distribution_may_be_given_in_whole_numbers() -> None:
    draft = np.array([0.5, 0.5])
    report = audit(lambda prefix: [1, 0], [[0] * 5], prompts=[[]], draft=lambda prefix: draft, progress=False)
    assert not report.rejected


def coin(prefix: tuple[int, ...]) -> list[float]:
    return [0.5, 0.5]


# What `audit` passes on


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
    assert models == Models(coin, sampling, coin, other, coin)
    assert given == [Completion([1], [0, 1, 1], [1, 2])]
    assert {type(token) for one in (*given[0].prompt, *given[0].tokens, *given[0].steps) for token in [one]} == {int}
    assert settings == Settings(0.25, 3, 1, 7, ("argmax",), True, print)
    assert (found_engine, more) == (engine, {"expected": 3})
    assert seen[2][0] == Models(coin, sampling, coin, sampling)


@pytest.mark.parametrize(
    ("completions", "given", "words"),
    [
        ([[0]], {"prompts": [[1], [2]]}, "there are 1 completions and 2 prompts; give one for each"),
        ([[0]], {"prompts": [[1]], "steps": []}, "there are 1 completions and 0 steps; give one for each"),
        ([], {"prompts": []}, "there are no tokens to audit; give at least one completion with a token in it"),
        ([[0]], {"prompts": [[0]], "seed": -1}, "seed is -1; it must be a non-negative integer"),
        ([[0]], {"prompts": [[0]], "aim": Aim(("x",))}, "ignore has x"),
        ([[0]], {"prompts": [[0]], "eos": 2}, "2"),
        ([[2]], {"prompts": [[0]]}, "sequence 0 has the token 2"),
        ([[0]], {"prompts": [[0]], "engine": Engine(control=[Completion([0], [3])])}, "sequence 1 has the token 3"),
        ([[0]], {"prompts": [[0]], "draft": lambda prefix: [1.0]}, "share|vocabulary"),
        (
            [[0]],
            {"prompts": [[0]], "engine": Engine(control=[Completion([0], [])])},
            "the control has no tokens; give at least one sequence with a token in it, or no control",
        ),
    ],
)
def test_input_is_checked_before_the_audit(completions: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        audit(coin, completions, progress=False, **given)


@pytest.mark.parametrize(
    ("given", "asked"),
    [({"delta": 0.0}, []), ({"seed": -1}, []), ({"aim": Aim(("x",))}, []), ({"eos": 2}, [(1,)]), ({"eos": -1}, [])],
)
def test_settings_are_checked_before_any_model_runs(given: dict[str, Any], asked: list[tuple[int, ...]]) -> None:
    """A function is asked for the size of its vocabulary only."""
    seen: list[tuple[int, ...]] = []

    def target(prefix: tuple[int, ...]) -> list[float]:
        seen.append(prefix)
        return [0.5, 0.5]

    with pytest.raises(ValueError, match=r"delta|seed|ignore|2|-1"):
        audit(target, [[0, 1], [1]], prompts=[[1], [0]], progress=False, **given)
    assert seen == asked


def test_assert_exact_shows_no_bar_and_takes_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(api, "audit", lambda *given, **more: seen.append(more) or report())
    assert_exact(coin, [[0]], prompts=[[]], delta=0.5)
    assert_exact(coin, [[0]], prompts=[[]], progress=True)
    assert seen == [{"progress": False, "prompts": [[]], "delta": 0.5}, {"progress": True, "prompts": [[]]}]
    found = report(found_after=3)
    monkeypatch.setattr(api, "audit", lambda *given, **more: found)
    with pytest.raises(AssertionError, match=f"^{re.escape(str(found))}$"):
        assert_exact(coin, [[0]])


def test_settings_make_the_auditor() -> None:
    assert Settings() == Settings(1e-6, 0, None, None, (), False, True)
    plain = Settings().auditor()
    assert (plain.delta, plain.ends, plain.max_new_tokens, plain.ignored) == (1e-6, set(), None, frozenset())
    measured = Numerics(1, 0.1, 0.1, 0.1, 0.1)
    given = Settings(0.25, 1, (1, 2), 7, ("argmax",)).auditor(measured, lambda: measured, more=("sharper",))
    assert (given.delta, given.ends, given.max_new_tokens) == (0.25, {1, 2}, 7)
    assert given.ignored == {"argmax", "sharper"}
    assert given.numerics == given.impossible.undeclared == measured
    seeds = [Settings(seed=seed).auditor().bets.random.random() for seed in (0, 1, 1)]
    assert seeds[0] != seeds[1] == seeds[2]
    for one in (Settings(), Aim(), Engine()):
        with pytest.raises(FrozenInstanceError):
            one.delta = 0.5  # type: ignore[misc, union-attr]


# Rows whose distributions exist


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


def test_progress_is_told_of_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def record(progress: Any, expected: int | None) -> Iterator[Any]:
        shown.append((progress, expected))
        yield lambda *given: shown.append(given)

    monkeypatch.setattr(run, "shown", record)
    auditor = Auditor()
    audit_distributions(rows([1] * 20, [1] * 20), auditor, expected=99)
    assert shown[0] == (True, 99)
    assert [given[::2] for given in shown[1:]] == [(20, None), (40, auditor.found_after)]
    assert auditor.found_after is not None
    assert shown[2][1] == auditor.log10_e
    audit(coin, [[0, 1]], prompts=[[]], progress=False)
    assert shown[3] == (False, 2)


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
    assert interrupted([], max_new_tokens=1).notes == ["interrupted after 0 tokens"]  # of the wrong length
    with pytest.raises(KeyboardInterrupt):
        interrupted([])
    assert not audit_distributions(rows([0]), progress=False).interrupted

    def none() -> Iterator[Row]:
        yield from ()
        raise KeyboardInterrupt

    before = Auditor()
    audit_distributions(rows([0, 1], [1]), before, progress=False)
    assert audit_distributions(none(), before, progress=False).sequences == 2


# Completions as they arrive


@pytest.mark.parametrize(
    ("sizes", "measured", "read"),
    [
        ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1], 4),  # four sequences
        ([1, None, 1, 1], [1], 2),  # as many as are ready
        ([0, None, None, 2, 3, None, 1], [0, 2, 3], 6),  # up to one with tokens
        ([None, 1, 0, None], [1, 0], 4),
        ([2], [2], 1),
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


def completions(*tokens: list[int]) -> list[Completion]:
    return [Completion([], one) for one in tokens]


def test_the_engine_s_numerics_are_those_of_the_audit() -> None:
    """An impossible token within a given tolerance is borderline, and one beyond it a violation."""
    models = Models(lambda prefix: [0.5, 0.4, 0.1], Sampling(0))
    for tolerance, borderline in ((1.0, 1), (0.1, 0)):
        given = completions([1])
        report = run.audit_completions(models, given, Settings(progress=False), Engine(logit_tolerance=tolerance))
        assert len(report.borderline) == borderline
        assert report.violations == ({} if borderline else {"impossible": 1})


def test_a_stop_and_the_expected_number_reach_the_audit() -> None:
    said: list[str] = []
    given = completions(*[[1] * 40] * 3)
    report = run.audit_completions(Models(coin), given, Settings(stop=True, progress=said.append), expected=1234)
    assert report.tokens == 40
    assert said == [f"audited 40 of 1,234 tokens, e = 10^{report.log10_e:.1f}; rejected after {report.found_after}"]


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


# The control and explanations

ONES = ("same-tokens", "noise-of-texts")
"""Kinds to ignore where all sequences are the same."""


def test_the_control_is_audited_with_the_same_bets_and_shown() -> None:
    said: list[str] = []
    exact = completions(*np.random.default_rng(0).integers(2, size=(2, 40)).tolist())
    ones = completions(*[[1] * 40] * 2)
    settings = Settings(progress=said.append, delta=0.01, ignore=ONES)
    models = Models(coin, draft=coin, suspected=lambda prefix: [0.25, 0.75])
    report = run.audit_completions(models, ones, settings, Engine(control=ones))
    assert report.control is not None
    assert report.control.control.by_alternative == report.by_alternative  # the same settings, and the same seed
    assert report.control.control.detectable == {}
    assert (report.control.source, report.control.p_value, report.control.delta) == ("engine", 1.0, 0.01)
    assert len(said) == 2
    assert all("rejected after" in line for line in said)
    quiet = run.audit_completions(models, exact, settings, Engine(control=exact))
    assert quiet.control is not None
    assert quiet.control.control.detectable == {}
    assert quiet.detectable
    alone = run.audit_completions(models, ones, settings)
    assert alone.control is None


def sharp(prefix: tuple[int, ...]) -> list[float]:
    return [0.6, 0.3, 0.1]


@pytest.mark.parametrize(
    ("here", "there", "tolerance", "outcome"),
    [
        (5, 5, 1.0, "not rejected"),  # within the tolerance
        (5, 6, None, "rejected"),  # the control rejects too
        (5, 0, None, "rejected"),
    ],
)
def test_impossible_tokens_of_the_control(here: int, there: int, tolerance: float | None, outcome: str) -> None:
    one, other = ([Completion([], [1] * count + [0] * (100 - count))] for count in (here, there))
    engine = Engine(torch.float32, tolerance, control=other)
    report = run.audit_completions(Models(sharp, Sampling(0)), one, Settings(progress=False), engine)
    assert report.verdict == outcome
    assert report.control is not None
    assert report.control.control.verdict == ("not rejected" if tolerance or not there else "rejected")


def test_impossible_tokens_as_in_a_control_that_is_explained_are_excused() -> None:
    """The control's are within the numerics of bfloat16, and those of speculation are up to twice as large."""

    class Supposed(Engine):
        def numerics(self, *given: object) -> tuple[None, Any]:
            return None, lambda: Numerics(1, 0.2, 0.2, 0.2, 0.0)

    for gap, excused in ((0.6, True), (0.9, False)):

        def target(prefix: tuple[int, ...], gap: float = gap) -> list[float]:
            weights = np.exp([0.0, -0.35, -gap])
            return list(weights / weights.sum())

        control = [Completion([], [1] * 5 + [0] * 95)]
        given = [Completion([], [2] * 5 + [0] * 95)]
        models, settings = Models(target, Sampling(0)), Settings(progress=False)
        report = run.audit_completions(models, given, settings, Supposed(control=control))
        assert report.control is not None
        assert report.control.control.verdict == "numerics"
        assert (report.verdict, bool(report.violations)) == (("numerics", False) if excused else ("rejected", True))
        assert report.control.alike == excused
        kinds = (report.control.shared, report.control.only_here, report.control.undecided)
        assert kinds == ([], [], [] if excused else ["impossible"])  # where they are, nothing is left to attribute
        assert len(report.undeclared) == 5 * excused
        also = [Completion([], [2] * 5 + [0] * 95)]
        worse = run.audit_completions(models, given, settings, Supposed(control=also))
        assert worse.verdict == "rejected"  # what the control has is no numerics either


def test_what_may_explain_a_finding_is_asked_only_after_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(run, "order_note", lambda *given: asked.append(given[1:]) or ["order"])
    monkeypatch.setattr(run, "bfloat16_note", lambda *given: asked.append(given[1:]) or ["bfloat16"])
    settings = Settings(progress=False, delta=0.01, ignore=ONES)
    fine, ones = completions([0, 1, 1, 0]), completions([0], [1] * 40)
    assert run.audit_completions(Models(coin), fine, settings).notes == []
    assert asked == []
    assert run.audit_completions(Models(coin), ones, settings).notes == ["order", "bfloat16"]
    assert asked == [(Sampling(), ones, set(), 0.01), (None, coin, Sampling(), ones)]
    asked.clear()
    near = Numerics(1, 10.0, 1.0, 1.0, 0.0)

    class Supposed(Engine):
        def numerics(self, *given: object) -> tuple[None, Any]:
            return None, lambda: near

    sampling, given = Sampling(top_k=1), completions([0], [0], [1, 0], [1])
    assert run.audit_completions(Models(sharp, sampling), given, settings, Supposed()).notes == ["order"]
    assert asked == [(sampling, given, {2, 3}, 0.01)]  # the sequences with impossible tokens
    asked.clear()
    certain = run.audit_completions(Models(sharp, sampling), given, settings, Engine(torch.float32))
    assert certain.notes == ["order", "bfloat16"]
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


@pytest.mark.parametrize(
    ("own", "tokens", "note"),
    [
        (2, [[0, 2, 1], [1, 2], [2]], "1 sequence continues after the end token [2]; give eos if it ends them"),
        ([3, 2], [[3, 0], [2, 2]], "2 sequences continue after the end token [2, 3]; give eos if it ends them"),
        (2, [[2, 0]] * 1000, "1,000 sequences continue after the end token [2]; give eos if it ends them"),
        (2, [[0, 1, 2], [2], []], None),
        (None, [[0, 2, 1]], None),
        ([], [[0, 2, 1]], None),
    ],
)
def test_the_note_on_sequences_that_continue(own: Any, tokens: list[list[int]], note: str | None) -> None:
    model = llama()
    model.config.eos_token_id = own
    given = [Completion([1], one) for one in tokens]
    assert run._notes_on_eos(model, given) == ([] if note is None else [note])
    assert run._notes_on_eos(coin, given) == []
    if len(tokens) < 4:
        settings: dict[str, Any] = {"prompts": [[1]] * len(tokens), "progress": False, "engine": Engine(positions=0)}
        assert audit(model, tokens, **settings).notes == ([] if note is None else [note])
        assert audit(model, tokens, eos=1, **settings).notes == []


def test_each_model_must_know_every_completion() -> None:
    target, other = llama(), llama(vocab=5)
    fine = [Completion([1], [0])]
    run.require_models(Models(target, draft=target, suspected=coin), fine)
    run.require_models(Models(coin, draft=target), fine)
    for models in (Models(target, draft=other), Models(target, suspected=other)):
        with pytest.raises(ValueError, match="same vocabulary"):
            run.require_models(models, fine)
    for models in (Models(target, suspected=coin), Models(target, draft=coin), Models(coin)):
        with pytest.raises(ValueError, match="line 2 has the token 3; the vocabulary has the tokens 0 to 1"):
            run.require_models(models, [*fine, Completion([1], [3])], ["line 1", "line 2"])


# Progress


@pytest.mark.parametrize(("expected", "of"), [(None, ""), (5000, " of 5,000")])
def test_lines_of_progress(expected: int | None, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After half a second, then every 10, and at the rejection once."""
    now, said = [100.0], list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with progress.shown(said.append, expected) as show:
        for at, given in [
            (100.4, (10, 0.0, None)),
            (100.5, (20, -0.5, None)),
            (110.4, (30, 0.0, None)),
            (110.5, (4000, 1.25, None)),
            (111.5, (4010, 6.5, 3999)),
            (111.6, (4020, 6.5, 3999)),
            (121.4, (4030, 6.5, 3999)),
            (121.5, (4040, math.inf, 3999)),
        ]:
            now[0] = at
            show(*given)
    assert said == [
        f"audited 20{of} tokens, e = 10^-0.5",
        f"audited 4,000{of} tokens, e = 10^1.2",
        f"audited 4,010{of} tokens, e = 10^6.5; rejected after 3,999",
        f"audited 4,040{of} tokens, e = infinite; rejected after 3,999",
    ]


@pytest.mark.parametrize("visible", [True, False])
def test_the_bar_has_the_tokens_and_the_e_value(visible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Bar:
        def __init__(self, **given: Any) -> None:
            made.extend([given, self])
            self.n, self.said = 0, list[Any]()

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            self.said.append("closed")

        def update(self, n: int) -> None:
            self.n += n

        def set_postfix_str(self, words: str, refresh: bool = True) -> None:
            self.said.append((words, refresh))

    monkeypatch.setattr(progress, "tqdm", Bar)
    with progress.shown(visible, 50) as show:
        show(20, 1.25, None)
        show(35, -2.0, 30)
    given, bar = made
    assert given == {
        "total": 50, "desc": "audit", "unit": "token", "delay": 0.5, "leave": False, "disable": not visible
    }  # fmt: skip
    assert bar.n == 35
    assert bar.said == [("e = 10^1.2", False), ("e = 10^-2.0", False), "closed"]
