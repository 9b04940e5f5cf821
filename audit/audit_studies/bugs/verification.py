"""More bugs of a step; what is not said to be wrong is as it should be.

First in how many draft tokens are accepted; then in the recovered or the bonus token, or in the
uniform that samples it; then in p or q (temperature, rounding, filters, penalties, biases, ids of
another vocabulary).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from audit_studies.bugs.bug import Bug, Change, registered
from audit_studies.bugs.step import (
    accepting_where,
    at_position,
    followed,
    in_bfloat16,
    leading,
    probability_of,
    ratios,
    sampled_as,
    without_bonus,
)
from specnb.distributions import Sampling, normalise, residual, sample
from specnb.rules import Outcome, block_verification, token_verification
from specnb_audit.claimed import Claimed, claimed_probs

ADDED, EPSILON, CERTAIN, DISCARDED = 0.05, 1e-3, 0.2, 0.05
TYPICAL, TYPICAL_OF_ENTROPY = 0.09, 0.3
TOLERANCE, BITS = 0.005, 8
COLD, COOL = Sampling(0.7), Sampling(0.9)
ROUNDED, CAP, SMOOTHED, SHARDS = 0.25, 8.0, 0.05, 2
FIRST = 0  # the token that is biased or suppressed
BIAS, PENALTY = 1.0, 0.5
TOP_P, WARM = Sampling(top_p=0.9), Sampling(temperature=1.3, top_p=0.9)
MORE_BUGS: dict[str, Bug] = {}
"""These bugs by name."""
_rule = partial(registered, MORE_BUGS)


@_rule("1bit-MONSTER#637")
def relative_to_the_largest(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token is accepted with probability p(x) / max p."""
    accept_prob = probability_of(draft_tokens, p) / p[..., :-1, :].amax(dim=-1)
    return accepting_where(p, q, draft_tokens, accept < accept_prob, final)


