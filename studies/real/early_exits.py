"""Hierarchical drafts on the real model: its first layers draft, and copies draft for these.

One line for each kind of text, temperature and number of layers, over prompts of
data/workloads.jsonl, counted, not timed: `alpha`, the mean overlap of the layers' distributions and
the target's along the target's own answers; in the loop `tokens_per_step`, and `passes`, the
forward passes of the layers in a step. `c` is their parameters over the target's, which are the
bytes that a pass reads. If verifying is free, `alone` is the speed-up of the layers with one pass
for each draft token, and `nested` with the passes that were made, as in Theorem 3.8. With 95%
intervals over prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.acceptance import distributions_along
from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling, overlap
from specnb.drafters import Context, ModelDrafter
from specnb.rules import Outcome
from specnb.sampler import generate
from specnb.statistics import ratio_of_sums
from studies.drafters.early_exit import early_exit
from studies.drafters.hierarchical import HierarchicalDrafter
from studies.real.smollm2 import model_and_tokenizer, prompts_of
from studies.study import Study, columns


class Counted(HierarchicalDrafter):
    """Counts the passes of the larger draft model."""

    passes = 0

    def _inner_step(self, context: Context, uniform: Tensor) -> tuple[Tensor, Outcome, Tensor]:
        self.passes += 1
        return super()._inner_step(context, uniform)


@torch.inference_mode()
def overlaps(models: tuple[PreTrainedModel, PreTrainedModel], ids: list[int], new: int, sampling: Sampling) -> float:
    """The sum of the overlaps of both models at the last `new` tokens of `ids`."""
    return float(overlap(*(distributions_along(model, [ids], new, sampling) for model in models)).sum())


def measure(
    item: str, layers: list[int], temperatures: list[float], prompts: int, new_tokens: int, gamma: int
) -> Iterator[dict[str, Any]]:
    """The lines of a kind of text."""
    target, tokenizer = model_and_tokenizer("float32")
    asked = prompts_of(tokenizer, item, prompts)
    for temperature in temperatures:
        how: dict[str, Any] = {
            "sampling": Sampling(temperature), "max_new_tokens": new_tokens, "eos": tokenizer.eos_token_id,
            "progress": False,
        }  # fmt: skip
        answers = generate(target, asked, None, seed=0, **how).tokens
        for number in layers:
            exit_model = early_exit(target, number)
            both = (target, exit_model)
            shared = [overlaps(both, a + b, len(b), how["sampling"]) for a, b in zip(asked, answers, strict=True)]
            counted = []
            for row, prompt in enumerate(asked):
                copies = PromptLookupDrafter(target.config.vocab_size)
                drafter = Counted(ModelDrafter(exit_model, how["sampling"]), copies, gamma)
                record = generate(target, [prompt], drafter, gamma=gamma, seed=row, **how).record
                counted.append((record.emitted.sum(), record.target_passes.sum(), drafter.passes))
            tokens, steps, passes = np.array(counted, dtype=float).T
            c = exit_model.num_parameters() / target.num_parameters()
            yield {
                "kind": item, "temperature": temperature, "layers": number, "of": target.config.num_hidden_layers,
                "prompts": prompts, "gamma": gamma, "c": c,
                **columns("alpha", ratio_of_sums(np.array(shared), np.array([len(made) for made in answers]))),
                **columns("tokens_per_step", ratio_of_sums(tokens, steps)), "passes": passes.sum() / steps.sum(),
                **columns("alone", ratio_of_sums(tokens, steps * (1 + gamma * c))),
                **columns("nested", ratio_of_sums(tokens, steps + passes * c)),
            }  # fmt: skip


STUDY = Study(
    measure,
    settings={"layers": [10, 20, 24, 28], "temperatures": [1.0, 0.0], "prompts": 8, "new_tokens": 32, "gamma": 3},
    small={"layers": [28], "temperatures": [0.0], "prompts": 8, "new_tokens": 3, "gamma": 2},
    items=("chat", "edit"),
    small_items=("chat",),
)
