"""Trains a T5 target of 8 million weights and drafts of three sizes: `python -m studies.training.encoder_decoder`.

Both tasks are made of functions in the corpus, with the tokenizer of the shipped pair:

    summary  a function without its docstring; the answer is the first line of that, short and open
    whole    a function with a hole in place of some lines; the answer is the whole function, long and mostly a copy

All models learn from the same batches, the drafts from the text and not from the target. Every few minutes everything
is saved in `--folder`, and the same command goes on from there. In the end the models lie beside it, in bfloat16.
"""

from __future__ import annotations

import argparse
import ast
import math
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from specnb.models.loading import TRAINED_PAIR
from specnb.notebook.findings import ROOT
from studies import corpus
from studies.training.training import Learner, rate, save, size_of, train

SHAPES = {  # width, feed-forward, heads, layers of the encoder and of the decoder
    "target": (256, 640, 4, 4, 4), "draft-1m": (128, 320, 2, 1, 1), "draft-250k": (48, 96, 2, 1, 1),
    "draft-50k": (12, 24, 1, 1, 1),
}  # fmt: skip
HOLE = "<hole>\n"
LONGEST_PROMPT, LONGEST_ANSWER = 256, 192  # tokens
POOL = 16  # so many batches are made at a time, each of examples of similar length
FACTOR = 0.5  # of the learning rates of the shipped pair, which divides its attention scores by a root
SAVE_EVERY, SEED, BATCH, STEPS = 50, 0, 32, 4_000
Example = tuple[list[int], list[int]]
"""A prompt, the encoder's input, and the answer, which ends with the end-of-text token."""


def functions(text: str) -> Iterator[tuple[str, str]]:
    r"""Of each function with a docstring in a source file: its code without that, and the first line of that.

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
    """`task`, "summary" or "whole", for each function of (`limit`) files of `split` that is not too long for it."""
    generator, found = np.random.default_rng(SEED), []
    for code, summary in (each for text in corpus.read(split, limit) for each in functions(text)):
        given, answer = (code, summary) if task == "summary" else (with_hole(code, generator), code)
        prompt, tokens = (tokenizer.encode(part, add_special_tokens=False) for part in (f"{task} {given}", answer))
        if len(prompt) <= LONGEST_PROMPT and len(tokens) < LONGEST_ANSWER:
            found.append((prompt, [*tokens, tokenizer.eos_token_id]))
    return found


def batches(given: Sequence[Example], size: int) -> Iterator[dict[str, Tensor]]:
    """Endless batches, as arguments of a T5's forward pass: every epoch in a new order. No token has the label -100."""
    generator = np.random.default_rng(SEED)
    while True:
        order = generator.permutation(len(given))
        for pool in (order[at : at + POOL * size] for at in range(0, len(order), POOL * size)):
            near = sorted(pool.tolist(), key=lambda at: (len(given[at][1]), len(given[at][0])))
            for begin in (generator.permutation(len(near) // size) * size).tolist():
                both = zip(*(given[at] for at in near[begin : begin + size]), strict=True)
                tensors = [[torch.tensor(row) for row in rows] for rows in both]
                prompts, labels = (pad_sequence(rows, batch_first=True, padding_value=-100) for rows in tensors)
                yield {"input_ids": prompts.clamp_min(0), "attention_mask": (prompts >= 0).long(), "labels": labels}


def build(shape: tuple[int, ...], end: int) -> T5ForConditionalGeneration:
    """A freshly initialised T5 1.1 with tied embeddings, whose decoder begins with the end-of-text token."""
    width, feed_forward, heads, encoder, decoder = shape
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=4096, d_model=width, d_ff=feed_forward, num_heads=heads, d_kv=width // heads, num_layers=encoder,
        num_decoder_layers=decoder, feed_forward_proj="gated-gelu", dropout_rate=0.0, tie_word_embeddings=True,
        **dict.fromkeys(("pad_token_id", "eos_token_id", "decoder_start_token_id"), end),
    ))  # fmt: skip
    model.shared.weight.data *= 0.1  # small, so that what the layers add counts from the beginning
    return model


def main() -> None:
    """Trains all models and writes them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "training" / "t5")
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(TRAINED_PAIR / "target")
    given = [one for task in ("summary", "whole") for one in examples(tokenizer, "train", task)]
    torch.manual_seed(SEED)
    learners = {name: Learner(build(shape, tokenizer.eos_token_id), FACTOR) for name, shape in SHAPES.items()}
    began, recent = time.time(), list[list[float]]()

    def update(step: int, batch: dict[str, Tensor]) -> dict[str, float]:
        part = rate(step, asked.steps)
        bits = {of: one.learn(one.model(**batch).loss, part) / math.log(2) for of, one in learners.items()}
        recent.append(list(bits.values()))
        if (step + 1) % SAVE_EVERY == 0:
            means = dict(zip(bits, np.mean(recent[-SAVE_EVERY:], axis=0).round(3).tolist(), strict=True))
            print(f"step {step + 1}, {time.time() - began:.0f} s, bits per token: {means}", flush=True)
        return bits

    train(learners, batches(given, BATCH), asked.steps, update, asked.folder, SAVE_EVERY)
    for name, learner in learners.items():
        note = {"seed": SEED, "steps": asked.steps, "batch": BATCH, "parameters": size_of(learner.model)}
        save(learner.model, tokenizer, asked.folder / name, note)


if __name__ == "__main__":
    main()
