"""Planted bugs: what implementations of speculative decoding have got wrong, each in a few lines.

Each changes one thing of a correct step: its rule, the laws that the rule reads, or where the drafts
come from. The docstrings say where it happened. `mended` undoes the one thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from laws import mapped
from torch import Tensor

from specnb.exact import Laws
from specnb.law import Sampling, draw, normalise, one_hot, residual, standardise
from specnb.verify import Outcome, Rule, exact_match, token_verification


class Step(NamedTuple):
    """A step that should have the law `intended`: the rule reads p and q, the drafts come from `drawn`."""

    intended: Laws
    rule: Rule
    p: Laws
    q: Laws
    drawn: Laws


Mutant = Callable[[Laws, Laws], Step]
"""From the laws of a target and a drafter to a step that is wrong."""

LENIENCE = 0.9
FILTERS = Sampling(top_k=3, top_p=0.9)


def mended(step: Step) -> Step:
    """The correct step with the same intention and the same drafts."""
    return step._replace(rule=token_verification, p=step.intended, q=step.drawn)


def greedy_draft_soft_q(p: Laws, q: Laws) -> Step:
    """Drafts are the argmax of q, the test reads the soft q: transformers#32867, jaymody/speculative-sampling#3."""
    return Step(p, token_verification, p, q, drawn=mapped(_argmax, q))


def raw_q(p: Laws, q: Laws) -> Step:
    """Tokens are drawn from the filtered law, the raw q is reported: transformers#47932."""
    target = _filtered(FILTERS, p)
    return Step(target, token_verification, target, q, drawn=_filtered(FILTERS, q))


def one_uniform(p: Laws, q: Laws) -> Step:
    """The uniform that rejected a draft also draws its replacement: vllm-ascend#16370."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        accepted = token_verification(p, q, drafts, accept, final).accepted
        reused = torch.cat([accept, final[..., None]], dim=-1).gather(-1, accepted[..., None])[..., 0]
        return token_verification(p, q, drafts, accept, reused)

    return Step(p, rule, p, q, drawn=q)


def zero_uniform(p: Laws, q: Laws) -> Step:
    """The uniforms of the test are 0, so that everything possible is accepted: vllm-ascend#13470."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, drafts, torch.zeros_like(accept), final)

    return Step(p, rule, p, q, drawn=q)


def p_mutated(p: Laws, q: Laws) -> Step:
    """p is zeroed in place at the drafted token, for the residual, and then the test reads it: vllm-ascend#2881."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        zeroed = torch.cat([p[..., :-1, :].scatter(-1, drafts[..., None], 0.0), p[..., -1:, :]], dim=-2)
        return token_verification(zeroed, q, drafts, accept, final)

    return Step(p, rule, p, q, drawn=q)


def filter_order(p: Laws, q: Laws) -> Step:
    """Verification applies top-p before top-k, plain decoding and drafting after it: sglang#36173."""
    first, second = Sampling(top_p=FILTERS.top_p), Sampling(top_k=FILTERS.top_k)
    drafted = _filtered(FILTERS, q)
    swapped = _filtered(second, _filtered(first, p))
    return Step(_filtered(FILTERS, p), token_verification, swapped, drafted, drawn=drafted)


def always_argmax(p: Laws, q: Laws) -> Step:
    """The verify path ignores the temperature: sglang#31214, sglang#39253."""
    return Step(p, token_verification, mapped(_argmax, p), q, drawn=q)


def wrong_slice(p: Laws, q: Laws) -> Step:
    """The target's laws are read one position too early: TensorRT-LLM#15098."""
    return Step(p, token_verification, lambda context: p(context[:-1]), q, drawn=q)


def draw_dtype(p: Laws, q: Laws) -> Step:
    """Drawn from q rounded to bfloat16, tested with the q that is not: DeepSpec#31."""
    return Step(p, token_verification, p, q, drawn=mapped(lambda law: normalise(law.bfloat16().double()), q))


