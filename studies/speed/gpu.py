"""The sampler on one CUDA device: is it exact there, what do forward passes cost, how fast are
whole calls?

`python -m studies gpu` writes each item as it is had, the most important first, and goes on where it
was. Each item is measured by itself, with the `commit` of its code; its lines have the columns of
its kind:

- `card`: gigabytes per second of a copy (read and written), and 10^12 operations per second of a
  product of two bfloat16 matrices: the floors of everything else
- `audit`: tokens sampled from the target, speculatively, captured and compiled, for a chain, a tree
  and rows that are refilled; and what the audit says of them: its verdict, log10 of its e-value, and
  the interval of the total variation per token
- `pass`: `cost` is v(n), the time of a forward pass of the target over `n` tokens of each of `rows`
  sequences, over that of one token each, with an interval over repetitions; for the draft, c.
  `reading` and `arithmetic` are the milliseconds that the weights and the products would take on
  `card`'s rates; the larger of them is the floor, their sum a pass without any overlap
- `call`, `graph`, `compiled`, `static`: whole calls for `rows` copies of a prompt, all ways in turn on
  each prompt. `speed_up` is the time per token of the fastest way to decode plainly (`over`) over
  this one's, with an interval over prompts; `predicted` is tokens per step over the cost of a step,
  from captured passes timed in the same item
- `part`: milliseconds of each part of a step, and the fraction of a call in which the device works

Ways to decode are ours, captured as a graph (`compile="auto"`) or with layers that torch compiles
before they are captured (`compile=True`), with the number of draft tokens; in `call` also eager, and
transformers' own generation, with prompt lookup or the draft model; in `static` with its static
cache, which it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from specnb.cache import slots_for
from specnb.cost import Costs, measure_costs
from specnb.distributions import Sampling
from specnb.fast import Compile
from specnb.loading import Pair
from specnb.record import now
from specnb.sampler import Instruments, Sampler, generate
from specnb.statistics import machine
from specnb_audit.api import audit
from specnb_audit.engine import Engine
from studies.speed.calls import Way, compared, way_of
from studies.speed.gpu_setups import CUDA, Setup, setup
from studies.study import Study, columns, commit, timed_in_turn

CONTEXT = 128  # tokens before the forward passes that are timed alone
LARGE = 2**26  # numbers that are copied; with as many in a square matrix, a product
REPEATED = 10  # copies and products in a round, and rounds
Line = dict[str, Any]


def rates() -> Iterator[Line]:
    """How fast this card copies, and multiplies."""
    many = torch.zeros(LARGE, dtype=torch.bfloat16, device=CUDA)
    square = many[: int(LARGE**0.5) ** 2].view(int(LARGE**0.5), -1)
    work = {"copy": (many.clone, 2e-9 * many.nbytes), "product": (lambda: square @ square, 2e-12 * len(square) ** 3)}

    def call(name: str, *prompt: int) -> None:
        for _ in range(REPEATED):
            work[name][0]()

    seconds = np.median(timed_in_turn(call, [*work], range(REPEATED), CUDA), axis=0) / REPEATED
    for (name, (_, amount)), taken in zip(work.items(), seconds, strict=True):
        yield {"way": name, "rate": amount / taken}


def audited(given: Setup, temperature: float, sequences: int, new_tokens: int) -> Iterator[Line]:
    """What the audit says of tokens that each drafter helped to sample, in batches of half of the
    rows, which are refilled."""
    prompts = (given.prompts * sequences)[:sequences]
    sampling = Sampling(temperature)
    modes: dict[str, Compile] = {"graph": "auto", "compiled": True}
    for (name, (make, gammas)), mode in product(given.drafters.items(), modes):
        gamma = gammas[0]
        made = generate(
            given.target, prompts, make(sampling), gamma=gamma, max_new_tokens=new_tokens, sampling=sampling,
            compile=modes[mode], batch_size=-(-sequences // 2), progress=False,
        )  # fmt: skip
        report = audit(
            given.target, made.tokens, prompts=prompts, sampling=sampling, max_new_tokens=new_tokens,
            engine=Engine(dtype=given.target.dtype), progress=False,
        )  # fmt: skip
        found: Line = {"way": f"{name}, {mode}", "gamma": gamma, "rows": sequences, "tokens": report.tokens}
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


def passes(given: Setup, rows: int, way: str, costs: Costs, card: dict[str, float]) -> Iterator[Line]:
    """A line for each length of the target's pass, and one for the draft's."""
    about: Line = {"way": way, "rows": rows}
    medians = 1e3 * np.median(costs.target, axis=0)
    head: Any = given.target.get_output_embeddings()
    layers = [weight for name, weight in given.target.named_parameters() if "embed" not in name]
    weights = [*(weight for weight in layers if weight is not head.weight), head.weight]  # once, if it is tied
    reading = sum(weight.nbytes for weight in weights) / (1e6 * card["copy"])
    of_one = 2 * sum(weight.numel() for weight in weights) / (1e9 * card["product"])
    for n, ms, cost in zip(costs.lengths, medians, costs.verify_costs, strict=True):
        floors = {"reading": reading, "arithmetic": of_one * rows * n}
        yield about | {"model": "target", "n": n, "ms": ms} | columns("cost", cost) | floors
    if given.draft is not None:
        ms = 1e3 * np.median(costs.draft)
        yield about | {"model": "draft", "n": 1, "ms": ms} | columns("cost", costs.cost_ratio)


def own_ways(given: Setup, sampling: Sampling, rows: int, new_tokens: int, modes: dict[str, Compile]) -> dict[str, Way]:
    """Plain and speculative decoding, in each mode of compilation, each by a sampler of its own."""
    longest = max(map(len, given.prompts))

    def way(drafter: Any, gamma: int, compile: Compile) -> Way:
        sampler = Sampler(
            given.target, drafter, gamma=gamma, sampling=sampling, compile=compile, rows=rows,
            slots=slots_for(longest, new_tokens, gamma), progress=False,
        )  # fmt: skip
        return way_of(sampler, new_tokens, given.eos, rows)

    drafted = [(name, gamma) for name, (_, gammas) in given.drafters.items() for gamma in gammas]
    ways: dict[str, Way] = {}
    for mode, compile in modes.items():
        ways[f"plain, {mode}"] = way(None, 0, compile)
        for name, gamma in drafted:
            # A graph holds its tensors, so each way has its own.
            ways[f"{name} {gamma}, {mode}"] = way(given.drafters[name][0](sampling), gamma, compile)
    return ways


def other_ways(given: Setup, sampling: Sampling, rows: int, new_tokens: int, static: bool) -> dict[str, Way]:
    """The same by transformers' own generation, which assists single sequences only; or plainly with
    its `static` cache."""
    target: Any = given.target
    end = -1 if given.eos is None else given.eos

    def call(settings: dict[str, Any], number: int, prompt: list[int]) -> tuple[int, list[int]]:
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
        return int((ended == 0).sum()), []

    if static:
        return {"plain, transformers static": partial(call, {"cache_implementation": "static"})}
    ways: dict[str, Way] = {"plain, transformers": partial(call, {})}
    if rows == 1 and given.draft is not None:
        ways["model, transformers"] = partial(call, {"assistant_model": given.draft})
    if rows == 1 and given.draft is None:
        ways["copies, transformers"] = partial(call, {"prompt_lookup_num_tokens": 5})
    return ways


def calls(ways: dict[str, Way], given: Setup, prompts: int, rows: int, predict: Callable[..., float]) -> Iterator[Line]:
    """A line for each way; all take turns on each of the first `prompts`."""
    plain = [name for name in ways if name.startswith("plain")]
    table, _ = compared(ways, given.prompts[:prompts], plain=plain, device=CUDA)
    for line in table.to_dict("records"):
        line |= {"rows": rows, "ms": line["ms"] * rows, "tokens_per_second": 1e3 / line["ms"]}
        if line["tokens_per_step"] > 0:  # the passes of transformers are not known
            line["predicted"] = predict(line["way"], line["tokens_per_step"])
        yield line


def predicted(costs: Costs, timed: str, drafts: bool, way: str, tokens_per_step: float) -> float:
    """Tokens per step over the cost of one: v(gamma + 1), and gamma c if a model drafts; copies
    cost nothing.

    Not a number for a head and a tree, whose costs were not timed, and for ways that run in another
    mode than the passes.
    """
    name, mode = way.split(", ")
    if mode != timed or name.startswith(("head", "tree")):
        return float("nan")
    gamma = 0 if name == "plain" else int(name.rsplit(" ", 1)[1])
    return float(tokens_per_step / (costs.verify_cost(gamma + 1) + gamma * drafts * costs.cost_ratio.value))


def parts(given: Setup, sampling: Sampling, new_tokens: int) -> Iterator[Line]:
    """Milliseconds of each part of a step, each a graph of its own, and how long the device works in a
    call whose step is one graph."""
    (name, (make, gammas)), *_ = given.drafters.items()
    modes: dict[str, Compile] = {"graph": "auto", "compiled": True}
    for mode, timed in product(modes, (True, False)):
        about: Line = {"way": f"{name} {gammas[0]}, {mode}", "rows": 1}
        sampler = Sampler(
            given.target, make(sampling), gamma=gammas[0], sampling=sampling, compile=modes[mode],
            instruments=Instruments(timed=timed), progress=False,
        )  # fmt: skip
        call = partial(sampler.generate, given.prompts[:1], max_new_tokens=new_tokens)
        call()  # captures
        with busy() as kernels:
            begun = now(given.target.device)
            made = call()
            elapsed = now(given.target.device) - begun
        for part, seconds in made.record.seconds.items():
            yield about | {"part": part, "ms": 1e3 * float(np.median(seconds))}
        if not timed:
            yield about | {"part": "device, of a call", "busy": sum(kernels) / elapsed}


@contextmanager
def busy() -> Iterator[list[float]]:
    """The seconds that kernels take, filled at the end; none on a device that torch does not
    profile."""
    found: list[float] = []
    if not torch.cuda.is_available():
        yield found
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        yield found
    found += [1e-6 * event.self_device_time_total for event in profiled.key_averages()]


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
        card = {line["way"]: line["rate"] for line in rates()}
        lines += [about | {"kind": "card", "way": way, "rate": rate} for way, rate in card.items()]
        modes: dict[str, Compile] = {"graph": "auto", "compiled": True}
        for rows, mode in product((1, 16, 64), modes):
            lines += passes(given, rows, mode, costs_of(given, rows, modes[mode], lengths, repetitions), card)
    elif kind == "part":
        lines += parts(given, Sampling(), new_tokens)
    else:
        text, temperature, rows = more[0], float(more[1]), int(more[2])
        sampling = Sampling(temperature)
        about |= {"prompts": text, "temperature": temperature}
        own: dict[str, dict[str, Compile]] = {
            "call": {"eager": False, "graph": "auto"}, "graph": {"graph": "auto"}, "compiled": {"compiled": True},
            "static": {"compiled": True},
        }  # fmt: skip
        ways = own_ways(given, sampling, rows, new_tokens, own[kind])
        if others and kind in ("call", "static"):
            ways |= other_ways(given, sampling, rows, new_tokens, kind == "static")
        timed, compile = list(own[kind].items())[-1]
        costs = costs_of(given, rows, compile, lengths, repetitions)
        lines += calls(ways, given, prompts, rows, partial(predicted, costs, timed, given.draft is not None))
    return [about | line for line in lines]


STUDY = Study(
    measure,
    settings={
        "sequences": 64, "prompts": 6, "new_tokens": 64, "lengths": (1, 2, 3, 5, 9, 17, 33, 64), "repetitions": 20,
        "others": True,
    },
    small={
        "sequences": 2, "prompts": 2, "new_tokens": 8, "lengths": (1, 3, 5, 9), "repetitions": 3, "others": False,
    },
    items=(
        "audit-pair-float32", "pass-6b-bfloat16", "pass-smollm2-bfloat16", "compiled-6b-bfloat16-random-1-1",
        "compiled-smollm2-bfloat16-edit-0-1", "static-smollm2-bfloat16-chat-0-1", "part-smollm2-bfloat16",
        "part-6b-bfloat16", "compiled-6b_0.6-bfloat16-random-1-1", "compiled-6b_0.9-bfloat16-random-1-1",
        *(f"compiled-6b-bfloat16-random-1-{rows}" for rows in (4, 16, 64)), "audit-smollm2-float32",
        "static-6b-bfloat16-random-1-1", "call-6b-bfloat16-random-1-1", "call-smollm2-bfloat16-edit-0-1",
        "call-smollm2-bfloat16-chat-0-1", "graph-pair-float32-text-1-1",
        *(f"graph-smollm2-bfloat16-{text}-{temperature}-1" for temperature in (0, 1)
          for text in ("chat", "summary", "edit")),
    ),
    small_items=(
        "audit-tiny-float64", "pass-tiny-float64", "call-tiny-float64-random-1-1", "static-tiny_0.6-float64-random-1-1",
        "part-tiny-float64",
    ),
)  # fmt: skip
