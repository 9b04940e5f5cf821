"""Arguments of `generate`: what works, and what is refused before any model runs, and with which
message."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from drafter_kinds import TWO_DRAFTS, TableDrafter, TableTreeDrafter, chain, table
from implementation_distribution import PROMPTS, SHARP, VOCAB
from specnb.decoding import request as checks
from tiny import LIMIT, gpt2, llama
from torch import Tensor
from unsupported_models import convolving, refusing, without_positions

from specnb.distributions import Sampling
from specnb.drafters import Context, ModelDrafter, TreeDrafter
from specnb.rules import PlannedRule, exact_match, recursive_rejection, token_verification
from specnb.sampler import LARGEST_SPARE_GAMMA, Hooks, Request, Scheduler, generate, slots_for
from specnb.step import Batch
from specnb.trees import distinct_children, independent_children

TARGET, DRAFT = refusing(llama()), refusing(llama(seed=2))
CHAIN, TREE = chain(), TableTreeDrafter(TWO_DRAFTS)


class Bare:
    vocab = VOCAB

    def propose(self, context: Context, uniforms: Tensor) -> None:
        return


class Restarting(ModelDrafter):
    can_refill = False


FOR_INDEPENDENT = PlannedRule(recursive_rejection.plan, schemes=(independent_children,))


class Deep(TableDrafter):
    hidden_layers = (7,)


def short_draft() -> Any:
    model = refusing(gpt2())
    model.config.n_positions = 8
    return model


def on_meta() -> Any:
    return llama().to("meta")  # type: ignore[arg-type]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompts": []}, "there are no prompts; give at least one list of tokens"),
    ({"prompts": [[1], []]}, "prompt 1 is empty; give at least one token"),
    ({"prompts": [[0], [1, VOCAB]]}, "prompt 1 has the token 4; the vocabulary has the tokens 0 to 3"),
    ({"prompts": 3}, "prompts is 3; it must be a list of prompts, each a list of tokens"),
    ({"prompts": [0, 1, 2]}, "prompt 0 is 0; each prompt is a list of tokens, which are whole numbers"),
    ({"prompts": [[0], [0.5]]}, "prompt 1 is [0.5]; each prompt is a list of tokens, which are whole numbers"),
    ({"eos": VOCAB}, "eos has the token 4; the vocabulary has the tokens 0 to 3"),
    ({"eos": [0.5]}, "eos is [0.5]; it must be a token, which is a whole number, a list of tokens, or None"),
    ({"gamma": -1}, "gamma is -1; it must be a whole number from 0"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number from 1"),
    ({"seed": -1}, "seed is -1; it must be a whole number from 0"),
    ({"batch_size": 0}, "batch_size is 0; it must be a whole number from 1"),
    ({"rows": [0, 1]}, "there are 3 prompts and 2 rows; each prompt has one number"),
    ({"sampling": 0.7}, "sampling is 0.7; it must be a specnb.distributions.Sampling"),
    ({"sampling": 0.7, "draft": None}, "sampling is 0.7; it must be a specnb.distributions.Sampling"),
    ({"compile": "fast"}, "compile is 'fast'; it must be False, True or \"graph\""),
    ({"compile": "graph"}, "a graph needs a CUDA device, and the target is on cpu; try compile=True"),
    ({"compile": True, "keep_probs": True}, "keep_probs is True and compile is True; leave one of them out"),
    ({"max_new_tokens": LIMIT - 3}, "a prompt of 4 and 13 new tokens need 17 positions, and LlamaForCausalLM has 16"),
    ({"draft": short_draft(), "max_new_tokens": 5}, "need 9 positions, and GPT2LMHeadModel has 8; shorten the prompt"),
    ({"draft": ModelDrafter(short_draft(), SHARP), "max_new_tokens": 5}, "GPT2LMHeadModel has 8"),
    ({"target": "gpt2"}, "str is no model of transformers"),
    ({"target": refusing(convolving())}, "LinearAttentionLayer"),
    ({"target": on_meta(), "draft": None}, "the target is on the device meta, where it has no weights"),
    ({"draft": on_meta()}, "the target is on cpu and the draft on meta; move one of them"),
    ({"draft": ModelDrafter(llama(VOCAB + 3))}, "the target has 4 tokens and the ModelDrafter 7; a drafter proposes"),
    ({"draft": TableDrafter(table()[:, :3])}, "the target has 4 tokens and the TableDrafter 3; a drafter proposes"),
    ({"draft": refusing(without_positions())}, "takes no position_ids"),
    ({"draft": "gpt2"}, "draft is a str; it must be a model, a Drafter, or None: load the model, or let"),
    ({"draft": Bare()}, "draft is a Bare; it must be a model, a Drafter, or None: load the model, or let"),
    ({"draft": TableDrafter}, "draft is the class TableDrafter; it must be a model, a Drafter, or None: give TableD"),
    ({"draft": Deep(table())}, "hidden layers (7,) are asked for, and LlamaForCausalLM has the hidden states -3 to 2"),
    ({"draft": Restarting(DRAFT), "batch_size": 2}, "3 prompts take turns in 2 rows, and Restarting cannot restart"),
    ({"draft": TREE, "gamma": 4}, "gamma is 4, and the tree of TableTreeDrafter has 2 nodes; give gamma=2, or 0"),
    ({"draft": TableTreeDrafter((1, -1)), "gamma": 2}, "node 0 has the parent 1; it must be an earlier node"),
    ({"rule": "token"}, "rule is 'token'; it must be an acceptance rule of specnb.rules, or such a function"),
    (
        {"draft": TreeDrafter(DRAFT, TWO_DRAFTS, scheme=distinct_children), "gamma": 2, "rule": FOR_INDEPENDENT},
        "exact",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[f"{n}-{'-'.join(one)}" for n, (one, _) in enumerate(WRONG)])
def test_bad_arguments_are_refused_before_any_model_runs(wrong: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"target": TARGET, "prompts": PROMPTS, "draft": DRAFT, "max_new_tokens": 4}
    asked |= wrong
    hooks = Hooks(**{name: asked.pop(name) for name in ("rows", "keep_probs") if name in asked})
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        generate(**asked, hooks=hooks)


@pytest.mark.parametrize(
    "given",
    [
        {"prompts": (np.array([1, 2, 0], dtype=np.uint8), [torch.tensor(3), np.int64(0)])},
        {"prompts": [torch.tensor([1, 2, 0], dtype=torch.int32), range(3, -1, -3)]},
        *({"eos": eos} for eos in (2, np.int64(2), torch.tensor(2), {2}, (2, 2), torch.tensor([2]))),
        # Four times gamma would not fit in eight bits.
        {"gamma": np.int8(32), "seed": np.uint8(200)},
        {"max_new_tokens": np.int32(5), "batch_size": torch.tensor(1)},
    ],
    ids=str,
)
def test_whole_numbers_of_any_type_are_numbers(given: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"prompts": [[1, 2, 0], [3, 0]], "gamma": 32, "max_new_tokens": 5, "eos": [2], "seed": 200}
    plain = generate(llama(), draft=llama(seed=2), progress=False, **asked)
    assert generate(llama(), draft=llama(seed=2), progress=False, **(asked | given)).tokens == plain.tokens


# What follows from the arguments.


def request_for(**asked: Any) -> Request:
    usual: dict[str, Any] = {"target": TARGET, "prompts": PROMPTS, "drafter": CHAIN, "max_new_tokens": 4}
    return Request(**(usual | asked))


def test_settings_that_are_left_out_have_these_values() -> None:
    request = Request(refusing(llama(dtype=torch.bfloat16)), [[0]], max_new_tokens=9)
    assert (request.drafter, request.gamma, request.rule, request.sampling) == (None, 0, token_verification, Sampling())
    assert (request.seed, request.compile, request.keep_probs, list(request.eos)) == (0, False, False, [])
    assert (request.rows, list(request.numbers), request.longest, request.slots, request.steps) == (1, [0], 1, 11, 9)
    assert request.probs_dtype == torch.float32
    assert Request(refusing(llama(dtype=torch.float64)), [[0]], max_new_tokens=9).probs_dtype == torch.float64


@pytest.mark.parametrize(
    ("gamma", "new", "useful"),
    [(0, 9, 0), (1, 1, 1), (32, 1, 32), (33, 1, 32), (33, 34, 33), (40, 40, 39), (10**30, 50, 49)],
)
def test_a_gamma_above_32_is_at_most_one_less_than_the_tokens_asked_for(gamma: int, new: int, useful: int) -> None:
    unlimited = llama()
    unlimited.config.max_position_embeddings = 10**6
    assert request_for(target=unlimited, gamma=gamma, max_new_tokens=new).gamma == useful
    assert request_for(target=unlimited, gamma=gamma, max_new_tokens=new, drafter=None).gamma == 0
    assert LARGEST_SPARE_GAMMA == 32


def test_the_default_rule_is_the_exact_one_for_the_kind_of_draft_tokens() -> None:
    assert request_for().rule is token_verification
    assert request_for(drafter=TREE, gamma=2).rule is recursive_rejection
    for drafter in (TREE, None):  # nothing is drafted, so that any rule will do
        without = request_for(drafter=drafter, gamma=0)
        assert (without.drafter, without.rule) == (None, token_verification)
        for rule in (exact_match, recursive_rejection):
            assert request_for(drafter=drafter, gamma=0, rule=rule).rule is rule
    independent = TreeDrafter(DRAFT, TWO_DRAFTS, scheme=independent_children)
    assert request_for(drafter=independent, gamma=2, rule=FOR_INDEPENDENT).rule is FOR_INDEPENDENT


def test_there_are_no_more_rows_than_prompts() -> None:
    assert [request_for(batch_size=size).rows for size in (None, 1, 2, 3, 9)] == [3, 1, 2, 3, 3]
    assert request_for(drafter=Restarting(DRAFT), batch_size=3).rows == 3, "no row is refilled"


@pytest.mark.parametrize("compiled", [True, "graph"])
def test_a_compiled_step_has_slots_in_multiples_of_128(compiled: bool | str) -> None:
    for prompt, new, gamma, slots in ((1, 1, 0, 3), (100, 22, 5, 128), (100, 23, 5, 129), (200, 52, 3, 256)):
        assert slots_for(prompt, new, gamma) == slots_for(prompt, new, gamma, compile=False) == slots
        assert slots_for(prompt, new, gamma, compile=compiled) == (128 if slots <= 128 else 256)
    assert request_for(compile=True).steps == 128


class Looking(ModelDrafter):
    hidden_layers = (-1, 0)


@torch.inference_mode()
@pytest.mark.parametrize("changes", [{}, {"drafter": None, "keep_probs": True}, {"drafter": Looking(llama(layers=1))}])
def test_caches_and_state_must_fit_into_what_is_free(changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes as the tensors have that a batch makes for them."""
    asked: dict[str, Any] = {"drafter": ModelDrafter(llama(layers=1)), "prompts": [[1, 2]] * 8, "max_new_tokens": 5}
    request = Request(llama(), **(asked | changes))
    batch = Batch(request)
    Scheduler(request, batch)
    runners: list[Any] = [batch.runner, *([getattr(batch.drafter, "runner")] if batch.drafter else [])]  # noqa: B009
    kept = [batch.state.tokens, batch.state.uniforms, batch.state.record, batch.state.probs, batch.runner.hidden_states]
    kept += [tensor for runner in runners for layer in runner.cache.ragged for tensor in (layer.keys, layer.values)]
    needed = sum(tensor.nbytes for tensor in kept if tensor is not None)
    monkeypatch.setattr(checks, "free_memory", lambda device: needed)
    checks.require_memory(request)
    monkeypatch.setattr(checks, "free_memory", lambda device: needed - 1)
    with pytest.raises(MemoryError, match=r"8 rows need .* GB for caches and state, and cpu .*: batch_size=7 would"):
        checks.require_memory(request)


def test_what_does_not_fit_is_refused_before_any_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "free_memory", lambda device: 100)
    for compiled in (False, True):
        with pytest.raises(MemoryError, match="two rows do not fit, which the model is checked with; ask"):
            generate(TARGET, [[1]], None, max_new_tokens=9, compile=compiled, progress=False)
