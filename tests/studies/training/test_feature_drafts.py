"""Training of drafts from features: what a step of a student means, resuming, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specnb.distributions import Sampling, overlap
from specnb.drafters import Context
from specnb.heads import AttentionDrafter, Eagle3Head, NextTokenHead
from specnb.loading import TRAINED_PAIR, Pair, load_pair
from specnb.released import load_drafter
from specnb.sampler import generate
from studies import corpus
from studies.drafters.heads import FeatureDrafter, ParallelHeadsDrafter
from studies.training.feature_drafts import (
    CONTROL,
    DEPTHS,
    EAGLE3,
    NEXT_TOKEN,
    PENULTIMATE,
    Plan,
    Recurrent,
    Student,
    betas,
    states_of,
    students_of,
)
from studies.training.released_heads import save_head

PLAN = Plan(steps=4, rows=2, length=40, hidden=8, wide=8, compiled=False)
CHAINED = (EAGLE3, PENULTIMATE, NEXT_TOKEN)
DRAFTERS: dict[str, Any] = {"recurrent": FeatureDrafter, "parallel": ParallelHeadsDrafter}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair()


@pytest.fixture(autouse=True)
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """To encode the whole corpus would take most of the time."""
    read = corpus.read
    monkeypatch.setattr(corpus, "read", lambda split: read(split, limit=10))


def with_random_weights(pair: Pair) -> dict[str, Student]:
    """Students whose distributions depend on what they read."""
    students = students_of(pair, PLAN)
    generator = torch.Generator().manual_seed(3)
    for name in (*CHAINED, *DRAFTERS):
        for weight in students[name].parameters():
            weight.normal_(std=0.2, generator=generator)
    return students


def drafter_of(pair: Pair, name: str, head: Any, folder: Path) -> AttentionDrafter:
    """With the trained head; of those that other engines load, with what they read."""
    if name in DRAFTERS:
        return DRAFTERS[name](pair.target, head)  # type: ignore[no-any-return]
    save_head(head, folder, pair.target)
    return load_drafter(pair.target, folder)


@torch.no_grad()
@pytest.mark.parametrize("name", [*CHAINED, *DRAFTERS])
def test_a_student_computes_what_its_drafter_proposes(pair: Pair, name: str, tmp_path: Path) -> None:
    """In steps whose newest token is at `newest`. The uniforms are chosen so that the drafter
    samples the sequence's own tokens."""
    student = with_random_weights(pair)[name]
    drafter = drafter_of(pair, name, student.head, tmp_path)
    tokens = torch.randint(4096, (1, 12), generator=torch.Generator().manual_seed(0))
    layers = pair.target(input_ids=tokens, output_hidden_states=True).hidden_states
    parts = student(tokens, states_of(layers))
    for newest in (1, 6):
        own = torch.cat([layers[layer] for layer in drafter.hidden_layers], dim=-1)
        context = Context(tokens, torch.tensor([newest + 1]), own)
        uniforms = torch.zeros(1, DEPTHS, dtype=torch.float64)
        for depth, (logits, at) in enumerate(parts):
            drafter.start(context)
            q = drafter.propose(context, uniforms).q[0, depth].double()
            wanted = torch.softmax(logits[0, newest + depth - at.start], -1)
            assert torch.allclose(wanted.double(), q, atol=1e-5), (name, newest, depth)
            following = int(tokens[0, newest + depth + 1])
            uniforms[0, depth] = float(q[:following].sum() + q[following] / 2)
    assert [part.logits.shape[1] for part in parts] == [11, 10, 9, 8]


@pytest.mark.parametrize(("name", "kind"), [("draft-eagle3", Eagle3Head), ("draft-next-token", NextTokenHead)])
def test_the_heads_that_ship_are_loaded_and_greedy_output_is_the_target_s(name: str, kind: type, pair: Pair) -> None:
    drafter = load_drafter(pair.target, TRAINED_PAIR / name, Sampling(0))
    assert isinstance(drafter.head, kind)
    prompts = [pair.encode("def area("), pair.encode("import math\n\nclass Circle:\n    def")]
    how: dict[str, Any] = {"max_new_tokens": 24, "sampling": Sampling(0), "progress": False}
    found = generate(pair.target, prompts, drafter, gamma=DEPTHS, **how)
    assert found.tokens == generate(pair.target, prompts, None, **how).tokens
    assert found.record.tokens_per_step > 1.3


@torch.no_grad()
def test_betas_of_every_depth_are_at_the_same_positions(pair: Pair) -> None:
    students = students_of(pair, PLAN)
    sequences = torch.randint(4096, (2, 41), generator=torch.Generator().manual_seed(2))
    found = betas(pair.target, students, sequences)
    assert {name: tuple(beta.shape) for name, beta in found.items()} == dict.fromkeys(students, (DEPTHS, 2, 9))
    assert torch.equal(found[CONTROL][0], found[CONTROL][3])
    states = pair.target(input_ids=sequences[:, :-1], output_hidden_states=True)
    student = students["recurrent"]
    assert isinstance(student, Recurrent)
    p = torch.softmax(states.logits[0, 35], dim=-1)
    state = states.hidden_states[-1][0, 35 - 2]  # depth 2: two tokens after the state
    for token in sequences[0, 34:36]:
        state = student.head(state, pair.target.get_input_embeddings()(token))
    q = torch.softmax(pair.target.get_output_embeddings()(student.head.features(state)), dim=-1)
    assert float(found["recurrent"][1, 0, 35 - 31]) == pytest.approx(float(overlap(p, q)), abs=1e-5)