@_rule("lattice#243")
def first_not_verified(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The first draft token of a step is always accepted."""
    accepting = accept < ratios(p, q, draft_tokens)
    accepting[..., 0] = True
    return accepting_where(p, q, draft_tokens, accepting, final)


@_rule("OpenVINO GenAI 2026.4", held_out=False)
def acceptance_without_p(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token x is accepted if a uniform is at most q(x)/p(y), y the target's most probable
    token."""
    ratio = probability_of(draft_tokens, q) / p[..., :-1, :].amax(dim=-1)
    accepted = leading(accept <= ratio, draft_tokens)
    return Outcome(accepted, sample(at_position(p, accepted), final))


@_rule("vLLM#35355 (an option)")
def threshold_added(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A constant is added to the acceptance probability."""
    return accepting_where(p, q, draft_tokens, accept < ratios(p, q, draft_tokens) + ADDED, final)


@_rule("-")
def epsilon_in_the_ratio(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """p is divided by q plus a constant against division by zero, which is not small beside most
    probabilities."""
    ratio = probability_of(draft_tokens, p) / (probability_of(draft_tokens, q) + EPSILON)
    return accepting_where(p, q, draft_tokens, accept < ratio, final)


@_rule("-")
def ratio_in_float8(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The acceptance probability is rounded to 8 bits, 3 of them after the leading one."""
    ratio = ratios(p, q, draft_tokens).clamp_max(1).to(torch.float8_e4m3fn).to(p.dtype)
    return accepting_where(p, q, draft_tokens, accept < ratio, final)


@_rule("-")
def cumulated_ratio(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Each draft token is tested with the product of p/q up to it, as in block verification,
    without its residual."""
    return accepting_where(p, q, draft_tokens, accept < ratios(p, q, draft_tokens).cumprod(dim=-1), final)


@_rule("-")
def argmax_accepted(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token that is the target's most probable token is accepted without a test."""
    accepting = (accept < ratios(p, q, draft_tokens)) | (draft_tokens == p[..., :-1, :].argmax(dim=-1))
    return accepting_where(p, q, draft_tokens, accepting, final)


@_rule("sglang#7702 (an option)")
def probable_accepted(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token whose p reaches a threshold is accepted without a test."""
    accepting = (accept < ratios(p, q, draft_tokens)) | (probability_of(draft_tokens, p) >= CERTAIN)
    return accepting_where(p, q, draft_tokens, accepting, final)


@_rule("Medusa, vLLM#5131 (an option)")
def typical_acceptance(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token is accepted where p exceeds a threshold that falls with the entropy; p itself
    follows."""
    entropy = torch.special.entr(p[..., :-1, :]).sum(dim=-1)
    threshold = (TYPICAL_OF_ENTROPY * torch.exp(-entropy)).clamp_max(TYPICAL)
    accepted = leading(probability_of(draft_tokens, p) > threshold, draft_tokens)
    return Outcome(accepted, sample(at_position(p, accepted), final))


@_rule("vLLM#2658 (in a metric)")
def all_accepted_counted(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """As many draft tokens are kept as passed their test, those after a rejected one included."""
    passed = (accept < ratios(p, q, draft_tokens)) & (draft_tokens >= 0)
    return followed(p, q, passed.sum(dim=-1), final)


@_rule("-")
def last_accepted_replaced(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The last accepted token is dropped, and a token is sampled from p in its place."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    kept = (accepted - 1).clamp_min(0)
    return Outcome(kept, torch.where(accepted > 0, sample(at_position(p, kept), final), token))


@_rule("ik_llama.cpp#1820")
def improbable_discarded(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The draft ends before the first draft token whose q is low, as if it had not been sampled."""
    proposed = leading(probability_of(draft_tokens, q) >= DISCARDED, draft_tokens)
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    return Outcome(
        torch.minimum(accepted, proposed),
        torch.where(accepted < proposed, token, sample(at_position(p, proposed), final)),
    )


@_rule("xLLM#2175")
def residual_of_one_token(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The residual subtracts q at the rejected draft token alone."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    at_draft_token = q * torch.zeros_like(q).scatter(-1, draft_tokens.clamp_min(0)[..., None], 1.0)
    return followed(p, at_draft_token, accepted, final)


@_rule("openvino.genai#4190")
def replaced_from_the_next_position(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor
) -> Outcome:
    """After a rejection a token is sampled from the target's distribution after the rejected draft
    token."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    following = (accepted + 1).clamp_max(p.shape[-2] - 1)
    return Outcome(accepted, sample(at_position(p, following), final))


@_rule("-")
def residual_not_normalised(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """max(0, p - q) is inverted as if it summed to 1: uniforms beyond its mass give the last
    token."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    here, drafted = at_position(p, accepted), at_position(without_bonus(q), accepted)
    cumulated = (here - drafted).clamp_min(0).cumsum(dim=-1)
    beyond = final >= cumulated[..., -1]
    inverted = torch.searchsorted(cumulated, final[..., None].contiguous(), right=True)[..., 0]
    return Outcome(accepted, torch.where(beyond, here.shape[-1] - 1, inverted.clamp_max(here.shape[-1] - 1)))


@_rule("transformers#28508")
def softmax_of_the_residual(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After a rejection softmax(max(0, p - q)) is sampled, which is nearly uniform."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    difference = at_position(p, accepted) - at_position(without_bonus(q), accepted)
    wrong = sample(torch.softmax(difference.clamp_min(0), dim=-1), final)
    return Outcome(accepted, torch.where(accepted < draft_tokens.shape[-1], wrong, token))


@_rule("-")
def absolute_residual(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After a rejection |p - q| is sampled."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    difference = at_position(p, accepted) - at_position(without_bonus(q), accepted)
    return Outcome(accepted, sample(difference.abs(), final))


@_rule("-")
def residual_with_the_first_q(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The residual subtracts q of the step's first position, wherever the rejection is."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    return followed(p, q[..., :1, :].expand_as(q), accepted, final)


@_rule("-")
def small_differences_dropped(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The residual leaves out the tokens where p - q is below a tolerance for rounding, unless it
    would be empty."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    difference = (at_position(p, accepted) - at_position(without_bonus(q), accepted)).clamp_min(0)
    large = difference.where(difference >= TOLERANCE, 0.0)
    replaced = sample(large.where(large.sum(dim=-1, keepdim=True) > 0, difference), final)
    return Outcome(accepted, torch.where(accepted < draft_tokens.shape[-1], replaced, token))


@_rule("vllm-ascend#7807")
def block_with_the_residual_of_tokens(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor
) -> Outcome:
    """The acceptance of block verification with the residual of token verification."""
    return followed(p, q, block_verification(p, q, draft_tokens, accept, final).accepted, final)


@_rule("-")
def last_not_tested(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The last draft token counts as rejected without a test: a token of its residual is in its
    place."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    return followed(p, q, accepted.clamp_max(draft_tokens.shape[-1] - 1), final)


@_rule("-")
def bonus_from_draft(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After full acceptance the bonus token is sampled from the draft's last distribution."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    is_full = accepted == draft_tokens.shape[-1]
    return Outcome(accepted, torch.where(is_full, sample(q[..., -1, :], final), token))


@_rule("-")
def bonus_argmax(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After full acceptance the bonus token is the target's most probable token."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    return Outcome(accepted, torch.where(accepted == draft_tokens.shape[-1], p[..., -1, :].argmax(dim=-1), token))


@_rule("-")
def few_bits(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The uniform of the recovered or bonus token has few bits, so that improbable tokens are lost
    or too frequent."""
    return token_verification(p, q, draft_tokens, accept, (final * 2**BITS).floor() / 2**BITS)


@_rule("-")
def averaged_uniforms(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Two workers average their uniforms to agree on one, so that it is not uniform."""
    return token_verification(p, q, draft_tokens, _mean_of_two(accept), _mean_of_two(final))


@_rule("Megatron-LM#7182, lmdeploy#1239")
def cumulated_in_bfloat16(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The recovered or bonus token is found among cumulative sums that were rounded to bfloat16."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    probs = residual(at_position(p, accepted), at_position(without_bonus(q), accepted))
    cumulated = probs.cumsum(dim=-1).bfloat16().to(p.dtype)
    return Outcome(accepted, sample(cumulated.diff(dim=-1, prepend=torch.zeros_like(cumulated[..., :1])), final))


@_rule("-")
def bonus_reuses_a_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The uniform that accepted the last draft token also samples the bonus token."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    reused = torch.where(accepted == draft_tokens.shape[-1], accept[..., -1], final)
    return token_verification(p, q, draft_tokens, accept, reused)


def _mean_of_two(uniform: Tensor) -> Tensor:
    """A sample of the mean of two uniforms, which is triangular on [0, 1]: its inverse distribution
    function."""
    return torch.where(uniform < 0.5, (uniform / 2).sqrt(), 1 - ((1 - uniform) / 2).sqrt())


def stale_temperatures(distributions: Tensor) -> Tensor:
    """The first position has its temperature, those after it that of uninitialised memory: here 0.2
    and 5 in turn."""
    positions = torch.arange(distributions.shape[-2])
    power = torch.where(positions % 2 == 1, 5.0, 0.2).to(distributions.dtype)
    power[0] = 1.0
    return torch.softmax(distributions.log() * power[:, None], dim=-1)


def compounded_temperature(distributions: Tensor) -> Tensor:
    """The temperature is applied in place once for each position: to the second one twice, and so
    on."""
    times = torch.arange(1, distributions.shape[-2] + 1, dtype=distributions.dtype, device=distributions.device)
    return torch.softmax(distributions.log() / COOL.temperature ** times[:, None], dim=-1)


def rounded_logits(distributions: Tensor) -> Tensor:
    """Logits rounded to multiples of 0.25, as coarse quantisation does: noise without direction."""
    return torch.softmax((distributions.log() / ROUNDED).round() * ROUNDED, dim=-1)


def soft_capped(distributions: Tensor) -> Tensor:
    """A soft cap on the logits, here on their differences from the mean; tokens of probability 0
    stay impossible."""
    logits = distributions.log()
    possible = distributions > 0
    mean = logits.where(possible, 0.0).sum(dim=-1, keepdim=True) / possible.sum(dim=-1, keepdim=True)
    return torch.softmax((CAP * torch.tanh((logits - mean) / CAP)).where(possible, -torch.inf), dim=-1)


def softmax_per_shard(distributions: Tensor) -> Tensor:
    """Each half of the vocabulary is normalised alone, as by two workers that do not exchange their
    sums."""
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
    """Token i has the probability of token i + 1, as where ids of a smaller vocabulary are not
    mapped."""
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


_held_out = partial(Bug, held_out=True)
_BUGS = [
    Bug("stale-temperatures", "the temperatures of drafted positions are uninitialised memory", "vLLM#55005",
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
    Bug("top-p-left-on", "a top-p of 0.98 is applied and not claimed", "-", p=sampled_as(Sampling(top_p=0.98))),
    Bug("min-p-left-on", "a min-p of 0.05 is applied and not claimed", "default of llama.cpp",
              p=claimed_as(Claimed(min_p=0.05))),
    Bug("tail-truncated", "the sampler stops at a cumulative probability of 0.999", "-",
              p=sampled_as(Sampling(top_p=0.999))),
    Bug("token-suppressed", "one token, such as the end token, is suppressed", "-", p=suppressed),
    Bug("logit-bias-left-on", f"the logit of one token has a bias of {BIAS}", "-", p=biased),
    _held_out("drafted-penalised", f"the step's draft tokens have a presence penalty of {PENALTY}", "-",
              rule=drafted_penalised),
    _held_out("q-of-another-vocabulary", "verification reads q at the wrong ids", "rtp-llm#1311",
              q=of_another_vocabulary),
]  # fmt: skip

MORE_BUGS |= {bug.name: bug for bug in _BUGS}
