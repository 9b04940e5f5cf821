"""Training: the pieces that decide what is learned from, and two steps of the real script's loop."""

from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from studies.training import training
from studies.training.training import Budget

TEXTS = ["def f(x):\n    return x + 1\n" * 40, "class A:\n    pass\n" * 40]


def test_files_are_joined_by_end_tokens() -> None:
    tokenizer = training.train_tokenizer(TEXTS)
    end = tokenizer.eos_token_id
    tokens = training.encode(tokenizer, TEXTS)
    assert tokens[0] == end
    assert (tokens == end).sum() == len(TEXTS) + 1
    inside = tokens[1 : np.flatnonzero(tokens == end)[1]]
    assert tokenizer.decode(inside) == TEXTS[0]


def test_windows_are_consecutive_text_and_every_epoch_differs() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    batches = list(islice(training.windows(tokens, batch=4, length=32, seed=0), 20))
    for batch in batches:
        assert batch.shape == (4, 33)
        assert (batch.diff(dim=1) == 1).all()
    starts = torch.cat([batch[:, 0] for batch in batches])
    assert len(starts.unique()) > len(starts) * 0.9


def test_the_curriculum_keeps_the_tokens_of_a_step() -> None:
    tokens = np.zeros(40_000, dtype=np.uint16)
    batches = list(training.curriculum(tokens, Budget(steps=5, batch=2), seed=0))
    assert [tuple(batch.shape) for batch in batches] == [(4, 257)] * 4 + [(2, 513)]


def test_a_saved_model_is_read_back(tmp_path: Path) -> None:
    tokenizer = training.train_tokenizer(TEXTS)
    model = training.build("draft", end=0)
    training.save(model, tokenizer, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(again.state_dict()[name], weight.float()) for name, weight in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_two_steps_of_training_change_every_weight() -> None:
    tokens = np.random.default_rng(0).integers(training.VOCABULARY, size=4000).astype(np.uint16)
    model = training.build("draft", end=0)
    before = [weight.clone() for weight in model.parameters()]
    training.fit(model, training.curriculum(tokens, Budget(2, 1), seed=0), 2, name="draft", compiled=False)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(weight.isnan().any() for weight in model.parameters())
    assert not model.training
