"""Trains heads that draft from the target's hidden states, and a draft model of tokens as their control.

All students start from random weights and learn the same objective on the same batches in one process: the total
variation between their distribution and the target's, which is the probability that a draft token is rejected, after a
beginning with forward KL, whose gradient does not vanish far from the target. The target's forward pass is made once
for each batch and serves all. An interrupted training continues from its last checkpoint.

What differs besides the target's states: heads use the target's embeddings and output head, which are not trained
further, and the model of tokens learns its own; heads learn from drafts after every fourth token, and the model of
tokens at every position. One learning rate serves all, and it was not searched for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specnb.drafting.heads import AttentionHead, ParallelHeads, RecurrentHead
from specnb.models.loading import Pair
from studies import corpus
from studies.training.distillation_training import forward_kl, total_variation
from studies.training.training import build, encode, windows
from studies.training.training_loop import Learner, rate
from studies.training.training_loop import train as run

DEPTHS = 4  # draft tokens that a student learns to propose
EVERY = 4  # heads learn from a draft that begins at every fourth position


@dataclass(frozen=True)
class Plan:
    """`steps` updates on `rows` sequences of `length` tokens; `hidden` units in the heads' layers.

    The attention head has `wide` units, `heads` heads and the target's states of `layers`; the other heads read the
    last. For the fraction `begin` of the steps the objective is forward KL, and it becomes total variation over as many
    more. `compiled` needs a C++ compiler.
    """

    steps: int
    rows: int = 16
    length: int = 256
    hidden: int = 320
    wide: int = 512
    heads: int = 6
    layers: tuple[int, ...] = (5, 10, -1)  # about a third, two thirds and all of the target
    begin: float = 0.1
    rate: float = 0.5  # of that of the first training
    save_every: int = 50
    seed: int = 17
    compiled: bool = True
    threads: int = 2


class Part(NamedTuple):
    """Logits `(batch, n, vocab)` of a student for the tokens that follow the tokens `at` of each row, at one depth."""

    logits: Tensor
    at: slice


class Student(nn.Module):
    """A draft in training. Its forward pass gives its logits along `tokens` `(batch, length)`, depth by depth.

    `states` `(batch, length, layers * width)` are the target's hidden states, the last hidden state last. Draft token k
    of a step follows the k - 1 before it, which here are those of the text. Heads draft after every `every`th token
    from the second on; a model of tokens, which has one depth, computes all positions.
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
    """`AttentionHead` on the states of several layers: its own states stand in for those of the tokens drafted."""

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        embedding, output = self.frozen
        embedded, slots = embedding(tokens), torch.arange(tokens.shape[1])
        # The states of a token's entry are those of the token before it; the first token has none.
        state = pad(self.head.combined(states), (0, 0, 1, -1))
        seen = Seen(self.head, slots)
        state = self.head(state, embedded, partial(seen.attend, slots))[:, 1::every]
        found = []
        for depth, at in enumerate(drafted(every)):
            if depth:
                state = self.head(state[:, : len(slots[at])], embedded[:, at], partial(seen.attend, slots[at]))
            found.append(Part(output(self.head.features(state)), at))
        return found


class OfTokens(Student):
    """A model of the shape of the shipped draft, which reads tokens alone: the same at all depths, so one is learnt."""

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        return [Part(self.head(input_ids=tokens, use_cache=False).logits, slice(None))]


class Seen:
    """What the tokens of a draft attend to: the text up to the newest token, and the tokens of the same draft.

    The first call of `attend` is for all tokens of the text, in the slots `text`; each later call is for one more token
    of every draft.
    """

    def __init__(self, head: AttentionHead, text: Tensor) -> None:
        self.head, self.text = head, text
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, slots: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionHead.forward`, for tokens at `slots` `(n,)`."""
        depth, n = len(self.keys), len(slots)  # so many tokens are between a draft token and the text it sees
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


def drafted(every: int) -> list[slice]:
    """The positions of each draft token, depth by depth, of drafts after every `every`th token from the second on.

    >>> drafted(4)
    [slice(1, None, 4), slice(2, None, 4), slice(3, None, 4), slice(4, None, 4)]
    """
    return [slice(depth, None, every) for depth in range(1, DEPTHS + 1)]


def students_of(pair: Pair, plan: Plan) -> dict[str, Student]:
    """The students of `plan` by name, as they are before the training."""
    width = pair.target.config.hidden_size
    torch.manual_seed(plan.seed)
    return {
        "attention": Attention(pair, AttentionHead(width, plan.wide, plan.heads, plan.layers)),
        "recurrent": Recurrent(pair, RecurrentHead(width, plan.hidden)),
        "parallel": Parallel(pair, ParallelHeads(width, plan.hidden, DEPTHS)),
        "of tokens": OfTokens(pair, build("draft", pair.tokenizer.eos_token_id)),
    }


def loss_of(student: Student, tokens: Tensor, states: Tensor, log_p: Tensor, share: Tensor) -> Tensor:
    """The objective, a mean over depths: `share` of it is total variation, the rest forward KL."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        parts = student(tokens, states, EVERY)
    total, unused = torch.zeros(()), tokens[:, :0]
    for logits, at in parts:
        q, p = logits.float(), log_p[:, at]
        total = total + share * total_variation(q, p, unused) + (1 - share) * forward_kl(q, p, unused)
    return total / len(parts)


@torch.no_grad()
def features(target: nn.Module, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's states `(batch, length, layers * width)` and log-probabilities `(batch, length, vocab)`."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        found = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return states_of(found.hidden_states, layers).float(), torch.log_softmax(found.logits.float(), dim=-1)


def states_of(hidden_states: Sequence[Tensor], layers: tuple[int, ...]) -> Tensor:
    """The states of `layers`, concatenated, of what transformers returns as `hidden_states`."""
    return torch.cat([hidden_states[layer] for layer in layers], dim=-1)


def train(pair: Pair, plan: Plan, folder: Path) -> dict[str, Student]:
    """The students of `plan`, in evaluation mode; what is in `folder` is not done again."""
    torch.set_num_threads(plan.threads)
    pair.target.requires_grad_(False)
    students = students_of(pair, plan)
    learners = {name: Learner(student, plan.rate) for name, student in students.items()}
    compiled = partial(torch.compile, dynamic=False) if plan.compiled else lambda function: function
    losses, seen = {name: compiled(loss_of) for name in students}, compiled(features)

    def update(step: int, window: Tensor) -> dict[str, float]:
        tokens = window[:, : plan.length]
        states, log_p = seen(pair.target, tokens, plan.layers)
        share = torch.tensor(min(1.0, max(0.0, step / (plan.begin * plan.steps) - 1)))
        return {
            name: learners[name].learn(losses[name](student, tokens, states, log_p, share), rate(step, plan.steps))
            for name, student in students.items()
        }

    text = encode(pair.tokenizer, corpus.read("train"))
    batches = windows(text, plan.rows, plan.length, plan.seed)
    run(learners, batches, plan.steps, update, folder=folder, save_every=plan.save_every)
    return students
