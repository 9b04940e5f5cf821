"""The sampler on one CUDA device: is it exact there, what do forward passes cost, how fast are
whole calls?

Ten minutes on one card: `python -m studies gpu`. Each item is measured by itself, with the `commit`
of its code; its lines have the columns of its kind:

- `audit`: tokens sampled from the target, speculatively and captured, and what the audit says of
  them: its verdict, log10 of its e-value, and the interval of the total variation per token
- `pass`: `cost` is v(n), the time of a forward pass of the target over `n` tokens of each of `rows`
  sequences, over that of one token each, with an interval over repetitions; for the draft, c
- `call`, `graph`, `compiled`: whole calls for `rows` copies of a prompt, all ways in turn on each
  prompt. `speed_up` is the time per token of the fastest way to decode plainly (`over`) over this
  one's, with an interval over prompts; `predicted` is tokens per step over the cost of a step, from
  captured passes timed in the same item

Ways to decode are ours, captured as a graph (`compile="graph"`), with the number of draft tokens; in
`call` also eager, and transformers' own generation, with prompt lookup or the draft model; in
`compiled` some whose layers torch compiles before they are captured (`compile=True`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from specnb.cost import Costs, measure_costs
from specnb.distributions import Sampling
from specnb.fast import Compile
from specnb.loading import Pair
from specnb.sampler import Sampler, generate, slots_for
from specnb.statistics import bootstrap, machine
from specnb_audit.api import audit
from specnb_audit.engine import Engine
from studies.speed.gpu_setups import CUDA, Setup, setup
from studies.study import Study, columns, commit, timed_in_turn

CONTEXT = 128  # tokens before the forward passes that are timed alone
Line = dict[str, Any]
# Number of a prompt and its tokens -> new tokens a row, and steps.
Way = Callable[[int, list[int]], tuple[int, int]]


def audited(given: Setup, temperature: float, sequences: int, new_tokens: int) -> Iterator[Line]:
    """What the audit says of tokens that each drafter helped to sample, in one captured batch."""
    prompts = (given.prompts * sequences)[:sequences]
    sampling = Sampling(temperature)
    for name, (make, gammas) in given.drafters.items():
        gamma = gammas[0]
        made = generate(
            given.target, prompts, make(sampling), gamma=gamma, max_new_tokens=new_tokens, sampling=sampling,
            compile="graph", progress=False,
        )  # fmt: skip
        report = audit(
            given.target, made.tokens, prompts=prompts, sampling=sampling, max_new_tokens=new_tokens,
            engine=Engine(dtype=given.target.dtype), progress=False,
        )  # fmt: skip
        found: Line = {"way": name, "gamma": gamma, "rows": sequences, "tokens": report.tokens}
        found |= {"tokens_per_step": sum(map(len, made.tokens)) / made.record.target_passes.sum()}
        yield found | {
            "verdict": report.verdict, "log10_e": report.log10_e_peak, "tv_low": report.tv.low,
            "tv_high": report.tv.high,
        }  # fmt: skip


def costs_of(given: Setup, rows: int, compile: Compile, lengths: tuple[int, ...], repetitions: int) -> Costs:
    """Seconds of forward passes of `rows` sequences."""
    pair: Any = Pair(given.target, given.draft or given.target, None)  # type: ignore[arg-type]  # no text is read
    return measure_costs(
        pair, context=CONTEXT, lengths=lengths, rows=rows, repetitions=repetitions, compile=compile, progress=False
    )


def passes(given: Setup, rows: int, compile: Compile, costs: Costs) -> Iterator[Line]:
    """A line for each length of the target's pass, and one for the draft's."""
    about: Line = {"way": "graph" if compile else "eager", "rows": rows}
    medians = 1e3 * np.median(costs.target, axis=0)
    for n, ms, cost in zip(costs.lengths, medians, costs.verify_costs, strict=True):
        yield about | {"model": "target", "n": n, "ms": ms} | columns("cost", cost)
    if given.draft is not None:
        ms = 1e3 * np.median(costs.draft[:, 0])
        yield about | {"model": "draft", "n": 1, "ms": ms} | columns("cost", costs.cost_ratio)


def own_ways(given: Setup, sampling: Sampling, rows: int, new_tokens: int, modes: dict[str, Compile]) -> dict[str, Way]:
    """Plain and speculative decoding, in each mode of compilation, each by a sampler of its own."""
    longest = max(map(len, given.prompts))

    def way(drafter: Any, gamma: int, compile: Compile) -> Way:
        sampler = Sampler(
            given.target, drafter, gamma=gamma, sampling=sampling, compile=compile, check=False, rows=rows,
            slots=slots_for(longest, new_tokens, gamma), progress=False,
        )  # fmt: skip

        def call(number: int, prompt: list[int]) -> tuple[int, int]:
            numbers = range(number * rows, (number + 1) * rows)
            made = sampler.generate([prompt] * rows, max_new_tokens=new_tokens, eos=given.eos, numbers=numbers)
            return sum(map(len, made.tokens)), int(made.record.target_passes.sum())

        return call

    drafted = [(name, gamma) for name, (_, gammas) in given.drafters.items() for gamma in gammas]
    ways: dict[str, Way] = {}
    for mode, compile in modes.items():
        ways[f"plain, {mode}"] = way(None, 0, compile)
        for name, gamma in drafted[:1] if mode == "compiled" else drafted:
            # a graph holds its tensors, so each way has its own.
            ways[f"{name} {gamma}, {mode}"] = way(given.drafters[name][0](sampling), gamma, compile)
    return ways


def other_ways(given: Setup, sampling: Sampling, rows: int, new_tokens: int) -> dict[str, Way]:
    """The same by transformers' own generation, which assists single sequences only."""
    target: Any = given.target
    end = -1 if given.eos is None else given.eos

    def call(settings: dict[str, Any], number: int, prompt: list[int]) -> tuple[int, int]:
        torch.manual_seed(number)
        tokens = torch.tensor([prompt] * rows, device=target.device)
        how = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        made = target.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, eos_token_id=end,
            pad_token_id=max(end, 0), **(how if sampling.temperature else {"do_sample": False}), **settings,
        )  # fmt: skip
        new = made[:, len(prompt) :]
        # Tokens after an end are padding.
        ended = (new == end).int().cumsum(dim=1) - (new == end).int()
        return int((ended == 0).sum()), 0

    ways: dict[str, Way] = {"plain, transformers": partial(call, {})}
    if rows == 1 and given.draft is not None:
        ways["model, transformers"] = partial(call, {"assistant_model": given.draft})
    if rows == 1 and given.draft is None:
        ways["copies, transformers"] = partial(call, {"prompt_lookup_num_tokens": 5})
    return ways


