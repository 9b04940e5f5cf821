"""A head for the real model: one transformer layer on its hidden states, which drafts the tokens
that it uses most.

The target answers prompts composed from `data/smollm2-head/prompts.json`, its own earlier answers
and functions of the corpus, at temperature 1; none is in `data/workloads.jsonl`, on which the head
is measured. Its states and samples are kept, chunk by chunk. The head begins as the linear map from
its inputs to the target's next state that has the least squared error, and learns, as in
`feature_drafts`, forward KL and then total variation to the target's distribution over the
`PROPOSED` tokens that have most of its probability, with `DEPTHS` draft tokens after every token of
an answer.

One line of the table for each temperature and depth, in the loop, on the prompts of `workloads`:
`alpha`, the mean acceptance probability of a draft token number `depth` that is tested, with a 95%
interval over prompts.

`python -m studies.training.real_head` samples `--chunks`, trains `--steps` and saves
`data/smollm2-head`; what was done before is not done again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb.heads import AttentionHead, save_head
from specnb.rules import Outcome
from specnb.sampler import Hooks, generate
from specnb.statistics import ratio_of_sums
from specnb.step import IDLE, Batch, Setup
from studies import corpus, study
from studies.files import ROOT
from studies.real.smollm2 import as_chat, head_drafter, model_and_tokenizer, prompts_of
from studies.real.workloads import KINDS
from studies.training.distillation import for_acceptance
from studies.training.feature_drafts import Attention
from studies.training.training import Learner, adam, add_note, size_of, taken_over, train

FOLDER = corpus.DATA / "smollm2-head"
WORK = ROOT / "build" / "training" / "smollm2-head"
LAYERS = (9, 18, 27, -1)  # whose states the head reads
HIDDEN, HEADS, DEPTHS = 1152, 9, 2
PROPOSED = 8192  # tokens that the head can propose
ROWS, NEW_TOKENS = 64, 96  # of a chunk of samples
BEFORE = 16  # tokens of the prompt in training
BATCH, RATE, BEGIN, SEED = 8, 1e-3, 0.15, 0
ASKED = ("questions", "questions", "questions", "codes", "edits", "summaries", "quotations")


class Recorded(Batch):
    """A batch that keeps the states of `LAYERS`, and the sum of the target's distributions at the
    tokens sampled."""

    made: Recorded

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.runner.record_hidden_states(LAYERS, setup.rows)
        self.mass, Recorded.made = torch.zeros(self.vocab), self

    def verify_and_emit(self, logits: Tensor, draft_tokens: Tensor, q: Tensor) -> Outcome:
        self.mass += torch.softmax(logits[self.state.remaining > IDLE, 0].float(), dim=-1).sum(dim=0)
        return super().verify_and_emit(logits, draft_tokens, q)


def functions_of(texts: list[str]) -> list[str]:
    """Functions of 4 to 16 lines without a decorator, as they stand in `texts`."""
    found = [part.rstrip() for text in texts for part in text.split("\n\n\n") if part.startswith("def ")]
    return [code for code in found if 4 <= len(code.splitlines()) <= 16]


def asked(number: int, words: dict[str, list[str]], answers: list[str], functions: list[str]) -> list[str]:
    """The prompts of chunk `number`, of one kind; `answers` are the texts to summarise and to
    quote."""
    chosen, kind = random.Random(number), ASKED[number % len(ASKED)]
    made = []
    for _ in range(ROWS):
        task, code = chosen.choice(words["functions"]), chosen.choice(functions)
        parts = {"thing": chosen.choice(words["things"]), "other": chosen.choice(words["things"]), "task": task}
        parts |= {"Task": task.capitalize(), "name": "_".join(task.split()[:4]).replace("-", "_"), "code": code}
        parts |= {"arguments": chosen.choice(["text", "values", "n", "items, k"])}
        if kind == "codes":
            parts["code"] = code[: code.find('"""', code.find('"""') + 3) + 4]
        made.append(chosen.choice(words[kind]).format(text=chosen.choice(answers) if answers else task, **parts))
    return made


def sample(chunks: int, folder: Path = WORK, dtype: str = "float32") -> list[Path]:
    """The files of so many chunks of samples of the target; those that are there are not made
    again."""
    target, tokenizer = model_and_tokenizer(dtype)
    words = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    functions = functions_of(corpus.read("train"))
    files = [folder / f"{number}.pt" for number in range(chunks)]
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        if file.exists():
            continue
        first = number // len(ASKED) * len(ASKED)  # of the latest questions
        earlier = [torch.load(files[at]) for at in range(first, min(number, first + 3))]
        answers = [text for chunk in earlier for text in chunk["answers"]]
        prompts = [as_chat(tokenizer, words) for words in asked(number, words, answers, functions)]
        made = generate(
            target, prompts, None, max_new_tokens=NEW_TOKENS, eos=tokenizer.eos_token_id, seed=number, progress=False,
            hooks=Hooks(batch_class=Recorded),
        )  # fmt: skip
        state, runner = Recorded.made.state, Recorded.made.runner
        assert runner.hidden_states is not None
        kept = {"tokens": state.tokens.int(), "starts": state.starts, "lengths": state.lengths}
        kept |= {"states": runner.hidden_states.bfloat16(), "mass": Recorded.made.mass}
        torch.save(kept | {"answers": tokenizer.batch_decode(made.tokens, skip_special_tokens=True)}, file)
        print(f"chunk {number}: {sum(map(len, made.tokens))} tokens", flush=True)
    return files


def windows(files: list[Path]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens `(n, BEFORE + NEW_TOKENS)`, the target's states there, and whether a token sampled
    follows."""
    parts: list[tuple[Tensor, ...]] = []
    for file in files:
        chunk = torch.load(file)
        starts, lengths = chunk["starts"], chunk["lengths"]
        slots = (starts - BEFORE).clamp_min(0)[:, None] + torch.arange(BEFORE + NEW_TOKENS)
        sampled = (slots >= starts[:, None] - 1) & (slots < lengths[:, None] - 1)
        slots = slots.clamp_max(chunk["tokens"].shape[1] - 1)
        parts.append((chunk["tokens"].gather(1, slots), chunk["states"].take_along_dim(slots[..., None], 1), sampled))
    tokens, states, sampled = (torch.cat(part) for part in zip(*parts, strict=True))
    return tokens.long(), states, sampled


