"""Does drafting from the target's features accept more than drafting from tokens?

Drafts, the students, start from random weights and learn the same objective on the same batches:

    EAGLE-3           a layer that attends to the tokens so far, on the target's states of three
                      layers
    penultimate layer the same with the states of the last but one layer alone
    without states    the same with zeros in place of the states
    next-token layer  one layer on the target's last hidden state, then on its own
    recurrent         continues the last hidden state token by token
    parallel          a network for each draft token, on the last hidden state
    of tokens         a model of the shape of the shipped draft: the control

The objective is the total variation between their distribution and the target's, which is the
probability that a draft token is rejected, after a beginning with forward KL, whose gradient does
not vanish far from the target. The target's forward pass is made once for each batch and serves
all.

What differs besides the target's states: all but the model of tokens read the target's embeddings.
EAGLE-3's have an output head of their own, which begins as the target's; the others take the
target's as it is. They learn from drafts after every fourth token, and the model of tokens at every
position. One learning rate serves all, and it was not searched for.

One line of the table for each draft, depth and kind of sequence, on held-out files at temperature
1:

- `alpha`: mean acceptance probability of draft token number `depth` of a step, at every position
  after the first `PROMPT` tokens, given the tokens before it; depth "all" is the mean over depths.
  The control's is the same at every depth
- `over_control`: difference to the control at the same positions
- `over_no_states`: difference to the head without states, which reads tokens alone: what the
  states add
- `over_penultimate`, `over_eagle3`: differences to the head on the last but one layer, and to
  EAGLE-3's

All with 95% intervals over files. `python -m studies.training.feature_drafts` saves the heads as
`data/pair/draft-eagle3` and `draft-next-token`, in the layout of `speculators`, and
`draft-recurrent` and `draft-parallel`.
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
from transformers import LlamaConfig, Qwen3Config

from specnb.distributions import overlap
from specnb.heads import Eagle3Head, NextTokenHead
from specnb.loading import TRAINED_PAIR, Pair, load_pair
from studies import corpus, study
from studies.drafters.heads import ParallelHeads, RecurrentHead, save_head
from studies.training import released_heads, training
from studies.training.chains import Chains, TrainedEagle3, TrainedNextToken, drafted
from studies.training.distillation import for_acceptance
from studies.training.evaluation import PROMPT, Files, held_out_windows, means, text_and_samples
from studies.training.training import CONTEXT, Learner, add_note, build, encode, folder_of, size_of, taken_over, windows

DEPTHS = 4  # draft tokens that a student learns to propose
EVERY = 4  # heads learn from a draft that begins at every fourth position
LAYERS = (5, 10, 15)  # whose states EAGLE-3's head reads: about a third, two thirds, and the last but one
# The fraction of the steps with forward KL; total variation takes over during as many more.
BEGIN = 5 / 32
FACTOR = 0.5  # of the learning rates of the first training
STEPS, ROWS, SEED, THREADS = 640, 16, 17, 2
EAGLE3, PENULTIMATE, NO_STATES, NEXT_TOKEN = "EAGLE-3", "penultimate layer", "without states", "next-token layer"
CONTROL, ALL = "of tokens", "all"
COMPARED = {  # with whom, by column
    "control": CONTROL, "no_states": NO_STATES, "penultimate": PENULTIMATE, "eagle3": EAGLE3,
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """`steps` updates on `rows` sequences of `length` tokens; `hidden` units in the heads' layers.

    Layers that attend have `wide` units. `compiled` needs a C++ compiler.
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

    `states` `(batch, length, layers * width)` are what `states_of` returns. Draft token k of a step
    follows the k - 1 before it, which here are those of the text. Heads draft after every `every`th
    token from the second on; a model of tokens, which has one depth, computes all positions.
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
        for at in drafted(every, DEPTHS):
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
            Part(output(features[:, : tokens[:, at].shape[1], depth]), at)
            for depth, at in enumerate(drafted(every, DEPTHS))
        ]


class Chained(Student):
    """A head that attends to the tokens so far, on the states `reads`: its own states stand in for
    those of the tokens drafted."""

    def __init__(self, pair: Pair, head: Eagle3Head | NextTokenHead, reads: slice) -> None:
        super().__init__(pair, head)
        embedding, output = self.frozen
        self.chains, self.reads = (Chains(head, embedding, DEPTHS),), reads
        self.output = (getattr(head, "lm_head", output),)

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        found = self.chains[0](tokens, states[..., self.reads], every)
        return [Part(self.output[0](features), at) for features, at in found]


class WithoutStates(Chained):
    """`Chained` that reads zeros for the target's states."""

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        return super().forward(tokens, torch.zeros_like(states), every)


class OfTokens(Student):
    """A model of the shape of the shipped draft, which reads tokens alone: the same at all depths,
    so one is learnt."""

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[Part]:
        return [Part(self.head(input_ids=tokens, use_cache=False).logits, slice(None))]


def eagle3(pair: Pair, plan: Plan, layers: tuple[int, ...]) -> TrainedEagle3:
    """A head with random weights and the target's output head."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": plan.wide, "tie_word_embeddings": False, "dtype": "bfloat16"}
    head = TrainedEagle3(LlamaConfig(**pair.target.config.to_dict() | sizes), layers, norm_before_residual=True)
    head.lm_head.load_state_dict(pair.target.get_output_embeddings().state_dict())
    begin(head.layers[0])
    return head


def next_token_layer(pair: Pair, plan: Plan) -> TrainedNextToken:
    """A layer of the target's sizes with random weights."""
    same = ("vocab_size", "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(pair.target.config, name) for name in (*same, "rms_norm_eps", "rope_parameters")}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": plan.wide, "max_position_embeddings": CONTEXT}
    head = TrainedNextToken(Qwen3Config(**sizes))
    begin(head.mtp_layers[0])
    return head


