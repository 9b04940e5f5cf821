"""Does speculation pay on a real model? SmolLM2-135M-Instruct on five kinds of prompts, at two temperatures.

Whole calls, the prompt's pass included, up to the end of the answer or `new_tokens`; all ways in turn on each prompt.
The drafter copies from the text so far (prompt lookup), with each of `GAMMAS` draft tokens and with `gamma="auto"`.
Beside them transformers' own generation of the same model, plain and with its prompt lookup; for `COMPILED` items also
compiled code, which takes some two minutes to compile for each number of draft tokens. One line a way:

- `ms_per_token`: all seconds over all tokens; answers differ in length above temperature 0, and in bfloat16 at 0, too
- `speed_up`: the time per token of the way `over`, plain decoding, over this one, with an interval over prompts
- `tokens_per_step`, and `predicted`: all tokens over what their steps cost, v(n) for a step that verifies n tokens.
  v is timed before the answers; the prompt's pass, which all ways make, drafting and sampling are left out
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from specnb.decoding.generate import generate
from specnb.distributions import Sampling
from specnb.drafting.ngram import PromptLookupDrafter
from specnb.measure.cost import measure_costs
from specnb.measure.statistics import bootstrap
from specnb.measure.timing import Job, device_clock, time_round
from specnb.models.loading import Pair, load_model
from specnb.models.real_model import smollm2
from specnb.notebook.findings import data_file
from studies.study import Study, columns

KINDS = ("chat", "summary", "quotation", "edit", "code")
TEMPERATURES = (0.0, 1.0)
GAMMAS = (2, 5)
COMPILED = {"edit-0": 5, "chat-1": 5}  # draft tokens of compiled speculation
CONTEXT = 192  # tokens before the forward passes that are timed alone
LENGTHS = (1, 3, 6, 11)  # of the forward passes that are timed alone
Made = tuple[int, list[int]]  # tokens, and how many of them each step verified


@cache
def model_and_tokenizer(dtype: str) -> tuple[PreTrainedModel, Any]:
    """The real model, and its tokenizer with the chat template."""
    return load_model("smollm2", dtype=getattr(torch, dtype)), AutoTokenizer.from_pretrained(smollm2())


def prompts_of(tokenizer: Any, kind: str, count: int) -> list[list[int]]:
    """The first `count` prompts of a kind, as the chat template writes them."""
    lines = map(json.loads, data_file("workloads.jsonl").read_text(encoding="utf-8").splitlines())
    asked = [line["prompt"] for line in lines if line["kind"] == kind][:count]
    turns = ([{"role": "user", "content": words}] for words in asked)
    return [list(tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]) for turn in turns]


def ways_of(
    target: PreTrainedModel, sampling: Sampling, eos: int, new_tokens: int, compiled: int
) -> dict[str, Callable[[int, list[int]], Made]]:
    """Every way to continue prompt number `number`."""
    lookup = PromptLookupDrafter(target.config.vocab_size)

    def ours(gamma: Any, number: int, prompt: list[int], compile: bool = False) -> Made:
        made = generate(
            target, [prompt], lookup if gamma else None, gamma=gamma, max_new_tokens=new_tokens, sampling=sampling,
            eos=eos, seed=number, compile=compile, progress=False,
        )  # fmt: skip
        verified = 1 + (made.record.draft_tokens[0] >= 0).sum(axis=-1)
        return len(made.tokens[0]), verified[made.record.active[0]].tolist()

    def theirs(settings: dict[str, Any], number: int, prompt: list[int]) -> Made:
        torch.manual_seed(number)
        tokens, model = torch.tensor([prompt]), target
        sampled = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        made = model.generate(  # type: ignore[operator]
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, eos_token_id=eos,
            pad_token_id=eos, **(sampled if sampling.temperature else {"do_sample": False}), **settings,
        )  # fmt: skip
        return made.shape[1] - len(prompt), []

    fixed = {f"gamma {gamma}": partial(ours, gamma) for gamma in GAMMAS}
    lookups = {"transformers": {}, "transformers, prompt lookup": {"prompt_lookup_num_tokens": 5}}
    others = {name: partial(theirs, settings) for name, settings in lookups.items()}
    fast = {"plain, compiled": 0, f"gamma {compiled}, compiled": compiled} if compiled else {}
    faster = {name: partial(ours, gamma, compile=True) for name, gamma in fast.items()}
    return {"plain": partial(ours, 0), **fixed, "auto": partial(ours, "auto"), **others, **faster}


def measure(
    item: str, prompts: int, new_tokens: int, dtype: str, threads: int, only: Sequence[str] = (), repeats: int = 1
) -> pd.DataFrame:
    """A line for each way, or those of `only`, to answer the prompts of one kind at one temperature."""
    kind, temperature = item.rsplit("-", 1)
    torch.set_num_threads(threads)
    target, tokenizer = model_and_tokenizer(dtype)
    asked = prompts_of(tokenizer, kind, prompts)
    ways = ways_of(target, Sampling(float(temperature)), tokenizer.eos_token_id, new_tokens, COMPILED.get(item, 0))
    ways = {name: ways[name] for name in only or ways}
    pair = Pair(target, target, tokenizer)  # nothing is drafted by a model
    costs = measure_costs(pair, context=CONTEXT, lengths=LENGTHS, repetitions=7, progress=False)
    made: dict[tuple[str, int], Made] = {}

    def run(name: str, number: int) -> None:
        made[name, number] = ways[name](number, asked[number])

    numbers = [0, *list(range(len(asked))) * repeats]  # the first warms up
    rounds = [[Job(partial(run, name, number)) for name in ways] for number in numbers]
    clock, order = device_clock(target.device), np.random.default_rng(0)
    seconds = np.stack([time_round(jobs, clock, order) for jobs in tqdm(rounds, desc=item)])[1:]
    seconds = seconds.reshape(repeats, len(asked), -1).mean(axis=0)
    tokens = np.array([[made[name, number][0] for name in ways] for number in range(len(asked))])
    about = {"kind": kind, "temperature": float(temperature), "prompts": len(asked)}
    plain = ["plain, compiled" if name.startswith("gamma") and name.endswith("compiled") else "plain" for name in ways]
    lines = []
    for at, (name, over) in enumerate(zip(ways, plain, strict=True)):
        found = line(at, list(ways).index(over), seconds, tokens)
        verified = [n for number in range(len(asked)) for n in made[name, number][1]]
        if verified:
            found["tokens_per_step"] = found["tokens"] / len(verified)
        if verified and "compiled" not in name:
            found["predicted"] = found["tokens"] / costs.verify_cost(verified).sum()
        lines.append(about | {"way": name, "over": over} | found)
    return pd.DataFrame(lines)


def line(at: int, over: int, seconds: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
    """What was measured of the way in column `at`, and its speed-up over the one in column `over`."""

    def speed_up(chosen: Any) -> Any:
        before, this = (seconds[chosen, way].sum(-1) / tokens[chosen, way].sum(-1) for way in (over, at))
        return before / this

    found = {"ms_per_token": 1e3 * seconds[:, at].sum() / tokens[:, at].sum(), "tokens": tokens[:, at].sum()}
    return found | columns("speed_up", bootstrap(speed_up, len(seconds), 2000, 0))


STUDY = Study(
    measure,
    settings={"prompts": 12, "new_tokens": 48, "dtype": "bfloat16", "threads": 2},
    small={"prompts": 3, "new_tokens": 8, "dtype": "bfloat16", "threads": 2},
    items=tuple(f"{kind}-{temperature:g}" for temperature in TEMPERATURES for kind in KINDS),
    small_items=("summary-0",),
)
