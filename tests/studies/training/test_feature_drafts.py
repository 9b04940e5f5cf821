"""Training of drafts from features: what a step of a student means, resuming, and the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specnb.distributions import overlap
from specnb.drafters import Context
from specnb.heads import AttentionDrafter
from specnb.loading import Pair, load_pair
from studies import corpus
from studies.drafters.heads import FeatureDrafter, ParallelHeadsDrafter
from studies.training.feature_drafts import (
    CONTROL,
    DEPTHS,
    Attention,
    Parallel,
    Plan,
    Recurrent,
    Student,
    betas,
    features,
    students_of,
)

PLAN = Plan(steps=4, rows=2, length=40, hidden=8, wide=8, compiled=False)
DRAFTERS: dict[str, Any] = {
    "attention": AttentionDrafter, "recurrent": FeatureDrafter, "parallel": ParallelHeadsDrafter,
}  # fmt: skip


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
    for name in DRAFTERS:
        for weight in students[name].parameters():
            weight.normal_(std=0.2, generator=generator)
    return students


@torch.no_grad()
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_student_computes_what_its_drafter_proposes(pair: Pair, name: str) -> None:
    """In steps whose newest token is at `newest`. The uniforms are chosen so that the drafter
    samples the sequence's own tokens."""
    student = with_random_weights(pair)[name]
    assert isinstance(student, Attention | Recurrent | Parallel)
    drafter = DRAFTERS[name](pair.target, student.head)
    tokens = torch.randint(4096, (1, 12), generator=torch.Generator().manual_seed(0))
    states, _ = features(pair.target, tokens)
    own = states if name == "attention" else states[..., -pair.target.config.hidden_size :]
    parts = student(tokens, states)
    for newest in (1, 6):
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
