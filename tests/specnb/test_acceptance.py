"""Acceptance along texts: overlaps against forward passes of one prefix at a time, rates by depth
against enumeration and against counting in the loop."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from distributions_for_tests import distribution_pair
from drafter_kinds import CHAINS, TREES, lookup
from torch import Tensor

from specnb.acceptance import FEWEST, depth_rates, depth_sums, distributions_along, measure_acceptance
from specnb.distributions import Conditional, Sampling, overlap
from specnb.drafters import ChainDrafter, Context, ModelDrafter
from specnb.enumeration import step_distribution
from specnb.loading import Pair
from specnb.rules import token_verification
from specnb.sampler import generate

VOCAB, NEW = 5, 6
PROMPTS = [[0, 1, 2], [3], [4, 4, 0, 1, 2], [2, 2]]
SAMPLINGS = [Sampling(), Sampling(0), Sampling(0.5), Sampling(top_k=2), Sampling(top_p=0.6)]
TARGET, MODEL = tiny.llama(VOCAB, dtype=torch.float64), tiny.gpt2(VOCAB, dtype=torch.float64)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_overlaps_are_those_at_every_prefix_of_plain_decoding(sampling: Sampling) -> None:
    """Of a model by itself and as a drafter."""
    options: dict[str, Any] = {"sampling": sampling, "seed": 7}
    drafts: dict[str, Any] = {"model": MODEL, "drafter": ModelDrafter(MODEL, sampling), "itself": TARGET}
    found = measure_acceptance(TARGET, PROMPTS, drafts, new_tokens=NEW, gamma=3, batch=3, **options)
    plain = generate(TARGET, PROMPTS, gamma=0, max_new_tokens=NEW, **options).tokens
    assert found.sequences == [prompt + tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    assert found.impossible == 0
    for row, sequence in enumerate(found.sequences):
        for at in range(NEW):
            p, q = (tiny.next_distributions(model, [sequence[: at - NEW]], sampling)[0] for model in (TARGET, MODEL))
            assert found.beta["model"][row, at] == pytest.approx(float(overlap(p, q)), abs=1e-9)
            assert found.beta["itself"][row, at] == pytest.approx(1, abs=1e-9)
    assert np.allclose(found.drafts["drafter"], found.drafts["model"], rtol=0, atol=1e-9, equal_nan=True)
    if sampling.temperature == 0:  # alpha is then an agreement rate
        assert set(found.beta["model"].flat) <= {0, 1}


def test_overlaps_are_at_most_1_however_float32_sums_are_rounded() -> None:
    target = tiny.llama(VOCAB)
    found = measure_acceptance(tiny.without_tokenizer(target, target), PROMPTS * 8, new_tokens=NEW)
    assert found.beta["draft"].max() <= 1
    assert found.alpha().value == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in CHAINS if "entropy" not in name])
@torch.inference_mode()
def test_a_drafter_that_goes_along_a_text_has_the_q_of_one_that_starts_at_each_place(name: str) -> None:
    """Whose state, if any, is therefore that of a row that has emitted a token a step."""
    target, drafter, gamma = tiny.llama(), CHAINS[name](), 3
    prompts, completions = [[0, 1, 2], [3], [1, 2]], [[3, 0, 1, 2, 0, 1], [2, 2, 1], [0, 1, 2, 3]]
    found = measure_acceptance(target, prompts, drafter, completions=completions, gamma=gamma).drafts["draft"]
    for row, (prompt, new) in enumerate(zip(prompts, completions, strict=True)):
        whole = torch.tensor([[*prompt, *new, 0, 0, 0, 0]])
        output = target(input_ids=whole, output_hidden_states=True)
        layers = [output.hidden_states[layer] for layer in drafter.hidden_layers]
        states = torch.cat(layers, dim=-1) if layers else None
        assert np.isnan(found[row, len(new) :]).all()
        for place in range(len(new)):
            length = len(prompt) + place
            context = Context(whole, torch.tensor([length]), states)
            drafter.start(context)
            ahead = whole[:, length : length + min(gamma, len(new) - place)]
            q = drafter.along(context, ahead)[0]
            p = output.logits[0, length - 1 : length - 1 + len(q)].softmax(-1)
            wanted = overlap(p, q).numpy()
            assert found[row, place, : len(q), 0] == pytest.approx(wanted, abs=1e-5)
            kept = (q / p).gather(-1, ahead[0][:, None])[:, 0].clamp_max(1).numpy()
            assert found[row, place, : len(q), 1] == pytest.approx(kept, abs=1e-4)
            assert np.isnan(found[row, place, len(q) :]).all()


# Rates by depth


def after(probs: Conditional, prefix: tuple[int, ...]) -> Conditional:
    return lambda tokens: probs((*prefix, *tokens))


def counted(p: Conditional, q: Conditional, gamma: int, new_tokens: int, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """The expected steps of a loop, and its tested and accepted draft tokens at each depth, by enumeration of steps."""
    total = np.zeros(1 + 2 * gamma)
    if len(prefix) >= new_tokens:
        return total
    total[0] = 1
    for tokens, chance in step_distribution(token_verification, after(p, prefix), after(q, prefix), gamma).items():
        for depth in range(gamma):
            tested = len(tokens) > depth and float(q((*prefix, *tokens[:depth])).sum()) > 0
            total[1 + depth] += chance * tested
            total[1 + gamma + depth] += chance * (len(tokens) - 1 > depth)
        total += chance * counted(p, q, gamma, new_tokens, (*prefix, *tokens))
    return total


def along(p: Conditional, q: Conditional, text: tuple[int, ...], gamma: int) -> np.ndarray:
    """`Acceptance.drafts` of one text, written down."""
    whole = np.full((len(text), gamma, 3), np.nan)
    for place in range(len(text)):
        for depth in range(min(gamma, len(text) - place)):
            at, before = place + depth, text[: place + depth]
            kept = min(1.0, float(q(before)[text[at]] / p(before)[text[at]]))
            whole[place, depth] = float(overlap(p(before), q(before))), kept, float(q(before).sum() > 0)
    return whole


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("kind", ["dense", "zeros in q", "zeros in both", "no draft token"])
def test_the_mean_over_all_texts_is_what_a_loop_counts(kind: str, gamma: int) -> None:
    """Steps, tested and accepted draft tokens, with the weights of the texts under the target."""
    vocab, new_tokens = 3 if gamma < 3 else 2, 3
    p, q = distribution_pair("dense" if kind == "no draft token" else kind, vocab)
    if kind == "no draft token":
        some, q = q, lambda prefix: some(prefix) * (sum(prefix) % 2 == 0)
    texts, chances = [], []
    for text in product(range(vocab), repeat=new_tokens + gamma - 1):
        chance = np.prod([float(p(text[:at])[x]) for at, x in enumerate(text)])
        if chance > 0:
            texts.append(along(p, q, text, gamma))
            chances.append(chance)
    sums = np.array(chances) @ depth_sums(np.array(texts))
    reached, tested, accepted = np.split(sums, 3)
    steps, wanted_tested, wanted_accepted = np.split(counted(p, q, gamma, new_tokens), [1, 1 + gamma])
    assert reached == pytest.approx([*steps, *wanted_accepted[:-1]], abs=1e-12)
    assert tested == pytest.approx(wanted_tested, abs=1e-12)
    assert accepted == pytest.approx(wanted_accepted, abs=1e-12)
    marginal = depth_rates(sums)[gamma : 2 * gamma]
    assert marginal == pytest.approx(wanted_accepted / steps, abs=1e-12)


@pytest.mark.parametrize("name", ["model", "EAGLE-3 head", "copy, otherwise a table"])
def test_a_measurement_agrees_with_counting_in_the_loop(name: str) -> None:
    """Each within five standard errors, steps of several and of single tokens together."""
    target, drafter, gamma, new_tokens, rows = tiny.llama(), CHAINS[name](), 3, 6, 1200
    prompts = torch.randint(4, (rows, 4), generator=torch.Generator().manual_seed(5)).tolist()
    record = generate(target, prompts, drafter, gamma=gamma, max_new_tokens=new_tokens, seed=6).record
    found = measure_acceptance(target, prompts, drafter, new_tokens=new_tokens + gamma - 1, gamma=gamma, seed=7)
    rates, steps = found.by_depth(), record.active.sum(axis=1)
    each = {"tokens": ((record.accepted * record.active).sum(axis=1) + steps, steps, rates.tokens_per_step)}
    for depth in range(gamma):
        reached = ((record.accepted > depth) & record.active).sum(axis=1)
        each[f"marginal {depth}"] = (reached, steps, rates.marginal[depth])
        each[f"conditional {depth}"] = (reached, record.tested[..., depth].sum(axis=1), rates.conditional[depth])
    for what, (top, bottom, estimate) in each.items():
        ratio = top.sum() / bottom.sum()
        error = np.std(top - ratio * bottom) * len(top) ** 0.5 / bottom.sum()
        own = (estimate.high - estimate.low) / 3.92
        assert abs(estimate.value - ratio) < 5 * (error**2 + own**2) ** 0.5, what
        assert own < 0.03, what


def test_fewer_draft_tokens_than_were_measured_have_their_own_steps() -> None:
    found = measure_acceptance(TARGET, PROMPTS * 2, MODEL, new_tokens=NEW, gamma=3)
    single = measure_acceptance(TARGET, PROMPTS * 2, MODEL, new_tokens=NEW, gamma=1)
    assert found.by_depth(gamma=1) == single.by_depth()
    with pytest.raises(ValueError, match="gamma is 4"):
        found.by_depth(gamma=4)


# Texts that are there already


def test_given_completions_are_measured_as_if_written_now() -> None:
    made = measure_acceptance(TARGET, PROMPTS, MODEL, new_tokens=NEW, seed=3)
    completions = [whole[-NEW:] for whole in made.sequences]
    given = measure_acceptance(TARGET, PROMPTS, MODEL, completions=completions, batch=3)
    assert given.sequences == made.sequences
    assert np.allclose(given.drafts["draft"], made.drafts["draft"], rtol=0, atol=1e-9, equal_nan=True)
    shorter = measure_acceptance(
        TARGET, PROMPTS, MODEL, completions=[one[: 2 + n] for n, one in enumerate(completions)]
    )
    for row in range(len(PROMPTS)):
        count = 2 + row
        assert shorter.beta["draft"][row, :count] == pytest.approx(made.beta["draft"][row, :count], abs=1e-9)
        assert np.isnan(shorter.beta["draft"][row, count:]).all()


def test_texts_are_read_without_a_begin_token() -> None:
    target, draft = tiny.llama(4), tiny.gpt2(4)
    pair = Pair(target, draft, tiny.tokenizer())
    found = measure_acceptance(pair, ["one two"], completions=["two three one"])
    assert found.sequences == [[0, 1, 2, 2, 3, 1]]


def test_tokens_that_the_target_cannot_have_written_are_counted() -> None:
    greedy = measure_acceptance(TARGET, PROMPTS, MODEL, new_tokens=NEW, sampling=Sampling(0))
    completions = [whole[-NEW:] for whole in greedy.sequences]
    completions[1][2] = (completions[1][2] + 1) % VOCAB
    found = measure_acceptance(TARGET, PROMPTS, MODEL, completions=completions, sampling=Sampling(0))
    assert found.impossible >= 1
    assert str(found.impossible) in str(found)


# What is printed, and what is refused


class Silent(ChainDrafter):
    vocab = VOCAB

    def distribution(self, context: Context, position: int) -> Tensor:
        return torch.zeros(len(context.tokens), VOCAB)


def test_rates_without_a_step_are_unknown() -> None:
    """Texts shorter than gamma have none, so that a resample of such texts says nothing."""
    assert np.isnan(depth_rates(np.zeros((2, 6)))).all()
    assert depth_rates(np.array([4.0, 0, 4, 0, 0, 0])).tolist()[2:] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rows", [1, FEWEST])
def test_whatever_was_measured_can_be_printed(rows: int) -> None:
    """Intervals or not, one token or several, a drafter that proposes nothing."""
    prompts = (PROMPTS * 2)[:rows]
    for new_tokens in (1, NEW):
        drafts: dict[str, Any] = {"model": MODEL, "silent": Silent()}
        found = measure_acceptance(TARGET, prompts, drafts, new_tokens=new_tokens)
        assert {"model", "silent"} <= set(repr(found).replace(":", " ").split())
        assert found.by_depth("silent").tokens_per_step.value == 1


def test_by_default_a_model_is_measured_with_copies() -> None:
    found = measure_acceptance(tiny.llama(4), [[0, 1, 0, 1, 0]], new_tokens=3)
    own = measure_acceptance(tiny.llama(4), [[0, 1, 0, 1, 0]], lookup(), new_tokens=3)
    assert np.array_equal(found.drafts["draft"], own.drafts["draft"], equal_nan=True)


class Fixed(ChainDrafter):
    vocab = VOCAB

    def __init__(self, q: torch.Tensor, before: int = 0) -> None:
        self.of_each, self.before = q, before

    def distribution(self, context: Context, number: int) -> torch.Tensor:
        """`of_each`, and before so many tokens the first token."""
        certain = torch.eye(VOCAB)[0]
        return torch.where(context.lengths[:, None] < self.before, certain, self.of_each)


def test_what_cannot_be_measured_is_refused() -> None:
    for sequences, new in (([[0, 1], [0, 1, 2]], 2), ([[0, 1]], 0), ([], 1)):
        with pytest.raises(ValueError, match="new_tokens is"):
            distributions_along(TARGET, sequences, new)
    distributions_along(MODEL, [[0] * (tiny.LIMIT + 1)], 2)  # the last token needs no forward pass
    with pytest.raises(ValueError, match="positions"):
        distributions_along(MODEL, [[0] * (tiny.LIMIT + 2)], 2)
    with pytest.raises(TypeError, match="training mode"):
        measure_acceptance(TARGET, PROMPTS, tiny.llama(VOCAB).train())
    for source in (TARGET, Pair(TARGET, MODEL, None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="draft is 'gpt2'"):
            measure_acceptance(source, PROMPTS, "gpt2")  # type: ignore[arg-type]
    for q in (torch.ones(VOCAB), torch.full((VOCAB,), torch.nan), torch.tensor([1.5, -0.5, *[0.0] * (VOCAB - 2)])):
        with pytest.raises(ValueError, match="is no distribution"):
            measure_acceptance(TARGET, PROMPTS, Fixed(q), new_tokens=4)
    beyond = Fixed(torch.full((VOCAB,), torch.nan), before=5)
    measure_acceptance(TARGET, [[0, 1, 2], [3]], beyond, completions=[[1, 1], [2, 2, 2]], gamma=2)
    with pytest.raises(TypeError, match="tree"):
        measure_acceptance(tiny.llama(4), [[1]], TREES["two drafts"](), new_tokens=4)
    for completions in ([[1]], [[1], [2], [], [3]], [[VOCAB]] * 4):
        with pytest.raises(ValueError, match=r"completion|vocabulary"):
            measure_acceptance(TARGET, PROMPTS, MODEL, completions=completions)
