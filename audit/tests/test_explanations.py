"""What may explain a finding: the order of the filters, bfloat16, prompts among the tokens, rows
that share noise."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from reports import report
from samplers import depending, raced, sample_row, tables
from tiny import llama
from transformers import LlamaConfig, LlamaForCausalLM

from specnb import generate
from specnb.distributions import Sampling, normalise, sample
from specnb.rules import token_verification
from specnb_audit import Aim, Auditor, Constraints, audit
from specnb_audit.alternatives import ALTERNATIVES
from specnb_audit.bets import Row
from specnb_audit.claimed import Claimed, claimed_probs
from specnb_audit.distant_noise import noise_within
from specnb_audit.explanations import (
    audited,
    checks_of,
    dependent_sequences,
    endings_of,
    likelier_settings,
    other_settings_or_prompts,
)
from specnb_audit.step_sizes import step_findings
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows

# Other settings


# At temperature 0.5 before top-p 0.9 two of them are kept, after it three.
TABLE = [0.5, 0.3, 0.15, 0.05]
SAMPLING = Sampling(0.5, top_p=0.9)


def constant(prefix: tuple[int, ...]) -> list[float]:
    return TABLE


def texts(*tokens: list[int]) -> list[Completion]:
    return [Completion([], one) for one in tokens]


def cause(sampling: Sampling, given: list[Completion], suspicious: Collection[int] = (), delta: float = 1e-6) -> str:
    return likelier_settings(Models(constant, sampling), given, set(suspicious), Auditor(delta))[0]


def of_order(order: str, engine: str) -> str:
    return f"the filters look as if applied in another order: {order}, as in {engine}"


def without(name: str) -> str:
    return f"it looks as if {name} is not applied: without it the tokens are explained"


def test_an_order_that_makes_all_tokens_possible_is_named() -> None:
    for sampling, names, engine in (
        (SAMPLING, "top-p, temperature", "llama.cpp"),
        (Sampling(0.5, 3, 0.9), "top-k, top-p, temperature", "llama.cpp"),
        (Claimed(0.5, top_p=0.9, min_p=0.01), "top-p, min-p, temperature", "llama.cpp"),
    ):
        given = texts([0] * 6 + [1, 2])
        found, notes = likelier_settings(Models(constant, sampling), given, set(), Auditor())
        assert (found, len(notes)) == (of_order(names, engine), 1)
        assert f"--filter-order {engine}" in notes[0]
    hot = Sampling(2.0, top_p=0.7)  # keeps two tokens in the other order, and here three
    assert cause(hot, texts([0, 1, 2])) == ""


def test_a_filter_that_is_not_applied_is_named() -> None:
    for sampling, name in ((SAMPLING, "top-p"), (Sampling(0), "temperature"), (Sampling(top_k=2), "top-k")):
        assert cause(sampling, texts([0, 1, 3])) == without(name)
    assert cause(Sampling(0.5, 3), texts([2] * 40)) == ""  # which is not explained without either
    exact = np.random.default_rng(0).choice(4, p=TABLE, size=400).tolist()
    assert cause(Sampling(0.5), texts(exact)) == without("temperature")
    assert cause(Sampling(1.0), texts(exact)) == ""  # no filter is claimed


@pytest.mark.parametrize(
    ("declared", "name"),
    [(Constraints(min_tokens=4), "min_tokens"), (Constraints(allowed=[0, 1, 2]), "allowed_token_ids")],
)
def test_a_constraint_that_is_not_applied_is_named(declared: Constraints, name: str) -> None:
    random = np.random.default_rng(0)
    made = [random.choice(4, p=TABLE, size=8).tolist() for _ in range(100)]
    made = [one[: one.index(3) + 1] if 3 in one else one for one in made]
    settings: dict[str, Any] = {"eos": 3, "max_new_tokens": 8, "constraints": declared, "progress": False}
    assert audit(constant, made, prompts=[[]] * 100, **settings).cause == without(name)
    made = [*[[2] * 8] * 20, *made]  # which nothing explains
    assert audit(constant, made, prompts=[[]] * 120, **settings).cause == ""


@pytest.mark.parametrize(("emitted", "explains"), [(1, True), (2, False)])
def test_a_suspected_model_that_explains_impossible_tokens_is_named(emitted: int, explains: bool) -> None:
    aim = Aim(suspected=lambda prefix: [0.3, 0.5, 0.15, 0.05])
    settings: dict[str, Any] = {"prompts": [[]], "sampling": Sampling(0), "aim": aim, "progress": False}
    report = audit(constant, [[emitted] * 20], **settings)
    assert (report.diagnosis, report.cause == ALTERNATIVES["suspected-model"]) == ("impossible", explains)


@pytest.mark.parametrize(
    ("given", "seen", "words"), [([], [1], "saw one more"), ([1], [], "did not see"), ([1], [1], "")]
)
def test_a_begin_of_text_token_that_makes_the_difference_is_named(
    given: list[int], seen: list[int], words: str
) -> None:
    target = llama(6)
    target.config.bos_token_id = 1
    prompts = [[first, second] for first in range(6) for second in range(6)] * 4
    made = generate(target, [[*seen, *one] for one in prompts], max_new_tokens=8, progress=False).tokens
    report = audit(target, made, prompts=[[*given, *one] for one in prompts], progress=False)
    assert report.rejected is bool(words)
    assert words in report.cause


@pytest.mark.parametrize(
    ("applied", "words"),
    [
        (Claimed(0.5, top_k=2, order=("top-k", "temperature")), "top-k 2 before a temperature of 0.5 in place of 1"),
        (Sampling(0.5), "a temperature of 0.5 in place of 1"),
        (Sampling(top_k=3), "top-k 3"),
        (Sampling(), None),
    ],
)
def test_settings_that_nobody_claimed_are_named(applied: Sampling, words: str | None) -> None:
    probs = claimed_probs(torch.tensor(TABLE, dtype=torch.float64).log()[None], applied)[0].numpy()
    given = texts(np.random.default_rng(0).choice(4, p=probs, size=4000).tolist())
    found, notes = other_settings_or_prompts(Models(constant), given, Auditor)
    expected = "" if words is None else f"it looks as if the engine applies {words}, which is not claimed"
    assert (found, len(notes)) == (expected, int(words is not None))


def test_completions_without_a_token_are_rejected_and_not_an_error() -> None:
    found = audit(llama(6), [[], []], prompts=[[1], [1]], eos=2, max_new_tokens=8, progress=False)
    assert found.rejected


@pytest.mark.parametrize("place", [1, -1])
def test_a_token_of_the_template_that_was_lost_is_named(place: int) -> None:
    model = llama(6)
    prompts = [[first, 2, second, 4] for first in range(6) for second in range(6)] * 4
    seen = [[token for at, token in enumerate(one) if at != place % 4] for one in prompts]
    made = generate(model, seen, max_new_tokens=8, progress=False).tokens
    report = audit(model, made, prompts=prompts, progress=False)
    which = "token 2 of the prompts (2 in all)" if place > 0 else "token 1 from the end of the prompts (4 in all)"
    assert report.cause == f"it looks as if the engine did not see {which}: so the tokens are explained"


@torch.no_grad()
def test_factors_of_longrope_by_the_length_so_far_are_named() -> None:
    """As with a cache: the keys of the first tokens keep their factors."""
    config = LlamaConfig(
        **(MODEL.config.to_dict() | {"max_position_embeddings": 16, "vocab_size": 6}),
    )
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 10.0, "original_max_position_embeddings": 6,
        "short_factor": [1.0] * 2, "long_factor": [6.0] * 2,
    }  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    prompts = [[first, second] for first in range(6) for second in range(6)] * 4
    ids = torch.tensor(prompts)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=12, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    report = audit(model, made[:, 2:].tolist(), prompts=prompts, progress=False)
    assert report.rejected
    assert report.cause.endswith(
        "those for up to 6 tokens for as many, which stay in the cache, and the others from there on"
    )


@pytest.mark.parametrize("rejected", [True, False])
def test_a_deviation_that_begins_with_a_rejection_is_said_to_be_of_the_cache(rejected: bool) -> None:
    """After the first rejection, or from the beginning, the target's distributions are another
    context's."""
    p, q = tables()
    given = []
    for seed in range(60):
        row = sample_row(p, q, 24, seed)
        until = next(at for at, size in enumerate(row.steps or ()) if size < 4) + 1
        steps = list(row.steps or ())[:until]
        text = list(row.tokens)[: sum(steps)]
        for token in sample_row(p.roll(1, 0), q, 12, seed + 100).tokens[4:] if rejected else ():
            text, steps = [*text, token], [*steps, 1]
        given.append((text, steps))
    texts_of = [text for text, _ in given]
    if not rejected:
        texts_of = [list(sample_row(p.roll(1, 0), q, len(text), seed).tokens) for seed, text in enumerate(texts_of)]
    report = audit(
        lambda prefix: p[prefix[-1]], texts_of, prompts=[[0]] * 60, steps=[steps for _, steps in given],
        draft=lambda prefix: q[prefix[-1]], progress=False,
    )  # fmt: skip
    assert report.rejected
    assert report.cause.startswith("tokens deviate only after the first rejection") == rejected


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("bonus", "the last token of steps of 4 follows the draft's distribution: a bonus token of the draft"),
        ("first", "only the first token of a step deviates (near-uniform)"),
        ("all", ""),
    ],
)
def test_one_place_of_steps_that_deviates_is_named(wrong: str, words: str) -> None:
    """And not where all draft tokens are accepted."""
    p, q = tables()

    def rule(ahead: Any, probs: Any, draft_tokens: Any, accept: Any, final: Any) -> Any:
        if wrong == "all":
            return len(draft_tokens), sample(ahead[-1], final), None
        if wrong == "first":
            ahead = torch.cat([normalise(ahead[:1] ** 0.3), ahead[1:]])
        accepted, token, rest = token_verification(ahead, probs, draft_tokens, accept, final)
        own = wrong == "bonus" and accepted == len(draft_tokens)
        return accepted, sample(q[draft_tokens[-1]], final) if own else token, rest

    rows = [sample_row(p, q, 24, seed, rule) for seed in range(100)]
    report = audit(
        lambda prefix: p[prefix[-1]], [row.tokens for row in rows], prompts=[[0]] * len(rows), progress=False,
        draft=lambda prefix: q[prefix[-1]], steps=[row.steps or () for row in rows],
    )  # fmt: skip
    assert report.rejected
    assert report.cause.startswith(words)
    assert ("of a step" in report.cause or "of steps" in report.cause) == (wrong != "all")


