"""Trains a T5 target and drafts of four sizes, `data/t5`:
`python -m studies.training.encoder_decoder`.

Both tasks are made of functions in the corpus, with the tokenizer of the shipped pair:

    summary  a function without its docstring; the answer is the first line of that, short and open
    whole    a function with a hole in place of some lines; the answer is the whole function, long
             and mostly a copy

All models see the same batches. The target learns from the text, the drafts from the target's
distributions along it: from their forward KL at first, and more and more from their total
variation, the probability of a rejection. Every few minutes everything is saved below
`build/training`, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import ast
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from specnb.loading import TRAINED_PAIR
from studies import corpus
from studies.corpus import DATA
from studies.training import training
from studies.training.distillation import for_acceptance
from studies.training.training import Learner, add_note, folder_of, size_of

TARGET, TASKS = "target", ("summary", "whole")
Shape = tuple[int, int, int, int, int]
"""Width, feed-forward, heads, layers of the encoder and of the decoder."""
SHAPES: dict[str, Shape] = {
    TARGET: (160, 320, 5, 4, 8), "large": (112, 224, 4, 1, 2), "base": (40, 80, 2, 1, 1), "small": (12, 24, 1, 1, 1),
    "tiny": (3, 6, 1, 1, 1),
}  # fmt: skip
HOLE = "<hole>\n"
LONGEST_PROMPT, LONGEST_ANSWER = 192, 144  # tokens
POOL = 16  # so many batches are made at a time, each of examples of similar length
# Of the learning rates of the shipped pair, which divides its attention scores by a root.
FACTOR = 0.5
SEED, BATCH, STEPS = 0, 32, 2_400
Example = tuple[list[int], list[int]]
"""A prompt, the encoder's input, and the answer, which ends with the end-of-text token."""


def shared_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the shipped pair, which all models share."""
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TRAINED_PAIR / "target")
    return found


def functions(text: str) -> Iterator[tuple[str, str]]:
    r"""Of each function with a docstring in a source file: its code without that, and the first
    line of that.

    >>> list(functions('def one():\n    "The first."\n    return 1\n'))
    [('def one():\n    return 1\n', 'The first.')]
    """
    lines = text.splitlines(keepends=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on escapes in other people's strings
        nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and (documented := ast.get_docstring(node)):
            code = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[node.body[0].end_lineno : node.end_lineno]
            yield textwrap.dedent("".join(code)), documented.splitlines()[0]


def with_hole(code: str, generator: np.random.Generator) -> str:
    """`code` with `HOLE` in place of up to a third of its lines, the first aside."""
    lines = code.splitlines(keepends=True)
    begin, count = generator.integers(1, len(lines)), generator.integers(1, len(lines) // 3 + 2)
    return "".join([*lines[:begin], HOLE, *lines[begin + count :]])


def examples(tokenizer: PreTrainedTokenizerBase, split: str, task: str, limit: int | None = None) -> list[Example]:
    """`task`, one of `TASKS`, for each function of (`limit`) files of `split` that is not too long
    for it."""
    generator, found = np.random.default_rng(SEED), []
    for code, summary in (each for text in corpus.read(split, limit) for each in functions(text)):
        given, answer = (code, summary) if task == "summary" else (with_hole(code, generator), code)
        prompt, tokens = (tokenizer.encode(part, add_special_tokens=False) for part in (f"{task} {given}", answer))
        if len(prompt) <= LONGEST_PROMPT and len(tokens) < LONGEST_ANSWER:
            found.append((prompt, [*tokens, tokenizer.eos_token_id]))
    return found


def batches(given: Sequence[Example], size: int) -> Iterator[dict[str, Tensor]]:
    """Endless batches, as arguments of a T5's forward pass: every epoch in a new order. No token
    has the label -100."""
    generator = np.random.default_rng(SEED)
    while True:
        order = generator.permutation(len(given))
        for pool in (order[at : at + POOL * size] for at in range(0, len(order), POOL * size)):
            near = sorted(pool.tolist(), key=lambda at: (len(given[at][1]), len(given[at][0])))
            for begin in (generator.permutation(len(near) // size) * size).tolist():
                yield padded([given[at] for at in near[begin : begin + size]])


def padded(some: Sequence[Example]) -> dict[str, Tensor]:
    """Examples as arguments of a T5's forward pass, padded to the longest; no token has the label
    -100."""
    rows = [[torch.tensor(part) for part in parts] for parts in zip(*some, strict=True)]
    prompts, labels = (pad_sequence(part, batch_first=True, padding_value=-100) for part in rows)
    return {"input_ids": prompts.clamp_min(0), "attention_mask": (prompts >= 0).long(), "labels": labels}


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Logits `(tokens, vocab)` for all tokens of the answers in `batch`, row after row."""
    begun = {"decoder_input_ids": model._shift_right(batch["labels"])}
    logits: Tensor = model(**{name: batch[name] for name in ("input_ids", "attention_mask")} | begun).logits
    return logits[batch["labels"] >= 0]


def build(shape: Shape, end: int, vocab: int = training.VOCABULARY) -> T5ForConditionalGeneration:
    """A freshly initialised T5 1.1 with tied embeddings, whose decoder begins with the end-of-text
    token."""
    width, feed_forward, heads, encoder, decoder = shape
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=vocab, d_model=width, d_ff=feed_forward, num_heads=heads, d_kv=width // heads, num_layers=encoder,
        num_decoder_layers=decoder, feed_forward_proj="gated-silu", dropout_rate=0.0, tie_word_embeddings=True,  # type: ignore[call-arg]
        pad_token_id=end, eos_token_id=end, decoder_start_token_id=end,
    ))  # fmt: skip
    model.shared.weight.data *= 0.05  # small, so that what the layers add counts from the beginning
    # T5 divides by it, which would slow the embeddings.
    model.decoder.final_layer_norm.weight.data *= width**0.5
    return model


def trained(
    shapes: dict[str, Shape], given: Sequence[Example], steps: int, size: int, folder: Path | None = None,
    vocab: int = training.VOCABULARY,
) -> dict[str, Any]:  # fmt: skip
    """Models of `shapes`, the target first, trained on `steps` batches of `size` examples, from
    what `folder` has."""
    torch.manual_seed(SEED)
    end = given[0][1][-1]
    learners = {name: Learner(build(shape, end, vocab), FACTOR) for name, shape in shapes.items()}

    def losses(step: int, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        labels, share = batch["labels"][batch["labels"] >= 0], step / steps
        for name, learner in learners.items():
            logits = logits_of(learner.model, batch)
            if name == TARGET:
                log_p = log_softmax(logits.detach(), dim=-1)
                yield name, cross_entropy(logits, labels)
            else:
                yield name, for_acceptance(logits, log_p, share)

    training.train(learners, batches(given, size), steps, losses, folder)
    return {name: learner.model for name, learner in learners.items()}


def main() -> None:
    """Trains all models and writes them, in bfloat16."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps, tokenizer = parser.parse_args().steps, shared_tokenizer()
    given = [one for task in TASKS for one in examples(tokenizer, "train", task)]
    note = {"seed": SEED, "steps": steps, "batch": BATCH, "examples": len(given)}
    for name, model in trained(SHAPES, given, steps, BATCH, folder_of("t5", SHAPES)).items():
        model.bfloat16().save_pretrained(DATA / "t5" / name)
        add_note(DATA / "t5" / name, note | {"parameters": size_of(model)})


if __name__ == "__main__":
    main()
