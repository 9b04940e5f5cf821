"""Planted bugs of a step: what implementations have got wrong, each as one change of a correct step.

A `Mutant` is data. What it changes is the rule, the distributions that the rule reads, or where the drafts come from;
`step` makes of it a step that can be enumerated, `specnb.audit.known_bugs` runs it in the real loop, together with the
bugs that only a loop can have. `seen` says where it happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specnb.sampling.distributions import Sampling, normalise, one_hot, residual, sample, standardise, total_variation
from specnb.sampling.enumeration import Conditional, Emissions, completed, joint_distribution, step_distribution
from specnb.sampling.verification import Outcome, Rule, exact_match, lenient_verification, token_verification

Change = Callable[[Tensor], Tensor]
"""Of the distributions `(..., positions, vocab)` that a model has at temperature 1."""

PLAIN = Sampling()
LENIENCE = 0.9
UNVERIFIED = 0.02
FILTERS = Sampling(top_k=50, top_p=0.9)
POINTS = 2**13


@dataclass(frozen=True)
class Bug:
    """One thing changed. `asked` is what the text should be drawn with; what is None is as it should be.

    rule    decides, from what it is given as p and q
    p, q    make what the rule reads of the target's and the draft's distributions at temperature 1
    drawn   makes of the draft's the distribution that the drafts really come from, position by position
    plant   for bugs of the loop: changes its code (see `specnb.audit.known_bugs`)
    """

    name: str
    wrong: str
    seen: str
    rule: Rule = token_verification
    asked: Sampling = PLAIN
    p: Change | None = None
    q: Change | None = None
    sampled: Change | None = None
    plant: Callable[[Any], None] | None = None
    lossless: bool = False


def sampled_as(sampling: Sampling) -> Change:
    """The change from a distribution at temperature 1 to the one that `sampling` makes of it."""
    return lambda distributions: standardise(distributions.log(), sampling, check=False)


def argmax_distribution(distributions: Tensor) -> Tensor:
    """Certainty of the most probable token."""
    return one_hot(distributions.argmax(dim=-1), distributions.shape[-1], distributions.dtype)


def unchanged(distributions: Tensor) -> Tensor:
    return distributions


def one_position_early(distributions: Tensor) -> Tensor:
    """Each position gets the distribution of the one before it; the first keeps its own."""
    return torch.cat([distributions[..., :1, :], distributions[..., :-1, :]], dim=-2)


def in_bfloat16(distributions: Tensor) -> Tensor:
    return normalise(distributions.bfloat16().to(distributions.dtype))


# Rules. The signature is that of `specnb.sampling.verification.Rule`: p, q, drafts, accept, final.


def one_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The uniform that rejected a draft draws its replacement."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    reused = torch.cat([accept, final[..., None]], dim=-1).gather(-1, accepted[..., None])[..., 0]
    return token_verification(p, q, draft_tokens, accept, reused)


def zero_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The uniforms of the test are 0."""
    return token_verification(p, q, draft_tokens, torch.zeros_like(accept), final)


def same_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """All tests of a step use one uniform."""
    return token_verification(p, q, draft_tokens, accept[..., :1].expand_as(accept), final)


