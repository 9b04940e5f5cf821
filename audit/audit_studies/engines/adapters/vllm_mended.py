"""vLLM's build for CPUs with `expand_batch_to_tokens` mended: what is left of its error
(vllm-project/vllm#55005)?

The released function returns uninitialised memory for temperature, top-k and top-p of draft tokens.
This one repeats each row's value for its draft tokens, as its own documentation says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from audit_studies.engines.adapters import Models, vllm
from specnb_audit.cli.settings import Request, Settings

PACKAGE = vllm.PACKAGE
SUPPORTED = vllm.SUPPORTED
BATCH = vllm.BATCH


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """As `vllm.generate`, with the mend in place."""
    vllm.set_environment()
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expanded
    yield from vllm.generate(models, requests, settings)


def expanded(values: Any, ends: Any, count: int, replace_from: Any = 0, replace_to: Any = 0) -> Any:
    """`values` `(rows,)` repeated for the draft tokens of each row, `(count,)`, where row i's end
    before `ends[i]`.

    A value equal to `replace_from` becomes `replace_to`.
    """
    sizes = ends.diff(prepend=ends.new_zeros(1)).long()
    replaced = values.masked_fill(values == replace_from, replace_to)
    return replaced.repeat_interleave(sizes, output_size=count)
