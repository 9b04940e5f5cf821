"""Which mistake explains a log: its likelihood by enumeration, the evidence over all outcomes, and
mistakes that are planted in the loop."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specnb import Sampling, generate
from specnb.acceptance import measure_acceptance
from specnb.distributions import standardise
from specnb.drafters import Drafter, ModelDrafter
from specnb.heads import AttentionDrafter, Eagle3Head
from specnb.rules import token_verification
from specnb.trees import TokenTree
from specnb_audit import explain_acceptance
from specnb_audit.draft_mistakes import known_mistakes
from specnb_audit.draft_replay import Log, Served, Text, _fates, replay
from specnb_audit.low_acceptance import evidence, text_weights

VOCAB, GAMMA = 7, 2


def tiny(seed: int, layers: int = 2, spread: float = 0.6) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    sizes |= {"vocab_size": VOCAB, "num_hidden_layers": layers, "initializer_range": spread}
    return LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=1, eos_token_id=None)).eval()


def head_of(target: Any, **settings: Any) -> Eagle3Head:
    torch.manual_seed(5)
    config = LlamaConfig(**target.config.to_dict() | {"num_hidden_layers": 1})
    head = Eagle3Head(config, (1, 2, 3), **settings)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.5)
    return head.eval()


PROMPTS = [[1, 2 + row % 5, 2 + row // 5 % 5] for row in range(40)]


def logged(
    target: Any, drafter: Any, new: int = 32, sampling: Sampling = Sampling(), eos: int | None = None
) -> dict[str, Any]:
    made = generate(
        target, PROMPTS, drafter, gamma=GAMMA, max_new_tokens=new, sampling=sampling, eos=eos, check=False,
        progress=False,
    )  # fmt: skip
    steps = [[int(size) for size in row if size] for row in made.record.emitted]
    return {"prompts": PROMPTS, "completions": made.tokens, "steps": steps, "gamma": GAMMA, "progress": False}


# The likelihood


def compositions(n: int, largest: int) -> list[list[int]]:
    return [[]] if n == 0 else [
        [first, *rest] for first in range(1, min(n, largest) + 1) for rest in compositions(n - first, largest)
    ]  # fmt: skip


def test_the_probabilities_of_all_ways_to_make_steps_of_a_text_add_up_to_1() -> None:
    target, tokens = tiny(0).double(), [3, 1, 4, 1, 5]
    drafter = ModelDrafter(tiny(1, 1).double())
    ways = compositions(len(tokens), GAMMA + 1)
    log = Log([[1, 2]] * len(ways), [tokens] * len(ways), ways, GAMMA)
    found = replay(Served("", "", drafter), Text(target, log.prompts, log.completions, Sampling(), False), log)
    b = found[..., 0].numpy()[log.tests.row, log.tests.step, log.tests.depth]
    likelihood = np.ones(len(ways))
    np.multiply.at(likelihood, log.tests.row, np.where(log.tests.accepted, b, 1 - b))
    assert likelihood.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("consistent", [True, False])
def test_fates_are_those_of_token_verification(consistent: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    p, s, q = (torch.rand(1, 1, 4, generator=generator).double().square() for _ in range(3))
    p, s, q = (one / one.sum() for one in (p, s, q))
    q = s if consistent else q
    joint = torch.zeros(2, 4).double()  # rejected or accepted, and the token that is emitted
    for draft in range(4):
        plan = token_verification.plan(torch.cat([p, p], 1), q, torch.tensor([[draft]]), TokenTree((-1,)))
        accept = plan.accept[0, 0].clamp(0, 1)
        joint[1, draft] += s[0, 0, draft] * accept
        last = plan.at(torch.tensor([0]))[0]
        joint[0] += s[0, 0, draft] * (1 - accept) * last / last.sum()
    for token in range(4):
        b, chance = _fates(p, s, torch.tensor([[token]]), None if consistent else q)[0, 0]
        assert float(chance) == pytest.approx(float(joint[:, token].sum()), abs=1e-12)
        assert float(b * chance) == pytest.approx(float(joint[1, token]), abs=1e-12)


@pytest.mark.parametrize("kind", ["model", "head"])
def test_the_replay_agrees_with_measured_acceptance(kind: str) -> None:
    target = tiny(0, 4)
    drafter: Drafter = ModelDrafter(tiny(1, 1)) if kind == "model" else AttentionDrafter(target, head_of(target))
    texts = [[3, 1, 4, 1, 5], [2, 6, 2]]
    measured = measure_acceptance(target, PROMPTS[:2], drafter, completions=texts, gamma=GAMMA, progress=False)
    expected = measured.drafts["draft"][..., 1]
    log = Log(PROMPTS[:2], texts, [], GAMMA).every_place()
    text = Text(target, log.prompts, texts, Sampling(), kind == "head")
    found = replay(Served("", "", drafter), text, log)[..., 0].double().numpy()
    there = ~np.isnan(expected)
    np.testing.assert_allclose(found[there], expected[there], atol=1e-5)


# The evidence


def test_an_e_value_has_an_expectation_of_1_at_most_for_all_probabilities_that_a_hypothesis_allows() -> None:
    tolerance, b = 0.05, np.array([[0.0, 0.4, 0.97], [0.5, 0.9, 0.2], [1.0, 0.1, 0.5]])
    of_text, depth = np.zeros((3, 3)), np.array([0, 1, 1])
    for ends in product((-tolerance, 0, tolerance), repeat=3):
        expectation = np.zeros(3)
        for outcome in product((False, True), repeat=3):
            accepted = np.array(outcome)
            e = np.exp(evidence(b, of_text, accepted, depth, tolerance))
            p = (b + np.array(ends)).clip(0, 1)
            expectation += np.where(accepted, p, 1 - p).prod(axis=1) * e
        assert (expectation <= 1 + 1e-9).all()


@pytest.mark.parametrize("tolerance", [0.01, 0.2])
def test_the_text_is_no_evidence_against_the_hypothesis_that_wrote_it(tolerance: float) -> None:
    """Whatever the given target, the first, says of it."""
    given = [[0.001, 0.999, 0.0], [0.9, 0.1, 0.0], [0.1, 0.8, 0.1], [0.0, 0.0, 1.0], [0.7, 0.3, 0.0]]
    chance = np.array(given)
    for own, p in enumerate(chance):
        factors = np.exp(text_weights(chance, own, tolerance))
        assert (factors @ p <= 1 + 1e-12).all()
        assert factors[own] @ p == pytest.approx(1)


# Mistakes in the loop


def test_a_log_without_a_mistake_agrees_with_the_draft_and_a_greedy_one_is_named() -> None:
    target, draft = tiny(0), tiny(1, 1)
    found = explain_acceptance(target, draft, **logged(target, draft))
    assert found.fits
    assert not found.named
    assert found.expected.conditional[0].low < found.logged.conditional[0].value < found.expected.conditional[0].high
    assert "the log agrees" in str(found).splitlines()[0]
    greedy = explain_acceptance(target, draft, **logged(target, ModelDrafter(draft, Sampling(0))))
    assert greedy.named == ("greedy drafts, tested as such",)
    assert "greedy drafts" in str(greedy).splitlines()[0]


def test_the_layers_whose_states_a_head_was_served_with_are_named() -> None:
    target = tiny(0, 4)
    given, served = (AttentionDrafter(target, head_of(target)) for _ in range(2))
    served.hidden_layers = (0, 1, 2)
    found = explain_acceptance(target, given, **logged(target, served))
    assert "states of the layers before" in found.named[:1]
    assert found.tried[0].excluded


def test_a_mistake_that_nobody_knows_fits_nothing() -> None:
    target, draft = tiny(0, 4), tiny(1, 1)
    found = explain_acceptance(target, draft, **logged(target, tiny(2, 1)))
    assert not found.fits
    assert not found.named
    assert "none of the known mistakes fits" in str(found)
    head = AttentionDrafter(target, head_of(target))
    others: dict[str, Any] = {"a head": {"draft": head}, "another": {"draft": tiny(2, 1)}}
    assert explain_acceptance(target, draft, **logged(target, tiny(2, 1)), others=others).named == ("another",)


def test_settings_that_the_text_contradicts_are_said_and_no_mistake_is_named() -> None:
    target, draft, sampling = tiny(0), tiny(1, 1), Sampling(0.5)
    log = logged(target, ModelDrafter(draft, sampling), sampling=sampling)
    found = explain_acceptance(target, draft, **log)
    assert "a temperature of 0.5 in place of 1" in str(found).splitlines()[0]
    assert "--temperature 0.5" in str(found).splitlines()[1]
    assert (found.fits, found.named) == (False, ())
    assert explain_acceptance(target, draft, **log, sampling=sampling).fits


@pytest.mark.parametrize("sampling", [Sampling(0.8, top_p=0.8), Sampling(top_k=3)])
def test_the_text_of_a_filter_does_not_contradict_it(sampling: Sampling) -> None:
    target, draft = tiny(0), tiny(1, 1)
    log = logged(target, ModelDrafter(draft, sampling), sampling=sampling)
    assert explain_acceptance(target, draft, **log, sampling=sampling).fits
    # A token that the filter excludes, as rounding may let one past it
    logits = target(torch.tensor([PROMPTS[0]])).logits[0, -1]
    possible = standardise(logits, sampling) > 0
    log["completions"][0][0] = int(logits.masked_fill(possible, -torch.inf).argmax())
    assert not explain_acceptance(target, draft, **log, sampling=sampling).settings


def test_the_begin_token_is_tried_twice_only_where_there_is_room() -> None:
    target, draft = tiny(0), tiny(1, 1)
    log = logged(target, draft)
    for more, tried in ((0, False), (1, True)):
        target.config.max_position_embeddings = len(PROMPTS[0]) + 32 - 1 + more
        found = explain_acceptance(target, draft, **log)
        names = {one.name for one in found.tried}
        assert ("the begin token twice" in names, "the begin token missing" in names) == (tried, True)


def test_a_log_in_which_no_step_gives_a_bonus_token_is_told_with_which_gamma_to_read_it() -> None:
    target, draft = tiny(0), tiny(1, 1)
    log = logged(target, draft)
    assert "bonus token, explain" not in str(explain_acceptance(target, draft, **log))
    found = str(explain_acceptance(target, draft, **log | {"gamma": GAMMA + 1}))
    assert f"no step emits {GAMMA + 2} tokens: if the engine gives no bonus token, explain with gamma {GAMMA}" in found


def test_another_target_shows_in_the_text_too() -> None:
    target, draft, other = tiny(0), tiny(1, 1), tiny(3)
    log = logged(other, draft)
    assert explain_acceptance(target, draft, **log, others={"other": {"target": other}}).named == ("other",)


def test_at_temperature_0_an_acceptance_is_certain_or_impossible() -> None:
    target, draft, sampling = tiny(0), tiny(1, 1), Sampling(0)
    log = logged(target, ModelDrafter(draft, sampling), sampling=sampling)
    assert explain_acceptance(target, draft, **log, sampling=sampling).fits
    log = logged(target, ModelDrafter(draft, Sampling()), sampling=sampling)
    found = explain_acceptance(target, draft, **log, sampling=sampling)
    assert found.named == ("the draft at temperature 1 without filters",)


def test_known_mistakes_have_names_of_their_own_and_change_neither_models_nor_drafter() -> None:
    target = tiny(0, 4)
    head = AttentionDrafter(target, head_of(target, draft_vocab=5, own_embedding=True, fc_norm=True))
    for drafter in (ModelDrafter(tiny(1, 1), Sampling(0.7)), head):
        model = drafter.model if isinstance(drafter, ModelDrafter) else drafter.head
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        parts = [name for name, _ in model.named_modules()]
        text = Text(target, PROMPTS[:2], [[3, 1, 4], [2]], Sampling(), True)
        log = Log(PROMPTS[:2], [[3, 1, 4], [2]], [[1, 2], [1]], GAMMA)
        names = []
        for served in known_mistakes(target, drafter, Sampling(0.7)):
            names.append(served.name)
            found = replay(served, text, log)
            assert bool(((found >= 0) & (found <= 1 + 1e-5)).all()), served.name
        assert len(set(names)) == len(names) > 10
        assert [name for name, _ in model.named_modules()] == parts
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


# What a log may look like


def test_counts_without_the_bonus_token_are_the_same_log() -> None:
    target, draft = tiny(0), tiny(1, 1)
    log = logged(target, draft, new=8)
    one = explain_acceptance(target, draft, **log)
    log["steps"] = [[size - 1 for size in row] for row in log["steps"]]
    assert str(explain_acceptance(target, draft, **log, bonus=False)) == str(one)
    with pytest.raises(ValueError, match="with the bonus token make"):
        explain_acceptance(target, draft, **log)


def test_texts_that_end_at_a_token_name_no_target_that_ends_less_often() -> None:
    target, other = tiny(0), tiny(0)
    for model, bias in ((target, 1.0), (other, -3.0)):
        weight = model.lm_head.weight
        model.lm_head = torch.nn.Linear(16, VOCAB)
        model.lm_head.weight = weight
        model.lm_head.bias.data = bias * torch.eye(VOCAB)[2]
    found = explain_acceptance(
        target, tiny(1, 1), **logged(target, tiny(1, 1), eos=2), others={"the base model": {"target": other}}
    )
    assert found.fits
    assert found.tried[0].against < 0
    (of_other,) = (one for one in found.tried if one.name == "the base model")
    assert of_other.gain < -10


def test_a_first_step_without_a_draft_is_no_test() -> None:
    log = Log([[1]], [[2, 3, 4]], [[1, 2]], GAMMA)
    assert log.tests.step.tolist() == [0, 1]
    assert Log([[1]], [[2, 3, 4]], [[1, 2]], GAMMA, undrafted=True).tests.step.tolist() == [1]


def test_averages_alone_exclude_what_has_other_averages() -> None:
    target, draft = tiny(0), tiny(1, 1)
    text = logged(target, draft, new=16)
    del text["steps"]
    right, greedy = (
        explain_acceptance(target, draft, **logged(target, one)).logged
        for one in (draft, ModelDrafter(draft, Sampling(0)))
    )
    given: dict[str, Any] = {"over": "steps", "logged_steps": 500}
    rates = [one.value for one in right.conditional]
    same = explain_acceptance(target, draft, **text, per_position=rates, conditional=True, **given)
    assert same.fits
    assert "averages alone" in str(same)
    marginal = [one.value for one in right.marginal]
    again = explain_acceptance(target, draft, **text, per_position=marginal, conditional=False, **given)
    np.testing.assert_allclose([one.value for one in again.logged.conditional], rates)
    other = explain_acceptance(
        target, draft, **text, per_position=[one.value for one in greedy.conditional], conditional=True, **given
    )
    assert not other.fits
    assert "greedy drafts, tested as such" in other.named
    few = explain_acceptance(
        target, draft, **text, per_position=[0.0, 0.0], conditional=False, **given | {"logged_steps": 3}
    )
    assert few.fits


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": None}, "the log has no column 'steps'"),
        ({"steps": None, "per_position": [0.5, 0.4]}, "per_position needs conditional"),
        ({"steps": None, "per_position": [0.4, 0.5], "conditional": False, "over": "steps", "logged_steps": 9}, "rise"),
        ({"steps": None, "per_position": [0.4], "conditional": True, "over": "steps", "logged_steps": 9}, "1 rates"),
        ({"steps": None, "per_position": [0, 0], "conditional": True, "over": "steps", "logged_steps": 0}, "is 0; it"),
        ({"completions": [[2, 3, 9]]}, "sequence 0 has the token 9"),
        ({"steps": [[3]], "gamma": 1}, "emits 3 tokens; with gamma 1"),
        ({"steps": [[3], [3]]}, "1 completions and steps of 2"),
        ({"kinds": []}, "1 completions and 0 kinds"),
        ({"steps": [[3]]}, None),
        ({"completions": [[2, 3]], "steps": [[1, 0, 1]]}, "emits 0 tokens"),
        ({"completions": [[2]], "steps": [[1]]}, "tests no draft token"),
    ],
)
def test_a_log_that_says_too_little_is_refused(changed: dict[str, Any], message: str | None) -> None:
    given: dict[str, Any] = {"prompts": [[1]], "completions": [[2, 3, 4]], "steps": [[1, 2]], "gamma": GAMMA}
    target, draft = tiny(0), tiny(1, 1)
    if message is None:
        assert explain_acceptance(target, draft, **given | changed, progress=False).tests == 2
    else:
        with pytest.raises(ValueError, match=message):
            explain_acceptance(target, draft, **given | changed, progress=False)


def test_the_page_prints_what_the_function_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "low-acceptance.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    found = names["found"]
    assert str(found) in page
    assert f"The log has {found.logged.tokens_per_step.value:.2f} tokens per step" in page


def test_kinds_of_text_are_listed_from_the_lowest_acceptance() -> None:
    target, draft = tiny(0), tiny(1, 1)
    log = logged(target, draft, new=8)
    found = explain_acceptance(target, draft, **log, kinds=["chat", "code"] * 20)
    assert set(found.kinds) == {"chat", "code"}
    assert "of the draft tokens accepted as given" in str(found)
