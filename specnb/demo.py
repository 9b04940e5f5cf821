"""`specnb demo`: a real model answers two questions, with and without speculation, and the times are compared."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import AutoTokenizer

from specnb.decoding.generate import Generation, generate
from specnb.decoding.record import now
from specnb.distributions import Sampling
from specnb.drafting.ngram import PromptLookupDrafter
from specnb.measure.timing import Job, measured_on, time_round
from specnb.models.loading import load_model
from specnb.models.real_model import REAL, smollm2

CODE = """
def add_up(values):
    x = 0
    for value in values:
        if value is not None:
            x = x + value
    return x
"""
QUESTIONS = {
    "An answer that repeats the prompt": f"Rename the variable x to total in this function:\n\n```python{CODE}```",
    "An answer in the model's own words": "Why does the sky look blue during the day and red at sunset?",
}


def run(new_tokens: int = 64, rounds: int = 3, questions: dict[str, str] = QUESTIONS) -> int:
    """Prints the answers of SmolLM2-135M at temperature 0, and how much faster drafts copied from the text made them.

    The model is fetched the first time (93 MB). Returns 0. Raises what `smollm2` raises.
    """
    target, tokenizer = load_model(REAL), AutoTokenizer.from_pretrained(smollm2())
    drafters, order = (None, PromptLookupDrafter(target.config.vocab_size)), np.random.default_rng(0)
    made: dict[int, Generation] = {}

    def answer(way: int, prompt: list[int]) -> None:
        made[way] = generate(
            target, [prompt], drafters[way], max_new_tokens=new_tokens, sampling=Sampling(temperature=0),
            eos=tokenizer.eos_token_id, progress=False,
        )  # fmt: skip

    for kind, question in questions.items():
        turn = [{"role": "user", "content": question}]
        prompt: Any = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        jobs, clock = [Job(partial(answer, way, prompt)) for way in (0, 1)], partial(now, target.device)
        bar = tqdm(range(rounds + 1), desc=kind, leave=False)  # the first round warms up
        seconds = np.stack([time_round(jobs, clock, order) for _ in bar])[1:]
        plain, drafted = (len(made[way].tokens[0]) / np.median(seconds[:, way]) for way in (0, 1))
        same = "the same as" if made[0].tokens == made[1].tokens else "by rounding not those of"
        print(f"{kind}: {question}\n\n{tokenizer.decode(made[1].tokens[0], skip_special_tokens=True)}\n")
        print(f"{drafted / plain:.2f} times as fast as plain decoding: {drafted:.0f} tokens/s instead of {plain:.0f},")
        print(f"{made[1].record.tokens_per_step:.2f} tokens per step; the tokens are {same} plain decoding\n")
    print(f"Medians of {rounds} rounds; {measured_on(target.dtype)}")
    return 0
