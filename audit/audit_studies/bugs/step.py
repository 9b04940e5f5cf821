"""The bug suite of a step: what implementations have got wrong, each as one change of a correct
step.

The bets of the audit were designed with these. More bugs of a step are in the modules beside this
one, by theme.

`audit_studies.bugs.known_bugs.generate` runs a bug in the loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from audit_studies.bugs.bug import Bug, Change
from specnb.distributions import Sampling, normalise, one_hot, residual, sample, standardise
from specnb.rules import Outcome, lenient_verification, token_verification

LENIENCE = 0.9
UNVERIFIED = 0.02
FILTERS = Sampling(top_k=50, top_p=0.9)


def sampled_as(sampling: Sampling) -> Change:
    """The change of a distribution at temperature 1 into the one under `sampling`."""
    return lambda distributions: standardise(distributions.log(), sampling, check=False)


def argmax_distribution(distributions: Tensor) -> Tensor:
    """One-hot at the most probable token."""
    return one_hot(distributions.argmax(dim=-1), distributions.shape[-1], distributions.dtype)


def unchanged(distributions: Tensor) -> Tensor:
    """The distributions as they are: no temperature, no filters."""
    return distributions


def one_position_early(distributions: Tensor) -> Tensor:
    """Each position gets the distribution of the one before it; the first keeps its own."""
    return torch.cat([distributions[..., :1, :], distributions[..., :-1, :]], dim=-2)


def in_bfloat16(distributions: Tensor) -> Tensor:
    """The distributions rounded to bfloat16, and normalised."""
    return normalise(distributions.bfloat16().to(distributions.dtype))


# Rules, as in `specnb.rules.Rule`: p, q, draft tokens, and the uniforms `accept` and `final`.


def one_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The uniform that rejected a draft token also samples the recovered token."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    reused = torch.cat([accept, final[..., None]], dim=-1).gather(-1, accepted[..., None])[..., 0]
    return token_verification(p, q, draft_tokens, accept, reused)


def zero_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The uniforms of the acceptance tests are 0."""
    return token_verification(p, q, draft_tokens, torch.zeros_like(accept), final)


def same_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """All acceptance tests of a step use one uniform."""
    return token_verification(p, q, draft_tokens, accept[..., :1].expand_as(accept), final)


