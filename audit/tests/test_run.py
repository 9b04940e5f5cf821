"""Audits of models and functions: what is found, what is refused, and sequences as they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    Auditor,
    Constraints,
    Engine,
    assert_exact,
    audit,
    audit_distributions,
    run,
)
from specnb_audit.bets import Row
from specnb_audit.claimed import Claimed
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


def test_numerics_are_measured_where_the_first_completions_are_empty(target: PreTrainedModel) -> None:
    given: Any = torch.tensor([[1], [2]])
    report = audit(target, given, prompts=[[1]] * 2, progress=False)
    assert report.numerics is not None
    empty: dict[str, Any] = {"steps": [[]] * 5 + [[2]], "logprobs": [[]] * 5 + [[-1.0, -1.0]]}
    report = audit(target, [[]] * 5 + [[1, 2]], prompts=[[1]] * 6, **empty, progress=False)
    assert report.numerics is not None


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


@dataclass(frozen=True)
class Richer(Claimed):
    typical_p: float = 0.5


def coin(prefix: tuple[int, ...]) -> list[float]:
    return [0.5, 0.5]


@pytest.mark.parametrize(
    ("completions", "given", "words"),
    [
        ([[]], {}, "there are no tokens to audit; give at least one sequence with a token in it"),
        ([[1]], {"prompts": [[1], [2]]}, "there are 1 completions and 2 prompts; give one for each"),
        ([[1, 9]], {}, "sequence 0 has the token 9; the vocabulary has the tokens 0 to 3"),
        ([[1]], {"prompts": [[]]}, "sequence 0 has no prompt"),
        ([[1] * 40], {}, "sequence 0 has 41 tokens with its prompt, and the model has 16 positions"),
        ([[1]], {"draft": coin}, "vocabulary"),
        ([[1, 2, 3]], {"steps": [[1]]}, "sequence 0 has 3 tokens, and its steps add up to 1"),
        ([[1, 2, 3]], {"logprobs": [[-0.1]]}, "sequence 0 has 3 tokens, and 1 logprobs"),
        ([[1]], {"eos": 9}, "eos is 9; the vocabulary has the tokens 0 to 3"),
        ([[1]], {"engine": Engine(control=[Completion([0], [])])}, "the control has no tokens"),
    ],
)
def test_bad_input_is_refused(
    target: PreTrainedModel, completions: list[list[int]], given: dict[str, Any], words: str
) -> None:
    for ask in (partial(audit, progress=False), assert_exact):
        with pytest.raises(ValueError, match=words):
            ask(target, completions, **({"prompts": [[1]] * len(completions)} | given))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        *(({"completions": [one]}, "completion 0 is") for one in ([0.9, 1.7], "01", [True], {0, 1}, None)),
        ({"prompts": [[0.9]]}, "prompt 0 is"),
        ({"steps": [[1.5, 0.5]]}, "steps 0 is"),
        ({"engine": Engine(control=[Completion([0], [0.9])])}, "sequence 1 is"),  # type: ignore[list-item]
        *(({"eos": eos}, "eos is") for eos in (1.5, True, torch.tensor([1.5]))),
        *(({"max_new_tokens": most}, "max_new_tokens is") for most in (2.5, float("inf"), True)),
        ({"stop": "no"}, "stop is"),
        ({"sampling": Richer()}, "Richer"),
        ({"sampling": {"temperature": 0.5}}, "give a Sampling"),
    ],
)
def test_what_is_no_token_and_no_number_is_refused(wrong: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {"completions": [[0, 1]], "prompts": [[0]]}
    with pytest.raises((TypeError, ValueError), match=words):
        audit(coin, **(good | wrong), progress=False)


def test_a_rejection_after_the_tokens_that_are_read_again_is_blamed_on_no_constraint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = [[0, 1] * 10] * 2 + [[1] * 20] * 4
    monkeypatch.setattr("specnb_audit.explanations.TRIED", 40)
    least = Constraints(min_tokens=1)
    report = audit(lambda _: [0.4, 0.5, 0.1], tokens, prompts=[[]] * 6, eos=2, constraints=least, progress=False)
    assert report.rejected
    assert "min_tokens" not in report.cause


def test_lines_that_are_sorted_by_length_are_named(target: PreTrainedModel) -> None:
    tokens = [[1] * (1 + n // 4) for n in range(40)]
    report = audit(target, tokens, prompts=[[1]] * 40, progress=False)
    assert report.rejected
    assert any(check.startswith("later lines are longer") for check in report.checks)


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


# Explanations


ONES = ("same-tokens", "noise-of-texts")
"""Kinds to ignore where all sequences are the same."""


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
