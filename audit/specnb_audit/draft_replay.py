"""A log of speculative decoding, replayed with a drafter: the probability with which each draft token was accepted.

A step of Algorithm 1 emits a token x that was drafted and accepted with probability min(p(x), q(x)),
and in all with probability p(x). Given the text, a test of the draft token at a place therefore
accepts with probability b = min(1, q(x) / p(x)), independently of all others, and the steps of a log
have the product of b and 1 - b as their likelihood. If draft tokens come from s and the test reads
another q, x is drafted and accepted with probability A = s(x) min(1, p(x) / q(x)); it follows a
rejection with R, the probability of a rejection times the residual of p and q. Then b = A / (A + R),
and the text has A + R in place of p(x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from specnb.distributions import Sampling, standardise, unnormalised_residual
from specnb.drafters import Context, Drafter, ModelDrafter
from specnb.fast import shared_copy
from specnb.rules import Outcome
from specnb.support import TokenMap, require_context

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Log:
    """Sequences, and the tokens that each of their steps emitted.

    Attributes
    ----------
    steps
        For each sequence; the recovered or bonus token counts.
    gamma
        Draft tokens of a step.
    undrafted
        Whether the first step of a sequence had no draft, as if the pass over the prompt emits a token.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    steps: list[list[int]]
    gamma: int
    undrafted: bool = False

    @cached_property
    def tests(self) -> Tests:
        """The last token of a sequence may be a draft token after which the step was cut, and is left out."""
        found = [
            (row, step, depth, depth + 1 < size)
            for row, sizes in enumerate(self.steps)
            for step, size in enumerate(sizes)
            if step or not self.undrafted
            for depth in range(min(size - (step + 1 == len(sizes)), self.gamma))
        ]
        columns = np.array(found, dtype=np.int64).reshape(-1, 4).T
        return Tests(columns[0], columns[1], columns[2], columns[3].astype(bool))

    @cached_property
    def ends(self) -> tuple[NDArray[np.int64], ...]:
        """Sequence, step and depth of the tokens that `tests` leaves out: drafted or not, they are text of the target.

        Whether a sequence ends may depend on its last token, so a likelihood of texts needs that, too.
        """
        found = [
            (row, len(sizes) - 1, sizes[-1] - 1)
            for row, sizes in enumerate(self.steps)
            if sizes[-1] <= self.gamma and (len(sizes) > 1 or not self.undrafted)
        ]
        return tuple(np.array(found, dtype=np.int64).reshape(-1, 3).T)

    def every_place(self) -> Log:
        """A log of the same text in which each token is a step."""
        return Log(self.prompts, self.completions, [[1] * len(one) for one in self.completions], self.gamma)


class Tests(NamedTuple):
    """Draft tokens that were tested `(n,)`: sequence, number of its step, depth from 0, and whether accepted."""

    row: NDArray[np.int64]
    step: NDArray[np.int64]
    depth: NDArray[np.int64]
    accepted: NDArray[np.bool_]


@dataclass(frozen=True)
class Served:
    """A way in which an engine may have served a draft.

    Attributes
    ----------
    name, mend
        What is wrong, and which line of the engine to look at.
    drafter
        Samples the draft tokens.
    tested
        The drafter of which the test reads q; None for the same.
    states
        The hidden states that the drafter reads, from a `Text`; None for those of its `hidden_layers`.
    target, sampling, prompts
        Of the engine, if they are not those given.
    """

    name: str
    mend: str
    drafter: Drafter
    tested: Drafter | None = None
    states: Callable[[Text], Tensor] | None = None
    target: PreTrainedModel | None = None
    sampling: Sampling | None = None
    prompts: list[list[int]] | None = None