# The sizes of steps


def test_steps_without_an_accepted_draft_token_are_noticed() -> None:
    """The tokens are exact."""
    random = np.random.default_rng(0)
    given = [Completion([], random.choice(4, p=TABLE, size=8).tolist(), [1] * 8) for _ in range(8)]
    models = Models(constant, draft=lambda prefix: [0.5, 0.3, 0.15, 0.05])
    (check,), notes = step_findings(models, given)
    assert check.startswith("no step emitted more than one token: no draft token was ever accepted, where Algorithm 1")
    assert notes == []
    assert step_findings(models._replace(draft=None), given)[0] == [
        "no step emitted more than one token: no draft token was ever accepted"
    ]
    assert step_findings(models, [one._replace(steps=None) for one in given]) == ([], [])


def test_steps_of_algorithm_1_are_no_finding_and_their_longest_is_told() -> None:
    p, q = tables()
    rows = [sample_row(p, q, 40, seed) for seed in range(20)]
    given = [Completion([0], list(row.tokens), list(row.steps or ())) for row in rows]
    models = Models(lambda prefix: p[prefix[-1]], draft=lambda prefix: q[prefix[-1]])
    checks, (note,) = step_findings(models, given)
    assert checks == []
    assert note.startswith(
        "steps emit up to 4 tokens, as with 3 draft tokens and a bonus token; if the engine drafts 4,"
    )
    other = models._replace(draft=lambda prefix: p[prefix[-1]])  # with which all would be accepted
    (check,), _ = step_findings(other, given)
    assert "where Algorithm 1 would accept 1.00" in check


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_first_step_without_a_draft_and_a_cut_last_one_are_no_tests(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, too."""
    target, draft = llama(dtype=torch.float64), llama(seed=9, layers=1, dtype=torch.float64)
    made = generate(target, [[1, 2]] * 200, draft, gamma=2, max_new_tokens=6, check=False, progress=False)
    steps = [[int(n) for n in row if n] for row in made.record.emitted]
    after = [[*prompt, tokens[0]] for prompt, tokens in zip(made.prompts, made.tokens, strict=True)]
    again = generate(target, after, draft, gamma=2, max_new_tokens=6, seed=1, check=False, progress=False)
    given = [
        Completion([1, 2], [first[0], *tokens], [1, *(int(n) for n in row if n)])
        for first, tokens, row in zip(made.tokens, again.tokens, again.record.emitted, strict=True)
    ]
    monkeypatch.setattr("specnb_audit.teacher_forcing.LOGITS", 4 * size)
    for texts in (given, [Completion([1, 2], *one) for one in zip(made.tokens, steps, strict=True)]):
        assert step_findings(Models(target, draft=draft), texts)[0] == []


# Prompts, ends and dependence


def test_completions_are_cut_to_what_was_audited() -> None:
    """A stop leaves sequences that were read ahead; tokens after an end token are not audited;
    steps are cut too."""
    given = [
        Completion([1], [0, 1, 3, 0, 1], [2, 2, 1]),
        Completion([2], []),
        Completion([], [3, 3], [2]),
        Completion([3], [0, 1]),
        Completion([0], [], []),
    ]
    for count, lengths in ((0, []), (1, [3]), (2, [3, 0]), (3, [3, 0, 1]), (5, [3, 0, 1, 2, 0])):
        auditor = Auditor(eos=3)
        for one in given[:count]:
            auditor.add(Row(one.tokens, torch.full((len(one.tokens), 4), 0.25), prompt=one.prompt))
        found = audited(auditor, given)
        assert [len(one.tokens) for one in found] == lengths
        assert [one.prompt for one in found] == [one.prompt for one in given[:count]]
        assert [one.tokens for one in found] == [one.tokens[:n] for one, n in zip(given, lengths, strict=False)]
        steps_found = [[2, 1], None, [1], None, []]
        assert [one.steps for one in found] == steps_found[:count]


def shared_noise(kinds: dict[str, list[list[float]]], delta: float = 1e-3) -> set[int] | None:
    """The dependent sequences where each kind gains so much at each token of each sequence."""
    running = {name: np.cumsum([gain for gains in rows for gain in gains]) for name, rows in kinds.items()}
    rows = next(iter(kinds.values()))
    found = report(delta=delta, running_by_alternative={"argmax": np.full(sum(map(len, rows)), 9.0), **running})
    return dependent_sequences(found, [len(gains) for gains in rows])


@pytest.mark.parametrize(
    ("gains", "found"),
    [
        ([[1.0, 1.0], [2.1], [0.9]], {1}),  # an e-value of more than 100 by its own part
        ([[0.0], [1.0, 1.1], [], [2.5], [0.2]], {1, 3}),
        ([[1.5], [1.4], [0.0]], set()),  # the evidence of all together is less than 1/delta
        ([[1.5], [1.6], [0.5], [0.0]], {0, 1}),  # where it is not, more than 10 by its own part
        ([[1.0], [1.0], [1.0]], None),  # too little in each
        ([[2.5], [-3.0], [0.0]], {0}),
    ],
)
def test_sequences_that_share_noise_have_evidence_of_their_own(
    gains: list[list[float]], found: set[int] | None
) -> None:
    assert shared_noise({"same-tokens": gains}) == found
    assert shared_noise({"noise-of-texts": gains}) == found
    nothing = [[0.0] * len(row) for row in gains]
    assert shared_noise({"same-tokens": gains, "noise-of-texts": nothing}) == found
    assert shared_noise({"same-tokens": nothing, "noise-of-texts": gains}) == found


@pytest.mark.parametrize(
    ("shared", "anew", "verdict"),
    [(True, True, "rejected"), (True, False, "dependent"), (False, True, "rejected"), (False, False, "not rejected")],
)
def test_noise_that_sequences_repeat_is_said_to_be_repeated(shared: bool, anew: bool, verdict: str) -> None:
    """Not taken for a bias of tokens."""
    tokens = [raced(start, 30, [3] if shared else [3, start], anew) for start in range(25)]
    report = audit(lambda prefix: depending(prefix).tolist(), tokens, prompts=[[n] for n in range(25)], progress=False)
    assert report.verdict == verdict
    words = "sequences repeat each other's noise"
    # With seeds of their own too each token repeats the noise of the one before.
    assert any(check.startswith(words) for check in report.checks) == anew
    assert report.cause.startswith(words) == anew
    assert ("DEPENDENT" in report.headline) == (shared and not anew)
    if anew:
        assert report.headline.startswith("REJECTED after ")
        assert "each token that of the one before" in report.headline


def test_noise_that_every_token_repeats_is_said_of_a_long_sequence() -> None:
    report = audit(target, [raced(0, 300, [3], anew=True)], prompts=[[0]], progress=False)
    assert report.cause.startswith("sequences repeat each other's noise, each token that of the one before")


def target(prefix: tuple[int, ...]) -> list[float]:
    return depending(prefix).tolist()  # type: ignore[no-any-return]


def repeated_noise(given: list[Completion]) -> tuple[int, float]:
    auditor, within = Auditor(), np.zeros(2)
    for row in teacher_forced_rows(Models(target), given):
        auditor.add(row)
        within += noise_within(row.p, torch.tensor(row.tokens))
    return auditor.bets.distant_noise.lag(within)


@pytest.mark.parametrize(("calls", "lag"), [(2, 5), (3, 1)])
def test_calls_with_one_seed_repeat_their_noise_so_many_lines_apart(calls: int, lag: int) -> None:
    """Each call has `lag` sequences, whose noises are those of the call before."""
    given = [Completion([number], raced(number, 30, [3, number % lag], anew=False)) for number in range(calls * lag)]
    found, log10 = repeated_noise(given)
    assert (found, log10 > 6) == (lag, True)


def test_a_bias_and_independent_sequences_repeat_no_noise() -> None:
    """Nor does a sampler that prefers one token, or the most probable ones."""
    random = np.random.default_rng(0)
    changes: list[Callable[[Any], Any]] = [
        lambda p: p, lambda p: p * np.where(np.arange(len(p)) == 3, 8, 1), lambda p: p**1.7
    ]  # fmt: skip
    for change in changes:
        given = []
        for number in range(12):
            text = [number]
            for _ in range(25):
                p = change(depending(text))
                text.append(int(random.choice(len(p), p=p / p.sum())))
            given.append(Completion([number], text[1:]))
        assert repeated_noise(given)[1] < 2


def budget(count: int, other: bool) -> list[Completion]:
    """Sequences whose fourth token is forced; `other`: all others are of another temperature."""
    random, made = np.random.default_rng(1), list[Completion]()
    for number in range(count):
        text = [number]
        for place in range(12):
            p = depending(text) ** (1.7 if other else 1)
            text.append(57 if place == 3 else int(random.choice(len(p), p=p / p.sum())))
        made.append(Completion([number], text[1:]))
    return made


def test_a_forced_token_is_not_called_dependence() -> None:
    """Unless something else deviates, too; declared as forced, nothing does."""
    given = budget(40, other=False)
    settings: dict[str, Any] = {"prompts": [one.prompt for one in given], "progress": False}
    tokens = [one.tokens for one in given]
    report = audit(target, tokens, **settings)
    assert report.verdict == "rejected"
    assert report.cause.startswith("token 57 at position 3 in 40 of 40 sequences, where ")
    assert any('"forced": [3]' in note for note in report.notes)
    declared = audit(target, tokens, constraints=Constraints(forced=[3]), **settings)
    assert (declared.verdict, declared.log10_e_peak < 2) == ("not rejected", True)
    wrong = audit(target, [one.tokens for one in budget(40, other=True)], **settings)
    assert wrong.rejected
    assert "position 3" not in wrong.cause


MODEL = llama()
MODEL.config.update({"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [3]})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([([1, 0], [1, 0, 1])], "the tokens of 1 of 1 sequences begin with their prompt; give the new tokens only"),
        ([([1], [1, 1])], None),  # a prompt of one token may be repeated
        ([([1], [2, 0, 0])], "1 of 1 sequences are padded with the token 0; leave padding out"),
        ([([0, 0, 1], [2]), ([1], [0])], None),  # half of them
        ([([2], [2])], "0 of 1 prompts begin with the model's begin-of-text token 1; did the model see one?"),
        ([([1, 1], [2])], "1 of 1 prompts begin with the begin-of-text token 1 twice; did the model see both?"),
        ([([2], [2]), ([1], [2])], None),
    ],
)
def test_what_is_wrong_with_the_sequences_themselves(
    given: list[tuple[list[int], list[int]]], words: str | None
) -> None:
    completions = [Completion(*one) for one in given]
    assert checks_of(MODEL, completions, True) == ([] if words is None else [words])
    statistical = words is not None and "see one" in words
    # Asked only where something has to be explained.
    expected = [] if words is None or statistical else [words]
    assert checks_of(MODEL, completions, False) == expected


@pytest.mark.parametrize(
    ("given", "settings", "words"),
    [
        ([([1], [3, 0])], {}, "1 of 1 sequences continue after the end token [3]; give eos if it ends them"),
        ([([1], [3, 0])], {"eos": 2}, None),
        (
            [([1], [2]), ([1], [2, 2])],
            {},
            "completions have 1 to 2 tokens; what ended them? Give eos, or max_new_tokens, and the "
            "tokens of a stop string that was cut off",
        ),
        ([([1], [2]), ([1], [2, 2])], {"max_new_tokens": 2}, None),
    ],
)
def test_what_is_said_of_ends_that_nobody_declared(
    given: list[tuple[list[int], list[int]]], settings: dict[str, Any], words: str | None
) -> None:
    completions = [Completion(*one) for one in given]
    assert endings_of(MODEL, completions, Auditor(**settings)) == ([] if words is None else [words])
