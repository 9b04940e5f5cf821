"""Two files of samples: equal distributions are hardly ever rejected, planted differences are found."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from chains import Array, zipf_tables
from reports import require_as_in
from torch import Tensor

from specnb_audit.cli import main
from specnb_audit.token_file import Sample
from specnb_audit.two_samples import _paired, compare_samples

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
    """Looked at after every pair: 12 comparisons at delta = 0.05; five or more rejections have a chance of 2e-4."""
    pairs = [(samples(P, 60, seed), samples(P, 60, 1000 + seed)) for seed in range(12)]
    assert sum(compare_samples(*pair, delta=0.05).rejected for pair in pairs) <= 4


@pytest.mark.parametrize(
    ("actual", "view"),
    [
        pytest.param(torch.softmax(P.log() / 0.8, dim=-1), "summary", id="temperature 0.8"),
        pytest.param(0.7 * P + 0.3 * Q, "pairs of tokens", id="a leak of the draft"),
        pytest.param(torch.softmax(P.log() + 1.0 * torch.nn.functional.one_hot(torch.tensor(3), len(P)), dim=-1),
                     "tokens", id="a bias of one token"),
    ],
)  # fmt: skip
def test_planted_differences_are_found(actual: Tensor, view: str) -> None:
    report = compare_samples(samples(actual, 400, 0), samples(P, 400, 1))
    print(report)
    assert report.rejected
    assert max(report.by_view, key=lambda name: report.by_view[name]) == view
    assert report.guessed.low > 0.5


def short(seed: int, count: int, bias: float) -> list[Sample]:
    """Sequences of up to 20 of four tokens, one empty, of three prompts."""
    random = np.random.default_rng(seed)
    p = np.array([0.4 + bias, 0.3 - bias, 0.2, 0.1])
    sizes = [0, 20, *random.integers(1, 9, count - 2).tolist()]
    return [Sample(at % 3, tuple(random.choice(4, size=n, p=p).tolist())) for at, n in enumerate(sizes)]


def test_sequences_are_paired_by_prompt_in_their_order() -> None:
    one = [Sample(prompt, (token,)) for prompt, token in (("a", 0), ("b", 1), ("a", 2), ("c", 3), ("a", 4))]
    other = [Sample(prompt, (token,)) for prompt, token in (("b", 5), ("a", 6), ("a", 7), ("d", 8))]
    assert [(a.tokens[0], b.tokens[0]) for a, b in _paired(one, other)] == [(0, 6), (1, 5), (2, 7)]
    assert compare_samples(one, other).unpaired == 3


WORDS = Path(__file__).parent / "reports"


def test_the_report_in_words() -> None:
    """Nothing found in too few pairs; a difference, with pairs that are identical and sequences left out."""
    one, other = [Sample("", (0, 0))] * 30, [Sample("", (1, 1))] * 30
    quiet = compare_samples(short(0, 5, 0.0), short(1, 5, 0.0))
    found = compare_samples([*one[:1], *one], [*one[:1], *other, Sample("x", (1,))], delta=1e-3, stop=True)
    require_as_in(WORDS / "comparison-nothing-found.txt", f"{quiet}\n")
    require_as_in(WORDS / "comparison-rejected.txt", f"{found}\n")
    assert json.loads(json.dumps(found.to_dict())) == vars(found) | {
        "rejected": True,
        "guessed": found.guessed._asdict(),
    }


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
    text = Path(two_files[1]).with_name("text")
    text.write_text('{"prompt": "Say", "text": " yes"}\n')
    for files, more, words in (
        (two_files, ["--delta", "1"], "delta is 1.0; a false-alarm rate lies between 0 and 1"),
        ((two_files[0], str(text)), [], "no prompt is in both files; generate both with the same prompts"),
    ):
        assert main(["compare", *files, *more]) == 2
        assert words in capsys.readouterr().err
