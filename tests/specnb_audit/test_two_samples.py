"""Two files of samples: equal distributions are hardly ever rejected, planted differences are found."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chains import Array, zipf_tables
from torch import Tensor

from specnb.measure.statistics import Estimate, proportion
from specnb_audit import two_samples
from specnb_audit.cli import compare as compare_command
from specnb_audit.cli import main
from specnb_audit.token_file import Sample, read_samples
from specnb_audit.two_samples import VIEWS, Memory, TwoSampleReport, _paired, compare_samples

P, Q = zipf_tables()


def samples(actual: Tensor, count: int, seed: int, n: int = 32, prompts: int = 8) -> list[Sample]:
    """`count` sequences of `n` tokens of a chain; the prompts, in turn, are its first token."""
    random = np.random.default_rng(seed)
    cumulated: Array = actual.cumsum(dim=-1).numpy()
    tokens = np.zeros((count, n + 1), dtype=np.int64)
    tokens[:, 0] = np.arange(count) % prompts
    for at in range(n):
        u = random.random(count) * cumulated[tokens[:, at], -1]
        tokens[:, at + 1] = (cumulated[tokens[:, at]] <= u[:, None]).sum(axis=1)
    return [Sample(int(line[0]), tuple(line[1:].tolist())) for line in tokens]


def test_the_expected_e_value_is_one() -> None:
    """Over both orders of each of four pairs: the two of a pair could be exchanged."""
    pairs = list(zip(samples(P, 4, 0, n=3), samples(P, 4, 1, n=3), strict=True))
    total = 0.0
    for orders in product((1, -1), repeat=4):
        one, other = zip(*(pair[::order] for pair, order in zip(pairs, orders, strict=True)), strict=True)
        total += 10 ** compare_samples(one, other).log10_e
    assert total / 16 == pytest.approx(1)


def test_equal_distributions_are_rejected_as_rarely_as_stated() -> None:
    """Looked at after every pair: 40 comparisons at delta = 0.05; seven or more rejections have a chance of 0.3%."""
    pairs = [(samples(P, 80, seed), samples(P, 80, 1000 + seed)) for seed in range(40)]
    assert sum(compare_samples(*pair, delta=0.05).rejected for pair in pairs) <= 6


@pytest.mark.parametrize(
    ("actual", "view"),
    [
        pytest.param(torch.softmax(P.log() / 0.8, dim=-1), "summary", id="temperature 0.8"),
        pytest.param(0.7 * P + 0.3 * Q, "pairs of tokens", id="a leak of the draft"),
        pytest.param(torch.softmax(P.log() + 0.7 * torch.nn.functional.one_hot(torch.tensor(3), len(P)), dim=-1),
                     "tokens", id="a bias of one token"),
    ],
)  # fmt: skip
def test_planted_differences_are_found(actual: Tensor, view: str) -> None:
    report = compare_samples(samples(actual, 600, 0), samples(P, 600, 1))
    print(report)
    assert report.rejected
    assert max(report.by_view, key=lambda name: report.by_view[name]) == view
    assert report.guessed.low > 0.5


def test_the_summary_of_a_sequence_is_by_token() -> None:
    """Half the tokens of the second sequence were not seen before; all but its length are means over its tokens."""
    memory = Memory()
    memory.add(Sample("", (1, 1, 2)))
    summary = VIEWS["summary"](Sample("", (1, 1, 3, 4)), memory)
    frequency = [math.log(count / 4) for count in (2.5, 2.5, 0.5, 0.5)]  # (count + 1/2) / (3 + 1)
    # of the four pairs the first two are known, each seen once; 0, 2 and 0 pairs begin as the others do
    prior = [4 * math.exp(one) for one in frequency]
    known = [(1 + prior[0]) / 5, (1 + prior[1]) / 6, prior[2] / 6, prior[3] / 4]
    assert summary == pytest.approx(
        {
            "length": math.log(5),
            "distinct": 3 / 4,
            "repeated": 1 / 4,
            "unseen": 2 / 4,
            "frequency": sum(frequency) / 4,
            "probability": sum(map(math.log, known)) / 4,
        }
    )


def test_the_e_value_is_the_mean_of_those_of_the_views() -> None:
    report = compare_samples(samples(P, 20, 0), samples(Q, 20, 1))
    assert 10**report.log10_e == pytest.approx(np.mean([10**value for value in report.by_view.values()]))


def test_stopping_early_and_what_is_left_out() -> None:
    one, other = [Sample("", (0, 0))] * 60, [Sample("", (1, 1))] * 50 + [Sample("x", (1,))]
    report = compare_samples(one, other, stop=True)
    assert report.found_after == report.pairs < 50
    assert report.unpaired == 11
    assert compare_samples(one, one).identical == 60
    assert "60 pairs are identical" in str(compare_samples(one, one))
    with pytest.raises(ValueError, match="no prompt is in both files"):
        compare_samples(one, other[-1:])
    with pytest.raises(ValueError, match="delta is 0"):
        compare_samples(one, other, delta=0)


def test_only_pairs_that_were_compared_and_guessed_are_counted() -> None:
    """A stop leaves the identical pairs at the end unread; the first pair, and identical ones, cannot be guessed."""
    same = [Sample("", (2, 2))] * 30
    report = compare_samples([Sample("", (0, 0))] * 60 + same, [Sample("", (1, 1))] * 60 + same, stop=True)
    assert report.identical == 0
    assert (report.guessed.value, report.guessed.n) == (1.0, report.pairs - 1)
    assert f"guessed right in 100.0% of {report.pairs - 1} pairs" in str(report)
    one = compare_samples(same[:1], same[:1])
    assert one.guessed.n == 0
    assert "comparison of 1 pair of" in str(one)
    assert "note: 1 pair is identical" in str(one)
    assert "guessed" not in str(one)


def test_the_command_compares_ids_and_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def file(name: str, lines: Sequence[dict[str, Any]]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    ids = [{"prompt": [at % 3], "tokens": [at % 2, 1]} for at in range(40)]
    texts = [{"prompt": "Say", "text": word} for word in (" yes", " no") * 30]
    assert main(["compare", str(file("a", ids)), str(file("b", ids))]) == 0
    assert "no difference was found" in capsys.readouterr().out
    always = file("c", [{"prompt": "Say", "text": " yes, yes"}] * 60)
    assert main(["compare", str(always), str(file("d", texts)), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rejected"]
    assert main(["compare", str(always), str(file("e", [{"prompt": 1, "text": ""}]))]) == 2
    assert "must both be strings" in capsys.readouterr().err
    assert main(["compare", str(always), str(file("f", []))]) == 2
    assert "is empty" in capsys.readouterr().err
    assert read_samples(file("g", ids))[1] == Sample((1,), (1, 1))


def features_by_hand(sample: Sample, earlier: list[Sample]) -> dict[str, dict[object, float]]:
    """The features of each view, by the definitions, with the `earlier` samples counted anew."""
    tokens, n = sample.tokens, max(len(sample.tokens), 1)
    seen = [token for one in earlier for token in one.tokens]

    def neighbours(one: Sample) -> list[tuple[object, object]]:
        return [(one.tokens[at - 1] if at else None, token) for at, token in enumerate(one.tokens)]

    pairs, own = [pair for one in earlier for pair in neighbours(one)], neighbours(sample)

    def frequency(token: object) -> float:
        return (seen.count(token) + 0.5) / (len(seen) + 1)

    def probability(before: object, token: object) -> float:
        followed = sum(one == before for one, _ in pairs)
        return (pairs.count((before, token)) + 4 * frequency(token)) / (followed + 4)

    def unit(keys: list[Any]) -> dict[object, float]:
        counts = {key: keys.count(key) for key in keys}
        return {key: count / math.sqrt(sum(one**2 for one in counts.values())) for key, count in counts.items()}

    summary: dict[object, float] = {
        "length": math.log(1 + len(tokens)),
        "distinct": len(set(tokens)) / n,
        "repeated": sum(one == other for one, other in own) / n,
        "unseen": sum(token not in seen for token in tokens) / n,
        "frequency": sum(math.log(frequency(token)) for token in tokens) / n,
        "probability": sum(math.log(probability(*pair)) for pair in own) / n,
    }
    beginning = [(sample.prompt, at, token) for at, token in enumerate(tokens[:16])]
    return {
        "summary": summary,
        "tokens": unit(list(tokens)),
        "pairs of tokens": unit(own),
        "beginning": unit(beginning),
    }


def by_hand(pairs: list[tuple[Sample, Sample]]) -> tuple[list[float], dict[str, float], int, int]:
    """The e-value after each pair, those of the views at the end, and how many pairs were guessed, right and in all."""
    rates, earlier, right, guesses, after = (0.01, 0.03, 0.1, 0.3), list[Sample](), 0, 0, list[float]()
    e_values = {(view, rate): 1.0 for view in VIEWS for rate in rates}
    weights: dict[Any, dict[Any, float]] = {bet: {} for bet in e_values}
    squares: dict[Any, dict[Any, float]] = {bet: {} for bet in e_values}
    for pair in pairs:
        one, other = (features_by_hand(sample, earlier) for sample in pair)
        expected = {+1: 0.0, -1: 0.0}
        for (view, rate), e_value in e_values.items():
            keys = {*one[view], *other[view]}
            difference = {key: one[view].get(key, 0.0) - other[view].get(key, 0.0) for key in keys}
            learnt, square = weights[view, rate], squares[view, rate]
            score = sum(learnt.get(key, 0.0) * value for key, value in difference.items())
            guess = {sign: 2 / (1 + math.exp(-sign * score)) for sign in (1, -1)}
            for sign in expected:
                expected[sign] += e_value * guess[sign] / 16
            e_values[view, rate] *= guess[1]
            wrong = 1 - guess[1] / 2
            for key, value in difference.items():
                if value != 0:
                    square[key] = square.get(key, 0.0) + (wrong * value) ** 2
                    learnt[key] = learnt.get(key, 0.0) + rate * wrong * value / math.sqrt(square[key])
        right += expected[1] > expected[-1]
        guesses += expected[1] != expected[-1]
        after.append(expected[1])
        earlier += pair
    views = {view: sum(e_values[view, rate] for rate in rates) / 4 for view in VIEWS}
    return after, views, right, guesses


def short(seed: int, count: int, bias: float) -> list[Sample]:
    """Sequences of up to 20 of four tokens, one empty, of three prompts."""
    random = np.random.default_rng(seed)
    p = np.array([0.4 + bias, 0.3 - bias, 0.2, 0.1])
    sizes = [0, 20, *random.integers(1, 9, count - 2).tolist()]
    return [Sample(at % 3, tuple(random.choice(4, size=n, p=p).tolist())) for at, n in enumerate(sizes)]


@pytest.mark.parametrize("bias", [0.0, 0.3])
def test_the_whole_report_is_that_computed_by_hand(bias: float) -> None:
    """Up to each pair, with 1/delta on either side of the largest e-value so far."""
    one, other = short(0, 25, bias), short(1, 25, 0.0)
    after, views, right, guesses = by_hand(list(zip(one, other, strict=True)))
    report = compare_samples(one, other)
    assert (report.delta, report.pairs, report.found_after) == (1e-6, 25, None)
    assert report.log10_e == pytest.approx(math.log10(after[-1]), abs=1e-9)
    assert report.log10_e_peak == pytest.approx(max(0.0, math.log10(max(after))), abs=1e-9)
    assert report.by_view == pytest.approx({view: math.log10(e) for view, e in views.items()}, abs=1e-9)
    assert list(report.by_view) == ["summary", "tokens", "pairs of tokens", "beginning"]
    assert report.guessed == proportion(right, guesses)
    assert (report.identical, report.unpaired) == (sum(a == b for a, b in zip(one, other, strict=True)), 0)
    records = [at for at, e in enumerate(after) if e > max([1.0, *after[:at]])]
    assert records
    for at in records[-3:]:
        for near, found in ((1 + 1e-7, at + 1), (1 - 1e-7, None)):
            delta = near / after[at]
            assert compare_samples(one[: at + 1], other[: at + 1], delta).found_after == found
        if bias:
            stopped = compare_samples(one, other, (1 + 1e-7) / after[at], stop=True)
            whole = compare_samples(one, other, (1 + 1e-7) / after[at])
            assert (stopped.found_after, stopped.pairs, whole.found_after, whole.pairs) == (at + 1, at + 1, at + 1, 25)
            assert stopped.log10_e == pytest.approx(math.log10(after[at]), abs=1e-9)


def test_counts_are_divided_by_their_length() -> None:
    """As a vector; nothing is counted in a sequence without tokens."""
    view = two_samples._counts(lambda sample: iter(sample.tokens))
    assert view(Sample("", (7, 7, 7, 5, 5, 5, 5)), Memory()) == {7: 0.6, 5: 0.8}
    assert view(Sample("", ()), Memory()) == {}


def test_sequences_are_paired_by_prompt_in_their_order() -> None:
    one = [Sample(prompt, (token,)) for prompt, token in (("a", 0), ("b", 1), ("a", 2), ("c", 3), ("a", 4))]
    other = [Sample(prompt, (token,)) for prompt, token in (("b", 5), ("a", 6), ("a", 7), ("d", 8))]
    assert [(a.tokens[0], b.tokens[0]) for a, b in _paired(one, other)] == [(0, 6), (1, 5), (2, 7)]
    assert compare_samples(one, other).unpaired == 3


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.5, 1.5, math.nan])
def test_a_comparison_needs_a_rate_between_0_and_1_and_a_common_prompt(delta: float) -> None:
    one = [Sample("", (0,))]
    words = f"delta is {delta}; a false-alarm rate lies between 0 and 1"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        compare_samples(one, one, delta)
    with pytest.raises(ValueError, match=r"^no prompt is in both files; generate both with the same prompts$"):
        compare_samples(one, [Sample("x", (0,))], 0.5)
    with pytest.raises(ValueError, match="no prompt is in both"):
        compare_samples([], [])


def test_the_report_in_words_and_in_json_types() -> None:
    views = {"summary": 0.25, "tokens": -1.0}
    report = TwoSampleReport(0.01, 1000, None, -0.06, 1.5, views, Estimate(0.5, 0.25, 0.625, 1000), 0, 0)
    first = "comparison of 1,000 pairs of sequences, false-alarm rate at most 0.01"
    e_value = "e-value: 10^-0.1, largest 10^1.5 (by view: summary 10^0.2, tokens 10^-1.0)"
    guessed = (
        "which file a sequence is from was guessed right in 50.0% of 1,000 pairs, 95% interval [25.0%, 62.5%]; chance "
        "gives 50%"
    )
    assert str(report) == f"{first}\nno difference was found\n{e_value}\n{guessed}"
    found = replace(report, pairs=1, found_after=1, identical=1, unpaired=1, guessed=Estimate(0.5, 0.0, 1.0, 0))
    assert str(found) == (
        "comparison of 1 pair of sequences, false-alarm rate at most 0.01\n"
        "REJECTED after 1 pair: the two files have different distributions\n"
        f"{e_value}\nnote: 1 pair is identical\nnote: 1 sequence had no partner of the same prompt"
    )
    many = str(replace(report, found_after=1000, identical=2000, unpaired=2)).splitlines()
    assert many[1] == "REJECTED after 1,000 pairs: the two files have different distributions"
    assert many[4:] == ["note: 2,000 pairs are identical", "note: 2 sequences had no partner of the same prompt"]
    assert (report.rejected, found.rejected) == (False, True)
    assert json.loads(json.dumps(report.to_dict())) == {
        "delta": 0.01,
        "pairs": 1000,
        "found_after": None,
        "log10_e": -0.06,
        "log10_e_peak": 1.5,
        "by_view": views,
        "guessed": {"value": 0.5, "low": 0.25, "high": 0.625, "n": 1000},
        "identical": 0,
        "unpaired": 0,
        "rejected": False,
    }
    with pytest.raises(FrozenInstanceError):
        report.pairs = 2  # type: ignore[misc]


def test_one_pair_cannot_be_guessed() -> None:
    report = compare_samples([Sample("", (0, 1))], [Sample("", (1,))])
    assert (report.log10_e, report.log10_e_peak, report.pairs) == (0.0, 0.0, 1)
    assert report.by_view == dict.fromkeys(VIEWS, 0.0)
    assert report.guessed == Estimate(0.5, 0.0, 1.0, 0)


# The command


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[str, str]:
    for name, token in (("a", 0), ("b", 1)):
        line = json.dumps({"prompt": [1], "tokens": [token, token]})
        (tmp_path / name).write_text(f"{line}\n" * 40)
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_every_option_of_the_command_counts(two_files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    one, other = ([Sample((1,), (token, token))] * 40 for token in (0, 1))
    for more, given, stop in ((["--delta", "0.25"], 0.25, False), (["--stop"], 1e-6, True), ([], 1e-6, False)):
        wanted = compare_samples(one, other, given, stop)
        assert main(["compare", *two_files, *more]) == int(wanted.rejected) == 1
        assert capsys.readouterr().out == f"{wanted}\n"
        assert main(["compare", *two_files, *more, "--json"]) == 1
        printed = capsys.readouterr().out
        assert printed == json.dumps(wanted.to_dict(), indent=1) + "\n"
    assert main(["compare", two_files[0], two_files[0]]) == 0
    assert capsys.readouterr().out == f"{compare_samples(one, one)}\n"
    assert main(["compare", *two_files, "--delta", "1"]) == 2
    assert "delta is 1.0" in capsys.readouterr().err


def test_the_command_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    asked = capsys.readouterr().out
    words = " ".join(asked.split())
    assert "[--delta D] [--stop] [--json] SAMPLES.jsonl REFERENCE.jsonl" in words
    assert "Compare two files of samples, without a model." in words
    for said in (
        "SAMPLES.jsonl sequences, or texts",
        "REFERENCE.jsonl those to compare them with",
        "--delta D false-alarm rate (default: 1e-6)",
        "--stop stop as soon as equality is rejected",
        "--json print the report as JSON",
    ):
        assert said in words
    assert asked.endswith(compare_command.EXAMPLES)  # as it is written, line by line
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "compare two files of samples, without a model" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as refused:
        main(["compare", "one.jsonl"])
    assert refused.value.code == 2


def test_too_few_pairs_are_said_to_be() -> None:
    """A pair at most doubles the e-value: 19 pairs stay below a million, whatever the difference."""
    one, other = [Sample("", (0, 0))] * 20, [Sample("", (1, 1))] * 20
    for pairs, delta, said in ((19, 1e-6, True), (20, 1e-6, False), (6, 1e-2, True), (7, 1e-2, False)):
        words = str(compare_samples(one[:pairs], other[:pairs], delta))
        assert ("a pair at most doubles the e-value" in words) == said
        assert (f"fewer than {pairs + 1} pairs cannot reject" in words) == said