def calls(ways: dict[str, Way], given: Setup, prompts: int, rows: int, predict: Callable[..., float]) -> Iterator[Line]:
    """A line for each way; all take turns on each of the first `prompts`."""
    names = list(ways)
    counts = np.zeros((2, prompts, len(names)))

    def call(name: str, prompt: list[int], number: int) -> None:
        counts[:, number, names.index(name)] = ways[name](number, prompt)

    seconds = timed_in_turn(call, names, given.prompts[:prompts], CUDA)
    tokens, steps = counts
    plain = [at for at, name in enumerate(names) if name.startswith("plain")]
    over = min(plain, key=lambda at: seconds[:, at].sum() / tokens[:, at].sum())

    for at, name in enumerate(names):

        def speed_up(chosen: Any, at: int = at) -> Any:
            before, this = (seconds[chosen, way].sum(-1) / tokens[chosen, way].sum(-1) for way in (over, at))
            return before / this

        found: Line = {"way": name, "rows": rows, "over": names[over], "tokens": int(tokens[:, at].sum())}
        found |= {"ms": 1e3 * seconds[:, at].sum() / tokens[:, at].sum() * rows}
        found |= {"tokens_per_second": tokens[:, at].sum() / seconds[:, at].sum()}
        found |= columns("speed_up", bootstrap(speed_up, prompts, 2000, 0))
        if steps[:, at].any():
            found["tokens_per_step"] = tokens[:, at].sum() / steps[:, at].sum()
            found["predicted"] = predict(name, found["tokens_per_step"])
        yield found


