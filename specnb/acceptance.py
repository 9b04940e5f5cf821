"""Acceptance along texts of the target, without speculation: alpha, rates by depth, and tokens per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.arguments import require_whole
from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling, overlap, standardise
from specnb.drafters import Context, Drafter, Proposal, no_distribution
from specnb.loading import Pair
from specnb.prompts import Prompts, require_tokens, token_lists
from specnb.rules import Outcome
from specnb.sampler import Instruments, Sampler, require_models
from specnb.statistics import Array, Estimate, bootstrap, ratio_of_sums
from specnb.step import side_by_side
from specnb.support import TokenMap, require_context, require_supported, vocabulary

ModelOrDrafter = PreTrainedModel | Drafter
FEWEST, RESAMPLES = 8, 1000  # sequences, over which an interval resamples


class DepthRates(NamedTuple):
    """What a loop with token verification counts for a drafter, in expectation.

    Attributes
    ----------
    marginal
        For each depth d of the draft, the fraction of steps that accept d draft tokens or more.
    conditional
        For each depth, the fraction of the tested draft tokens that are accepted.
    tokens_per_step, accepted_per_step
        With the recovered or bonus token, and without: the sum of `marginal`.
    """

    marginal: list[Estimate]
    conditional: list[Estimate]
    tokens_per_step: Estimate
    accepted_per_step: Estimate


@dataclass(frozen=True, repr=False)
class Acceptance:
    """The outcome of `measure_acceptance`; printed, a table for each draft.

    Attributes
    ----------
    sequences
        Prompts with their completions.
    drafts
        By name, `(rows, new_tokens, gamma, 3)`: at each depth of a draft from each place, the overlap
        of p and q, min(1, q / p) of the text's token, and whether a token is proposed; NaN where the
        text has ended.
    impossible
        Tokens of the text with probability 0 under the target.
    """

    sequences: list[list[int]]
    drafts: dict[str, Array]
    impossible: int = 0

    @property
    def beta(self) -> dict[str, Array]:
        """The overlap of p and q at every new token `(rows, new_tokens)`, 0 for no draft token, NaN after the end."""
        return {name: measured[:, :, 0, 0] for name, measured in self.drafts.items()}

    def alpha(self, draft: str = "draft", seed: int = 0) -> Estimate:
        """alpha of a draft, the mean of its beta (Corollary 3.6), with a 95% interval over rows."""
        beta = self.beta[draft]
        return ratio_of_sums(np.nansum(beta, axis=1), (~np.isnan(beta)).sum(axis=1), seed=seed)

    def by_depth(self, draft: str = "draft", gamma: int | None = None) -> DepthRates:
        """Rates by depth, and tokens per step, of a loop with `gamma` draft tokens, by default all that were measured.

        Intervals are over at least 8 rows, otherwise NaN.

        Notes
        -----
        A draft token y is sampled and accepted with probability min(p, q), which is p times b,
        b(y) = min(1, q(y) / p(y)). Along a text from p a step that begins at a place therefore accepts
        its first d draft tokens with probability

            sum over y of prod_{i <= d} min(p(y_i), q(y_i)) = E[b_1 ... b_{d-1} beta_d].

        Places are weighted by the expected number of steps that begin there: given the text, a step
        emits its next n tokens with probability b_1 ... b_{n-1} (1 - b_n), or b_1 ... b_gamma if n =
        gamma + 1. A marginal rate is the product, over the depths up to it, of the weighted means of
        b_1 ... b_{d-1} beta_d over those of b_1 ... b_{d-1}.
        """
        measured = self.drafts[draft]
        gamma = measured.shape[2] if gamma is None else gamma
        if not 1 <= gamma <= measured.shape[2]:
            raise ValueError(f"gamma is {gamma}, and drafts of 1 to {measured.shape[2]} tokens were measured")
        sums = depth_sums(measured[:, :, :gamma])

        def rate(column: int, more: float = 0) -> Estimate:
            one = bootstrap(
                lambda rows: depth_rates(sums[rows].sum(axis=-2))[..., column] + more, len(sums), RESAMPLES, 0
            )
            return one if len(sums) >= FEWEST else one._replace(low=np.nan, high=np.nan)

        conditional, marginal = ([rate(first + depth) for depth in range(gamma)] for first in (0, gamma))
        return DepthRates(marginal, conditional, rate(2 * gamma, more=1), rate(2 * gamma))

    def __str__(self) -> str:
        few = len(self.sequences) < FEWEST
        lines = []
        for name, beta in self.beta.items():
            rates = self.by_depth(name)
            alpha = f"{np.nanmean(beta):.3g}" if few else self.alpha(name)
            lines += [
                f"{name}: alpha {alpha}, the mean overlap of p and q",
                f"gamma {len(rates.marginal)}: {_short(rates.tokens_per_step)} tokens per step, of which "
                f"{_short(rates.accepted_per_step)} are draft tokens",
                f"{'depth':<7}{'conditional':<25}marginal",
                *(
                    f"{depth:<7}{_short(given):<25}{_short(of_all)}"
                    for depth, (given, of_all) in enumerate(zip(rates.conditional, rates.marginal, strict=True), 1)
                ),
            ]
        if few:
            lines.append(f"no intervals: they resample sequences, and {len(self.sequences)} are fewer than {FEWEST}")
        if self.impossible:
            lines.append(
                f"{self.impossible} tokens of the text have probability 0 under the target: another model or sampling "
                "wrote them, and rates by depth are not those of the loop"
            )
        return "\n".join(lines)

    __repr__ = __str__


def _short(estimate: Estimate) -> str:
    return f"{estimate.value:.3g}" if np.isnan(estimate.low) else str(estimate).split(" (")[0]


def depth_sums(measured: Array) -> Array:
    """The expected number `(rows, 3 gamma)` of steps that reach each depth, test there, and accept there.

    `measured` is one of `Acceptance.drafts`.
    """
    inside = ~np.isnan(measured[:, :, -1, 0])  # places that have all depths
    overlaps, kept, proposed = np.moveaxis(np.nan_to_num(measured), -1, 0)
    reached = np.concatenate([np.ones_like(kept[..., :1]), kept[..., :-1]], axis=-1).cumprod(axis=-1)
    begins = (expected_steps(kept) * inside)[..., None]
    sums = [(begins * each).sum(axis=1) for each in (reached, reached * proposed, reached * overlaps)]
    return np.concatenate(sums, axis=-1)


def depth_rates(sums: Array) -> Array:
    """From sums of `depth_sums` `(..., 3 gamma)`: conditional rates (NaN if nothing is tested), marginal rates, and
    accepted draft tokens per step `(..., 2 gamma + 1)` (NaN without any step)."""
    reached, tested, accepted = np.split(sums, 3, axis=-1)
    conditional = np.divide(accepted, tested, out=np.full_like(tested, np.nan), where=tested > 0)
    without = np.where(reached[..., :1] > 0, np.zeros_like(reached), np.nan)
    of_reached = np.divide(accepted, reached, out=without, where=reached > 0)
    marginal = of_reached.cumprod(axis=-1)
    return np.concatenate([conditional, marginal, marginal.sum(axis=-1, keepdims=True)], axis=-1)


def expected_steps(kept: Array) -> Array:
    """The expected number of steps that begin at each place `(rows, places)`.

    `kept` `(rows, places, gamma)` is min(1, q / p) of the text's tokens from each place on.

    >>> expected_steps(np.array([[[0.5], [1.0], [0.0]]]))
    array([[1. , 0.5, 0.5]])
    """
    rows, places, gamma = kept.shape
    ones = np.ones((rows, places, 1))
    reached = np.concatenate([ones, kept.cumprod(axis=-1), 0 * ones], axis=-1)  # n draft tokens or more are accepted
    emits = reached[..., :-1] - reached[..., 1:]  # n + 1 tokens
    begins = np.zeros((rows, places + gamma + 1))
    begins[:, 0] = 1
    for place in range(places):
        begins[:, place + 1 : place + gamma + 2] += begins[:, place, None] * emits[:, place]
    return begins[:, :places]


@torch.inference_mode()
def measure_acceptance(
    target: PreTrainedModel | Pair,
    prompts: Prompts,
    draft: ModelOrDrafter | Mapping[str, ModelOrDrafter] | Literal["auto"] = "auto",
    *,
    completions: Sequence[Any] | None = None,
    new_tokens: int = 64,
    gamma: int = 4,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    batch: int = 48,
    progress: bool = True,
) -> Acceptance:
    """Measure alpha, rates by depth and tokens per step along texts of the target, without speculation.

    Parameters
    ----------
    draft
        A model, sampled as `sampling` says, or any `Drafter` of chains, then called "draft", or several
        by name; by default that of a `Pair`, otherwise copies from the text.
    completions
        What the target wrote after each prompt, with the same `sampling`: lists of tokens, or with
        a `Pair` texts. By default it writes `new_tokens` tokens now.
    gamma
        Measure drafts of 1 to so many tokens.
    batch
        The distributions of so many rows are kept in memory at a time.

    Raises
    ------
    TypeError, ValueError
        For models, drafters and texts that cannot be measured, and for a q that is no distribution.

    Examples
    --------
    >>> from specnb import load_pair
    >>> measure_acceptance(load_pair(), [[1], [2, 3]], new_tokens=5, gamma=2).beta["draft"].shape
    (2, 5)
    """
    require_whole(new_tokens=(new_tokens, 1), gamma=(gamma, 1), batch=(batch, 1))
    keeping = Instruments(keep_probs=True)
    sampler = Sampler(target, None, sampling=sampling, compile=False, instruments=keeping, progress=False)
    model = sampler.target
    if isinstance(draft, str) and draft == "auto":
        draft = target.draft if isinstance(target, Pair) else PromptLookupDrafter(vocabulary(model))
    drafts: Mapping[str, ModelOrDrafter] = draft if isinstance(draft, Mapping) else {"draft": draft}
    for each in drafts.values():
        if isinstance(each, PreTrainedModel):
            require_supported(each)
        else:
            require_models(model, each)
    prompts = sampler.token_lists(prompts)
    require_tokens(prompts, [], vocabulary(model))
    written = None if completions is None else _written(completions, prompts, sampler.tokenizer, vocabulary(model))
    longest = new_tokens if written is None else max(map(len, written))
    sequences: list[list[int]] = []
    measured: dict[str, list[Tensor]] = {name: [] for name in drafts}
    impossible = 0
    for at in tqdm(range(0, len(prompts), batch), desc="sequences", delay=3, leave=False, disable=not progress):
        part = prompts[at : at + batch]
        if written is None:
            made = sampler.generate(part, max_new_tokens=new_tokens, seed=seed, numbers=range(at, at + len(part)))
            assert made.probs is not None
            tokens, p = made.tokens, torch.stack(made.probs)
        else:
            tokens = written[at : at + batch]
            whole = [[*prompt, *new] for prompt, new in zip(part, tokens, strict=True)]
            p = distributions_along(model, whole, [len(new) for new in tokens], sampling)
        text = _Text(model, sampling, part, tokens, p)
        sequences += text.sequences
        impossible += text.impossible
        for name, each in drafts.items():
            along = text.of_drafter(each, gamma) if isinstance(each, Drafter) else text.of_model(each, gamma)
            along = along.masked_fill(text.beyond(gamma), torch.nan).double().cpu()
            measured[name].append(pad(along, (0, 0, 0, 0, 0, longest - along.shape[1]), value=torch.nan))
    deepest = min(gamma, longest)
    of_drafts = {name: torch.cat(parts)[:, :, :deepest].numpy() for name, parts in measured.items()}
    return Acceptance(sequences, of_drafts, impossible)


def _written(completions: Sequence[Any], prompts: list[list[int]], tokenizer: Any, vocab: int) -> list[list[int]]:
    if any(isinstance(one, str) for one in completions):
        if tokenizer is None:
            raise TypeError("completions are texts; give a Pair, whose tokenizer reads them, or lists of tokens")
        # Without the begin token, which stands before the prompt.
        completions = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in completions]
    written = token_lists(completions)
    if len(written) != len(prompts) or not all(written):
        raise ValueError(f"{len(prompts)} prompts have {len(written)} completions; give each one of a token or more")
    require_tokens(written, [], vocab)
    return written


class _Text:
    """Prompts with the target's completions `tokens` `(rows, places)`, and its p at every place."""

    def __init__(
        self, target: PreTrainedModel, sampling: Sampling, prompts: list[list[int]], completions: list[list[int]],
        p: Tensor,
    ) -> None:  # fmt: skip
        self.target, self.sampling, self.prompts, self.p = target, sampling, prompts, p
        self.sequences = [[*prompt, *new] for prompt, new in zip(prompts, completions, strict=True)]
        self.tokens, self.counts = side_by_side(completions, p.device)
        chosen = p.gather(-1, self.tokens[..., None])[..., 0]
        self.impossible = int(((chosen == 0) & ~self.beyond(1)[..., 0, 0]).sum())

    def beyond(self, gamma: int) -> Tensor:
        """Whether a draft from a place `(rows, places, gamma, 1)` has left the text."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        depths = torch.arange(gamma, device=self.tokens.device)
        return (places[:, None] + depths >= self.counts[:, None, None])[..., None]

    def of_model(self, model: PreTrainedModel, gamma: int) -> Tensor:
        """For `Acceptance.drafts`: a model's q does not depend on where the draft began."""
        new = self.counts.tolist()
        q = distributions_along(model, self.sequences, new, self.sampling, self.p.shape[-1]).to(self.p.device)
        each = pad(_compared(self.p, q, self.tokens), (0, 0, 0, gamma - 1))
        return each.unfold(1, gamma, 1).transpose(-1, -2)

    def of_drafter(self, drafter: Drafter, gamma: int) -> Tensor:
        """For `Acceptance.drafts`: the drafter goes along the text, a token a step."""
        lengths = torch.tensor([len(prompt) for prompt in self.prompts], device=self.p.device)
        places = self.tokens.shape[1]
        whole = max(map(len, self.sequences))
        require_context([len(one) - 1 for one in self.sequences], draft=drafter.draft_model)
        known = pad(side_by_side(self.prompts, self.p.device)[0], (0, whole + gamma - int(lengths.max())))
        states, slots = self.states(drafter.hidden_layers), torch.arange(whole - 1, device=self.p.device)

        def seen(lengths: Tensor) -> Context:
            """Without the tokens, and the states, that a loop does not know yet."""
            if states is None:
                return Context(known, lengths)
            until = states.masked_fill((slots >= lengths[:, None] - 1)[..., None], 0.0)
            return Context(known, lengths, pad(until, (0, 0, 0, known.shape[1] - until.shape[1])))

        context = seen(lengths)
        drafter.start(context)
        measured = []
        for place in range(places):
            ahead = slice(place, place + gamma)
            q = drafter.along(context, self.tokens[:, ahead]).to(self.p.device)
            total = q.sum(dim=-1)
            improper = no_distribution(Proposal((total > 0).long() - 1, q)) | total.isnan()
            within = place + torch.arange(q.shape[1], device=q.device) < self.counts[:, None]
            if bool((improper & within).any()):
                raise ValueError(f"the q of {type(drafter).__name__} is no distribution, or NaN; see Drafter.propose")
            each = _compared(self.p[:, ahead], q, self.tokens[:, ahead])
            measured.append(pad(each, (0, 0, 0, gamma - each.shape[1])))
            newest = self.tokens[:, place]
            known.scatter_(1, context.lengths[:, None], newest[:, None])
            context = seen(context.lengths + (place + 1 < self.counts))
            drafter.update(context, Outcome(torch.zeros_like(newest), newest))
        return torch.stack(measured, dim=1)

    def states(self, layers: tuple[int, ...]) -> Tensor | None:
        """The target's hidden states `(rows, tokens, width)` at all tokens but the last."""
        if not layers:
            return None
        tokens = side_by_side([one[:-1] for one in self.sequences], self.target.device)[0]
        output = self.target(input_ids=tokens, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        return torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)


