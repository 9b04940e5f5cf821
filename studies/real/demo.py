"""`make demo`: a real model answers two questions, plain and with speculation; both are seen and timed.

The drafter copies from the text; if nothing can be copied, a trained head drafts.
Both answers repeat parts of their prompts, of two kinds of data/workloads.jsonl, which has others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling
from specnb.drafters import Context, Proposal
from specnb.heads import FallbackDrafter
from specnb.record import Generation, now
from specnb.sampler import Sampler
from specnb.statistics import Job, measured_on, ratio_of_medians, time_round
from studies.real.smollm2 import as_chat, head_drafter, model_and_tokenizer, texts_of

QUESTIONS = {"An edited function": ("edit", 8), "A quotation": ("quotation", 11)}  # kinds and numbers of prompts
WAYS = ("plain", "speculative")
DTYPES = ("float32", "bfloat16")
ABOUT = (
    "SmolLM2-135M-Instruct answers two questions whose answers repeat parts of them, which favours copying. Both ways "
    "decode with a default Sampler, in the dtype that is fastest here. (The first time, 93 MB are fetched.)"
)
# How a terminal shows a token: copied from the text, drafted by the head, sampled by the target.
COLOURS = {"copied": "\033[32m", "drafted": "\033[36m", "own": ""}
PLAIN = "\033[0m"


def colours() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


class Copies(PromptLookupDrafter):
    """Remembers whether the newest draft was copied."""

    copied = False

    def propose(self, context: Context, uniforms: Any) -> Proposal:
        proposal = super().propose(context, uniforms)
        self.copied = bool((proposal.draft_tokens[:, :1] >= 0).any())
        return proposal


class Writer:
    """Prints an answer token by token, each in the colour of its kind if the output is a terminal."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.colours = tokenizer, colours()
        self.tokens, self.text = list[int](), ""

    def write(self, tokens: Iterable[int], kinds: Iterable[str]) -> None:
        for token, kind in zip(tokens, kinds, strict=True):
            self.tokens.append(token)
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # a part of a character
                piece, self.text = text[len(self.text) :], text
                coloured = self.colours and COLOURS[kind]
                print(f"{COLOURS[kind]}{piece}{PLAIN}" if coloured else piece, end="", flush=True)


def run(new_tokens: int = 64, rounds: int = 3) -> None:
    """Prints the answers at temperature 0 as they are written, and how much faster speculation made them."""
    _, tokenizer = model_and_tokenizer(DTYPES[0])
    questions = {title: texts_of(kind)[number] for title, (kind, number) in QUESTIONS.items()}
    prompts = {title: as_chat(tokenizer, question) for title, question in questions.items()}
    slots = max(map(len, prompts.values())) + new_tokens + 16  # the last for the draft tokens of a step
    how: dict[str, Any] = {"rows": 1, "slots": slots, "progress": False}
    plain = fastest(next(iter(prompts.values())), min(new_tokens, 16), sampling=Sampling(temperature=0), **how)
    target = plain.target
    copies, head = Copies(target.config.vocab_size, shortest=2), head_drafter(target, plain.sampling, most=2)
    speculative = Sampler(target, FallbackDrafter(copies, head, 10), sampling=plain.sampling, **how)
    speculative.generate(next(iter(prompts.values())), max_new_tokens=1)  # makes the batch
    kinds = {"plain": lambda: "own", "speculative": lambda: "copied" if copies.copied else "drafted"}
    if colours():
        print(f"Tokens are {COLOURS['copied']}copied{PLAIN}, {COLOURS['drafted']}drafted{PLAIN}, or the target's own.")
    for title, prompt in prompts.items():
        print(f"\n{title}: {questions[title]}")
        calls = {
            way: partial(sampler.generate, [prompt], max_new_tokens=new_tokens, eos=tokenizer.eos_token_id)
            for way, sampler in zip(WAYS, (plain, speculative), strict=True)
        }
        made = {}
        for way, sampler in zip(WAYS, (plain, speculative), strict=True):
            print(f"\n{way}:")
            with watched(sampler, Writer(tokenizer), kinds[way]):
                made[way] = calls[way]()
            print()
        clock, order = partial(now, target.device), np.random.default_rng(0)
        seconds = [time_round([Job(calls[way]) for way in WAYS], clock, order) for _ in range(rounds)]
        print(f"\n{comparison(made, np.stack(seconds))}")
    print(f"\nMedians of {rounds} rounds, {measured_on(target.dtype)}")


def fastest(prompt: list[int], tokens: int, **how: Any) -> Sampler:
    """The sampler without a draft in the dtype in which it is fastest here."""
    samplers = {dtype: Sampler(model_and_tokenizer(dtype)[0], None, **how) for dtype in DTYPES}
    jobs = [Job(partial(sampler.generate, [prompt], max_new_tokens=tokens)) for sampler in samplers.values()]
    clock, order = partial(now, torch.device("cpu")), np.random.default_rng(0)
    _, *seconds = (time_round(jobs, clock, order) for _ in range(4))  # the first makes the batch
    medians = np.median(seconds, axis=0)
    speeds = ", ".join(f"{dtype} {tokens / median:.1f}" for dtype, median in zip(DTYPES, medians, strict=True))
    print(f"Plain decoding, tokens per second: {speeds}")
    return samplers[DTYPES[int(medians.argmin())]]


@contextmanager
def watched(sampler: Sampler, writer: Writer, kind: Callable[[], str]) -> Iterator[None]:
    """Writes the tokens of the only row as each step ends; `kind` says what was drafted in it."""
    batch: Any = sampler.batch
    step, state = batch.step, batch.state

    def shown(*given: Any) -> None:
        before, going = int(state.lengths[0]), bool(state.remaining[0])
        step(*given)
        if going:
            tokens = state.tokens[0, before : int(state.lengths[0])].tolist()
            accepted = int(state.record[0, int(state.steps[0]) - 1, state.gamma])
            writer.write(tokens, [kind() if at < accepted else "own" for at in range(len(tokens))])

    batch.step = shown
    try:
        yield
    finally:
        del batch.step  # the method is seen again


def comparison(made: dict[str, Generation], seconds: np.ndarray) -> str:
    """Lines about speed: each of `WAYS`, and the ratio with its interval over rounds."""
    per_token = seconds / [len(made[way].tokens[0]) for way in WAYS]
    lines = [
        f"{way:12} {1 / median:6.1f} tokens/s {made[way].record.tokens_per_step:6.2f} tokens/step"
        for way, median in zip(WAYS, np.median(per_token, axis=0), strict=True)
    ]
    same = "the same as" if made["plain"].tokens == made["speculative"].tokens else "by rounding not those of"
    ratio = ratio_of_medians(*per_token.T)
    return "\n".join([*lines, f"{ratio} times as fast as plain decoding; the tokens are {same} plain decoding"])


if __name__ == "__main__":
    print(ABOUT)
    run()
