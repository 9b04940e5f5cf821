"""Bugs of a step in the shape of p or q: their temperature, rounding and normalisation."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specnb.distributions import Sampling, normalise
from specnb_audit.bugs.bug import Bug
from specnb_audit.bugs.step import in_bfloat16, sampled_as

COLD = Sampling(0.7)
COOL = Sampling(0.9)
ROUNDED = 0.25
CAP = 8.0
SMOOTHED = 0.05
SHARDS = 2


def stale_temperatures(distributions: Tensor) -> Tensor:
    """The first position has its temperature, those after it that of uninitialised memory: here 0.2 and 5 in turn."""
    positions = torch.arange(distributions.shape[-2])
    power = torch.where(positions % 2 == 1, 5.0, 0.2).to(distributions.dtype)
    power[0] = 1.0
    return torch.softmax(distributions.log() * power[:, None], dim=-1)


def compounded_temperature(distributions: Tensor) -> Tensor:
    """The temperature is applied in place once for each position: to the second one twice, and so on."""
    times = torch.arange(1, distributions.shape[-2] + 1, dtype=distributions.dtype, device=distributions.device)
    return torch.softmax(distributions.log() / COOL.temperature ** times[:, None], dim=-1)


def rounded_logits(distributions: Tensor) -> Tensor:
    """Logits rounded to multiples of 0.25, as coarse quantisation does: noise without direction."""
    return torch.softmax((distributions.log() / ROUNDED).round() * ROUNDED, dim=-1)


def soft_capped(distributions: Tensor) -> Tensor:
    """A soft cap on the logits, here on their differences from the mean; tokens of probability 0 stay impossible."""
    logits = distributions.log()
    possible = distributions > 0
    mean = logits.where(possible, 0.0).sum(dim=-1, keepdim=True) / possible.sum(dim=-1, keepdim=True)
    return torch.softmax((CAP * torch.tanh((logits - mean) / CAP)).where(possible, -torch.inf), dim=-1)


def softmax_per_shard(distributions: Tensor) -> Tensor:
    """Each half of the vocabulary is normalised alone, as by two workers that do not exchange their sums."""
    return torch.cat([normalise(shard) / SHARDS for shard in distributions.tensor_split(SHARDS, dim=-1)], dim=-1)


def smoothed(distributions: Tensor) -> Tensor:
    """The distributions mixed with the uniform one."""
    return (1 - SMOOTHED) * distributions + SMOOTHED / distributions.shape[-1]


_held_out = partial(Bug, kind="step", held_out=True)
_aimed_at = partial(Bug, kind="step")
_BUGS = [
    _aimed_at("stale-temperatures", "the temperatures of drafted positions are uninitialised memory", "vLLM#55005",
              p=stale_temperatures),
    _held_out("temperature-at-1", "verification has a temperature of 1 whatever is claimed", "lattice#388",
              claimed=COLD, p=sampled_as(Sampling())),
    _held_out("temperature-off-by-3-percent", "the temperature is 0.97 in place of 1", "-",
              p=sampled_as(Sampling(0.97))),
    _held_out("compounded-temperature", "the temperature is applied once more at each position of a step",
              "CodonTransformer#20 (plain sampling)", claimed=COOL, p=compounded_temperature),
    _held_out("rounded-logits", f"the target's logits are rounded to multiples of {ROUNDED}", "coarse quantisation",
              p=rounded_logits),
    _held_out("verified-in-bfloat16", "verification reads p in bfloat16", "-", p=in_bfloat16),
    _held_out("soft-capped", f"the target's logits have a soft cap of {CAP}", "-", p=soft_capped),
    _held_out("softmax-per-shard", "each half of the vocabulary is normalised alone", "-", p=softmax_per_shard),
    _held_out("smoothed-draft", f"draft tokens come from the uniform distribution with probability {SMOOTHED}, "
              "verification reads q without it", "-", sampled=smoothed),
]  # fmt: skip

DISTRIBUTION_BUGS = {bug.name: bug for bug in _BUGS}
"""These bugs by name."""
