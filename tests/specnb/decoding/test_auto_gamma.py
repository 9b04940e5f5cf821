"""gamma="auto": exact whatever is chosen, close to the best fixed gamma, and never much slower than
plain decoding."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from specnb.decoding.auto_gamma import LARGEST, SAMPLED, Auto, AutoGamma, assumed_costs, varies
from tiny import llama, near_copy, next_distributions

from specnb import ModelDrafter, PromptLookupDrafter, Sampling, generate
from specnb.cache import CachedModel
from specnb.drafters import Drafter, MixtureDrafter, TreeDrafter
from specnb.enumeration import joint_distribution
from specnb.sampler import Hooks
from specnb.statistics import goodness_of_fit
from specnb.step import Batch

VOCAB = 4
LEVEL = 1e-7


def _steps(accepted: Callable[[int], float], costs: Sequence[float], tokens: int) -> tuple[float, list[int]]:
    """Tokens per unit of time and the widths of a simulated generation, with the acceptance at each
    token's place."""
    rng = np.random.default_rng(1)
    choice, done, widths = AutoGamma(rows=1, costs=costs), 0, list[int]()
    while done < tokens:
        (width,) = choice.choose()
        count = int((rng.random(width) < accepted(done)).cumprod().sum())
        choice.learn(np.array([width]), np.array([count]))
        done, widths = done + count + 1, [*widths, width]
    return done / sum(costs[width] for width in widths), widths


@pytest.mark.parametrize("slope", [0.02, 0.1])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.4, 0.7, 0.95])
def test_it_comes_close_to_the_best_fixed_gamma(alpha: float, slope: float) -> None:
    costs = [1 + slope * width for width in range(11)]
    reached, _ = _steps(lambda place: alpha, costs, tokens=3000)
    best = max(sum(alpha**k for k in range(gamma + 1)) / cost for gamma, cost in enumerate(costs))
    assert reached > 0.96 * best
    assert reached > 0.97  # of plain decoding, which makes one token in a unit of time


def test_it_follows_a_text_that_changes() -> None:
    """300 tokens in which nothing is accepted, then 300 in which nearly all is."""
    _, widths = _steps(
        lambda place: 0.95 if place >= 300 else 0.0, [1 + 0.1 * width for width in range(11)], tokens=600
    )
    before = widths[5 : next(i for i, w in enumerate(widths) if sum(x + 1 for x in widths[: i + 1]) > 299)]
    assert np.mean([width == 0 for width in before]) > 0.8
    assert np.mean(widths[-20:]) > 6


def _widths(monkeypatch: pytest.MonkeyPatch, *widths: int) -> None:
    """Steps have these widths in turn, again and again; each row after the first is a step ahead of
    the one before."""
    step = itertools.count()

    def choose(self: AutoGamma, matched: object = None) -> NDArray[np.int64]:
        return np.take(widths, self.rows + next(step), mode="wrap")

    monkeypatch.setattr(AutoGamma, "choose", choose)


# By its size a near copy is never asked.
CHEAP = Auto(costs=[1 + 0.1 * width for width in range(6)])
TARGET, DRAFT = llama(VOCAB), near_copy(llama(VOCAB), 0.5)


def _drafters() -> dict[str, Drafter]:
    lookup = PromptLookupDrafter(vocab=VOCAB, longest=2)
    return {
        "model": ModelDrafter(DRAFT),
        "lookup": lookup,
        "mixture": MixtureDrafter(lookup, ModelDrafter(DRAFT), weight=0.5),
    }


