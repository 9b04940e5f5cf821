"""`make demo`: a real model answers two questions, plain and with speculation, and both are timed.

Copies from the text are drafted, and where nothing is to be copied, the tokens of a trained head.
Both answers repeat parts of their prompts, of two kinds of data/workloads.jsonl, which has others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling
from specnb.heads import FallbackDrafter
from specnb.record import Generation
from specnb.sampler import generate
from specnb.statistics import measured_on, ratio_of_medians
from studies.real.smollm2 import as_chat, head_drafter, model_and_tokenizer, texts_of
from studies.study import timed_in_turn

QUESTIONS = {"An edited function": ("edit", 8), "A quotation": ("quotation", 11)}  # kinds and numbers of prompts
WAYS = ("plain", "speculative")
ABOUT = (
    "SmolLM2-135M-Instruct answers two questions whose answers repeat parts of them, which favours copying; the "
    "baseline is plain decoding, not compiled. About a minute on two cores, the first time two (it fetches 93 MB)."
)


def run(new_tokens: int = 64, rounds: int = 3) -> None:
    """Prints the answers at temperature 0, and how much faster speculation made them."""
    target, tokenizer = model_and_tokenizer("float32")
    for title, (kind, number) in QUESTIONS.items():
        question = texts_of(kind)[number]
        made, seconds = timed(target, as_chat(tokenizer, question), tokenizer.eos_token_id, new_tokens, rounds)
        answer = tokenizer.decode(made["speculative"].tokens[0], skip_special_tokens=True)
        print(f"{title}: {question}\n\n{answer}\n\n{comparison(made, seconds)}\n")
    print(f"Medians of {rounds} rounds, {measured_on(target.dtype)}")


def timed(
    target: Any, prompt: list[int], eos: int, new_tokens: int, rounds: int
) -> tuple[dict[str, Generation], np.ndarray]:
    """What each of `WAYS` generated, and seconds `(rounds, ways)`, measured in turn."""
    sampling, made = Sampling(temperature=0), dict[str, Generation]()
    copies, head = PromptLookupDrafter(target.config.vocab_size, shortest=2), head_drafter(target, sampling, most=2)
    drafts = dict(zip(WAYS, (None, FallbackDrafter(copies, head, 10)), strict=True))

    def call(way: str, prompt: list[int], _: int) -> None:
        made[way] = generate(
            target, [prompt], drafts[way], max_new_tokens=new_tokens, sampling=sampling, eos=eos, progress=False
        )

    return made, timed_in_turn(call, WAYS, [prompt] * rounds)


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
