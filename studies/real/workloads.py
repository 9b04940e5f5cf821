"""Does speculation pay on a real model? SmolLM2-135M-Instruct on five kinds of prompts, at temperatures 0 and 1.

Whole calls, the prompt's pass included, up to the end of the answer or `new_tokens`; all ways in turn on each prompt
(`studies.speed.calls`), each by a sampler of its own. The drafter copies from the text so far (prompt lookup), at most
`COPIED` tokens; a trained head drafts `OF_HEAD` tokens, alone and where nothing can be copied. Modules run as they
are. Beside them transformers' own generation of the same model, plain and with its prompt lookup, with the settings
that are best for it by the tokens that it drafts and has accepted (`THEIRS`); llama.cpp (`studies.real.llama_cpp`); and
packed weights and compiled layers (`compile=True`): plain, copies, and copies or, in rows without one, the head. One
line a way:

- `ms_per_token`: all seconds over all tokens; answers differ in length above temperature 0, and in bfloat16 at 0, too
- `speed_up`: over the way `over`, plain decoding
- `tokens_per_step`, and `predicted`: all tokens over what their steps cost, v(n) for a step that verifies n tokens and
  `c` for each token that the head drafts. v and c are timed before the answers, compiled for what is compiled; the
  prompt's pass, which all ways make, copying and sampling are left out
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from specnb.cache import slots_for
from specnb.copies import PromptLookupDrafter
from specnb.cost import measure_costs
from specnb.distributions import Sampling
from specnb.fast import Compile
from specnb.heads import FallbackDrafter
from specnb.loading import Pair
from specnb.sampler import Hooks, Sampler, generate
from studies.real import llama_cpp
from studies.real.smollm2 import head_drafter, model_and_tokenizer, prompts_of
from studies.speed.calls import Way, compared, way_of
from studies.study import Study

KINDS = ("chat", "summary", "quotation", "edit", "code")
TEMPERATURES = ("0", "1")
OF_HEAD = 2
COPIED = 10  # the most that is copied
MIXED = 2  # tokens that agree before a copy is preferred to the head's tokens
THEIRS = {"max_matching_ngram_size": 4, "prompt_lookup_num_tokens": 3}
"""Of n-grams of 4 tokens with 3 to 8 draft tokens, and of 1 to 3 with 3 to 16, the best above
temperature 0 where n draft tokens add 0.035 n to the cost of a step; at 0 it is 5 tokens."""
CONTEXT = 192  # tokens before the forward passes that are timed alone
LENGTHS = (1, 3, 6, 11)  # of the forward passes that are timed alone


def samplers_of(
    target: PreTrainedModel, sampling: Sampling, new_tokens: int, longest: int, compiled: bool
) -> dict[str, Sampler]:
    """Our ways to decode, for prompts of up to `longest` tokens."""
    vocab = target.config.vocab_size

    def either(compile: Compile) -> FallbackDrafter:
        head = head_drafter(target, sampling, compile=compile, most=OF_HEAD)
        return FallbackDrafter(PromptLookupDrafter(vocab, shortest=MIXED), head)

    chosen: dict[str, tuple[Any, int, Compile]] = {
        "plain": (None, 0, False),
        "copies": (PromptLookupDrafter(vocab), COPIED, False),
        f"head {OF_HEAD}": (head_drafter(target, sampling), OF_HEAD, False),
        f"copies or head {OF_HEAD}": (either(False), COPIED, False),
    }
    if compiled:
        chosen |= {
            "plain, compiled": (None, 0, True),
            "copies, compiled": (PromptLookupDrafter(vocab), COPIED, True),
            f"copies or head {OF_HEAD}, compiled": (either("auto"), COPIED, True),
        }
    return {
        name: Sampler(
            target, drafter, gamma=gamma, sampling=sampling, compile=compile,
            slots=slots_for(longest, new_tokens, gamma), progress=False,
        )
        for name, (drafter, gamma, compile) in chosen.items()
    }  # fmt: skip


def ways_of(
    target: PreTrainedModel, sampling: Sampling, eos: int, new_tokens: int, longest: int, compiled: bool
) -> dict[str, Way]:
    """Every way to continue a prompt of up to `longest` tokens."""

    def theirs(settings: dict[str, Any], number: int, prompt: list[int]) -> tuple[int, list[int]]:
        torch.manual_seed(number)
        tokens, model = torch.tensor([prompt]), target
        sampled = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        made = model.generate(  # type: ignore[operator]
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, eos_token_id=eos,
            pad_token_id=eos, **(sampled if sampling.temperature else {"do_sample": False}), **settings,
        )  # fmt: skip
        return made.shape[1] - len(prompt), []

    samplers = samplers_of(target, sampling, new_tokens, longest, compiled)
    ways: dict[str, Way] = {name: way_of(sampler, new_tokens, eos) for name, sampler in samplers.items()}
    theirs_at = THEIRS if sampling.temperature else THEIRS | {"prompt_lookup_num_tokens": 5}
    ways |= {"transformers": partial(theirs, {}), "transformers, prompt lookup": partial(theirs, theirs_at)}
    return ways | (llama_cpp.ways(sampling, new_tokens) if compiled else {})


def head_cost(target: PreTrainedModel, prompt: list[int], plain: float, compile: Compile) -> float:
    """c: the time that the head needs for a draft token, over that of a forward pass of the target,
    `plain` seconds."""
    drafter, gamma = head_drafter(target, Sampling(), compile=compile), OF_HEAD
    timed = generate(target, [prompt], drafter, gamma=gamma, max_new_tokens=48, hooks=Hooks(timed=True), progress=False)
    return float(np.median(timed.record.seconds["draft"])) / gamma / plain


def measure(item: str, prompts: int, new_tokens: int, dtype: str, threads: int, compiled: bool) -> pd.DataFrame:
    """A line for each way to answer the prompts of one kind at one temperature."""
    kind, temperature = item.split("-")
    torch.set_num_threads(threads)
    target, tokenizer = model_and_tokenizer(dtype)
    asked, sampling = prompts_of(tokenizer, kind, prompts), Sampling(float(temperature))
    ways = ways_of(target, sampling, tokenizer.eos_token_id, new_tokens, max(map(len, asked)), compiled)
    pair = Pair(target, target, tokenizer)  # nothing is drafted by a model
    costs, c = {}, {}
    modes: dict[bool, tuple[Compile, Compile]] = {False: (False, False), True: (True, "auto")}  # of target and head
    for mode in (False, True)[: 1 + compiled]:
        compile, of_head = modes[mode]
        costs[mode] = measure_costs(
            pair, context=CONTEXT, lengths=LENGTHS, repetitions=7, compile=compile, progress=False
        )
        c[mode] = head_cost(target, asked[0], float(np.median(costs[mode].target[:, 0])), of_head)
    over = {name: "plain, compiled" for name in ways if name.endswith(", compiled") and name != "plain, compiled"}
    table, verified = compared(ways, asked, over)
    table = table.rename(columns={"ms": "ms_per_token"})
    for at, name in table.way.items():
        if verified[name]:
            mode = name.endswith(", compiled")
            table.loc[at, "c"] = c[mode] * ("head" in name)
            drafting = table.c[at] * OF_HEAD * len(verified[name])
            table.loc[at, "predicted"] = table.tokens[at] / (costs[mode].verify_cost(verified[name]).sum() + drafting)
    return table.assign(kind=kind, temperature=sampling.temperature, prompts=len(asked))


STUDY = Study(
    measure,
    settings={"prompts": 12, "new_tokens": 48, "dtype": "bfloat16", "threads": 2, "compiled": True},
    small={"prompts": 3, "new_tokens": 8, "dtype": "bfloat16", "threads": 2, "compiled": False},
    items=tuple(f"{kind}-{temperature}" for temperature in TEMPERATURES for kind in KINDS),
    small_items=("summary-0",),
)
