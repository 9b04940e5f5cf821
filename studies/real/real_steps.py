"""The steps of completions of the real model by prompt lookup, as text: two that are copied, one
that is not.

One line a step: the draft tokens accepted, the first one rejected, those after it, and the target's
own token; and `tests`, the p and the uniform of each draft token that was tested (q is 1). Lists
are JSON. In float32, so that the text depends less on the processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

import specnb
from specnb.distributions import draw_uniforms
from studies.real.smollm2 import model_and_tokenizer, prompts_of
from studies.real.step_view import step_views
from studies.study import Study


def steps(item: str, gamma: int, new_tokens: int, prompt: int) -> Iterator[dict[str, Any]]:
    """The steps of the answer to prompt number `prompt` of a kind of text, at a temperature."""
    kind, temperature = item.rsplit("-", 1)
    target, tokenizer = model_and_tokenizer("float32")
    asked = prompts_of(tokenizer, kind, prompt + 1)[prompt:]
    made = specnb.generate(
        target, asked, specnb.PromptLookupDrafter(target.config.vocab_size), gamma=gamma, max_new_tokens=new_tokens,
        sampling=specnb.Sampling(float(temperature)), eos=tokenizer.eos_token_id,
        instruments=specnb.Instruments(keep_probs=True), progress=False,
    )  # fmt: skip
    assert made.probs is not None
    accept, position = draw_uniforms(0, [0], new_tokens, gamma).accept[0], 0
    for number, step in enumerate(step_views(made.record, 0, tokenizer)):
        tested = made.record.draft_tokens[0, number][: len(step.accepted) + (step.rejected is not None)]
        p = made.probs[0][position + np.arange(len(tested)), tested]
        tests = np.column_stack([p, accept[number, : len(tested)]]).round(4).tolist()
        lists = {name: getattr(step, name) for name in ("accepted", "rejected", "unused", "sampled")} | {"tests": tests}
        position += step.tokens
        parts = {name: json.dumps(part) for name, part in lists.items()}
        yield {"kind": kind, "temperature": float(temperature), "step": number} | parts


STUDY = Study(
    steps,
    settings={"gamma": 5, "new_tokens": 64, "prompt": 0},
    small={"gamma": 3, "new_tokens": 8, "prompt": 0},
    items=("edit-0", "chat-1", "edit-1"),
    small_items=("edit-0",),
)
