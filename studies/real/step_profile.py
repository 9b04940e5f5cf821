"""Where does the time of a step go? SmolLM2 with copies or, in steps without one, two tokens of the head.

One line for each kind of text, temperature and part of a step of one row, in bfloat16 with `compile="auto"`:
`ms`, milliseconds in an average step, `share` of the step, and `calls` in a step. Parts contain those below them:

    step
      propose             copies, and the head where it drafts
        search            for the newest tokens in the text
        head              its passes and distributions
      target pass         over the newest token and what was proposed
      verify and emit
        distributions     from logits to p
        rule              which draft tokens are accepted, and the next token
        validity          of the proposal: token ids, q that is a distribution
        overlap           of p and q, for the record
        append            to the sequence
        record

The prompt's pass is no part of a step. `tokens_per_step` is that of the calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from specnb import step as loop
from specnb.cache import slots_for
from specnb.distributions import Sampling
from specnb.sampler import Sampler
from studies.real.smollm2 import model_and_tokenizer, prompts_of
from studies.real.workloads import COPIED, copies_or_head
from studies.study import Study

WHOLE = "step"


class Stopwatch:
    """Seconds and calls, inside `WHOLE`, of functions that are watched."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.inside = False

    def watched(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            before, begun = self.inside, perf_counter()
            self.inside = before or part == WHOLE
            found = function(*given, **named)
            if self.inside:
                self.seconds[part] += perf_counter() - begun
                self.calls[part] += 1
            self.inside = before
            return found

        return timed


def measure(item: str, prompts: int, new_tokens: int, dtype: str, threads: int) -> Iterator[dict[str, Any]]:
    """The lines of one kind of text at a temperature."""
    kind, temperature = item.split("-")
    torch.set_num_threads(threads)
    target, tokenizer = model_and_tokenizer(dtype)
    sampling, asked = Sampling(float(temperature)), prompts_of(tokenizer, kind, prompts)
    drafter = copies_or_head(target, sampling)
    slots = slots_for(max(map(len, asked)), new_tokens, COPIED)
    sampler = Sampler(target, drafter, gamma=COPIED, sampling=sampling, rows=1, slots=slots, progress=False)
    sampler.generate(asked[0], max_new_tokens=new_tokens)  # packs, and makes the batch
    batch: Any = sampler.batch
    watch = Stopwatch()
    watched = {
        WHOLE: (batch, "step"), "propose": (batch, "propose"), "search": (drafter.copy, "propose"),
        "head": (drafter.head, "propose"), "target pass": (batch, "run_target"),
        "verify and emit": (batch, "verify_and_emit"), "distributions": (loop, "standardise"), "rule": (batch, "rule"),
        "validity": (batch, "valid_tokens"), "overlap": (loop, "overlap"), "append": (batch.state, "append"),
        "record": (batch.state, "remember"),
    }  # fmt: skip
    with ExitStack() as replaced:
        for part, (owner, name) in watched.items():
            replaced.enter_context(patch.object(owner, name, watch.watched(part, getattr(owner, name))))
        made = [sampler.generate(prompt, max_new_tokens=new_tokens, eos=tokenizer.eos_token_id) for prompt in asked]
    steps, tokens = watch.calls[WHOLE], sum(len(tokens) for one in made for tokens in one.tokens)
    for part in watched:
        yield {
            "kind": kind, "temperature": sampling.temperature, "part": part, "ms": 1e3 * watch.seconds[part] / steps,
            "share": watch.seconds[part] / watch.seconds[WHOLE], "calls": watch.calls[part] / steps,
            "tokens_per_step": tokens / steps,
        }  # fmt: skip


STUDY = Study(
    measure,
    settings={"prompts": 12, "new_tokens": 48, "dtype": "bfloat16", "threads": 2},
    small={"prompts": 1, "new_tokens": 4, "dtype": "bfloat16", "threads": 2},
    items=tuple(f"{kind}-{temperature}" for temperature in (0, 1) for kind in ("chat", "edit")),
    small_items=("chat-1",),
)
