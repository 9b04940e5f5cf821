"""Options that each work alone, in combinations: what the report says must be true of the tokens that were audited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from samplers import sample_row, tables
from tiny import llama

import specnb_audit.run as run_module
from specnb.distributions import Sampling, normalise
from specnb_audit import Aim, Auditor, Engine, audit, explanations, teacher_forcing
from specnb_audit.alternatives import ALTERNATIVES, DEPENDENCE
from specnb_audit.bets import Row
from specnb_audit.numerics import Numerics
from specnb_audit.report import Report
from specnb_audit.run import Settings, audit_completions, audit_distributions
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows

P, Q = tables()
END = 5


def chain(prefix: tuple[int, ...]) -> torch.Tensor:
    return P[prefix[-1]]


def rows(count: int, n: int, seed: int = 0) -> list[list[int]]:
    return [list(sample_row(P, Q, n, seed + row).tokens) for row in range(count)]


def run(given: list[list[int]], **settings: Any) -> Report:
    return audit(chain, given, prompts=[[0]] * len(given), progress=False, **settings)


def test_rows_that_a_stopped_audit_has_not_read_are_not_said_to_be_independent() -> None:
    report = run(rows(1, 60) * 8, stop=True)
    assert report.sequences == 2
    assert report.verdict == "dependent"
    assert report.rows_alone is not None
    assert report.rows_alone.sequences == 1


def test_shared_noise_is_found_in_rows_that_are_cut_at_their_end_token() -> None:
    """The evidence of a row has as many tokens as were audited, not as many as the row."""
    three_times = [row for row in rows(12, 60) for _ in range(3)]
    steps = [[2] * 30] * 36
    for settings in ({}, {"steps": steps}):
        report = run(three_times, eos=END, aim=Aim(ignore=("after-the-end",)), **settings)
        assert report.tokens < 36 * 60
        assert report.rows_alone is not None
        assert report.rows_alone.sequences == 12
        assert report.rows_alone.tokens * 3 == report.tokens


def test_it_is_said_how_many_rows_were_searched_for_shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "REMEMBERED", 400)
    report = run([row for row in rows(12, 60) for _ in range(3)])
    assert report.rows_alone is not None
    assert report.rows_alone.sequences == 3
    assert "note: shared noise was looked for in the first 7 sequences" in report.lines()


def completions(given: list[list[int]]) -> list[Completion]:
    return [Completion([0], row) for row in given]


def test_an_engine_that_is_wrong_without_speculation_too_is_not_blamed_on_speculation() -> None:
    """Neither by bets on the draft, nor by a control that is too short to show the same."""
    cold = normalise(P**1.5)
    here, there = ([list(sample_row(cold, cold, 60, seed + n).tokens) for n in range(20)] for seed in (0, 100))
    report = run(here, draft=lambda prefix: Q[prefix[-1]], engine=Engine(control=completions(there)))
    assert report.control is not None
    assert report.control.source == "engine"
    short = run(here, engine=Engine(control=completions(there[:1]))).control
    assert short is not None
    assert short.source is None
    assert "sharper" in short.undecided
    assert "which the control does not decide: sharper" in "\n".join(short.lines())


LOGITS = torch.tensor([20.0, 0.0, 19.9])


def greedy(tokens: list[int], control: list[int]) -> Report:
    """An audit at temperature 0; bfloat16 is taken to explain gaps of 0.4 between logits."""
    models = Models(lambda prefix: torch.softmax(LOGITS, dim=-1), Sampling(0))

    class Known(Engine):
        def numerics(self, *arguments: object) -> tuple[None, Callable[[], Numerics]]:
            return None, lambda: Numerics(1, logit=0.2, tv=0.0, tv_mean=0.0, nats=0.0)

    known = Known(control=[Completion([], control)])
    return audit_completions(models, [Completion([], tokens)], Settings(progress=False), known)


def test_a_large_gap_is_not_excused_by_near_ties_of_the_control() -> None:
    report = greedy([0] * 99 + [1], [0] * 99 + [2])
    assert report.verdict == "rejected"
    assert report.control is not None
    assert not report.control.alike
    assert "as many impossible tokens, and as large ones" not in str(report)


@pytest.mark.parametrize(("count", "words"), [(1, "about as many"), (15, "not decided"), (60, "more or larger")])
def test_more_near_ties_than_the_control_has_are_not_called_as_many(count: int, words: str) -> None:
    report = greedy([0] * (100 - count) + [2] * count, [0] * 98 + [2] * 2)
    assert report.control is not None
    assert ("as many impossible tokens, and as large ones" in str(report)) == (count == 1)
    assert words in "\n".join(report.control.lines()) or report.control.p_value == 1


def test_a_control_without_impossible_tokens_does_not_have_them_too() -> None:
    def certain(prefix: tuple[int, ...]) -> list[float]:
        return [1.0, 0.0]

    engine = Engine(control=[Completion([], [0] * 100)])
    report = audit(certain, [[0] * 97 + [1] * 3], prompts=[[]], engine=engine, progress=False)
    assert report.control is not None
    assert (report.control.shared, report.control.only_here) == ([], [])
    assert list(report.control.undecided) == ["impossible"]


def test_a_control_without_tokens_is_refused_as_such() -> None:
    with pytest.raises(ValueError, match="the control has no tokens"):
        run(rows(1, 5), engine=Engine(control=completions([[]])))


def interrupting(after: int, given: Iterable[Any]) -> Iterator[Any]:
    """The first elements, and then Ctrl-C."""
    yield from islice(given, after)
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["control", "rows_alone"])
def test_an_interrupt_after_the_audit_does_not_lose_its_verdict(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = completions(rows(1, 60) * 8)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "compare_with_control" if where == "control" else "rows_alone", interrupt)
    report = audit_completions(Models(chain), given, Settings(progress=False), Engine(control=given))
    assert report.rejected
    assert report.interrupted
    assert report.control is None
    assert "note: interrupted after the last token" in str(report)


def test_an_interrupt_in_the_control_is_one_of_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of a control would be compared as if it were all of it."""
    given = completions(rows(2, 60))
    whole = run_module.audit_distributions

    def part(rows: Iterable[Row], auditor: Auditor, **settings: Any) -> Report:
        return whole(rows if "expected" in settings else interrupting(1, rows), auditor, **settings)

    monkeypatch.setattr(run_module, "audit_distributions", part)
    report = audit_completions(Models(chain), given, Settings(progress=False), Engine(control=given))
    assert report.interrupted
    assert report.control is None