class Drafted(Attention):
    """`Attention` of `DEPTHS` draft tokens, whose `Part.logits` are the inputs of the output
    head."""

    depths = DEPTHS

    def __init__(self, target: Any, head: nn.Module) -> None:
        nn.Module.__init__(self)
        self.head, self.frozen = head, (target.get_input_embeddings(), nn.Identity())


@torch.no_grad()
def begun(target: Any, head: AttentionHead, tokens: Tensor, states: Tensor, sampled: Tensor) -> AttentionHead:
    """`head` as the least-squares map from a token and the states before it to the last state at
    the token."""
    width, gains = target.config.hidden_size, target.base_model.norm.weight.float()
    at = sampled[:, 1:].nonzero(as_tuple=True)
    before, last = states[:, :-1][at].float(), states[:, 1:][at][:, -width:].float() / gains
    each = rms_norm(before.unflatten(-1, (len(LAYERS), -1)), (width,)).flatten(-2)
    embedded = rms_norm(target.get_input_embeddings()(tokens[:, 1:][at]).float(), (width,))
    inputs = torch.cat([each, embedded], dim=-1)
    ridge = inputs.T @ inputs + 1e-4 * len(inputs) * torch.eye(inputs.shape[1])
    found = torch.linalg.solve(ridge, inputs.T @ last).T
    head.states_projection.weight.copy_(found[:, : each.shape[1]])
    size = (each @ found[:, : each.shape[1]].T).square().mean().sqrt()
    head.input_projection.weight.copy_(torch.cat([size * torch.eye(width), found[:, each.shape[1] :]], dim=1))
    head.scale.copy_(gains)
    return head