def lenience_left_on(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Draft tokens are accepted with probability min(1, p / (l q))."""
    return lenient_verification(LENIENCE)(p, q, draft_tokens, accept, final)


def unverified(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A fraction of the draft tokens is accepted without a test; the others are verified
    correctly."""
    tested = ((accept - UNVERIFIED) / (1 - UNVERIFIED)).clamp_min(0)
    return token_verification(p, q, draft_tokens, tested, final)


def p_mutated(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """p is set to zero at the draft token, for the residual, before the acceptance test reads
    it."""
    zeroed = torch.cat([p[..., :-1, :].scatter(-1, draft_tokens[..., None], 0.0), p[..., -1:, :]], dim=-2)
    return token_verification(zeroed, q, draft_tokens, accept, final)


def redraw(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The target's own samples are accepted if they are the draft tokens; at a mismatch it samples
    a second time."""
    accepted = leading(draft_tokens == sample(p[..., :-1, :], accept), draft_tokens)
    return Outcome(accepted, sample(at_position(p, accepted), final))


def no_residual(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After a rejection p itself is sampled."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    return Outcome(accepted, sample(at_position(p, accepted), final))


def inverted_residual(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After a rejection max(0, q - p) is sampled."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    padded_q = torch.cat([q, p[..., -1:, :]], dim=-2)
    p_or_zero = torch.cat([p[..., :-1, :], torch.zeros_like(p[..., -1:, :])], dim=-2)
    wrong = residual(at_position(padded_q, accepted), at_position(p_or_zero, accepted))
    return Outcome(accepted, sample(wrong, final))


def soft_greedy(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """All tokens are argmaxes, that of the residual too; the acceptance test reads p and q at
    temperature 1."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    return Outcome(accepted, residual(at_position(p, accepted), at_position(without_bonus(q), accepted)).argmax(dim=-1))


def merged_children(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Two draft tokens for the first position become one child if they are equal, and that is
    tested once."""
    return Outcome(
        torch.zeros_like(draft_tokens[..., 0]), sample(merged_distribution(p[..., 0, :], q[..., 0, :]), final)
    )


def merged_distribution(p: Tensor, q: Tensor) -> Tensor:
    """The distribution `(..., vocab)` of the token emitted from two draft tokens, merged where they
    are equal.

    With a(x) = min(1, p/q), b(x) = min(1, r/q) for the residual r, and s the residual of r and q:
    equal draft tokens (q^2) are tested once, and replaced from r; different ones are tested with a,
    then with b, then replaced from s.
    """
    first, r = _accept_prob(p, q), residual(p, q)
    second, last = _accept_prob(r, q), residual(r, q)
    equal, rejected = q * q, q * (1 - first)
    rejected_equal = (equal * (1 - first)).sum(-1, keepdim=True)
    # a different token was tested first and rejected.
    other_rejected = rejected.sum(-1, keepdim=True) - rejected
    both_rejected = (q * (1 - second) * other_rejected).sum(-1, keepdim=True)
    from_equal = equal * first + rejected_equal * r
    return from_equal + q * (1 - q) * first + q * second * other_rejected + both_rejected * last


def step_bugs(filters: Sampling = FILTERS) -> dict[str, Bug]:
    """The bugs of one step by name; `filters` is claimed by those that need a top-k and a top-p."""
    nucleus_first = [sampled_as(Sampling(top_p=filters.top_p)), sampled_as(Sampling(top_k=filters.top_k))]
    bugs = [
        Bug("greedy-draft-soft-q", "draft tokens are the argmax of q, verification reads q at temperature 1",
            "transformers#32867, jaymody/speculative-sampling#3", sampled=argmax_distribution),
        Bug("raw-q", "draft tokens are sampled from the filtered q, verification reads the unfiltered q",
            "transformers#47932", claimed=filters, q=unchanged, sampled=sampled_as(filters)),
        Bug("wrong-temperature-q", "draft tokens are sampled from q at temperature 0.7, verification reads q at 1", "-",
            sampled=sampled_as(Sampling(0.7))),
        Bug("draw-dtype", "draft tokens are sampled from q in bfloat16, verification reads q in float32", "DeepSpec#31",
            sampled=in_bfloat16),
        Bug("one-uniform", "the uniform that rejected a draft token also samples the recovered token",
            "vllm-ascend#16370", rule=one_uniform),
        Bug("zero-uniform", "the uniforms of the acceptance tests are 0: every possible token is accepted",
            "vllm-ascend#13470", rule=zero_uniform),
        Bug("reseeded", "the generator is seeded again before each acceptance test", "LLMSpeculativeSampling",
            rule=same_uniform),
        Bug("p-mutated", "p is set to zero in place for the residual, and then the acceptance test reads it",
            "vllm-ascend#2881", rule=p_mutated),
        Bug("processors-dropped", "top-k and top-p are applied when drafting, not when verifying",
            "vLLM#18902, #42744, TensorRT-LLM#17701", claimed=filters, p=unchanged),
        Bug("filter-order", "verification applies top-p before top-k, drafting after it", "sglang#36173",
            claimed=filters, p=lambda distributions: nucleus_first[1](nucleus_first[0](distributions))),
        Bug("always-argmax", "verification ignores the temperature", "sglang#31214, #39253", p=argmax_distribution),
        Bug("wrong-slice", "the target's distributions are read one position early", "TensorRT-LLM#15098",
            p=one_position_early),
        Bug("redraw", "exact match, but a mismatch samples the target's token again", "an n-gram assisted sampler",
            rule=redraw),
        Bug("soft-greedy", "tokens are argmaxes, verification reads p and q at temperature 1",
            "n-gram sampler; a source", rule=soft_greedy, claimed=Sampling(temperature=0), p=unchanged, q=unchanged,
            sampled=argmax_distribution),
        Bug("no-residual", "after a rejection p itself is sampled", "teaching code", rule=no_residual),
        Bug("inverted-residual", "after a rejection max(0, q - p) is sampled", "-", rule=inverted_residual),
        Bug("lenience-left-on", f"lenience {LENIENCE} by default", "-", rule=lenience_left_on),
        Bug("unverified", f"{UNVERIFIED:.0%} of the draft tokens are accepted without a test", "- (a yardstick)",
            rule=unverified),
        Bug("merged-children", "two equal draft tokens become one child of a tree, tested once",
            "SpecInfer, as notes tell it", rule=merged_children),
    ]  # fmt: skip
    return {one.name: one for one in bugs}


def _accept_prob(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q), and 0 where q is 0."""
    return torch.where(q > 0, p / q, 0.0).clamp_max(1)


def at_position(distributions: Tensor, position: Tensor) -> Tensor:
    """The distributions `(..., vocab)` of `distributions` `(..., positions, vocab)` at `position`
    `(...,)`."""
    return distributions.take_along_dim(position[..., None, None], dim=-2).squeeze(-2)


def probability_of(draft_tokens: Tensor, distributions: Tensor) -> Tensor:
    """The probability `(..., gamma)` of each draft token in `distributions`
    `(..., gamma or more, vocab)`."""
    gamma = draft_tokens.shape[-1]
    return distributions[..., :gamma, :].gather(-1, draft_tokens.clamp_min(0)[..., None])[..., 0]


def ratios(p: Tensor, q: Tensor, draft_tokens: Tensor) -> Tensor:
    """p/q `(..., gamma)` of each draft token; NaN, which no comparison accepts, where both are
    0."""
    return probability_of(draft_tokens, p) / probability_of(draft_tokens, q)


def without_bonus(q: Tensor) -> Tensor:
    """q with a distribution of zeros at the position of the bonus token,
    `(..., gamma + 1, vocab)`."""
    return torch.cat([q, torch.zeros_like(q[..., :1, :])], dim=-2)


def leading(accepting: Tensor, draft_tokens: Tensor) -> Tensor:
    """The number `(...,)` of draft tokens before the first that `accepting` `(..., gamma)` does not
    mark."""
    return (accepting & (draft_tokens >= 0)).long().cumprod(dim=-1).sum(dim=-1)


def followed(p: Tensor, q: Tensor, accepted: Tensor, final: Tensor) -> Outcome:
    """After `accepted` `(...,)` draft tokens the correct recovered or bonus token."""
    return Outcome(accepted, sample(residual(at_position(p, accepted), at_position(without_bonus(q), accepted)), final))


def accepting_where(p: Tensor, q: Tensor, draft_tokens: Tensor, accepting: Tensor, final: Tensor) -> Outcome:
    """Accepts the leading draft tokens that `accepting` `(..., gamma)` marks; what follows them is
    correct."""
    return followed(p, q, leading(accepting, draft_tokens), final)
