"""Bugs of a step in the distributions p or q.

First their shape (temperature, rounding, normalisation), then which tokens they prefer (filters, penalties, biases, ids
of another vocabulary).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specnb.distributions import Sampling, normalise
from specnb.rules import Outcome, token_verification
from specnb_audit.bugs.bug import Bug, Change
from specnb_audit.bugs.step import in_bfloat16, sampled_as
from specnb_audit.claimed import Claimed, claimed_probs

COLD = Sampling(0.7)
COOL = Sampling(0.9)
ROUNDED = 0.25
CAP = 8.0
SMOOTHED = 0.05
SHARDS = 2
FIRST = 0  # the token that is biased or suppressed
BIAS = 1.0
PENALTY = 0.5
TOP_P = Sampling(top_p=0.9)
WARM = Sampling(temperature=1.3, top_p=0.9)


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


def claimed_as(sampling: Claimed) -> Change:
    """The change of a distribution at temperature 1 into the one under `sampling`."""
    return lambda distributions: claimed_probs(distributions.log(), sampling)


def ascending_top_p(distributions: Tensor, top_p: float = TOP_P.top_p) -> Tensor:
    """Top-p over tokens sorted the wrong way: the least probable ones are kept first."""
    ordered, index = distributions.sort(dim=-1)
    return _kept(distributions, index, ordered.cumsum(dim=-1) - ordered < top_p)


def without_the_crossing_token(distributions: Tensor, top_p: float = TOP_P.top_p) -> Tensor:
    """Top-p that drops the token which crosses the limit; the likeliest token always stays."""
    ordered, index = distributions.sort(dim=-1, descending=True)
    kept = ordered.cumsum(dim=-1) <= top_p
    kept[..., 0] = True
    return _kept(distributions, index, kept)


def kept_not_normalised(distributions: Tensor) -> Tensor:
    """Top-p sets tokens to zero and leaves the others as they are, so that the sum is below 1."""
    return distributions.where(sampled_as(TOP_P)(distributions) > 0, 0.0)


def temperature_after_top_p(distributions: Tensor) -> Tensor:
    """Top-p chooses tokens at temperature 1, and the temperature is applied to what is left."""
    return sampled_as(Sampling(WARM.temperature))(sampled_as(Sampling(top_p=WARM.top_p))(distributions))


def biased(distributions: Tensor) -> Tensor:
    """A bias on the logit of one token."""
    factor = torch.ones_like(distributions)
    factor[..., FIRST] = torch.tensor(BIAS).exp()
    return normalise(distributions * factor)


def suppressed(distributions: Tensor) -> Tensor:
    """One token is impossible, as an end token is until a minimum length is reached."""
    possible = distributions.clone()
    possible[..., FIRST] = 0.0
    return normalise(possible.where(possible.sum(dim=-1, keepdim=True) > 0, distributions))


def of_another_vocabulary(distributions: Tensor) -> Tensor:
    """Token i has the probability of token i + 1, as where ids of a smaller vocabulary are not mapped."""
    return distributions.roll(-1, dims=-1)


def drafted_penalised(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A presence penalty on the draft tokens of the step, at the positions after them."""
    proposed = (draft_tokens >= 0)[..., None].to(q.dtype)
    drafted = torch.zeros_like(q).scatter(-1, draft_tokens.clamp_min(0)[..., None], proposed).cummax(dim=-2).values
    penalised = normalise(p[..., 1:, :] * torch.exp(-PENALTY * drafted))
    return token_verification(torch.cat([p[..., :1, :], penalised], dim=-2), q, draft_tokens, accept, final)


def _kept(distributions: Tensor, index: Tensor, kept: Tensor) -> Tensor:
    """The distributions without the tokens `index` `(..., vocab)` that `kept` does not mark."""
    return normalise(distributions * torch.zeros_like(distributions).scatter(-1, index, kept.to(distributions.dtype)))


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
    _held_out("ascending-top-p", "top-p keeps the least probable tokens first when verifying", "vllm-ascend#4860",
              claimed=TOP_P, p=ascending_top_p),
    _held_out("crossing-token-dropped", "top-p drops the token that crosses the limit", "-", claimed=TOP_P,
              p=without_the_crossing_token),
    _held_out("kept-not-normalised", "what top-p keeps of p is not normalised when verifying", "-", claimed=TOP_P,
              p=kept_not_normalised),
    _held_out("temperature-after-top-p", "verification applies top-p before the temperature, drafting after it",
              "fish-speech#1150, mlx-audio#732", claimed=WARM, p=temperature_after_top_p),
    _aimed_at("top-p-left-on", "a top-p of 0.98 is applied and not claimed", "-", p=sampled_as(Sampling(top_p=0.98))),
    _aimed_at("min-p-left-on", "a min-p of 0.05 is applied and not claimed", "default of llama.cpp",
              p=claimed_as(Claimed(min_p=0.05))),
    _aimed_at("tail-truncated", "the sampler stops at a cumulative probability of 0.999", "-",
              p=sampled_as(Sampling(top_p=0.999))),
    _aimed_at("token-suppressed", "one token, such as the end token, is suppressed", "-", p=suppressed),
    _aimed_at("logit-bias-left-on", f"the logit of one token has a bias of {BIAS}", "-", p=biased),
    _held_out("drafted-penalised", f"the step's draft tokens have a presence penalty of {PENALTY}", "-",
              rule=drafted_penalised),
    _held_out("q-of-another-vocabulary", "verification reads q at the wrong ids", "rtp-llm#1311",
              q=of_another_vocabulary),
]  # fmt: skip

DISTRIBUTION_BUGS = {bug.name: bug for bug in _BUGS}
"""These bugs by name."""
