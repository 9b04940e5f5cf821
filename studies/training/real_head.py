"""A head for the real model in EAGLE-3's architecture, which drafts the tokens that it uses most.

The target answers prompts composed from `PROMPTS`, its own earlier answers and functions of the
corpus, at temperatures 1 and 0 by turns; none is in `data/workloads.jsonl`, on which the head is
measured. Its states and samples are kept, chunk by chunk. The head begins as the linear map from a
token and the states before it to the target's next state that has the least squared error, and
learns, as in `feature_drafts`, forward KL and then total variation to the target's distribution over
the `PROPOSED` tokens that have most of its probability, with `DEPTHS` draft tokens after every token
of an answer.

`python -m studies.training.real_head` samples `--chunks`, trains `--steps` and saves `FOLDER`; what
was done before is not done again.

One line of the table for each temperature and depth, in the loop, on the prompts of `workloads`:
`alpha`, the mean acceptance probability of a draft token number `depth` that is tested, with a 95%
interval over prompts.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from specnb.distributions import Sampling
from specnb.heads import Eagle3Head
from specnb.rules import Outcome
from specnb.sampler import Instruments, generate
from specnb.statistics import ratio_of_sums
from specnb.step import IDLE, Batch, Setup
from studies import corpus, study
from studies.files import ROOT
from studies.real.smollm2 import as_chat, head_drafter, model_and_tokenizer, prompts_of
from studies.real.workloads import KINDS
from studies.training.chains import Chains, TrainedEagle3
from studies.training.distillation import for_acceptance
from studies.training.released_heads import save_head
from studies.training.training import Learner, adam, add_note, size_of, taken_over, train

FOLDER = corpus.DATA / "smollm2-eagle3"
PROMPTS = FOLDER / "prompts.json"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WORK = ROOT / "build" / "training" / "smollm2-head"
LAYERS = (9, 19, 29)  # whose states the head reads: about a third, two thirds, and before the last
HIDDEN, DEPTHS, SEEN = 1152, 3, 1.5
PROPOSED = 6144  # tokens that the head can propose
TEMPERATURES = (1.0, 0.0)  # of the answers, by turns
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
        self.runner.record_hidden_states((*LAYERS, -1), setup.max_rows)
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


def sample(chunks: int, folder: Path = WORK, dtype: str = "bfloat16") -> list[Path]:
    """The files of so many chunks of samples of the target; those that are there are not made
    again."""
    target, tokenizer = model_and_tokenizer(dtype)
    words = json.loads(PROMPTS.read_text(encoding="utf-8"))
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
        sampling = Sampling(TEMPERATURES[number // len(ASKED) % len(TEMPERATURES)])
        made = generate(
            target, prompts, None, max_new_tokens=NEW_TOKENS, eos=tokenizer.eos_token_id, seed=number, progress=False,
            sampling=sampling, instruments=Instruments(batch_class=Recorded), compile="auto",
        )  # fmt: skip
        kept = windows(Recorded.made) | {"mass": Recorded.made.mass}
        torch.save(kept | {"answers": tokenizer.batch_decode(made.tokens, skip_special_tokens=True)}, file)
        print(f"chunk {number}: {sum(map(len, made.tokens))} tokens", flush=True)
    return files


def windows(made: Recorded) -> dict[str, Tensor]:
    """Of each row the last `BEFORE` tokens of the prompt and the answer, the target's states there,
    and whether a token sampled follows."""
    state, states = made.state, made.runner.hidden_states
    assert states is not None
    slots = (state.starts - BEFORE).clamp_min(0)[:, None] + torch.arange(BEFORE + NEW_TOKENS)
    sampled = (slots >= state.starts[:, None] - 1) & (slots < state.lengths[:, None] - 1)
    slots = slots.clamp_max(states.shape[1] - 1)
    taken = states.take_along_dim(slots[..., None], 1).bfloat16()
    return {"tokens": state.tokens.gather(1, slots).int(), "states": taken, "sampled": sampled}


def read(files: list[Path]) -> tuple[Tensor, Tensor, Tensor]:
    """What `windows` returned for all `files`."""
    chunks = [torch.load(file) for file in files]
    tokens, states, sampled = (torch.cat([chunk[name] for chunk in chunks]) for name in ("tokens", "states", "sampled"))
    return tokens.long(), states, sampled


@torch.no_grad()
def begun(target: Any, head: Eagle3Head, tokens: Tensor, states: Tensor, sampled: Tensor) -> None:
    """`head` as the least-squares map from a token and the states before it to the last state at
    the token, and the target's output head.

    `fc` is the map from the states alone. The attention adds what the token says: its queries are
    its keys, a projection of the token's embedding, so that a token sees itself more than others.
    """
    gains, layer = target.base_model.norm.weight.float(), cast(Any, head.layers[0])
    at, width = sampled[:, 1:].nonzero(as_tuple=True), len(gains)
    before, last = states[:, :-1, :-width][at].float(), states[:, 1:, -width:][at].float() / gains
    head.fc.weight.copy_(least_squares(before, last))
    read = layer.hidden_norm(head.fc(before))
    embedded = layer.input_layernorm(target.get_input_embeddings()(tokens[:, 1:][at]).float())
    attention = layer.self_attn
    attention.v_proj.weight.copy_(least_squares(torch.cat([embedded, read], dim=-1), last - read))
    nn.init.eye_(attention.o_proj.weight)
    nn.init.normal_(attention.k_proj.weight, std=SEEN / width**0.5)
    attention.k_proj.weight[:, width:] = 0
    attention.q_proj.weight.copy_(attention.k_proj.weight)
    nn.init.zeros_(layer.mlp.down_proj.weight)
    head.norm.weight.copy_(gains)
    head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.proposed])


def least_squares(inputs: Tensor, wanted: Tensor) -> Tensor:
    """The weight `(out, in)` of least squared error, with a ridge."""
    products = inputs.T @ inputs
    ridge = 1e-4 * products.diagonal().mean() * torch.eye(len(products))
    found: Tensor = torch.linalg.solve(products + ridge, inputs.T @ wanted)
    return found.T


def loss_of(student: Chains, rows: Tensor, tokens: Tensor, states: Tensor, sampled: Tensor, share: float) -> Tensor:
    """The mean over depths of `share` of total variation and the rest of forward KL, where
    `sampled`; `rows` are those of the target's output head for the tokens that are proposed."""
    read, last = states.split([states.shape[-1] - rows.shape[1], rows.shape[1]], dim=-1)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = last[sampled] @ rows.T
        parts = [(student.head.lm_head(features[sampled[:, at]]), at) for features, at in student(tokens, read)]
    log_p = torch.log_softmax(wanted.float(), dim=-1)
    number = torch.zeros_like(tokens).masked_scatter(sampled, torch.arange(len(log_p)))
    total = torch.zeros(())
    for logits, at in parts:
        total = total + for_acceptance(logits.float(), log_p[number[:, at][sampled[:, at]]], share)
    return total / len(parts)


