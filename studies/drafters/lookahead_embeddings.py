"""Look-ahead embeddings: trained vectors that let the target draft for itself, with no other
weight.

`count` vectors stand for the tokens that are not known yet. Appended to a text they are evaluated
like tokens; what the target says after the k-th is the distribution of the token k + 1 places after
the text. The target stays as it is.

PaSS (Monea et al., arXiv:2311.13581) makes two passes in a step: one over the text and the vectors,
which samples the target's next token and drafts `count` more, and one that verifies them (notebook
09). `FusedDrafter` has the schedule of BiTA (Lin et al., arXiv:2401.12522): one pass, over the
newest token, the draft tokens and, after each of these, all vectors, because the step may end
there. After the last accepted token they give q of the next step, which so depends on the sequence
without its newest token.

`python -m studies.drafters.lookahead_embeddings` trains the vectors that ship in
`data/pair/lookahead`.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb.cache import additive_mask
from specnb.distributions import Sampling, sample, standardise
from specnb.drafters import Context, Proposal
from specnb.loading import TRAINED_PAIR, load_pair
from specnb.rules import Outcome
from specnb.trees import TokenTree, chain
from studies import corpus
from studies.drafters.early_exit import shallow
from studies.drafters.one_pass import OnePassDrafter
from studies.files import WEIGHTS
from studies.training import training
from studies.training.distillation import for_acceptance
from studies.training.training import Learner, add_note, encode, taken_over, windows

FOLDER = TRAINED_PAIR / "lookahead"
COUNT, STEPS, ROWS, LENGTH, EVERY, RATE, BEGIN, SEED = 3, 400, 4, 128, 4, 0.02, 0.1, 15


class Extended(nn.Module):
    """`embedding` for tokens of its vocabulary, and `vectors` `(count, width)` for the ids after
    them."""

    def __init__(self, embedding: nn.Embedding, vectors: Tensor) -> None:
        super().__init__()
        self.embedding, self.vectors = embedding, nn.Parameter(vectors)

    def forward(self, tokens: Tensor) -> Tensor:
        vocab = len(self.embedding.weight)
        own = self.vectors[(tokens - vocab).clamp(0, len(self.vectors) - 1)]
        return own.where((tokens >= vocab)[..., None], self.embedding(tokens.clamp_max(vocab - 1)))


def extended(target: PreTrainedModel, vectors: Tensor) -> PreTrainedModel:
    """`target` with `vectors` `(count, width)` for the token ids from `vocab` on; all other weights
    are shared.

    Raises `ValueError` for vectors of another width.
    """
    embedding = cast(nn.Embedding, target.get_input_embeddings())
    if vectors.shape[1:] != embedding.weight.shape[1:]:
        raise ValueError(
            f"the vectors have the shape {tuple(vectors.shape)}, and the target the width {embedding.weight.shape[1]}; "
            "give those that were trained for this target"
        )
    model, body = shallow(target), shallow(cast(PreTrainedModel, target.base_model))
    model._modules[target.base_model_prefix] = body
    model.set_input_embeddings(Extended(embedding, vectors.to(target.dtype)))
    return model


class FusedDrafter(OnePassDrafter):
    """Draft tokens from the `count` vectors of an `extended` target, for `generate` with
    `instruments=ONE_PASS`.

    gamma is `count`, and a pass evaluates (count + 1)^2 tokens. The first step of a sequence drafts
    nothing.

    >>> FusedDrafter(vocab=9, count=2).extra_parents
    (-1, 2, 0, 4, 1, 6)
    """

    def __init__(self, vocab: int, count: int, sampling: Sampling = Sampling()) -> None:
        self.vocab, self.count, self.sampling = vocab, count, sampling
        self.parents = chain(count)
        self.extra_parents = vectors_after(range(-1, count), count, count)

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        if rows is None:
            self.q = torch.zeros(len(context.lengths), self.count, self.vocab, device=context.tokens.device)
        else:
            self.q[rows] = 0.0

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return Proposal(sample(self.q, uniforms).where(self.q.sum(dim=-1) > 0, -1), self.q)

    def extra_tokens(self, context: Context) -> Tensor:
        ids = self.vocab + torch.arange(self.count, device=context.tokens.device)
        return ids.repeat(self.count + 1).expand(len(context.tokens), -1)

    def read(self, logits: Tensor) -> None:
        self.logits = logits.unflatten(1, (self.count + 1, self.count))

    def update(self, context: Context, outcome: Outcome) -> None:
        """The vectors after the last accepted token are those of the next step."""
        after = self.logits.take_along_dim(outcome.accepted[:, None, None, None], dim=1)[:, 0]
        self.q = standardise(after, self.sampling, check=False)


def vectors_after(nodes: range, count: int, first: int) -> tuple[int, ...]:
    """The parents of `count` vectors after each of `nodes`; the vectors are numbered from `first`
    on."""
    starts = range(first, first + len(nodes) * count, count)
    return tuple(
        node if at == 0 else start + at - 1 for node, start in zip(nodes, starts, strict=True) for at in range(count)
    )


@cache
def training_tree(length: int, count: int) -> tuple[list[int], Tensor, Tensor]:
    """A text of `length` tokens, with `count` vectors after every `EVERY`th: which tokens have
    them, depths, mask."""
    after = range(EVERY - 1, length - count - 1, EVERY)
    nodes = range(after.start - 1, after.stop - 1, EVERY)  # the first token is the root
    tree = TokenTree((*chain(length - 1), *vectors_after(nodes, count, length - 1)))
    return [*after], tree.depths[None], additive_mask(tree.ancestors[None], torch.float32)


def losses(target: Any, tokens: Tensor, share: float) -> Tensor:
    """The objective of each vector `(count,)`: `share` of it total variation, the rest forward KL,
    as for the heads.

    Vectors follow some of `tokens` `(rows, length)`, all in one pass; what they say of a token is
    compared with what the target says of it with all tokens before it known.
    """
    (rows, length), vocab = tokens.shape, target.config.vocab_size
    count = len(target.get_input_embeddings().vectors)
    after, positions, mask = training_tree(length, count)
    ids = vocab + torch.arange(count).repeat(len(after)).expand(rows, -1)
    logits = target(
        input_ids=torch.cat([tokens, ids], dim=1), position_ids=positions.expand(rows, -1), attention_mask=mask,
        use_cache=False,
    ).logits  # fmt: skip
    log_p = torch.log_softmax(logits[:, :length].detach(), dim=-1)
    each = []
    for ahead, q in enumerate(logits[:, length:].unflatten(1, (len(after), count)).unbind(dim=2), start=1):
        p = log_p[:, torch.tensor(after) + ahead]
        each.append(for_acceptance(q, p, share))
    return torch.stack(each)


def train(target: PreTrainedModel, batches: Any, count: int, steps: int) -> Tensor:
    """The vectors `(count, width)` after `steps` of `batches`, which begin as the mean of the
    target's embeddings."""
    target.requires_grad_(False)
    mean = cast(nn.Embedding, target.get_input_embeddings()).weight.mean(dim=0)
    model: Any = extended(target, mean.expand(count, -1).clone())
    vectors = model.get_input_embeddings().vectors
    learner = Learner(model, 1.0, torch.optim.AdamW([vectors], lr=RATE, weight_decay=0.0), longest=math.inf)

    def mean_loss(step: int, tokens: Tensor) -> list[tuple[str, Tensor]]:
        return [("vectors", losses(model, tokens, taken_over(step, steps, BEGIN)).mean())]

    training.train({"vectors": learner}, batches, steps, mean_loss)
    return vectors.detach()  # type: ignore[no-any-return]


def load_vectors(folder: Path = FOLDER) -> Tensor:
    """The vectors `(count, width)` of the shipped target, in float32."""
    return load_file(folder / WEIGHTS)["vectors"].float()


def main() -> None:
    """Trains the vectors of the shipped target and writes them with a note."""
    pair = load_pair()
    text = encode(pair.tokenizer, corpus.read("train"))
    vectors = train(pair.target, windows(text, ROWS, LENGTH - 1, SEED), COUNT, STEPS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file({"vectors": vectors.bfloat16()}, FOLDER / WEIGHTS)
    note = {"of": "data/pair/target", "from": "the mean embedding", "objective": "total variation", "steps": STEPS}
    add_note(FOLDER, note | {"tokens": STEPS * ROWS * LENGTH, "seed": SEED, "parameters": vectors.numel()})


if __name__ == "__main__":
    main()
