"""Does speculation pay on a real model? SmolLM2-135M-Instruct on five kinds of prompts, at
temperature 0 and 1.

Whole calls, the prompt's pass included, up to the end of the answer or `new_tokens`; all ways in
turn on each prompt, each by a sampler of its own. The drafter copies from the text so far (prompt
lookup), at most `COPIED` tokens; a trained head drafts `OF_HEAD` tokens, alone and where nothing can
be copied. Modules run as they are. Beside them transformers' own generation of the same model,
plain and with its prompt lookup, with the settings that are best for it by the tokens that it
drafts and has accepted (`THEIRS`); llama.cpp (`studies.real.llama_cpp`); and compiled layers
(`compile="auto"`): plain, copies, and copies or, in rows without one, the head. One line a way:

- `ms_per_token`: all seconds over all tokens; answers differ in length above temperature 0, and in
  bfloat16 at 0, too
- `speed_up`: the time per token of the way `over`, plain decoding, over this one, with an interval
  over prompts
- `tokens_per_step`, and `predicted`: all tokens over what their steps cost, v(n) for a step that
  verifies n tokens and `c` for each token that the head drafts, if not compiled. v and c are timed
  before the answers; the prompt's pass, which all ways make, copying and sampling are left out
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.cost import measure_costs
from specnb.distributions import Sampling
from specnb.fast import Compile
from specnb.heads import FallbackDrafter
from specnb.loading import Pair
from specnb.ngram import PromptLookupDrafter
from specnb.record import now
from specnb.sampler import Hooks, Sampler, generate, slots_for
from specnb.statistics import Job, bootstrap, time_round
from studies.real import llama_cpp
from studies.real.smollm2 import head_drafter, model_and_tokenizer, prompts_of
from studies.study import Study, columns

KINDS = ("chat", "summary", "quotation", "edit", "code")
SAMPLINGS = {"0": Sampling(0), "1": Sampling(1.0)}
OF_HEAD = 2
OF_COMPILED = 1  # where verifying a token costs more of a step
COPIED, COMPILED_COPIED = 10, 6  # the most copied; where layers are compiled and the head drafts otherwise
MIXED = 2  # tokens that agree before a copy is preferred to the head's tokens
THEIRS = {"max_matching_ngram_size": 4, "prompt_lookup_num_tokens": 3}
"""Of n-grams of 4 tokens with 3 to 8 draft tokens, and of 1 to 3 with 3 to 16, the best above
temperature 0 where n draft tokens add 0.035 n to the cost of a step; at 0 it is 5 tokens."""
CONTEXT = 192  # tokens before the forward passes that are timed alone
LENGTHS = (1, 3, 6, 11)  # of the forward passes that are timed alone
Made = tuple[int, list[int]]  # tokens, and how many of them each step verified


def samplers_of(
    target: PreTrainedModel, sampling: Sampling, new_tokens: int, longest: int, compiled: bool
) -> dict[str, Sampler]:
    """Our ways to decode, for prompts of up to `longest` tokens."""
    vocab = target.config.vocab_size

    def either(most: int, compile: Compile) -> FallbackDrafter:
        head = head_drafter(target, sampling, compile=compile, most=most)
        return FallbackDrafter(PromptLookupDrafter(vocab, shortest=MIXED), head)

    chosen: dict[str, tuple[Any, int, Compile]] = {
        "plain": (None, 0, False),
        "copies": (PromptLookupDrafter(vocab), COPIED, False),
        f"head {OF_HEAD}": (head_drafter(target, sampling), OF_HEAD, False),
        f"copies or head {OF_HEAD}": (either(OF_HEAD, False), COPIED, False),
    }
    if compiled:
        chosen |= {
            "plain, compiled": (None, 0, "auto"),
            "copies, compiled": (PromptLookupDrafter(vocab), COPIED, "auto"),
            f"copies or head {OF_COMPILED}, compiled": (either(OF_COMPILED, "auto"), COMPILED_COPIED, "auto"),
        }
    return {
        name: Sampler(
            target, drafter, gamma=gamma, sampling=sampling, compile=compile, check=False,
            slots=slots_for(longest, new_tokens, gamma), progress=False,
        )
        for name, (drafter, gamma, compile) in chosen.items()
    }  # fmt: skip


def ways_of(
    target: PreTrainedModel, sampling: Sampling, eos: int, new_tokens: int, longest: int, compiled: bool
) -> dict[str, Callable[[int, list[int]], Made]]:
    """Every way to continue prompt number `number`, of up to `longest` tokens."""

    def ours(sampler: Sampler, number: int, prompt: list[int]) -> Made:
        made = sampler.generate([prompt], max_new_tokens=new_tokens, eos=eos, seed=number)
        verified = 1 + (made.record.draft_tokens[0] >= 0).sum(axis=-1)
        return len(made.tokens[0]), verified[made.record.active[0]].tolist()

    def theirs(settings: dict[str, Any], number: int, prompt: list[int]) -> Made:
        torch.manual_seed(number)
        tokens, model = torch.tensor([prompt]), target
        sampled = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": sampling.top_p}
        made = model.generate(  # type: ignore[operator]
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, eos_token_id=eos,
            pad_token_id=eos, **(sampled if sampling.temperature else {"do_sample": False}), **settings,
        )  # fmt: skip
        return made.shape[1] - len(prompt), []

    theirs_at = THEIRS if sampling.temperature else THEIRS | {"prompt_lookup_num_tokens": 5}
    lookups: dict[str, dict[str, Any]] = {"transformers": {}, "transformers, prompt lookup": theirs_at}
    samplers = samplers_of(target, sampling, new_tokens, longest, compiled)
    own = {name: partial(ours, sampler) for name, sampler in samplers.items()}
    others = {name: partial(theirs, settings) for name, settings in lookups.items()}
    return own | others | (llama_cpp.ways(sampling, new_tokens) if compiled else {})


def head_cost(target: PreTrainedModel, prompt: list[int], plain: float) -> float:
    """c: the time that the head needs for a draft token, over that of a forward pass of the target,
    `plain` seconds."""
    drafter, gamma = head_drafter(target, Sampling()), OF_HEAD
    timed = generate(target, [prompt], drafter, gamma=gamma, max_new_tokens=48, hooks=Hooks(timed=True), progress=False)
    return float(np.median(timed.record.seconds["draft"])) / gamma / plain


def measure(item: str, prompts: int, new_tokens: int, dtype: str, threads: int, compiled: bool) -> pd.DataFrame:
    """A line for each way to answer the prompts of one kind with one of `SAMPLINGS`."""
    kind, name = item.rsplit("-", 1)
    torch.set_num_threads(threads)
    target, tokenizer = model_and_tokenizer(dtype)
    asked = prompts_of(tokenizer, kind, prompts)
    sampling = SAMPLINGS[name]
    ways = ways_of(target, sampling, tokenizer.eos_token_id, new_tokens, max(map(len, asked)), compiled)
    pair = Pair(target, target, tokenizer)  # nothing is drafted by a model
    costs = measure_costs(pair, context=CONTEXT, lengths=LENGTHS, repetitions=7, progress=False)
    c = head_cost(target, asked[0], float(np.median(costs.target[:, 0])))
    made: dict[tuple[str, int], Made] = {}

    def run(name: str, number: int) -> None:
        made[name, number] = ways[name](number, asked[number])

    numbers = [0, *range(len(asked))]  # the first warms up
    rounds = [[Job(partial(run, name, number)) for name in ways] for number in numbers]
    clock, order = partial(now, target.device), np.random.default_rng(0)
    seconds = np.stack([time_round(jobs, clock, order) for jobs in tqdm(rounds, desc=item)])[1:]
    tokens = np.array([[made[name, number][0] for name in ways] for number in range(len(asked))])
    about = {"kind": kind, "temperature": sampling.temperature, "top_p": sampling.top_p, "prompts": len(asked)}
    plain = [
        "plain, compiled" if name.endswith(", compiled") and name != "plain, compiled" else "plain" for name in ways
    ]
    lines = []
    for at, (name, over) in enumerate(zip(ways, plain, strict=True)):
        found = line(at, list(ways).index(over), seconds, tokens)
        verified = [n for number in range(len(asked)) for n in made[name, number][1]]
        if verified:
            found["tokens_per_step"] = found["tokens"] / len(verified)
        if verified and not name.endswith("compiled"):
            found["c"] = c * ("head" in name)
            drafting = found["c"] * OF_HEAD * len(verified)
            found["predicted"] = found["tokens"] / (costs.verify_cost(verified).sum() + drafting)
        lines.append(about | {"way": name, "over": over} | found)
    return pd.DataFrame(lines)


def line(at: int, over: int, seconds: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
    """What was measured of the way in column `at`, and its speed-up over the one in column
    `over`."""

    def speed_up(chosen: Any) -> Any:
        before, this = (seconds[chosen, way].sum(-1) / tokens[chosen, way].sum(-1) for way in (over, at))
        return before / this

    found = {"ms_per_token": 1e3 * seconds[:, at].sum() / tokens[:, at].sum(), "tokens": tokens[:, at].sum()}
    return found | columns("speed_up", bootstrap(speed_up, len(seconds), 2000, 0))


STUDY = Study(
    measure,
    settings={"prompts": 12, "new_tokens": 48, "dtype": "bfloat16", "threads": 2, "compiled": True},
    small={"prompts": 3, "new_tokens": 8, "dtype": "bfloat16", "threads": 2, "compiled": False},
    items=tuple(f"{kind}-{name}" for name in SAMPLINGS for kind in KINDS),
    small_items=("summary-0",),
)