@pytest.mark.parametrize("name", _drafters())
@pytest.mark.parametrize("widths", [None, (0, 3, 1, 0, 0, 2)], ids=["chosen", "given"])
def test_completions_have_the_target_s_distribution(
    name: str, widths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if widths:
        _widths(monkeypatch, *widths)
    prompt, new, rows = [1, 0, 1], 4, 6000
    sampling = Sampling()
    made = generate(
        TARGET, [prompt] * rows, _drafters()[name], gamma=CHEAP, max_new_tokens=new, batch_size=500, progress=False,
        sampling=sampling, seed=3,
    )  # fmt: skip
    counts = torch.zeros((VOCAB,) * new)
    for tokens in made.tokens:
        counts[tuple(tokens)] += 1
    expected = joint_distribution(lambda tokens: next_distributions(TARGET, [[*prompt, *tokens]])[0], new)
    assert goodness_of_fit(counts.flatten().numpy(), expected.flatten().numpy()).p_value > LEVEL


def test_models_catch_up_on_the_tokens_of_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that drafts for itself has every token accepted, unless its cache lacks some."""
    _widths(monkeypatch, 2, 0, 0, 0, 3, 0, 1)
    target = llama(VOCAB, dtype=torch.float64)
    for drafter in (ModelDrafter(target), MixtureDrafter(ModelDrafter(target), ModelDrafter(target), weight=0.5)):
        record = generate(target, [[1], [2, 3]], drafter, gamma=CHEAP, max_new_tokens=12, progress=False).record
        drafted = (record.draft_tokens >= 0).sum(-1)
        assert (record.accepted == drafted)[record.emitted > 0].all()
        assert np.allclose(record.beta[record.tested], 1)
        assert set(drafted[record.emitted > 0].tolist()) >= {0, 1, 2, 3}


@pytest.mark.parametrize("mixed", [False, True])
def test_models_evaluate_what_their_cache_lacks_and_not_more(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens after a step that they drafted, as many more as there were plain steps since, and
    each draft token."""
    _widths(monkeypatch, 2, 0, 0, 3, 1)
    evaluated: list[int] = []

    class Counting(CachedModel):
        def run(self, tokens: torch.Tensor, *settings: Any, **more: Any) -> torch.Tensor:
            evaluated.append(tokens.shape[1])
            return super().run(tokens, *settings, **more)

    class Counted(ModelDrafter):
        runner_class = Counting

    drafter = MixtureDrafter(PromptLookupDrafter(VOCAB), Counted(TARGET), 0.0) if mixed else Counted(TARGET)
    record = generate(TARGET, [[1, 3]], drafter, gamma=CHEAP, max_new_tokens=11, progress=False).record
    assert record.emitted.tolist() == [[3, 1, 1, 4, 2]]
    assert evaluated == [1, *[2, 1], *[4, 1, 1], 2]


def test_greedy_tokens_are_those_of_plain_decoding() -> None:
    sampling = Sampling(temperature=0)
    prompts = [[1, 0, 1, 0], [2], [3, 3, 1]]
    plain = generate(TARGET, prompts, None, max_new_tokens=10, sampling=sampling, progress=False)
    for drafter in _drafters().values():
        made = generate(TARGET, prompts, drafter, gamma=CHEAP, max_new_tokens=10, sampling=sampling, batch_size=2)
        assert made.tokens == plain.tokens


def test_a_step_without_draft_tokens_is_a_plain_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt lookup without a match costs a pass over one token, not over gamma + 1."""
    passes: list[int] = []
    run = Batch.run_target

    def counted(self: Batch, draft_tokens: torch.Tensor) -> torch.Tensor:
        passes.append(draft_tokens.shape[1] + 1)
        return run(self, draft_tokens)

    monkeypatch.setattr(Batch, "run_target", counted)
    drafter = PromptLookupDrafter(vocab=VOCAB, longest=3, shortest=3)
    generate(TARGET, [[0, 1, 2, 3]], drafter, gamma="auto", max_new_tokens=3, progress=False)
    assert passes[0] == 1


def test_the_numbers_of_draft_tokens_of_a_prompt_do_not_depend_on_the_batch() -> None:
    """Those that are chosen; tests/specnb/drafting/test_all_drafters.py has all drafters, with
    other numbers."""
    target = llama(VOCAB, dtype=torch.float64)
    prompts = [[1, 0, 1, 0, 1, 0], [2], [3, 3, 1], [0, 2]]
    asked: dict[str, Any] = {"gamma": CHEAP, "max_new_tokens": 10, "seed": 4, "progress": False}
    made = generate(target, prompts, DRAFT, batch_size=3, **asked)
    assert len({*(made.record.draft_tokens >= 0).sum(-1)[:, 1:].flat}) > 2
    for number, prompt in enumerate(prompts):
        alone = generate(target, [prompt], DRAFT, hooks=Hooks(rows=[number]), **asked)
        assert alone.tokens == [made.tokens[number]]
        steps = alone.record.draft_tokens.shape[1]
        assert (alone.record.draft_tokens[0] == made.record.draft_tokens[number, :steps]).all()


def test_without_a_drafter_it_decodes_alone() -> None:
    made = generate(TARGET, [[1]], None, gamma="auto", max_new_tokens=3, progress=False)
    assert made.tokens == generate(TARGET, [[1]], gamma=0, max_new_tokens=3, progress=False).tokens


def test_left_out_it_is_chosen() -> None:
    how: list[dict[str, Any]] = [{}, {"gamma": "auto"}]
    made = [generate(TARGET, [[1, 2, 1]], PromptLookupDrafter(VOCAB), max_new_tokens=9, **more) for more in how]
    assert (made[0].record.draft_tokens == made[1].record.draft_tokens).all()
    assert made[0].record.gamma == 10


def test_a_longer_match_drafts_more_and_a_rejected_one_less() -> None:
    """Each row by its own steps; what is forgotten is tried again."""
    choice, matched = AutoGamma(rows=3, costs=[1 + 0.05 * width for width in range(11)]), np.array([0, 1, 8])
    none, short, long = choice.choose(matched).tolist()
    assert none == 0 < short < long
    chosen = []
    for _ in range(60):
        chosen.append(choice.choose(np.array([1, 1, 1])))
        choice.learn(chosen[-1], np.where([True, True, False], 0, chosen[-1]))
    first, second, third = np.transpose(chosen)
    assert first.tolist() == second.tolist()
    assert 0 < first[20:].mean() < 0.2
    assert third[-1] > short
    choice.forget([1])
    _, again, third = choice.choose(np.array([1, 1, 1])).tolist()
    assert (again, third > short) == (short, True)


def test_costs_decide_what_is_drafted() -> None:
    asked: dict[str, Any] = {"max_new_tokens": 12, "progress": False}
    never = generate(TARGET, [[1]], TARGET, gamma=Auto(costs=(1, 100)), **asked).record
    assert never.gamma == 1
    assert not (never.draft_tokens >= 0).any()
    always = generate(TARGET, [[1]], TARGET, gamma=Auto(costs=(1, 1, 1)), **asked).record
    assert ((always.draft_tokens >= 0).sum(-1) == 2).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"costs": costs}, f"costs is {costs!r}; it must be a list of times of steps with 0, 1, ... draft tokens")
          for costs in ("12", b"12", {0: 1.0, 1: 1.2}, 3, (1, 0), [1.0], [1, np.nan], [1, np.inf],
                        ["1", "2"], [[1, 2], [3, 4]])),
        *(({name: value}, f"{name} is {value!r}; it must lie in [0, 1]")
          for name in ("lately", "long", "accepted") for value in (-0.1, 1.1, np.nan, "1", None)),
        *(({"weight": value}, f"weight is {value!r}; it must lie in [1e-06, ") for value in (0, -1.0, np.nan, "3")),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        Auto(**given)


@pytest.mark.parametrize("costs", [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), [1, np.float32(2)], range(1, 3)])
def test_costs_may_be_any_list_of_numbers(costs: Any) -> None:
    assert Auto(costs=costs) == Auto(costs=(1.0, 2.0), lately=0.85, long=0.99, accepted=0.6, weight=4.0)


def test_where_the_width_cannot_change_it_is_fixed() -> None:
    asked: dict[str, Any] = {"max_new_tokens": 3, "progress": False}
    assert generate(TARGET, [[1]], TreeDrafter(DRAFT, (-1, -1)), **asked).record.gamma == 2
    assert generate(TARGET, [[1]], DRAFT, gamma=Auto(), hooks=Hooks(batch_class=Batch), **asked).record.gamma == 4
    hidden = PromptLookupDrafter(vocab=VOCAB)
    hidden.hidden_layers = (-1,)
    assert varies(TARGET, PromptLookupDrafter(VOCAB), True)
    assert not varies(TARGET, hidden, False)
    assert [varies(TARGET, _drafters()["mixture"], compile) for compile in (False, True)] == [True, False]
    with pytest.raises((TypeError, ValueError), match=r"gamma"):
        generate(TARGET, [[1]], DRAFT, gamma="fast")  # type: ignore[arg-type]


def test_on_a_device_the_first_draft_token_is_assumed_to_cost_most() -> None:
    target: Any = SimpleNamespace(device=torch.device("cuda"))
    costs = assumed_costs(target, PromptLookupDrafter(4))
    assert np.allclose(costs[:3], [1, 1 + SAMPLED[0], 1 + sum(SAMPLED)])
    assert len(costs) == LARGEST + 1
