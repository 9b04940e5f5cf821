"""The two pairs that are timed, and their prompts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import numpy as np

from specnb.fast import pack
from specnb.loading import Pair, load_pair
from studies import corpus
from studies.speed.synthetic import synthetic_pair

PAIRS: dict[str, Callable[..., Pair]] = {"synthetic": synthetic_pair, "trained": load_pair}
PROMPTS = {"trained": ("held-out", "stdlib"), "synthetic": ("random",)}
PROMPT_TOKENS = 32
MODULES = (
    "argparse", "ast", "asyncio.base_events", "bisect", "calendar", "cmd", "codecs", "collections", "configparser",
    "contextlib", "copy", "csv", "datetime", "decimal", "difflib", "dis", "doctest", "email.message", "enum",
    "fractions", "functools", "gettext", "glob", "gzip", "heapq", "html.parser", "http.client", "inspect",
    "json.decoder", "locale", "logging", "mailbox", "optparse", "os", "pathlib", "pdb", "pickle", "platform",
    "plistlib", "random", "shelve", "shutil", "smtplib", "socketserver", "statistics", "string",
)  # fmt: skip


def packed(pair: Pair) -> Pair:
    """`pair`, whose models from now on use the products that are fastest on this machine."""
    return replace(pair, target=pack(pair.target), draft=pack(pair.draft))


def texts_of(kind: str, count: int) -> list[str]:
    """`count` "held-out" files of the corpus, or modules of the "stdlib", which is not in the
    corpus. Raises `ValueError` where there are not so many."""
    if kind == "stdlib":
        texts = [inspect.getsource(import_module(name)) for name in MODULES[:count]]
    else:
        texts = corpus.read("held-out", limit=count)
    if len(texts) < count:
        raise ValueError(f"there are {len(texts)} {kind} prompts, fewer than {count}; ask for fewer")
    return texts


def prompts_of(pair: Pair, kind: str, count: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """`count` prompts of `length` tokens: beginnings of the texts of `texts_of`, or "random"
    tokens."""
    if kind == "random":
        random = np.random.default_rng(0)
        prompts: list[list[int]] = random.integers(pair.target.config.vocab_size, size=(count, length)).tolist()
        return prompts
    return [pair.encode(text[:4000])[:length] for text in texts_of(kind, count)]