def _compared(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Overlap, min(1, q / p) of the token, and whether one is proposed `(rows, n, 3)`."""
    at_p, at_q = (probs.gather(-1, tokens[..., None])[..., 0] for probs in (p, q))
    kept = (at_q / at_p).clamp_max(1).where(at_p > 0, 0.0)
    return torch.stack([overlap(p, q), kept, (q.sum(dim=-1) > 0).to(kept.dtype)], dim=-1)


@torch.inference_mode()
def distributions_along(
    source: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    vocab: int | None = None,
) -> Tensor:
    """Distributions `(rows, new_tokens, vocab)` for the last `new_tokens` tokens of each sequence, in one pass.

    If `new_tokens` differ, rows of fewer have anything after theirs. `vocab` is the number of the target's
    tokens, if a draft model has another.
    """
    lengths = [len(sequence) for sequence in sequences]
    counts = [new_tokens] * len(lengths) if isinstance(new_tokens, int) else list(new_tokens)
    if not lengths or not all(1 <= count < length for count, length in zip(counts, lengths, strict=True)):
        raise ValueError(f"new_tokens is {new_tokens}, and sequences of {sorted(set(lengths))} tokens are too short")
    longest = max(lengths)
    require_context([length - 1 for length in lengths], model=source)
    # Padding follows the sequence, where causal attention does not see it. The last token needs no
    # forward pass.
    padded = side_by_side([one[:-1] for one in sequences], source.device)[0]
    begins = [length - 1 - count for length, count in zip(lengths, counts, strict=True)]
    first, token_map = min(begins), TokenMap(source, vocab)
    output = source(input_ids=token_map.inputs(padded), use_cache=False, logits_to_keep=longest - 1 - first)
    logits = token_map.logits(output.logits)
    at = torch.tensor(begins, device=source.device)[:, None] - first + torch.arange(max(counts), device=source.device)
    at = at.clamp_max(logits.shape[1] - 1)
    return standardise(logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1])), sampling)
