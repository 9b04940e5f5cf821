"""Does drafting from the target's features accept more than drafting from tokens?

Four drafts, the students, start from random weights and learn the same objective on the same
batches: an attention head, a recurrent head and parallel heads, which read the target's hidden
states, and as their control a model of tokens of the shape of the shipped draft. The objective is
the total variation between their distribution and the target's, which is the probability that a
draft token is rejected, after a beginning with forward KL, whose gradient does not vanish far from
the target. The target's forward pass is made once for each batch and serves all.

What differs besides the target's states: heads use the target's embeddings and output head, which
are not trained further, and the model of tokens learns its own; heads learn from drafts after every
fourth token, and the model of tokens at every position. One learning rate serves all, and it was
not searched for.

One line of the table for each draft, depth and kind of sequence, on held-out files at temperature
1:

- `alpha`: mean acceptance probability of draft token number `depth` of a step, at every position
  after the first `PROMPT` tokens, given the tokens before it; depth "all" is the mean over depths.
  The control's is the same at every depth
- `over_control`: difference to the control at the same positions

Both with 95% intervals over files. `python -m studies.training.feature_drafts` saves the heads as
`data/pair/draft-attention`, `draft-recurrent` and `draft-parallel`.

A fifth student, `NO_STATES`, is trained by itself, on the same batches: the attention head with
zeros in place of the target's states. It has the target's embeddings and output head and reads
tokens alone, so what separates it from the attention head is what the states say. Its lines have
`states_add`, with an interval: alpha of the saved attention head less its own at the same
positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specnb.distributions import overlap
from specnb.drafting.heads import AttentionHead, load_head, save_head
from specnb.models.loading import TRAINED_PAIR, Pair, load_pair
from studies import corpus, study
from studies.drafters.heads import ParallelHeads, RecurrentHead
from studies.training import training
from studies.training.distillation import for_acceptance
from studies.training.evaluation import PROMPT, Files, held_out_windows, means, text_and_samples
from studies.training.training import Learner, add_note, build, encode, folder_of, size_of, taken_over, windows

DEPTHS = 4  # draft tokens that a student learns to propose
EVERY = 4  # heads learn from a draft that begins at every fourth position
# Whose states the attention head reads: about a third, two thirds and all of the target.
LAYERS = (5, 10, -1)
HEADS = 6  # of its attention
# The fraction of the steps with forward KL; total variation takes over during as many more.
BEGIN = 0.1
FACTOR = 0.5  # of the learning rates of the first training
SEED, THREADS = 17, 2
TOGETHER, ALONE = "features", "without-states"  # what is trained in one run
CONTROL, NO_STATES, ALL = "of tokens", "without states", "all"


@dataclass(frozen=True)
class Plan:
    """`steps` updates on `rows` sequences of `length` tokens; `hidden` units in the heads' layers.

    The attention head has `wide` units and the target's states of `LAYERS`; the other heads read
    the last. `compiled` needs a C++ compiler.
    """

    steps: int
    rows: int = 16
    length: int = 256
    hidden: int = 320
    wide: int = 512
    compiled: bool = True


class Part(NamedTuple):
    """Logits `(batch, n, vocab)` of a student for the tokens that follow the tokens `at` of each
    row, at one depth."""

    logits: Tensor
    at: slice


class Student(nn.Module):
    """A draft in training. Its forward pass gives its logits along `tokens` `(batch, length)`,
    depth by depth.

    `states` `(batch, length, layers * width)` are the target's hidden states, the last hidden state
    last. Draft token k of a step follows the k - 1 before it, which here are those of the text.
    Heads draft after every `every`th token from the second on; a model of tokens, which has one
    depth, computes all positions.
    """

    def __init__(self, pair: Pair, head: nn.Module) -> None:
        super().__init__()
        self.head: Any = head
        self.frozen = (pair.target.get_input_embeddings(), pair.target.get_output_embeddings())

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        raise NotImplementedError


class Recurrent(Student):
    """`RecurrentHead` on the last hidden state."""

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        embedding, output = self.frozen
        found, state = [], states[:, :-1:every, -self.head.settings["width"] :]
        for at in drafted(every):
            embedded = embedding(tokens[:, at])
            state = self.head(state[:, : embedded.shape[1]], embedded)
            found.append(Part(output(self.head.features(state)), at))
        return found


class Parallel(Student):
    """`ParallelHeads` on the last hidden state."""

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        _, output = self.frozen
        features = self.head(states[:, :-1:every, -self.head.settings["width"] :])
        return [
            Part(output(features[:, : tokens[:, at].shape[1], depth]), at) for depth, at in enumerate(drafted(every))
        ]


class Attention(Student):
    """`AttentionHead` on the states of several layers: its own states stand in for those of the
    tokens drafted."""

    depths = DEPTHS

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        embedding, output = self.frozen
        embedded, slots = embedding(tokens), torch.arange(tokens.shape[1])
        # The states of a token's entry are those of the token before it; the first token has none.
        state = pad(self.head.combined(states), (0, 0, 1, -1))
        seen = Seen(self.head, slots)
        state = self.head(state, embedded, partial(seen.attend, slots))[:, 1::every]
        found = []
        for depth, at in enumerate(drafted(every, self.depths)):
            if depth:
                state = self.head(state[:, : len(slots[at])], embedded[:, at], partial(seen.attend, slots[at]))
            found.append(Part(output(self.head.features(state)), at))
        return found


class WithoutStates(Attention):
    """`Attention` that reads zeros for the target's states."""

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        return super().forward(tokens, torch.zeros_like(states), every)


