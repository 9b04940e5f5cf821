"""Drafts of a head in training: what it learns from is what its drafter proposes, along a text and
in the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import llama
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from specnb.acceptance import measure_acceptance
from specnb.distributions import overlap
from specnb.heads import AttentionDrafter, Eagle3Head, LayeredHead, NextTokenHead
from specnb.sampler import generate
from studies.training.chains import Chains, TrainedEagle3, TrainedNextToken

VOCAB, DEPTHS = 13, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip


def eagle3(kind: type[Eagle3Head]) -> Eagle3Head:
    return kind(LlamaConfig(**SIZES), (0, 1), norm_before_residual=True)


def next_token(kind: type[NextTokenHead]) -> NextTokenHead:
    return kind(Qwen3Config(**SIZES))


HEADS: dict[Callable[..., LayeredHead], Any] = {
    eagle3: (TrainedEagle3, Eagle3Head), next_token: (TrainedNextToken, NextTokenHead),
}  # fmt: skip


def head_and_drafter(made: Callable[..., LayeredHead], target: Any) -> tuple[LayeredHead, AttentionDrafter]:
    """A head with random weights as it is trained, and a drafter with the same weights."""
    in_training, released = HEADS[made]
    head, random = made(in_training).double(), torch.Generator().manual_seed(1)
    for weight in head.parameters():
        weight.data.normal_(std=0.5, generator=random)
    copied = made(released).double()
    copied.load_state_dict(head.state_dict())
    return head, AttentionDrafter(target, copied)


@torch.no_grad()
def q_along(drafter: AttentionDrafter, head: LayeredHead, target: Any, tokens: Tensor, every: int = 1) -> Any:
    """q `(batch, n, vocab)` of draft tokens along `tokens`, depth by depth, and what they follow."""
    states = target(tokens, output_hidden_states=True).hidden_states
    states = torch.cat([states[layer] for layer in head.hidden_layers], dim=-1)
    found = Chains(head, target.get_input_embeddings(), DEPTHS)(tokens, states, every)
    return [(torch.softmax(drafter.output(features), dim=-1), at) for features, at in found]


@pytest.mark.parametrize("made", HEADS)
@torch.no_grad()
def test_a_draft_in_training_is_that_of_the_drafter(made: Callable[..., LayeredHead]) -> None:
    """At every place of a text, which is given to the drafter, and after every second token."""
    target = llama(VOCAB, dtype=torch.float64)
    head, drafter = head_and_drafter(made, target)
    prompts, written = [[1, 2], [3, 4]], [[5, 6, 0, 7, 8, 9], [9, 9, 1, 12, 11, 10]]
    measured = measure_acceptance(target, prompts, drafter, completions=written, gamma=DEPTHS)
    tokens = torch.tensor(measured.sequences)
    p = torch.softmax(target(tokens).logits, dim=-1)
    for every in (1, 2):
        for depth, (q, at) in enumerate(q_along(drafter, head, target, tokens[:, :-1], every)):
            places = 6 - depth
            expected = torch.from_numpy(measured.drafts["draft"][:, :places:every, depth, 0])
            torch.testing.assert_close(
                overlap(p[:, :-1][:, at], q)[:, : expected.shape[1]], expected, atol=1e-9, rtol=0
            )


@pytest.mark.parametrize("made", HEADS)
@torch.no_grad()
def test_a_draft_in_training_is_that_of_the_loop(made: Callable[..., LayeredHead]) -> None:
    """Where it is tested: the draft tokens before it are then those of the text."""
    target = llama(VOCAB, dtype=torch.float64)
    head, drafter = head_and_drafter(made, target)
    answer = generate(target, [[1, 2]], drafter, gamma=DEPTHS, max_new_tokens=12, seed=3, progress=False)
    record, tokens = answer.record, torch.tensor([[1, 2, *answer.tokens[0]]])
    p = torch.softmax(target(tokens).logits, dim=-1)
    found = q_along(drafter, head, target, tokens[:, :-1])
    newest, compared = 1, 0
    for step in range(record.target_passes[0]):
        for depth in range(DEPTHS):
            at = newest + depth
            if record.tested[0, step, depth] and at < tokens.shape[1] - 1:
                beta = overlap(p[0, at], found[depth][0][0, at - 1 - depth])
                assert float(beta) == pytest.approx(record.beta[0, step, depth], abs=1e-9), (step, depth)
                compared += depth
        newest += int(record.emitted[0, step])
    assert compared, "no draft token of a later depth was tested"