def loss_of(student: Drafted, rows: Tensor, tokens: Tensor, states: Tensor, sampled: Tensor, share: float) -> Tensor:
    """The mean over depths of `share` of total variation and the rest of forward KL, where
    `sampled`."""
    log_p = torch.log_softmax(states[sampled][:, -rows.shape[1] :] @ rows.T, dim=-1)
    number = torch.zeros_like(tokens).masked_scatter(sampled, torch.arange(len(log_p)))
    total = torch.zeros(())
    for features, at in student(tokens, states):
        learnt = sampled[:, at]
        total = total + for_acceptance(features[learnt] @ rows.T, log_p[number[:, at][learnt]], share)
    return total / DEPTHS


def trained(target: PreTrainedModel, files: list[Path], steps: int, folder: Path = WORK) -> AttentionHead:
    """The head after so many steps on the samples in `files`, from the last checkpoint in
    `folder`."""
    mass = sum(torch.load(file)["mass"] for file in files)
    tokens, states, sampled = windows(files)
    torch.manual_seed(SEED)
    head = AttentionHead(target.config.hidden_size, HIDDEN, HEADS, LAYERS, proposed=PROPOSED)
    head.choose(target, mass.topk(PROPOSED).indices.sort().values)
    student = Drafted(target.requires_grad_(False), begun(target, head, tokens[:200], states[:200], sampled[:200]))
    output = target.get_output_embeddings().weight

    def batches() -> Iterator[Tensor]:
        order = np.random.default_rng(SEED)
        while True:
            yield from torch.from_numpy(order.permutation(len(tokens))[: len(tokens) // BATCH * BATCH]).split(BATCH)

    def losses(step: int, at: Tensor) -> Iterator[tuple[str, Tensor]]:
        rows = output[head.proposed]  # those of the checkpoint, where there is one
        yield (
            "head",
            loss_of(student, rows, tokens[at], states[at].float(), sampled[at], taken_over(step, steps, BEGIN)),
        )

    # Muon would take a minute a step.
    train({"head": Learner(student, 1.0, adam(student.parameters(), RATE))}, batches(), steps, losses, folder)
    return head.eval()


def measure(item: str, prompts: int, new_tokens: int, gamma: int, dtype: str) -> Iterator[dict[str, Any]]:
    """The lines of one temperature."""
    target, tokenizer = model_and_tokenizer(dtype)
    sampling = Sampling(float(item.removeprefix("t")))
    every = [prompt for kind in KINDS for prompt in prompts_of(tokenizer, kind, prompts)]
    record = generate(
        target, every, head_drafter(target, sampling), gamma=gamma, max_new_tokens=new_tokens, sampling=sampling,
        batch_size=16, eos=tokenizer.eos_token_id, progress=False,
    ).record  # fmt: skip
    for depth in range(gamma):
        tested = record.tested[..., depth]
        found = ratio_of_sums((record.beta[..., depth] * tested).sum(axis=1), tested.sum(axis=1))
        about = {"temperature": sampling.temperature, "depth": depth + 1, "positions": int(tested.sum())}
        yield about | study.columns("alpha", found) | {"tokens_per_step": record.tokens_per_step}


STUDY = study.Study(
    measure,
    settings={"prompts": 12, "new_tokens": 48, "gamma": 4, "dtype": "bfloat16"},
    small={"prompts": 1, "new_tokens": 4, "gamma": 2, "dtype": "bfloat16"},
    items=("t0", "t1"),
    small_items=("t1",),
)


def main() -> None:
    """Samples, trains and saves."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1500)
    chosen = parser.parse_args()
    files = sample(chosen.chunks)
    head = trained(model_and_tokenizer("float32")[0], files, chosen.steps)
    save_head(head, FOLDER)
    sizes = {"chunks": chosen.chunks, "steps": chosen.steps, "rows": BATCH, "seed": SEED, "parameters": size_of(head)}
    add_note(FOLDER, {"of": "smollm2", "objective": "forward KL, then total variation"} | sizes)


if __name__ == "__main__":
    main()