class OfTokens(Student):
    """A model of the shape of the shipped draft, which reads tokens alone: the same at all depths,
    so one is learnt."""

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        return [Part(self.head(input_ids=tokens, use_cache=False).logits, slice(None))]


class Seen:
    """What the tokens of a draft attend to: the text up to the newest token, and the tokens of the
    same draft.

    The first call of `attend` is for all tokens of the text, in the slots `text`; each later call
    is for one more token of every draft.
    """

    def __init__(self, head: AttentionHead, text: Tensor) -> None:
        self.head, self.text = head, text
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, slots: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionHead.forward`, for tokens at `slots` `(n,)`."""
        # So many tokens are between a draft token and the text it sees.
        depth, n = len(self.keys), len(slots)
        query = query * query.shape[-1] ** -0.5
        self.keys.append(key)
        self.values.append(value)
        distance = (slots[:, None] - self.text)[None]
        scores = [query @ self.keys[0].transpose(-1, -2) + self.head.bias(distance.where(distance >= depth, -1))]
        read = [self.values[0]]
        for back, (its_key, its_value) in enumerate(zip(self.keys[:0:-1], self.values[:0:-1], strict=True)):
            own = (query * its_key[:, :, :n]).sum(dim=-1, keepdim=True)
            scores.append(own + self.head.bias(distance.new_full((1, n, 1), back)))
            read.append(its_value[:, :, :n])
        weights = torch.softmax(torch.cat(scores, dim=-1).float(), dim=-1).to(value.dtype)
        of_text, *of_draft = weights.split([len(self.text), *[1] * depth], dim=-1)
        found: Tensor = of_text @ read[0]
        for weight, its_value in zip(of_draft, read[1:], strict=True):
            found = found + weight * its_value
        return found


def drafted(every: int, depths: int = DEPTHS) -> list[slice]:
    """The positions of each draft token, depth by depth, of drafts after every `every`th token from
    the second on.

    >>> drafted(4)
    [slice(1, None, 4), slice(2, None, 4), slice(3, None, 4), slice(4, None, 4)]
    """
    return [slice(depth, None, every) for depth in range(1, depths + 1)]


def students_of(pair: Pair, plan: Plan) -> dict[str, Student]:
    """The students of `plan` by name, as they are before the training."""
    width = pair.target.config.hidden_size
    torch.manual_seed(SEED)
    return {
        "attention": Attention(pair, AttentionHead(width, plan.wide, HEADS, LAYERS)),
        "recurrent": Recurrent(pair, RecurrentHead(width, plan.hidden)),
        "parallel": Parallel(pair, ParallelHeads(width, plan.hidden, DEPTHS)),
        CONTROL: OfTokens(pair, build("draft", pair.tokenizer.eos_token_id)),
        NO_STATES: WithoutStates(pair, AttentionHead(width, plan.wide, HEADS, LAYERS)),
    }


def loss_of(student: Student, tokens: Tensor, states: Tensor, log_p: Tensor, share: Tensor) -> Tensor:
    """The objective, a mean over depths: `share` of it is total variation, the rest forward KL."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        parts = student(tokens, states, EVERY)
    total = torch.zeros(())
    for logits, at in parts:
        total = total + for_acceptance(logits.float(), log_p[:, at], share)
    return total / len(parts)


@torch.no_grad()
def features(target: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The target's states `(batch, length, layers * width)` and log-probabilities
    `(batch, length, vocab)`."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        found = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return states_of(found.hidden_states).float(), torch.log_softmax(found.logits.float(), dim=-1)


def states_of(hidden_states: Sequence[Tensor]) -> Tensor:
    """The states of `LAYERS`, concatenated, of what transformers returns as `hidden_states`."""
    return torch.cat([hidden_states[layer] for layer in LAYERS], dim=-1)


def trained(pair: Pair, plan: Plan, item: str) -> dict[str, Student]:
    """The students of `plan` that are trained together as `item`, in evaluation mode; what was done
    before is not done again."""
    torch.set_num_threads(THREADS)
    pair.target.requires_grad_(False)
    students = {name: one for name, one in students_of(pair, plan).items() if (name == NO_STATES) == (item == ALONE)}
    learners = {name: Learner(student, FACTOR) for name, student in students.items()}
    compiled = partial(torch.compile, dynamic=False) if plan.compiled else lambda function: function
    objectives, seen = {name: compiled(loss_of) for name in students}, compiled(features)

    def losses(step: int, window: Tensor) -> Iterator[tuple[str, Tensor]]:
        tokens = window[:, : plan.length]
        states, log_p = seen(pair.target, tokens)
        share = torch.tensor(taken_over(step, plan.steps, BEGIN))
        for name, student in students.items():
            yield name, objectives[name](student, tokens, states, log_p, share)

    text = encode(pair.tokenizer, corpus.read("train"))
    batches = windows(text, plan.rows, plan.length, SEED)
    training.train(learners, batches, plan.steps, losses, folder_of(item, plan))
    return students


@torch.inference_mode()
def betas(target: nn.Module, students: Mapping[str, Student], sequences: Tensor) -> dict[str, Tensor]:
    """beta `(DEPTHS, n, length - PROMPT)` of each student's draft tokens along `sequences`
    `(n, length)`."""
    found: dict[str, list[Tensor]] = {name: [] for name in students}
    for rows in sequences.split(8):
        seen = target(input_ids=rows[:, :-1], use_cache=False, output_hidden_states=True)
        p = torch.softmax(seen.logits[:, PROMPT - 1 :], dim=-1)
        states = states_of(seen.hidden_states)
        for name, student in students.items():
            parts = student(rows[:, :-1], states)
            of_depths = [
                overlap(p, torch.softmax(logits[:, PROMPT - 1 - (at.start or 0) :], dim=-1)) for logits, at in parts
            ]
            found[name].append(torch.stack(of_depths).expand(DEPTHS, -1, -1))
    return {name: torch.cat(parts, dim=1) for name, parts in found.items()}


def lines(found: Mapping[str, Tensor], differences: Mapping[str, Mapping[str, Tensor]], numbers: Files) -> pd.DataFrame:
    """A line for each draft of `differences` and depth, with alpha and the means of its
    differences; `numbers` `(n,)` are the files of the sequences."""
    depths = {ALL: slice(None)} | {str(k + 1): slice(k, k + 1) for k in range(DEPTHS)}
    return pd.DataFrame(
        {"draft": name, "depth": depth}
        | means({column: beta[at].mean(0) for column, beta in {"alpha": found[name], **others}.items()}, numbers)
        for name, others in differences.items()
        for depth, at in depths.items()
    )


def compared(found: Mapping[str, Tensor], item: str) -> dict[str, dict[str, Tensor]]:
    """The differences of `lines` for each draft that was trained as `item`."""
    if item == ALONE:
        return {NO_STATES: {"states_add": found["attention"] - found[NO_STATES]}}
    return {name: {"over_control": beta - found[CONTROL]} for name, beta in found.items()}


def measure(
    item: str, plan: Mapping[str, Any], per_file: int, sampled_per_file: int, files: int | None = None
) -> pd.DataFrame:
    """Trains the students and measures them."""
    chosen, pair = Plan(**plan), load_pair()
    students = trained(pair, chosen, item)
    if item == ALONE:
        students["attention"] = Attention(pair, load_head(TRAINED_PAIR / "draft-attention"))
    text, prompts = (held_out_windows(pair, chosen.length + 1, each, files) for each in (per_file, sampled_per_file))
    parts = []
    for along, sequences, of in text_and_samples(pair.target, text, prompts, 1.0, SEED):
        found = betas(pair.target, students, sequences)
        parts.append(lines(found, compared(found, item), of).assign(along=along))
    table = pd.concat(parts, ignore_index=True)
    sizes = {name: size_of(student) for name, student in students.items()}
    tokens = chosen.steps * chosen.rows * chosen.length
    return table.assign(target="shipped", parameters=table.draft.map(sizes), steps=chosen.steps, tokens=tokens)


STUDY = study.Study(
    measure,
    settings={"plan": {"steps": 3200, "compiled": True}, "per_file": 4, "sampled_per_file": 2},
    small={
        "plan": {"steps": 2, "rows": 2, "length": 40, "hidden": 8, "wide": 8, "compiled": False},
        "per_file": 1, "sampled_per_file": 1, "files": 9,
    },
    items=(TOGETHER, ALONE),
)  # fmt: skip


def ship(plan: Plan, folder: Path = TRAINED_PAIR) -> list[Path]:
    """Saves the heads beside the pair; returns their folders."""
    made = []
    for name, student in trained(load_pair(), plan, TOGETHER).items():
        if name != CONTROL:
            made.append(folder / f"draft-{name}")
            save_head(student.head, made[-1])
            note = {"of": "data/pair/target", "from": "random weights", "objective": "total variation"}
            sizes = {"steps": plan.steps, "tokens": plan.steps * plan.rows * plan.length, "seed": SEED}
            add_note(made[-1], note | sizes | {"parameters": size_of(student)})
    return made


if __name__ == "__main__":
    print("saved:", *ship(Plan(**STUDY.settings["plan"])))