def new_head(target: PreTrainedModel, proposed: Tensor) -> Eagle3Head:
    """A head with one layer as the target's, that drafts the tokens `proposed`."""
    heads = target.config.num_attention_heads
    shape = {"num_hidden_layers": 1, "intermediate_size": HIDDEN, "num_key_value_heads": heads}
    head = TrainedEagle3(
        LlamaConfig(**target.config.to_dict() | shape), LAYERS, len(proposed), norm_before_residual=True
    )
    head.choose(proposed)
    return head


def trained(
    target: PreTrainedModel, files: list[Path], steps: int, depths: int = DEPTHS, folder: Path = WORK
) -> Eagle3Head:
    """The head after so many steps on the samples in `files`, from the last checkpoint in
    `folder`."""
    mass = sum(torch.load(file)["mass"] for file in files)
    tokens, states, sampled = read(files)
    torch.manual_seed(SEED)
    proposed = mass.topk(PROPOSED).indices.sort().values
    head, few = new_head(target.requires_grad_(False), proposed), torch.randperm(len(tokens))[:800]
    begun(target, head, tokens[few], states[few], sampled[few])
    student = Chains(head, target.get_input_embeddings(), depths)
    rows = target.get_output_embeddings().weight[proposed]

    def batches() -> Iterator[Tensor]:
        order = np.random.default_rng(SEED)
        while True:
            yield from torch.from_numpy(order.permutation(len(tokens))[: len(tokens) // BATCH * BATCH]).split(BATCH)

    def losses(step: int, at: Tensor) -> Iterator[tuple[str, Tensor]]:
        share = taken_over(step, steps, BEGIN)
        yield "head", loss_of(student, rows, tokens[at], states[at].float(), sampled[at], share)

    # Muon would take a minute a step.
    train({"head": Learner(head, 1.0, adam(head.parameters(), RATE))}, batches(), steps, losses, folder)
    return head.eval()


def measure(item: str, prompts: int, new_tokens: int, gamma: int, dtype: str) -> Iterator[dict[str, Any]]:
    """The lines of one temperature, one for each depth."""
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
    parser.add_argument("--chunks", type=int, default=84)
    parser.add_argument("--steps", type=int, default=2000)
    chosen = parser.parse_args()
    files = sample(chosen.chunks)
    target = model_and_tokenizer("float32")[0]
    head = trained(target, files, chosen.steps).bfloat16()
    save_head(head, FOLDER, target, name=NAME, gamma=DEPTHS)
    answers = sum(int(torch.load(file)["sampled"].sum()) for file in files)
    note = {"of": NAME, "objective": "forward KL, then total variation", "chunks": chosen.chunks, "tokens": answers}
    note |= {"steps": chosen.steps, "rows": BATCH, "depths": DEPTHS, "seed": SEED, "parameters": size_of(head)}
    add_note(FOLDER, note)


if __name__ == "__main__":
    main()
