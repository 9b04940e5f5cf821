"""The steps of two completions of the real model by prompt lookup, as text: one that is copied, one that is not.

One line a step: the draft tokens accepted, the first one rejected, those after it, and the target's own token. Lists of
strings are JSON. In float32, so that the text depends less on the processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from specnb.decoding.generate import generate
from specnb.distributions import Sampling
from specnb.drafting.ngram import PromptLookupDrafter
from studies.real.workloads import model_and_tokenizer, prompts_of
from studies.study import Study
from studies.views.step_view import step_views


def steps(item: str, gamma: int, new_tokens: int, prompt: int) -> Iterator[dict[str, Any]]:
    """The steps of the answer to prompt number `prompt` of a kind of text, at a temperature."""
    kind, temperature = item.rsplit("-", 1)
    target, tokenizer = model_and_tokenizer("float32")
    asked = prompts_of(tokenizer, kind, prompt + 1)[prompt:]
    record = generate(
        target, asked, PromptLookupDrafter(target.config.vocab_size), gamma=gamma, max_new_tokens=new_tokens,
        sampling=Sampling(float(temperature)), eos=tokenizer.eos_token_id, progress=False,
    ).record  # fmt: skip
    for number, step in enumerate(step_views(record, 0, tokenizer)):
        lists = {name: json.dumps(getattr(step, name)) for name in ("accepted", "rejected", "unused", "sampled")}
        yield {"kind": kind, "temperature": float(temperature), "step": number} | lists


STUDY = Study(
    steps,
    settings={"gamma": 5, "new_tokens": 64, "prompt": 0},
    small={"gamma": 3, "new_tokens": 8, "prompt": 0},
    items=("edit-0", "chat-1"),
    small_items=("edit-0",),
)