def begin(layer: Any) -> None:
    """The layer adds nothing yet."""
    nn.init.zeros_(layer.self_attn.o_proj.weight)
    nn.init.zeros_(layer.mlp.down_proj.weight)


def students_of(pair: Pair, plan: Plan) -> dict[str, Student]:
    """The students of `plan` by name, as they are before the training."""
    width = pair.target.config.hidden_size
    first, last = slice(len(LAYERS) * width), slice(len(LAYERS) * width, None)
    penultimate = slice((len(LAYERS) - 1) * width, len(LAYERS) * width)
    torch.manual_seed(SEED)
    return {
        EAGLE3: Chained(pair, eagle3(pair, plan, LAYERS), first),
        PENULTIMATE: Chained(pair, eagle3(pair, plan, LAYERS[-1:]), penultimate),
        NO_STATES: WithoutStates(pair, eagle3(pair, plan, LAYERS), first),
        NEXT_TOKEN: Chained(pair, next_token_layer(pair, plan), last),
        "recurrent": Recurrent(pair, RecurrentHead(width, plan.hidden)),
        "parallel": Parallel(pair, ParallelHeads(width, plan.hidden, DEPTHS)),
        CONTROL: OfTokens(pair, build("draft", pair.tokenizer.eos_token_id)),
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
    """The states of `LAYERS` and the last, concatenated, of what transformers returns as
    `hidden_states`."""
    return torch.cat([hidden_states[layer] for layer in (*LAYERS, -1)], dim=-1)


def trained(pair: Pair, plan: Plan) -> dict[str, Student]:
    """The students of `plan`, in evaluation mode; what was done before is not done again."""
    torch.set_num_threads(THREADS)
    pair.target.requires_grad_(False)
    students = students_of(pair, plan)
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
    training.train(learners, batches, plan.steps, losses, folder_of("features", plan))
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


def lines(found: Mapping[str, Tensor], numbers: Files) -> pd.DataFrame:
    """A line for each draft and depth, with alpha and its differences to others; `numbers` `(n,)`
    are the files of the sequences."""
    depths = {ALL: slice(None)} | {str(k + 1): slice(k, k + 1) for k in range(DEPTHS)}
    made = []
    for name, beta in found.items():
        others = {f"over_{column}": beta - found[other] for column, other in COMPARED.items()}
        for depth, at in depths.items():
            quantities = {column: each[at].mean(0) for column, each in {"alpha": beta, **others}.items()}
            made.append({"draft": name, "depth": depth} | means(quantities, numbers))
    return pd.DataFrame(made)


def measure(
    item: str, plan: Mapping[str, Any], per_file: int, sampled_per_file: int, files: int | None = None
) -> pd.DataFrame:
    """Trains the students and measures them."""
    chosen, pair = Plan(**plan), load_pair()
    students = trained(pair, chosen)
    text, prompts = (held_out_windows(pair, chosen.length + 1, each, files) for each in (per_file, sampled_per_file))
    parts = []
    for along, sequences, of in text_and_samples(pair.target, text, prompts, 1.0, SEED):
        parts.append(lines(betas(pair.target, students, sequences), of).assign(along=along))
    table = pd.concat(parts, ignore_index=True)
    sizes = {name: size_of(student) for name, student in students.items()}
    tokens = chosen.steps * chosen.rows * chosen.length
    return table.assign(target="shipped", parameters=table.draft.map(sizes), steps=chosen.steps, tokens=tokens)


STUDY = study.Study(
    measure,
    settings={"plan": {"steps": STEPS, "rows": ROWS, "compiled": True}, "per_file": 4, "sampled_per_file": 2},
    small={
        "plan": {"steps": 2, "rows": 2, "length": 40, "hidden": 8, "wide": 8, "compiled": False},
        "per_file": 1, "sampled_per_file": 1, "files": 9,
    },
)  # fmt: skip


def ship(plan: Plan, folder: Path = TRAINED_PAIR) -> list[Path]:
    """Saves the heads beside the pair; returns their folders."""
    pair = load_pair()
    students = trained(pair, plan)
    shipped = {"eagle3": EAGLE3, "next-token": NEXT_TOKEN, "recurrent": "recurrent", "parallel": "parallel"}
    for name, student in ((name, students[of]) for name, of in shipped.items()):
        head, place = student.head, folder / f"draft-{name}"
        if isinstance(head, Eagle3Head | NextTokenHead):
            released_heads.save_head(head.bfloat16(), place, pair.target, name="data/pair/target", gamma=DEPTHS)
        else:
            save_head(head, place)
        note = {"of": "data/pair/target", "from": "random weights", "objective": "forward KL, then total variation"}
        sizes = {"steps": plan.steps, "tokens": plan.steps * plan.rows * plan.length, "seed": SEED}
        add_note(place, note | sizes | {"parameters": size_of(student)})
    return [folder / f"draft-{name}" for name in shipped]


if __name__ == "__main__":
    print("saved:", *ship(Plan(**STUDY.settings["plan"])))