def predicted(costs: Costs, drafts: bool, way: str, tokens_per_step: float) -> float:
    """Tokens per step over the cost of one: v(gamma + 1), and gamma c if a model drafts; copies
    cost nothing.

    Not a number for a head, whose cost was not timed, and for ways that are not just captured.
    """
    name, mode = way.split(", ")
    number = "0" if name == "plain" else name.rsplit(" ", 1)[1]
    if mode != "graph" or name.startswith("head"):
        return float("nan")
    gamma = int(number)
    return float(tokens_per_step / (costs.verify_cost(gamma + 1) + gamma * drafts * costs.cost_ratio.value))


def measure(
    item: str, sequences: int, prompts: int, new_tokens: int, lengths: tuple[int, ...], repetitions: int, others: bool
) -> list[Line]:
    """The lines of one item: kind, models, dtype, and what the kind needs."""
    kind, models, dtype, *more = item.split("-")
    given = setup(models, getattr(torch, dtype), *more[:1])
    about: Line = {"kind": kind, "models": models, "dtype": dtype, "commit": commit()}
    about |= {"machine": machine(given.target.device), "torch": torch.__version__}
    lines: list[Line] = []
    if kind == "audit":
        lines += audited(given, 1.0, sequences, new_tokens)
    elif kind == "pass":
        modes: tuple[Compile, ...] = (False, "graph")
        for rows, compile in product((1, 16), modes):
            lines += passes(given, rows, compile, costs_of(given, rows, compile, lengths, repetitions))
    else:
        text, temperature, rows = more[0], float(more[1]), int(more[2])
        sampling = Sampling(temperature)
        about |= {"prompts": text, "temperature": temperature}
        added: dict[str, dict[str, Compile]] = {"call": {"eager": False}, "compiled": {"compiled": True}}
        modes_of: dict[str, Compile] = {"graph": "graph", **added.get(kind, {})}
        ways = own_ways(given, sampling, rows, new_tokens, modes_of)
        if others and kind == "call":
            ways |= other_ways(given, sampling, rows, new_tokens)
        costs = costs_of(given, rows, "graph", lengths, repetitions)
        lines += calls(ways, given, prompts, rows, partial(predicted, costs, given.draft is not None))
    return [about | line for line in lines]


STUDY = Study(
    measure,
    settings={
        "sequences": 64, "prompts": 6, "new_tokens": 64, "lengths": (1, 2, 3, 5, 9, 17), "repetitions": 20,
        "others": True,
    },
    small={
        "sequences": 2, "prompts": 2, "new_tokens": 8, "lengths": (1, 3, 5, 9), "repetitions": 3, "others": False,
    },
    items=(
        "audit-pair-float32", "audit-smollm2-float32", "pass-smollm2-bfloat16", "pass-6b-bfloat16",
        "call-6b-bfloat16-random-1-1", "call-smollm2-bfloat16-edit-0-1", "call-smollm2-bfloat16-chat-0-1",
        "graph-6b-bfloat16-random-1-16", "graph-pair-float32-text-1-1",
        *(f"graph-smollm2-bfloat16-{text}-{temperature}-1" for temperature in (0, 1)
          for text in ("chat", "summary", "edit")),
        "compiled-smollm2-bfloat16-edit-0-1",
    ),
    small_items=("audit-tiny-float64", "pass-tiny-float64", "call-tiny-float64-random-1-1"),
)  # fmt: skip
