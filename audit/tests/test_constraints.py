"""Forced tokens, min_tokens and allowed tokens: what is tested and what is refused; log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import llama

from specnb.distributions import Sampling
from specnb_audit import Constraints, audit
from specnb_audit.claimed import claimed_sampling
from specnb_audit.constraints import constrained
from specnb_audit.token_file import read_tokens

P = np.random.default_rng(0).dirichlet(np.ones(6), size=6)
END = 5


def target(prefix: tuple[int, ...]) -> list[float]:
    return P[prefix[-1]].tolist()  # type: ignore[no-any-return]


def sampled(possible: dict[int, list[int]], forced: dict[int, int], n: int = 12, rows: int = 60) -> list[list[int]]:
    """Sequences in which only some tokens are possible at some places, and some are forced."""
    random, made = np.random.default_rng(1), list[list[int]]()
    for _ in range(rows):
        text = [0]
        for place in range(n):
            p = P[text[-1]] * np.isin(np.arange(6), possible.get(place, range(6)))
            text.append(forced[place] if place in forced else int(random.choice(6, p=p / p.sum())))
        tokens = text[1:]
        made.append(tokens[: tokens.index(END) + 1] if END in tokens else tokens)
    return made


NO_END, SOME = [0, 1, 2, 3, 4], [0, 2, 3]
CASES: dict[str, tuple[dict[int, list[int]], dict[int, int], Constraints]] = {
    "forced": (dict.fromkeys(range(12), NO_END), {4: 1}, Constraints(forced=[4], allowed=NO_END)),
    "min_tokens": (dict.fromkeys(range(4), NO_END), {}, Constraints(min_tokens=4)),
    "allowed everywhere": (dict.fromkeys(range(12), SOME), {}, Constraints(allowed=SOME)),
    "allowed at places": ({1: [1, 2], 3: [0]} | dict.fromkeys((0, 2, *range(4, 12)), NO_END), {}, Constraints(
        allowed=[[1, 2] if at == 1 else [0] if at == 3 else NO_END for at in range(12)])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_declared_is_no_deviation_and_what_is_not_is_one(case: str) -> None:
    possible, forced, constraints = CASES[case]
    tokens = sampled(possible, forced, rows=120)
    settings: dict[str, Any] = {"prompts": [[0]] * len(tokens), "eos": END, "max_new_tokens": 12, "progress": False}
    declared = audit(target, tokens, constraints=constraints, **settings)
    assert (declared.verdict, declared.log10_e_peak < 2) == ("not rejected", True)
    assert audit(target, tokens, **settings).rejected


def test_a_token_that_is_not_allowed_is_impossible() -> None:
    for constraints in (Constraints(allowed=[0, 1]), Constraints(allowed=[None, [0]])):
        for source in (target, llama(6)):  # a model has numerics, which explain no such token
            report = audit(source, [[0, 2]], prompts=[[0]], constraints=constraints, progress=False)
            assert (report.diagnosis, report.impossible[0].token) == ("impossible", 2)
    early = audit(target, [[0, END]], prompts=[[0]], eos=END, constraints=Constraints(min_tokens=2), progress=False)
    assert early.violations == {"impossible": 1}


def test_logits_without_constraints_are_the_same_and_pieces_add_up() -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert constrained(logits, Constraints(), [0, 1, 2, 3]) is logits
    own = Constraints(forced=[2], min_tokens=3, allowed=[[0, 5], None, None, [1]])
    whole = constrained(logits, own, [0, 1, 2, 1], ends=[5])
    parts = [constrained(logits[at : at + 2], own, [0, 1, 2, 1], at, ends=[5]) for at in (0, 2)]
    assert torch.equal(whole, torch.cat(parts))
    possible = [row.isfinite().nonzero()[:, 0].tolist() for row in whole]
    assert possible == [[0], [0, 1, 2, 3, 4], [2], [1]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"allowed": [[1], []]}, "is empty"),
        ({"forced": [2]}, "sequence 0 has 2 tokens, and place 2 is said to be forced"),
        ({"allowed": [[1]]}, "allowed tokens for 1 places"),
        ({"min_tokens": 1}, "min_tokens is given and no end token"),
    ],
)
def test_constraints_that_cannot_be_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        audit(target, [[0, 1]], prompts=[[0]], constraints=Constraints(**given), progress=False)


def test_settings_of_single_sequences_and_others_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="min_tokens belongs to single sequences; declare it in each line"):
        claimed_sampling({"min_tokens": 12})
    for name in ("grammar", "stop_strings"):
        with pytest.raises(ValueError, match=f"{name} is .*a function as target"):
            claimed_sampling({name: "x"})
    assert claimed_sampling({"min_tokens": 0, "stop_strings": None}) == Sampling()


def line(tmp_path: Path, words: str) -> Any:
    file = tmp_path / "tokens.jsonl"
    file.write_text(f'{{"prompt": [1], "tokens": [2, 3], {words}}}\n', encoding="utf-8")
    return read_tokens(file)[0]


def test_lines_of_a_file(tmp_path: Path) -> None:
    one = line(tmp_path, '"forced": [1], "min_tokens": 2, "allowed_token_ids": [[2], null], "logprobs": [-1, null]')
    assert (one.forced, one.min_tokens, one.allowed, one.logprobs) == ([1], 2, [[2], None], [-1, None])
    assert line(tmp_path, '"forced": null, "steps": null').steps is None
    chat = '{"content": [{"logprob": -0.5}, {"token": "a", "logprob": -1}]}'
    for own in ('{"token_logprobs": [-0.5, -1]}', chat):
        assert line(tmp_path, f'"logprobs": {own}').logprobs == [-0.5, -1]
    for words, message in (
        ('"min_tokens": -1', "'min_tokens' is -1"),
        ('"allowed_token_ids": [1, null]', "neither a list of ids"),
        ('"logprobs": {"tokens": []}', "not a list of 2 numbers"),
        ('"logprobs": [1]', "not a list of 2 numbers"),
        ('"forced": 1', "'forced' is not a list of integers"),
        ('"seed": true', "'seed' is true; give an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            line(tmp_path, words)


def test_log_probabilities_that_are_all_missing_say_nothing() -> None:
    report = audit(target, [[1, 2]], prompts=[[0]], logprobs=[[None, None]], progress=False)
    assert "logprobs" not in str(report)


def test_allowed_tokens_may_be_arrays() -> None:
    for array in (np.array([0, 5]), torch.tensor([0, 5])):
        given: Any = array
        assert Constraints(allowed=given).at(3) == (0, 5)
        assert Constraints(allowed=[given, None]).at(0) == (0, 5)
    wrong: list[Any] = [[5, [7]], [True, 5], 5]
    for one in wrong:
        with pytest.raises(TypeError):
            Constraints(allowed=one)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("right", "note: logprobs of 240 tokens fit the settings claimed"),
        ("raw", "check: logprobs fit the model's own distribution, before temperature and filters (raw)"),
        ("early", "check: logprobs fit the token after, one place too early"),
        ("late", "check: logprobs fit the token before, one place too late"),
        ("zero", "check: all logprobs are 0"),
        ("random", "check: logprobs of 240 tokens do not fit"),
    ],
)
def test_log_probabilities_are_compared(kind: str, words: str) -> None:
    sampling = Sampling(temperature=0.6)
    random, tokens, given = np.random.default_rng(2), list[list[int]](), list[list[float]]()
    for _ in range(20):
        text, logs = [0], list[float]()
        for _ in range(12):
            p = P[text[-1]] ** (1 / 0.6)
            p = p / p.sum()
            text.append(int(random.choice(6, p=p)))
            logs.append(float(np.log((P[text[-2]] if kind == "raw" else p)[text[-1]])))
        changed = {"early": [*logs[1:], -1.0], "late": [-1.0, *logs[:-1]], "zero": [0.0] * 12}
        noise = list(-random.exponential(size=12))
        tokens.append(text[1:])
        given.append(noise if kind == "random" else changed.get(kind, logs))
    settings: dict[str, Any] = {"prompts": [[0]] * 20, "sampling": sampling, "progress": False}
    report = audit(target, tokens, logprobs=given, **settings)
    assert report.verdict == "not rejected"
    assert any(one.startswith(words) for one in str(report).splitlines()), report