def test_a_sequence_that_an_interrupt_cut_off_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    auditor = Auditor()

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    given = [sample_row(P, Q, 60, seed) for seed in range(3)]

    def three() -> Iterator[Row]:
        yield from given[:2]
        monkeypatch.setattr(auditor.distance, "add", interrupt)
        yield given[2]

    report = audit_distributions(three(), auditor, progress=False)
    assert (report.sequences, report.tokens) == (2, 120)
    assert report.interrupted


def uniform_rows(vocab: int, length: int, count: int) -> list[list[int]]:
    """Sampled from the uniform distribution over `vocab` tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


@pytest.mark.parametrize(("vocab", "length", "count", "copies"), [(3, 5, 60, 2), (8, 2, 40, 4)])
def test_short_rows_that_are_repeated_are_not_said_to_share_no_noise(
    vocab: int, length: int, count: int, copies: int
) -> None:
    """A row of few tokens has an e-value below 100 even where it repeats another one."""
    given = [row for row in uniform_rows(vocab, length, count) for _ in range(copies)]
    report = audit(lambda prefix: [1 / vocab] * vocab, given, prompts=[[]] * len(given), progress=False)
    assert report.verdict == "dependent"
    assert report.rows_alone is not None
    assert 0.75 * count < report.rows_alone.sequences < 1.05 * count  # some repeat an earlier one by chance


@pytest.mark.parametrize("length", [1, 5])
def test_where_rows_are_too_short_to_tell_which_share_noise_nothing_is_said_of_the_others(length: int) -> None:
    given = [row for row in uniform_rows(2, length, 150) for _ in range(2)]
    report = audit(lambda prefix: [0.5, 0.5], given, prompts=[[]] * len(given), progress=False)
    assert report.diagnosis in DEPENDENCE
    assert report.rows_alone is None


def test_a_length_that_is_wrong_counts_once_for_a_sequence_in_pieces() -> None:
    auditor = Auditor(max_new_tokens=3)
    p = torch.full((2, 2), 0.5)
    for more, continues in ((True, False), (True, True), (False, True)):
        auditor.add(Row([0, 1], p, more=more, continues=continues))
    auditor.add(Row([0, 1], p))
    assert auditor.report().violations == {"wrong-length": 2}
    assert auditor.found_after == 4


def test_the_steps_of_a_sequence_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    coin = llama(vocab=4)
    completions = [Completion([1], [2, 3, 0, 1, 2, 3, 0], [3, 1, 3]), Completion([1], [2, 3], [2])]

    def steps() -> list[Any]:
        rows = teacher_forced_rows(Models(coin), completions)
        return [row.steps for row in rows]

    assert steps() == [[3, 1, 3], [2]]
    monkeypatch.setattr(teacher_forcing, "LOGITS", 4 * 4)
    assert steps() == [[3, 1], [3], [2]]
    report = audit_completions(Models(coin), iter(completions), Settings(progress=False))
    assert report.tokens == 9


def test_what_is_ignored_is_not_said_to_be_detectable() -> None:
    completions = [[0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1]]
    coin = [0.5, 0.5]
    report = audit(lambda _: coin, completions, prompts=[[]], aim=Aim(ignore=("impossible", "sharper")), progress=False)
    assert report.detectable
    assert not report.detectable.keys() & {"impossible", "sharper"}


def test_an_audit_that_ignores_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="ignore leaves no kind"):
        audit(lambda _: [0.5, 0.5], [[0, 1]], prompts=[[]], aim=Aim(ignore=tuple(ALTERNATIVES)), progress=False)


def test_numbers_and_nouns_agree() -> None:
    report = audit(lambda _: [1.0, 0.0], [[1]], prompts=[[]], progress=False)
    assert "audit of 1 token in 1 sequence," in str(report)
    assert "REJECTED after 1 token:" in str(report)
    assert report.to_dict()["interrupted"] is False