class Text:
    """Completions after their prompts, with the distributions p and hidden states of a target.

    Attributes
    ----------
    p : (rows, longest, vocab)
    hidden, before_norm : (rows, tokens, width)
        All hidden states, if they are wanted, and the last one before the final norm.
    """

    @torch.inference_mode()
    def __init__(
        self, target: PreTrainedModel, prompts: list[list[int]], completions: list[list[int]], sampling: Sampling,
        hidden: bool,
    ) -> None:  # fmt: skip
        self.target, self.device = target, target.device
        self.sequences = [[*prompt, *tokens] for prompt, tokens in zip(prompts, completions, strict=True)]
        self.begins = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.counts = torch.tensor([len(tokens) for tokens in completions], device=self.device)
        rows, longest = len(prompts), int(self.counts.max())
        first = min(map(len, prompts)) - 1
        model: Any = shared_copy(target) if hidden else target
        token_map, norm, before = TokenMap(target), final_norm(model), []
        if norm is not None and hidden:
            norm.register_forward_pre_hook(lambda module, given: before.append(given[0]))
        tokens = self.tokens()
        require_context([len(one) - 1 for one in self.sequences], target=target)
        output = model(
            input_ids=token_map.inputs(tokens[:, :-1]), use_cache=False, output_hidden_states=hidden,
            logits_to_keep=tokens.shape[1] - 1 - first,
        )  # fmt: skip
        places = self.begins[:, None] - 1 - first + torch.arange(longest, device=self.device)
        logits = token_map.logits(output.logits)
        of_rows = torch.arange(rows, device=self.device)[:, None]
        self.p = standardise(logits[of_rows, places.clamp_max(logits.shape[1] - 1)], sampling)
        self.hidden = list(output.hidden_states) if hidden else []
        self.before_norm = before[-1] if before else None

    def tokens(self, more: int = 0) -> Tensor:
        """The sequences `(rows, longest + more)`, padded with 0."""
        longest = max(map(len, self.sequences)) + more
        padded = [[*one, *[0] * (longest - len(one))] for one in self.sequences]
        return torch.tensor(padded, device=self.device)

    def states(self, layers: Sequence[int]) -> Tensor:
        return torch.cat([self.hidden[layer] for layer in layers], dim=-1)


def final_norm(model: Any) -> Any:
    """The norm after the last layer of `model`; None if it is not found."""
    inner = model.base_model
    return next((getattr(inner, name) for name in ("norm", "ln_f", "final_layer_norm") if hasattr(inner, name)), None)


@torch.inference_mode()
def replay(served: Served, text: Text, log: Log) -> Tensor:
    """For each step and depth of `log` `(rows, steps, gamma, 2)`: b, and the probability of the text's token.

    The drafter goes through the steps of the log and is asked for q along the text. Rows that have
    ended repeat their last step.
    """
    gamma, tokens, offsets = log.gamma, text.tokens(log.gamma + 1), torch.arange(log.gamma, device=text.device)
    used = [served.drafter] if served.tested is None else [served.drafter, served.tested]
    layers = served.drafter.hidden_layers
    states = None if not layers else text.states(layers) if served.states is None else served.states(text)
    if states is not None:
        states = torch.nn.functional.pad(states, (0, 0, 0, gamma + 2))
    rows = torch.arange(len(tokens), device=text.device)
    begun = torch.zeros_like(rows)
    context = Context(tokens, text.begins, states)
    for drafter in used:
        drafter.start(context)
    # What a model says does not depend on where the draft began: one pass serves all steps.
    written = torch.arange(int(text.counts.max()) + gamma, device=text.device)
    whole = {
        at: drafter.along(context, tokens.gather(1, (text.begins[:, None] + written).clamp_max(tokens.shape[1] - 1)))
        for at, drafter in enumerate(used) if type(drafter) is ModelDrafter
    }  # fmt: skip
    found = []
    for number in range(max(map(len, log.steps))):
        ahead = begun[:, None] + offsets
        drafted = tokens.gather(1, text.begins[:, None] + ahead)
        s, *others = (
            whole[at][rows[:, None], ahead] if at in whole else drafter.along(context, drafted)
            for at, drafter in enumerate(used)
        )
        p = text.p[rows[:, None], ahead.clamp_max(text.p.shape[1] - 1)]
        found.append(_fates(p, s.to(p), drafted, others[0].to(p) if others else None))
        sizes = torch.tensor([one[number] if number + 1 < len(one) else 0 for one in log.steps], device=text.device)
        begun = begun + sizes
        context = context._replace(lengths=text.begins + begun)
        for drafter in used:
            drafter.update(context, Outcome((sizes - 1).clamp_min(0), context.newest))
    return torch.stack(found, dim=1)


def _fates(p: Tensor, s: Tensor, tokens: Tensor, q: Tensor | None) -> Tensor:
    """b and the probability of each of `tokens` `(rows, gamma)`, for draft tokens from s that are tested with q."""

    def of_token(probs: Tensor) -> Tensor:
        return probs.gather(-1, tokens[..., None])[..., 0]

    at_p = of_token(p)
    if q is None:
        at_s = of_token(s)
        b = (at_s / at_p).clamp_max(1).where(at_s > 0, 0.0)  # 1 for a token that only the engine's p has
        return torch.stack([b, at_p], dim=-1)
    passed = s * (p / q).clamp_max(1).where(q > 0, 1.0)
    residual = unnormalised_residual(p, q)
    left = (1 - passed.sum(dim=-1)).clamp_min(0) / residual.sum(dim=-1).clamp_min(1e-30)
    accepted, rejected = of_token(passed), left * of_token(residual)
    both = accepted + rejected
    return torch.stack([(accepted / both).where(both > 0, 0.0), both], dim=-1)
