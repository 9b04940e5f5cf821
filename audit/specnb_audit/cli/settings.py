"""What an engine is asked for. Only Python's standard library is imported here: adapters run in
environments that hold nothing but their engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

SPECULATIONS = (
    "none", "draft", "probabilistic", "stopping", "other-tokenizer", "lookup", "early-exit", "assistant", "eagle3",
    "mtp", "dflash",
)  # fmt: skip
"""`none`: the control. `draft`: a draft model, as the engine uses it by default. `probabilistic`: a
draft model whose tokens are sampled, where the engine has that as an option. `stopping`: one that
drafts fewer tokens where it is unsure. `other-tokenizer`: one with a tokenizer of its own.
`lookup`: n-grams of the prompt and the completion. `early-exit`: the target's first layers.
`assistant`: a model that reads the target's keys and values. `eagle3`: an EAGLE-3 head. `mtp`:
next-token layers. `dflash`: a drafter of blocks."""
DTYPES = ("float32", "bfloat16", "default")
# a prime, so that seeds of two runs with different seeds do not meet within a run.
SEED_STRIDE = 100_003


@dataclass(frozen=True)
class Settings:
    """Settings of a generation.

    temperature, top_k, top_p  0 is greedy; top_k 0 and top_p 1 are none
    speculation                one of `SPECULATIONS`, with `gamma` draft tokens a step
    seed                       of the run; each prompt has its own, `seed_of`
    max_new_tokens             length of every completion; end tokens are ignored
    dtype                      `default` is the precision that the engine chooses itself
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    speculation: str = "none"
    gamma: int = 4
    seed: int = 1
    max_new_tokens: int = 64
    dtype: str = "float32"

    def __post_init__(self) -> None:
        finite = 0 <= self.temperature < float("inf")
        _require(finite, "temperature", self.temperature, "0 (greedy) or positive and finite")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (none) or positive")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (none)")
        _require(self.seed >= 0, "seed", self.seed, "0 or positive")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")

    def seed_of(self, prompt: int) -> int:
        """The seed of prompt number `prompt`: different for all prompts of a run, and below 2^31."""
        return (self.seed * SEED_STRIDE + prompt) % 2**31


class Request(NamedTuple):
    prompt: list[int]
    seed: int


def requests(prompts: Sequence[list[int]], settings: Settings, count: int = 0) -> list[Request]:
    """A request for each prompt; with `count`, so many, the prompts repeated with new seeds."""
    numbers = range(count or len(prompts))
    return [Request(prompts[number % len(prompts)], settings.seed_of(number)) for number in numbers]


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value}; it must be {allowed}")


def settings_of(options: argparse.Namespace) -> Settings:
    return Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})


def add_settings(add: Callable[..., Any]) -> None:
    default = "(default: %(default)s)"
    add("--speculation", choices=SPECULATIONS, default=Settings.speculation, help=f"how tokens are drafted {default}")
    add("--gamma", type=int, default=Settings.gamma, help=f"draft tokens per step {default}")
    add("--temperature", type=float, default=Settings.temperature, help=f"0: greedy {default}")
    add("--top-k", type=int, default=Settings.top_k, help=f"most probable tokens; 0: all {default}")
    add("--top-p", type=float, default=Settings.top_p, help=f"most probable tokens of this mass; 1: all {default}")
    limit = ("--max-new-tokens", "--max-tokens")  # servers say max_tokens
    add(*limit, type=int, default=Settings.max_new_tokens, help=f"of each completion {default}")
    add("--seed", type=int, default=Settings.seed, help=f"of the whole run; each prompt gets its own from it {default}")
    add("--dtype", choices=DTYPES, default=Settings.dtype, help=f"of the engine's weights {default}")
