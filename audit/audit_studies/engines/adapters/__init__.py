"""Adapters: tokens of other engines for the audit, without torch or transformers in the engine's
environment.

Each module is for one engine; `gguf` writes a Llama model as a GGUF file, and `vllm_mended` is
vLLM's build for CPUs without its known error. An adapter imports its engine inside its functions,
so that importing it needs nothing but Python's standard library, which is all that is imported
here, too.

    python -m audit_studies.engines.adapters openvino --target TARGET --draft DRAFT --prompts
    prompts.jsonl --out FILE
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specnb_audit.cli.settings import Request, Settings


@dataclass(frozen=True)
class Models:
    """Folders of the target and of the draft model, and a `cache` folder for files converted from
    them."""

    target: Path
    draft: Path | None = None
    cache: Path = Path("build/engines/models")

    def require_draft(self) -> Path:
        """The draft model's folder. Raises `ValueError` if there is none."""
        if self.draft is None:
            raise ValueError("this kind of speculation needs a draft model; give its folder with --draft")
        return self.draft


class Adapter(Protocol):
    """What a module of an engine has.

    PACKAGE      the package on PyPI whose version is the engine's
    SUPPORTED    the kinds of speculation that it can be asked for
    generate     yields the tokens that continue each prompt, in the order of the requests

    One with rows in the engine's own precision has `default_dtype(target)`, the name of its dtype.
    """

    PACKAGE: str
    SUPPORTED: tuple[str, ...]

    def generate(self, models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
        """The tokens that continue the prompt of each request, without the prompt."""


def batches(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    """The requests in groups of at most `size`."""
    for start in range(0, len(requests), size):
        yield requests[start : start + size]
