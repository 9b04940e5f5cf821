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
from studies import corpus
from studies.files import data_file
from studies.training import real_head
from studies.training.chains import Chains
from studies.training.real_head import ASKED, PROMPTS, asked, begun, functions_of, loss_of, new_head, read

VOCAB, ROWS, BEFORE, NEW = 12, 3, 3, 5
FUNCTION = 'def twice(values):\n    """Doubles."""\n    found = [2 * value for value in values]\n    return found'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two chunks of samples of a tiny target; prompts have five tokens, and 0 ends a text."""
    sizes = {"LAYERS": (0, 1), "HIDDEN": 8, "PROPOSED": 4, "BATCH": 2, "ROWS": ROWS}
    for name, value in (sizes | {"BEFORE": BEFORE, "NEW_TOKENS": NEW}).items():
        monkeypatch.setattr(real_head, name, value)
    tokenizer = SimpleNamespace(eos_token_id=0, batch_decode=lambda rows, **_: [str(row) for row in rows])
    monkeypatch.setattr(real_head, "model_and_tokenizer", lambda _: (llama(VOCAB), tokenizer))
    monkeypatch.setattr(real_head, "as_chat", lambda _, words: [1 + ord(word[-1]) % 11 for word in words.split()[-5:]])
    monkeypatch.setattr(corpus, "read", lambda _: [FUNCTION])
    return real_head.sample(2, tmp_path)


def test_prompts_are_none_of_those_measured_on() -> None:
    words = json.loads(PROMPTS.read_text(encoding="utf-8"))
    made = [asked(number, words, ["One. Two."], [FUNCTION]) for number in range(len(ASKED))]
    assert made[0] == asked(0, words, ["Others."], [FUNCTION])
    measured = {json.loads(line)["prompt"] for line in data_file("workloads.jsonl").read_text("utf-8").splitlines()}
    assert not measured & {prompt for prompts in made for prompt in prompts}
    assert not any("{" in prompt for prompts in made for prompt in prompts)
    assert functions_of([f"import math\n\n\n{FUNCTION}\n\n\ndef short(x):\n    return x\n"]) == [FUNCTION]


def in_16_bits(inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.softmax((inputs.bfloat16() @ rows.bfloat16().T).float(), dim=-1)


@torch.no_grad()
def test_the_loss_is_the_rejected_part_of_the_drafts_after_each_token(files: list[Path]) -> None:
    target = llama(VOCAB)
    tokens, states, sampled = read(files)
    answers = [answer for file in files for answer in torch.load(file)["answers"]]
    assert tokens.shape == sampled.shape == (2 * ROWS, BEFORE + NEW)
    assert sampled.sum(dim=1).tolist() == [len(json.loads(answer)) for answer in answers]
    torch.manual_seed(0)
    head = new_head(target, torch.tensor([1, 3, 5, 7]))
    begun(target, head, tokens, states, sampled)
    rows, student = target.get_output_embeddings().weight[head.proposed], Chains(head, target.get_input_embeddings(), 2)
    states = states.float()
    found = float(loss_of(student, rows, tokens, states, sampled, 1.0))
    with torch.autocast("cpu", torch.bfloat16):
        parts = student(tokens, states[..., :-8])
    betas = []
    for features, at in parts:
        p, q = in_16_bits(states[:, at, -8:], rows), in_16_bits(features, head.lm_head.weight)
        betas.append(float(overlap(p, q)[sampled[:, at]].mean()))
    assert len(betas) == 2
    assert found == pytest.approx(1 - sum(betas) / 2, abs=1e-5)


def test_the_head_begins_with_the_tokens_that_the_target_makes_likely(files: list[Path]) -> None:
    """Before it has learnt anything, it is nearer to the target than the target's mean distribution."""
    target = llama(VOCAB)
    tokens, states, sampled = read(files)
    head = new_head(target, torch.arange(VOCAB))
    begun(target, head, tokens, states, sampled)
    ((features, at),) = Chains(head, target.get_input_embeddings(), 1)(tokens, states[..., :-8].float())
    p = torch.softmax(states[:, at, -8:].float() @ target.get_output_embeddings().weight.T, dim=-1)[sampled[:, at]]
    drafted = overlap(p, torch.softmax(head.lm_head(features), dim=-1)[sampled[:, at]]).mean()
    assert drafted > overlap(p, p.mean(dim=0, keepdim=True)).mean()
