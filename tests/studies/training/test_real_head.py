"""The head of the real model, on a tiny target: prompts, samples, what it learns from, and where it
begins."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import llama

from specnb.distributions import overlap
from specnb.heads import AttentionHead
from studies import corpus
from studies.files import data_file
from studies.training import real_head
from studies.training.real_head import ASKED, FOLDER, Drafted, asked, begun, functions_of, loss_of, windows

VOCAB, ROWS, BEFORE, NEW = 12, 3, 3, 5
FUNCTION = 'def twice(values):\n    """Doubles."""\n    found = [2 * value for value in values]\n    return found'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two chunks of samples of a tiny target; prompts have five tokens, and 0 ends a text."""
    sizes = {"LAYERS": (1, -1), "HIDDEN": 8, "HEADS": 2, "PROPOSED": 4, "BATCH": 2, "ROWS": ROWS}
    for name, value in (sizes | {"BEFORE": BEFORE, "NEW_TOKENS": NEW}).items():
        monkeypatch.setattr(real_head, name, value)
    tokenizer = SimpleNamespace(eos_token_id=0, batch_decode=lambda rows, **_: [str(row) for row in rows])
    monkeypatch.setattr(real_head, "model_and_tokenizer", lambda _: (llama(VOCAB), tokenizer))
    monkeypatch.setattr(real_head, "as_chat", lambda _, words: [1 + ord(word[-1]) % 11 for word in words.split()[-5:]])
    monkeypatch.setattr(corpus, "read", lambda _: [FUNCTION])
    return real_head.sample(2, tmp_path)


def test_prompts_are_none_of_those_measured_on() -> None:
    words = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    made = [asked(number, words, ["One. Two."], [FUNCTION]) for number in range(len(ASKED))]
    assert made[0] == asked(0, words, ["Others."], [FUNCTION])
    measured = {json.loads(line)["prompt"] for line in data_file("workloads.jsonl").read_text("utf-8").splitlines()}
    assert not measured & {prompt for prompts in made for prompt in prompts}
    assert not any("{" in prompt for prompts in made for prompt in prompts)
    assert functions_of([f"import math\n\n\n{FUNCTION}\n\n\ndef short(x):\n    return x\n"]) == [FUNCTION]


@torch.no_grad()
def test_the_loss_is_the_rejected_part_of_the_drafts_after_each_token(files: list[Path]) -> None:
    target = llama(VOCAB)
    tokens, states, sampled = windows(files)
    chunks = [torch.load(file) for file in files]
    assert tokens.shape == sampled.shape == (2 * ROWS, BEFORE + NEW)
    assert sampled.sum() == sum((chunk["lengths"] - chunk["starts"]).sum() for chunk in chunks)
    torch.manual_seed(0)
    head = AttentionHead(8, 8, 2, (1, -1), proposed=4)
    head.choose(target, torch.tensor([1, 3, 5, 7]))
    rows = target.get_output_embeddings().weight[head.proposed]
    student = Drafted(target, begun(target, head, tokens, states, sampled))
    states = states.float()
    found = float(loss_of(student, rows, tokens, states, sampled, 1.0))
    betas: list[list[float]] = []
    for features, at in student(tokens, states):
        p, q = torch.softmax(states[:, at, -8:] @ rows.T, dim=-1), torch.softmax(features @ rows.T, dim=-1)
        betas.append(overlap(p, q)[sampled[:, at]].tolist())
    assert len(betas) == real_head.DEPTHS
    assert found == pytest.approx(1 - sum(sum(beta) / len(beta) for beta in betas) / len(betas), abs=1e-5)