def redraw(p: Laws, q: Laws) -> Step:
    """Exact match, but on a mismatch the target's token is drawn once more: an n-gram assisted sampler."""
    return Step(p, _last_from_p(exact_match), p, q, drawn=q)


def soft_greedy(p: Laws, q: Laws) -> Step:
    """Tokens are argmaxes, but p and q stay soft in the test: the same sampler, and one of the source documents."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        accepted = token_verification(p, q, drafts, accept, final).accepted
        left = residual(_at_position(p, accepted), _at_position(_with_zero_law(q), accepted))
        return Outcome(accepted, left.argmax(dim=-1))

    return Step(mapped(_argmax, p), rule, p, q, drawn=mapped(_argmax, q))


def reseeded(p: Laws, q: Laws) -> Step:
    """The generator is seeded again before each test, which therefore gets the same uniform: LLMSpeculativeSampling."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, drafts, accept[..., :1].expand_as(accept), final)

    return Step(p, rule, p, q, drawn=q)


def no_residual(p: Laws, q: Laws) -> Step:
    """After a rejection p itself is sampled: common in teaching code."""
    return Step(p, _last_from_p(token_verification), p, q, drawn=q)


def inverted_residual(p: Laws, q: Laws) -> Step:
    """After a rejection max(0, q - p) is sampled."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        accepted = token_verification(p, q, drafts, accept, final).accepted
        drafted = torch.cat([q, p[..., -1:, :]], dim=-2)
        nothing_after = torch.cat([p[..., :-1, :], torch.zeros_like(p[..., -1:, :])], dim=-2)
        wrong = residual(_at_position(drafted, accepted), _at_position(nothing_after, accepted))
        return Outcome(accepted, draw(wrong, final))

    return Step(p, rule, p, q, drawn=q)


def lenience_left_on(p: Laws, q: Laws) -> Step:
    """A lenience below 1 by default: accept with probability min(1, p(x) / (l q(x)))."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, drafts, LENIENCE * accept, final)

    return Step(p, rule, p, q, drawn=q)


def processors_dropped(p: Laws, q: Laws) -> Step:
    """A processor works in plain decoding and drafting and not when verifying: vLLM#18902, TensorRT-LLM#17701."""
    drafted = _filtered(FILTERS, q)
    return Step(_filtered(FILTERS, p), token_verification, p, drafted, drawn=drafted)


MUTANTS: tuple[Mutant, ...] = (
    greedy_draft_soft_q,
    raw_q,
    one_uniform,
    zero_uniform,
    p_mutated,
    filter_order,
    always_argmax,
    wrong_slice,
    draw_dtype,
    redraw,
    soft_greedy,
    reseeded,
    no_residual,
    inverted_residual,
    lenience_left_on,
    processors_dropped,
)

NOT_ENUMERABLE = (one_uniform, reseeded, inverted_residual, lenience_left_on)
"""Those that use a uniform otherwise than any exact rule does: enumeration itself notices, and raises."""


def _argmax(law: Tensor) -> Tensor:
    return one_hot(law.argmax(dim=-1), law.shape[-1], law.dtype)


def _filtered(sampling: Sampling, laws: Laws) -> Laws:
    return mapped(lambda law: standardise(law.log(), sampling), laws)


def _with_zero_law(q: Tensor) -> Tensor:
    return torch.cat([q, torch.zeros_like(q[..., :1, :])], dim=-2)


def _last_from_p(accepting: Rule) -> Rule:
    """Accepts as `accepting` does, and draws the token behind from p itself, whatever was rejected."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        accepted = accepting(p, q, drafts, accept, final).accepted
        return Outcome(accepted, draw(_at_position(p, accepted), final))

    return rule


def _at_position(laws: Tensor, position: Tensor) -> Tensor:
    return laws.take_along_dim(position[..., None, None], dim=-2).squeeze(-2)