def unverified(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A share of the drafts is accepted without a test; the others are tested as they should be."""
    tested = ((accept - UNVERIFIED) / (1 - UNVERIFIED)).clamp_min(0)
    return token_verification(p, q, draft_tokens, tested, final)


def p_mutated(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """p is zeroed at the drafted token, for the residual, before the test reads it."""
    zeroed = torch.cat([p[..., :-1, :].scatter(-1, draft_tokens[..., None], 0.0), p[..., -1:, :]], dim=-2)
    return token_verification(zeroed, q, draft_tokens, accept, final)


def redraw(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Exact match, but at a mismatch the target's token is drawn once more."""
    accepted = exact_match(p, q, draft_tokens, accept, final).accepted
    return Outcome(accepted, sample(_at_position(p, accepted), final))


def no_residual(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After a rejection p itself is sampled."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    return Outcome(accepted, sample(_at_position(p, accepted), final))


def inverted_residual(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After a rejection max(0, q - p) is sampled."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    drafted = torch.cat([q, p[..., -1:, :]], dim=-2)
    nothing_after = torch.cat([p[..., :-1, :], torch.zeros_like(p[..., -1:, :])], dim=-2)
    wrong = residual(_at_position(drafted, accepted), _at_position(nothing_after, accepted))
    return Outcome(accepted, sample(wrong, final))


def soft_greedy(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Tokens are argmaxes, also that of the residual; the test reads soft p and q."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    after = torch.cat([q, torch.zeros_like(p[..., :1, :])], dim=-2)
    return Outcome(accepted, residual(_at_position(p, accepted), _at_position(after, accepted)).argmax(dim=-1))


def merged_children(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Two drafts of the first token become one child if they are equal, and that is tested once."""
    return Outcome(
        torch.zeros_like(draft_tokens[..., 0]), sample(merged_distribution(p[..., 0, :], q[..., 0, :]), final)
    )


def merged_distribution(p: Tensor, q: Tensor) -> Tensor:
    """The distribution `(..., vocab)` of the token that comes of two drafts from q, merged where they are equal.

    With a(x) = min(1, p/q), b(x) = min(1, r/q) for the residual r, and s the residual of r and q: equal drafts
    (q^2) are tested once, and replaced from r; different ones are tested with a, then with b, then replaced from s.
    """
    first, left = _chance(p, q), residual(p, q)
    second, last = _chance(left, q), residual(left, q)
    alone, refused = q * q, q * (1 - first)
    refused_alone = (alone * (1 - first)).sum(-1, keepdim=True)
    some_other = refused.sum(-1, keepdim=True) - refused  # another draft than this one was tested first, and refused
    both_refused = (q * (1 - second) * some_other).sum(-1, keepdim=True)
    return alone * first + refused_alone * left + q * (1 - q) * first + q * second * some_other + both_refused * last


def step_bugs(filters: Sampling = FILTERS) -> dict[str, Bug]:
    """The bugs of one step by name; `filters` is what those that need a top-k and a top-p were asked for."""
    nucleus_first = [sampled_as(Sampling(top_p=filters.top_p)), sampled_as(Sampling(top_k=filters.top_k))]
    made = [
        Bug("greedy-draft-soft-q", "drafts are the argmax of q, the test reads the soft q",
               "transformers#32867, jaymody/speculative-sampling#3", sampled=argmax_distribution),
        Bug("raw-q", "drafts come from the filtered q, the test reads the raw one", "transformers#47932",
               asked=filters, q=unchanged, sampled=sampled_as(filters)),
        Bug("wrong-temperature-q", "drafts come from q at temperature 0.7, the test reads it at 1",
               "-", sampled=sampled_as(Sampling(0.7))),
        Bug("draw-dtype", "drafts come from q rounded to bfloat16, the test reads float32", "DeepSpec#31",
               sampled=in_bfloat16),
        Bug("one-uniform", "the uniform that rejected a draft draws its replacement", "vllm-ascend#16370",
               one_uniform),
        Bug("zero-uniform", "the uniforms of the test are 0: whatever is possible is accepted", "vllm-ascend#13470",
               zero_uniform),
        Bug("reseeded", "the generator is seeded again before each test", "LLMSpeculativeSampling", same_uniform),
        Bug("p-mutated", "p is zeroed in place for the residual, and then the test reads it", "vllm-ascend#2881",
               p_mutated),
        Bug("processors-dropped", "filters work when drafting and not when verifying",
               "vLLM#18902, #42744, TensorRT-LLM#17701", asked=filters, p=unchanged),
        Bug("filter-order", "verification applies top-p before top-k, drafting after it", "sglang#36173",
               asked=filters, p=lambda distributions: nucleus_first[1](nucleus_first[0](distributions))),
        Bug("always-argmax", "verification ignores the temperature", "sglang#31214, #39253", p=argmax_distribution),
        Bug("wrong-slice", "the target's distributions are read one position early", "TensorRT-LLM#15098",
               p=one_position_early),
        Bug("redraw", "exact match, but a mismatch draws the target's token again", "an n-gram assisted sampler",
               redraw),
        Bug("soft-greedy", "tokens are argmaxes, the test reads soft p and q", "n-gram sampler; a source",
               soft_greedy, asked=Sampling(temperature=0), p=unchanged, q=unchanged, sampled=argmax_distribution),
        Bug("no-residual", "after a rejection p itself is sampled", "teaching code", no_residual),
        Bug("inverted-residual", "after a rejection max(0, q - p) is sampled", "-", inverted_residual),
        Bug("lenience-left-on", f"lenience {LENIENCE} by default", "-",
               lenient_verification(LENIENCE)),
        Bug("unverified", f"{UNVERIFIED:.0%} of the drafts are not tested", "- (a yardstick)", unverified),
        Bug("merged-children", "two equal drafts become one child of a tree, tested once", "SpecInfer as printed",
               merged_children),
    ]  # fmt: skip
    return {bug.name: bug for bug in made}


class Step(NamedTuple):
    """A step that should have the distribution `intended`: the rule reads p and q, the drafts come from `drawn`."""

    intended: Conditional
    rule: Rule
    p: Conditional
    q: Conditional
    sampled: Conditional


def step(bug: Bug, p: Conditional, q: Conditional) -> Step:
    """The step of `bug` where target and draft have the distributions p and q at temperature 1."""
    asked = sampled_as(bug.asked)
    drafted, read = bug.sampled or asked, bug.q or (unchanged if bug.sampled else asked)
    return Step(_changed(p, asked), bug.rule, _changed(p, bug.p or asked), _changed(q, read), _changed(q, drafted))


def corrected(step: Step) -> Step:
    """The correct step with the same intention and the same drafts."""
    return step._replace(rule=token_verification, p=step.intended, q=step.sampled)


def deviation(step: Step, gamma: int) -> float:
    """Total variation of the joint distribution of the next gamma + 1 tokens from the intended one, enumerated.

    Raises `ValueError` where a rule uses a uniform in a way that cannot be; `deviation_on_points` can.
    """
    return _distance(step, step_distribution(step.rule, step.p, step.q, gamma, step.sampled), gamma)


def deviation_on_points(step: Step, gamma: int, points: int = POINTS) -> float:
    """The same for any rule at all: on that many evenly spread points in place of the uniforms."""
    vocab = len(step.p(()))
    uniforms = torch.quasirandom.SobolEngine(gamma + 1).draw(points + 1, dtype=torch.float64)[1:]
    drafted = joint_distribution(step.sampled, gamma)
    emitted: Emissions = {}
    for draft_tokens in drafted.nonzero().tolist():
        prefixes = [tuple(draft_tokens[:i]) for i in range(gamma + 1)]
        p = torch.stack([step.p(prefix) for prefix in prefixes])
        q = torch.stack([step.q(prefix) for prefix in prefixes[:-1]])
        each_p, each_q, each_draft = (x.expand(points, *x.shape) for x in (p, q, torch.tensor(draft_tokens)))
        accepted, token = step.rule(each_p, each_q, each_draft, uniforms[:, :-1], uniforms[:, -1])
        each = drafted[tuple(draft_tokens)].expand(points) / points
        chances = torch.zeros(gamma + 1, vocab, dtype=torch.float64).index_put((accepted, token), each, accumulate=True)
        for n, x in chances.nonzero().tolist():
            tokens = (*draft_tokens[:n], x)
            emitted[tokens] = emitted.get(tokens, 0.0) + float(chances[n, x])
    return _distance(step, emitted, gamma)


def _distance(step: Step, emitted: Emissions, gamma: int) -> float:
    have, want = completed(emitted, step.intended, gamma + 1), joint_distribution(step.intended, gamma + 1)
    return float(total_variation(have.flatten(), want.flatten()))


def _changed(distributions: Conditional, change: Change) -> Conditional:
    """`change` may look at the positions before: it is given all distributions along a context, and the last is kept."""
    return lambda context: change(torch.stack([distributions(context[:i]) for i in range(len(context) + 1)]))[-1]


def _at_position(distributions: Tensor, position: Tensor) -> Tensor:
    return distributions.take_along_dim(position[..., None, None], dim=-2).squeeze(-2)


def _chance(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q), and 0 where no draft comes from."""
    return torch.where(q > 0, p / q, 0.0).clamp_max(1)
