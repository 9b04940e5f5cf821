"""Two files of samples: equal distributions are hardly ever rejected, planted differences are found."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chains import Array, zipf_tables
from torch import Tensor

from specnb.audit.token_file import Sample, read_samples
from specnb.audit.two_samples import VIEWS, Memory, compare_samples
from specnb.cli import main

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
