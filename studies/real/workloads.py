"""Does speculation pay on a real model? SmolLM2-135M-Instruct on five kinds of prompts, at temperatures 0 and 1.

Whole calls, the prompt's pass included, up to the end of the answer or `new_tokens`; all ways in turn on each prompt
(`studies.speed.calls`), each by a sampler of its own, as it is without other settings: its check on, its weights packed
(`compile="auto"`), and those of 4 bits read so for few tokens. The drafter copies from the text so far (prompt lookup),
at most `COPIED` tokens; a trained head drafts `OF_HEAD` tokens, alone and in steps in which nothing can be copied.
Beside them the same with compiled layers (`compile=True`): plain, copies, and copies or the head; transformers' own
generation of the same model, plain and with its prompt lookup, with the settings that are best for it by the tokens
that it drafts and has accepted (`THEIRS`); and llama.cpp (`studies.real.llama_cpp`). One line a way:

- `ms_per_token`: all seconds over all tokens; answers differ in length above temperature 0, and in bfloat16 at 0, too
- `speed_up`: over the way `over`, plain decoding
- `tokens_per_step`, and `predicted`, the speed-up by all tokens over what their steps cost: v(n) for a step that
  verifies n tokens and `c` for each token that the head drafts, which is left out of steps that copy. v and c are timed
  before the answers, compiled for what is compiled; the prompt's pass, which all ways make, copying and sampling are
  left out
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
from specnb.sampler import Instruments, Sampler, generate
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
LENGTHS = (1, 2, 3, 4, 5, 7, 11)  # of the forward passes that are timed alone


def copies_or_head(target: PreTrainedModel, sampling: Sampling) -> FallbackDrafter:
    """Copies after `MIXED` tokens that agree, and in rows without one `OF_HEAD` tokens of the head."""
    head = head_drafter(target, sampling, compile="auto", most=OF_HEAD)
    return FallbackDrafter(PromptLookupDrafter(target.config.vocab_size, shortest=MIXED), head)


def samplers_of(
    target: PreTrainedModel, sampling: Sampling, new_tokens: int, longest: int, compiled: bool
) -> dict[str, Sampler]:
    """Our ways to decode, for prompts of up to `longest` tokens."""
    vocab = target.config.vocab_size

    either = partial(copies_or_head, target, sampling)
    chosen: dict[str, tuple[Any, int, Compile]] = {
        "plain": (None, 0, "auto"),
        "copies": (PromptLookupDrafter(vocab), COPIED, "auto"),
        f"head {OF_HEAD}": (head_drafter(target, sampling, compile="auto"), OF_HEAD, "auto"),
        f"copies or head {OF_HEAD}": (either(), COPIED, "auto"),
    }
    if compiled:
        chosen |= {
            "plain, compiled": (None, 0, True),
            "copies, compiled": (PromptLookupDrafter(vocab), COPIED, True),
            f"copies or head {OF_HEAD}, compiled": (either(), COPIED, True),
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


def head_seconds(target: PreTrainedModel, prompt: list[int]) -> float:
    """How long the head takes for a draft token."""
    drafter = head_drafter(target, Sampling(), compile="auto")
    timed = generate(
        target, [prompt], drafter, gamma=OF_HEAD, max_new_tokens=48, instruments=Instruments(timed=True), progress=False
    )  # fmt: skip
    return float(np.median(timed.record.seconds["draft"])) / OF_HEAD


def measure(item: str, prompts: int, new_tokens: int, dtype: str, threads: int, compiled: bool) -> pd.DataFrame:
    """A line for each way to answer the prompts of one kind at one temperature."""
    kind, temperature = item.split("-")
    torch.set_num_threads(threads)
    target, tokenizer = model_and_tokenizer(dtype)
    asked, sampling = prompts_of(tokenizer, kind, prompts), Sampling(float(temperature))
    ways = ways_of(target, sampling, tokenizer.eos_token_id, new_tokens, max(map(len, asked)), compiled)
    pair = Pair(target, target, tokenizer)  # nothing is drafted by a model
    modes: tuple[Compile, ...] = ("auto", True) if compiled else ("auto",)
    costs = {
        mode: measure_costs(pair, context=CONTEXT, lengths=LENGTHS, repetitions=7, compile=mode, progress=False)
        for mode in modes
    }
    of_head = head_seconds(target, asked[0])
    over = {name: "plain, compiled" for name in ways if name.endswith(", compiled") and name != "plain, compiled"}
    table, verified = compared(ways, asked, over)
    table = table.rename(columns={"ms": "ms_per_token"})
    for at, name in table.way.items():
        if verified[name]:
            of_mode, of_over = (costs[True if way.endswith(", compiled") else "auto"] for way in (name, table.over[at]))
            one_token, over_one = (float(np.median(of.target[:, 0])) for of in (of_mode, of_over))
            table.loc[at, "c"] = c = of_head / one_token if "head" in name else 0.0
            # A copy has three tokens for each one that agrees, more than the head drafts.
            drafted = OF_HEAD * sum(n <= 1 + OF_HEAD for n in verified[name])
            passes = one_token * (of_mode.verify_cost(verified[name]).sum() + c * drafted)
            table.loc[at, "predicted"] = over_one * table.tokens[at] / passes
    return table.assign(kind=kind, temperature=sampling.temperature, prompts=len(asked))


STUDY = Study(
    measure,
    settings={"prompts": 40, "new_tokens": 48, "dtype": "bfloat16", "threads": 2, "compiled": True},
    small={"prompts": 3, "new_tokens": 8, "dtype": "bfloat16", "threads": 2, "compiled": False},
    items=tuple(f"{kind}-{temperature}" for temperature in TEMPERATURES for kind in KINDS),
    small_items=("summary-0",),
)
