"""How near an engine's converted models are to the originals: a step of `make engines`.

    python -m studies.engines.engines_converted openvino build/engines/openvino/bin/python

In the engine's own environment its adapter converts target and draft, and says what the converted models give after
some prompts in float32. Here that is compared with the checkpoints. `data/engines/converted.csv` has a line for each
engine and model: `log_probability` is the largest difference of a log-probability over all tokens, `total_variation`
that of a next-token distribution. No row is collected from a model whose distributions are further off than `LIMIT`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specnb.distributions import total_variation
from specnb.models.loading import TRAINED_PAIR
from specnb.notebook.corpus import DATA
from specnb.notebook.findings import ROOT, write
from specnb_audit.cli.tokens_out import read_prompts
from studies.engines import engine_prompts
from studies.engines.engines_collect import answer, version

TABLE = DATA / "engines" / "converted.csv"
ENGINES = ("llama_cpp", "mlx_lm", "onnxruntime", "openvino")
MODELS = ("target", "draft")
PROMPTS = 8
LIMIT = 1e-3
"""In total variation: a tenth of what an audit of 20,000 tokens can find."""


def converted_logits(engine: str, python: str, name: str, prompts: Sequence[Sequence[int]]) -> Tensor:
    """What the engine computes after each prompt with its conversion of the model `name`, `(prompts, vocab)`."""
    code = (
        f"import json; from pathlib import Path; from studies.engines.adapters.{engine} import logits; "
        "from studies.engines.adapters.adapter import Models; "
        f"models = Models(Path({str(TRAINED_PAIR / 'target')!r}), Path({str(TRAINED_PAIR / 'draft')!r}), "
        f"Path({str(ROOT / 'build' / 'engines' / 'models')!r})); "
        f"print(json.dumps(logits(models, {name!r}, {[list(prompt) for prompt in prompts]!r})))"
    )
    return torch.tensor(json.loads(answer(python, code)), dtype=torch.float64)


@torch.inference_mode()
def original_logits(name: str, prompts: Sequence[Sequence[int]]) -> Tensor:
    """The same of the checkpoint in float64."""
    model = AutoModelForCausalLM.from_pretrained(TRAINED_PAIR / name, dtype=torch.float64)
    return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])


def differences(one: Tensor, other: Tensor) -> dict[str, float]:
    """The columns of the table for logits `(prompts, vocab)` of a converted model and of the original.

    >>> differences(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))  # a constant changes nothing
    {'log_probability': 0.0, 'total_variation': 0.0}
    """
    logs = one.log_softmax(-1), other.log_softmax(-1)
    return {
        "log_probability": float((logs[0] - logs[1]).abs().max()),
        "total_variation": float(total_variation(logs[0].exp(), logs[1].exp()).max()),
    }


def check(engine: str, python: str, table: Path = TABLE) -> None:
    """Writes the lines of `engine` to `table`. Raises `ValueError` for a model further off than `LIMIT`."""
    prompts = read_prompts(engine_prompts.FILE)[:PROMPTS]
    label = {"engine": engine, "version": version(engine, python)}
    lines = []
    for name in MODELS:
        apart = differences(converted_logits(engine, python, name, prompts), original_logits(name, prompts))
        if not apart["total_variation"] <= LIMIT:
            raise ValueError(
                f"the {name} as converted for {engine} has a total variation of {apart['total_variation']:.2g} to the "
                f"checkpoint; the limit is {LIMIT:g}, because an audit could take more for an error of the sampler"
            )
        lines.append(label | {"model": name, "prompts": len(prompts)} | apart)
    others = pd.read_csv(table).query("engine != @engine").to_dict("records") if table.exists() else []
    every = pd.DataFrame([*others, *lines]).sort_values("engine", kind="stable")
    write(table, every.to_csv(index=False, lineterminator="\n", float_format="%.2g"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Checks the models of one engine."""
    parser = argparse.ArgumentParser("python -m studies.engines.engines_converted", description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("python", help="the Python of the engine's environment")
    asked = parser.parse_args(arguments)
    check(asked.engine, asked.python)


if __name__ == "__main__":
    main()
