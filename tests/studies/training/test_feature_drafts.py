"""Training of drafts from features: what a step of a student means, resuming, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specnb.distributions import overlap
from specnb.drafting.base import Context
from specnb.drafting.heads import AttentionDrafter
from specnb.models.loading import Pair, load_pair
from studies import corpus
from studies.drafters.heads import FeatureDrafter, ParallelHeadsDrafter
from studies.training import feature_drafts
from studies.training.feature_drafts import (
    CONTROL,
    DEPTHS,
    NO_STATES,
    Attention,
    Parallel,
    Plan,
    Recurrent,
    Student,
    betas,
    features,
    loss_of,
    ship,
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
def test_positions_that_are_learnt_from_are_some_of_all(pair: Pair) -> None:
    tokens = torch.randint(4096, (2, 13), generator=torch.Generator().manual_seed(4))
    states, log_p = features(pair.target, tokens)
    for name, student in with_random_weights(pair).items():
        for depth, (some, every) in enumerate(zip(student(tokens, states, 2), student(tokens, states), strict=True), 1):
            whole = torch.full_like(log_p, torch.nan)
            whole[:, every.at] = every.logits
            assert torch.allclose(some.logits, whole[:, some.at], atol=1e-5), name
            assert name == CONTROL or every.at.start == depth


@torch.no_grad()
def test_the_head_without_states_reads_tokens_alone(pair: Pair) -> None:
    student = students_of(pair, PLAN)[NO_STATES]
    tokens = torch.randint(4096, (1, 9), generator=torch.Generator().manual_seed(5))
    states, _ = features(pair.target, tokens)
    of_one, of_other = student(tokens, states), student(tokens, states.flip(1))
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(of_one, of_other, strict=True))


@torch.no_grad()
def test_the_loss_is_the_mean_over_the_positions_learnt_from(pair: Pair) -> None:
    student = students_of(pair, PLAN)["of tokens"]
    tokens = torch.randint(4096, (2, 20), generator=torch.Generator().manual_seed(1))
    states, log_p = features(pair.target, tokens)
    q = torch.softmax(student(tokens, states)[0].logits, dim=-1)
    found = float(loss_of(student, tokens, states, log_p, torch.tensor(1.0)))
    # The loss is in bfloat16.
    assert found == pytest.approx(1 - float(overlap(log_p.exp(), q).mean()), abs=2e-3)


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


def test_heads_are_saved_beside_the_pair_and_what_is_trained_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_drafts, "folder_of", lambda *_: tmp_path / "checkpoints")
    folders = ship(PLAN, tmp_path)
    assert [folder.name for folder in folders] == ["draft-attention", "draft-recurrent", "draft-parallel"]
    sums = [(folder / "SHA256SUMS").read_text() for folder in folders]
    monkeypatch.setattr(feature_drafts, "loss_of", None)
    assert [(folder / "SHA256SUMS").read_text() for folder in ship(PLAN, tmp_path)] == sums
