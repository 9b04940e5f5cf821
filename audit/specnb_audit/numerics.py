"""How far an engine's distributions may be from the target's by rounding alone, and what that
explains.

A sampler runs its target over a few tokens at a time, perhaps in another dtype; the audit runs it
over a whole sequence, and kernels then sum in other orders. That is no fault of the sampler, so it
is measured by comparing the target with itself, or with a copy in the engine's dtype.

At temperature 0, and with top-k or top-p, near ties then produce tokens of probability zero.
`ImpossibleTokens` sorts them by what explains the size of each, and `impossible_rate` bets on their
number: the engine's logits are taken to be the target's plus normal noise, larger than measured,
and `DRAWS` imagined engines with such noise emit a token at each position. If the engine is one of
their kind and k of the DRAWS + 1 tokens are impossible, the engine's is with probability k / (DRAWS
+ 1); so odds^[it is], divided by its mean given k, has expectation 1. A prefix counts once. With a
draft the bet is made again on "impossible, and the draft's most probable token", as a rule that
accepts too much emits it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import binom, norm
from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import cache_argument
from specnb.distributions import Sampling, total_variation
from specnb_audit.claimed import claimed_probs, penalties_of
from specnb_audit.evidence import log_mean
from specnb_audit.penalties import penalised
from specnb_audit.teacher_forcing import Completion, Models, batch_logits, forward, teacher_forced_logits

SUSPICIOUS = 2.0  # decimal logarithm of an e-value from which on the report asks for more tokens
DRAWS = 4
ODDS = (3.0, 10.0, 30.0)
"""The engine's tokens are bet to be impossible with odds so many times those of the imagined
ones."""
ENTRIES = 2**27
"""Logits that noise is added to, at most: a long audit with a large vocabulary is judged by its
beginning."""
SEQUENCES = 4  # of which rounding errors are measured
LISTED = 100  # impossible tokens of each class kept with all details
OTHER_KERNELS = 2
"""An engine's kernels may err this many times as much as the two ways of computing that are
compared here."""
LARGEST = float(norm.isf(1e-6 / 1e6))
"""No value among a million normal ones is more standard deviations from its mean, but for a
probability of 1e-6."""
ORDERS = np.array([1 - 2.0**-10, 1 / 2, 3 / 4, 7 / 8, 15 / 16, 31 / 32])
WEIGHTS = np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
NEGLIGIBLE = 1e-9
"""Nats per token up to which the first of `ORDERS` has all weight: it costs 0.1% of the evidence, and
1e-6 nats a token."""


class Numerics(NamedTuple):
    """Differences between two ways to compute the target's distributions, at `positions` positions.

    logit    largest difference of a logit
    tv       largest total variation, and `tv_mean` the mean one
    nats     mean Kullback-Leibler divergence of the engine's distributions from the audit's
    spread   root mean square of the differences of the logits, where it is largest
    source   what was compared
    """

    positions: int
    logit: float
    tv: float
    tv_mean: float
    nats: float
    spread: float = 0.0
    source: str = "the target's forward passes over one token differ from its pass over the whole sequence"

    def __str__(self) -> str:
        if not self.positions:
            return self.source
        return (
            f"{self.source} by up to {self.logit:.2g} in a logit and {self.tv:.2g} in total variation "
            f"({self.positions} positions)"
        )

    @property
    def logit_gap(self) -> float:
        """How far below the tokens kept the logit of a token may be that the engine keeps.

        Two logits err, hence the 2. For normal errors with the measured `spread`, doubled by other
        kernels, a difference of two logits exceeds the bound anywhere in a million tokens with
        probability 1e-6.
        """
        return max(2 * self.logit, OTHER_KERNELS * math.sqrt(2) * LARGEST * self.spread)

    @property
    def mass_gap(self) -> float:
        """How much more than top-p the tokens likelier than a kept one may have."""
        return 2 * self.tv * (OTHER_KERNELS if self.spread else 1)

    @property
    def noise(self) -> float:
        """The standard deviation of a logit's error up to which their number is explained."""
        return OTHER_KERNELS * self.spread

    def explains(self, logit: float, mass: float) -> bool:
        """Whether the engine may keep a token so far from those kept; False for NaN."""
        return logit <= self.logit_gap and mass <= self.mass_gap


def given_numerics(logit_gap: float, sampling: Sampling) -> Numerics:
    """The numerics of an engine whose logits each err by at most `logit_gap` / 2.

    The log ratio of the distributions at temperature T then varies by at most logit_gap / T: their
    total variation is at most tanh(logit_gap / (4 T)), and their Renyi divergence of order a at
    most a (logit_gap / T)^2 / 8 (Hoeffding's lemma), as `crossing` needs.
    """
    scaled = logit_gap / sampling.temperature if sampling.temperature else 0.0
    tv = math.tanh(scaled / 4)
    source = f"the engine's logits are taken to err by up to {logit_gap / 2:.2g}, as given"
    return Numerics(0, logit_gap / 2, tv, tv, scaled**2 / 8, source=source)


@torch.inference_mode()
def measure_numerics(
    model: PreTrainedModel,
    completions: Sequence[Completion],
    sampling: Sampling = Sampling(),
    positions: int = 16,
    engine_dtype: torch.dtype | None = None,
) -> Numerics:
    """The differences at about `positions` first positions of up to four of `completions`, one of
    which must have tokens.

    `engine_dtype` is that of the passes over one token; another than the model's needs a copy of
    it.
    """
    chosen = [completion for completion in completions if completion.tokens][:SEQUENCES]
    each = -(-positions // len(chosen))
    engine = model if engine_dtype in (None, model.dtype) else in_dtype(model, engine_dtype)
    beginnings, penalties = [Completion(one.prompt, one.tokens[:each]) for one in chosen], penalties_of(sampling)
    pairs = [
        [penalised(logits, penalties, one.prompt, one.tokens) for logits in _many_and_one(model, engine, one)]
        for one in beginnings
    ]
    many, one = (torch.cat(logits).double() for logits in zip(*pairs, strict=True))
    p, r = claimed_probs(many, sampling), claimed_probs(one, sampling)
    distance = total_variation(p, r)
    both = (p > 0) & (r > 0)
    nats = torch.where(both, r * (r.where(both, 1.0) / p.where(both, 1.0)).log(), 0.0).sum(dim=-1)
    difference = one - many
    # a shift of all logits changes no probability.
    centred = difference - difference.mean(dim=-1, keepdim=True)
    numerics = Numerics(
        len(many),
        float(difference.abs().max()),
        float(distance.max()),
        float(distance.mean()),
        max(0.0, float(nats.mean())),
        float(centred.square().mean(dim=-1).sqrt().max()),
    )
    if engine is model:
        return numerics
    dtype = str(engine.dtype).removeprefix("torch.")
    return numerics._replace(source=f"forward passes over one token in {dtype} differ from the target's pass")


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    copied: Any = copy.deepcopy(model)
    converted: PreTrainedModel = copied.to(dtype)
    for module, original in zip(converted.modules(), model.modules(), strict=True):
        if isinstance(frequencies := getattr(original, "inv_freq", None), Tensor):
            # Loading does not round those of rotary embeddings.
            module.inv_freq = frequencies.clone()
    return converted


def _many_and_one(model: PreTrainedModel, engine: PreTrainedModel, completion: Completion) -> tuple[Tensor, Tensor]:
    """Logits `(n, vocab)` of `model` from one pass, and of `engine` from a pass per token; from a pass
    over each prefix where its state cannot be continued, as of recurrent models."""
    ((_, _, many),) = batch_logits(model, [completion])
    try:
        return many, _with_cache(engine, completion)
    except Exception:  # no cache of that name, or a state that cannot be continued
        beginnings = [completion._replace(tokens=completion.tokens[: n + 1]) for n in range(len(completion.tokens))]
        return many, torch.cat([logits[-1:] for one in beginnings for _, _, logits in batch_logits(engine, [one])])


def _with_cache(engine: PreTrainedModel, completion: Completion) -> Tensor:
    name, cache, found = cache_argument(engine), None, list[Tensor]()
    for part in (completion.prompt, *([token] for token in completion.tokens[:-1])):
        ids = torch.tensor([part], device=engine.device)
        logits, cache = forward(engine, ids, None, keep=1, use_cache=True, **{name: cache})
        if cache is None:
            raise ValueError(f"{type(engine).__name__} returns no {name}")
        found.append(logits[:, -1])
    return torch.cat(found)


def crossing(log_e: NDArray[np.float64], delta: float, nats: float, before: int = 0) -> int | None:
    """The number of tokens at which the e-value first passes 1/delta by more than rounding
    explains.

    `log_e` `(n,)` are its natural logarithms after `before` earlier tokens; the engine differs from
    the target by `nats` per token.

    If tokens are sampled from r instead of p, Hoelder's inequality bounds the mean of a token's
    factor to the power a < 1 by E_p[(r/p)^(1/(1-a))]^(1-a), at most exp(a nats / (1-a)) where Renyi
    divergences grow no faster than their order (exact for `given_numerics`, to second order for
    measured ones). So e^a exp(-n a nats / (1-a)), and its mean over several a, are supermartingales
    that start at 1: such an engine is rejected with probability at most delta.
    """
    n = before + np.arange(1, len(log_e) + 1)
    explained = log_e
    if nats > 0:
        powers = ORDERS * log_e[:, None] - n[:, None] * nats * ORDERS / (1 - ORDERS)
        explained = powers[:, 0] if nats < NEGLIGIBLE else np.asarray(logsumexp(powers, b=WEIGHTS, axis=1))
    passed = explained >= -np.log(delta)
    return int(n[passed.argmax()]) if passed.any() else None


def bar(delta: float, nats: float, n: int) -> float:
    """The logarithm of the e-value with which `crossing` passes after n tokens, at most."""
    if nats == 0:
        return -math.log(delta)
    each = -math.log(delta) / ORDERS + n * nats / (1 - ORDERS)
    return float(each[0] if nats < NEGLIGIBLE else (each - np.log(WEIGHTS) / ORDERS).min())


class Impossible(NamedTuple):
    """A token of probability zero.

    sequence, position  where it is, both counted from 0
    logit               how far its logit is below the smallest one kept; NaN without logits
    mass                the probability of likelier tokens in excess of top-p; NaN without logits
    """

    sequence: int
    position: int
    token: int
    logit: float
    mass: float

    def __str__(self) -> str:
        finite = 0 < self.logit < math.inf
        gaps = [f"its logit is {self.logit:.3g} below the smallest one kept"] if finite else []
        gaps += [] if not self.mass > 0 else [f"likelier tokens have {self.mass:.3g} more than top-p"]
        place = f"sequence {self.sequence}, position {self.position}: token {self.token}"
        return f"{place} ({' and '.join(gaps)})" if gaps else place


class ImpossibleTokens:
    """The impossible tokens of an audit, in three classes.

    violations  no numerics considered explain them
    borderline  the engine's `numerics` explain them
    undeclared  those of bfloat16 would, and nobody said which dtype the engine computes in
    """

    def __init__(self, numerics: Numerics | None, undeclared: Callable[[], Numerics] | None) -> None:
        self.numerics = numerics
        self._measure = undeclared
        self.listed: dict[str, list[Impossible]] = {"violations": [], "borderline": [], "undeclared": []}
        # Of each, whatever its class: logit and mass; sequence and position; where there is a draft,
        # whether it is the draft's most probable token.
        self.gaps: list[tuple[float, float]] = []
        self.places: list[tuple[int, int]] = []
        self.are_drafted: list[bool] = []
        self.counts = dict.fromkeys(self.listed, 0)

    @property
    def may_be_explained(self) -> bool:
        """Whether numerics may explain impossible tokens, so that their number is tested."""
        return self.numerics is not None or self._measure is not None

    @cached_property
    def undeclared(self) -> Numerics | None:
        """The numerics of bfloat16; None where the engine's dtype is known."""
        return None if self._measure is None else self._measure()

    def add(self, one: Impossible) -> str:
        self.gaps.append((one.logit, one.mass))
        self.places.append((one.sequence, one.position))
        if self.numerics is not None and self.numerics.explains(one.logit, one.mass):
            name = "borderline"
        elif one.logit == one.logit and self.undeclared is not None and self.undeclared.explains(one.logit, one.mass):
            name = "undeclared"
        else:
            name = "violations"
        self.listed[name] += [one][: LISTED - len(self.listed[name])]
        self.counts[name] += 1
        return name

    @property
    def noise(self) -> float:
        """The noise of the numerics that explain all tokens; 0 if there are none."""
        largest = self.undeclared if self.counts["undeclared"] else self.numerics if self.counts["borderline"] else None
        return 0.0 if largest is None or self.counts["violations"] else largest.noise

    def move(self, name: str, *others: str) -> None:
        for other in others:
            self.listed[name] = [*self.listed[name], *self.listed[other]][:LISTED]
            self.counts[name] += self.counts[other]
            self.listed[other], self.counts[other] = [], 0

    def summary(self, tokens: int) -> str:
        """How many of `tokens` tokens are impossible, and by how much; empty without any."""
        if not self.gaps:
            return ""
        logit, mass = (max(filter(math.isfinite, column), default=0.0) for column in zip(*self.gaps, strict=True))
        sizes = [f"{logit:.2g} in a logit"] * (logit > 0) + [f"{mass:.2g} in top-p"] * (mass > 0)
        share = f"{len(self.gaps):,} of {tokens:,} tokens {'is' if len(self.gaps) == 1 else 'are'} impossible"
        by = f", by up to {' and '.join(sizes)}" if sizes else ""
        percent = float(f"{100 * len(self.gaps) / max(tokens, 1):.2g}")
        count = sum(self.are_drafted)
        drafted = f"; {count:,} of them the draft's most probable token" if self.are_drafted else ""
        return f"{share} ({percent:g}%){by}{drafted}"


class Rate(NamedTuple):
    """The impossible tokens among the first `tokens`, or (`drafted`) those of them that are the
    draft's.

    expected     how many the imagined engines emit, on average
    log10_e      decimal logarithm of the largest e-value
    found_after  number of tokens after which it passed 1/delta, or None
    drafted_p    p-value of so many of all impossible ones being the draft's, if their odds are at
    most twice those that noise gives
    """

    tokens: int
    impossible: int
    expected: float
    log10_e: float
    found_after: int | None
    drafted: bool = False
    drafted_p: float = 1.0

    def __str__(self) -> str:
        which = " that are the draft's most probable token" * self.drafted
        number = "and not their number" if self.log10_e >= SUSPICIOUS else "and their number"
        return (
            f"numerics would explain the size of each, {number}: {self.impossible:,} in {self.tokens:,} tokens{which}, "
            f"where noise larger than theirs gives {self.expected:.2g} (e-value 10^{self.log10_e:.1f})"
        )


@torch.inference_mode()
def impossible_rate(
    models: Models, completions: Sequence[Completion], noise: float, delta: float, seed: int = 0
) -> Rate:
    """The bet on the impossible tokens of `completions`, up to where it passes 1/delta.

    `noise` is the standard deviation of each logit of the imagined engines.

    >>> near = lambda prefix: [0.505, 0.495]
    >>> given = [Completion([seed], [seed % 2]) for seed in range(200)]
    >>> models = Models(near, Sampling(0))
    >>> [impossible_rate(models, given, noise, 1e-6).found_after is None for noise in (1e-3, 0.1)]
    [False, True]
    """
    random = np.random.default_rng([seed, DRAWS])
    bets = 1 if models.draft is None else 2
    log_e, peak, found_after = np.zeros((bets, len(ODDS))), 0.0, None
    tokens, seen = 0, set[int]()
    counts = np.zeros((2, bets), dtype=np.int64)  # of the engine, and of all those imagined
    for completion, start, logits, draft in teacher_forced_logits(models, completions):
        emitted = completion.tokens[start : start + len(logits)]
        own, others = _impossible(logits, draft, emitted, models.sampling, noise, random)
        for at in np.flatnonzero(own[:, 0]).tolist():
            context = hash((tuple(completion.prompt), tuple(completion.tokens[: start + at])))
            if context in seen:
                own[at], others[at] = 0, 0
            seen.add(context)
        odds = np.array(ODDS)
        share = (own + others)[..., None] / (DRAWS + 1)
        running = log_e + np.cumsum(own[..., None] * np.log(odds) - np.log1p((odds - 1) * share), axis=0)
        mean = log_mean(running.reshape(len(own), -1))
        passed = mean >= -np.log(delta)
        n = int(passed.argmax()) + 1 if passed.any() else len(own)
        log_e, peak = running[n - 1], max(peak, float(mean[:n].max()))
        tokens, counts = tokens + n, counts + np.stack([own[:n].sum(axis=0), others[:n].sum(axis=0)])
        found_after = tokens if passed.any() else None
        if found_after is not None or tokens * logits.shape[-1] > ENTRIES:
            break
    best = int(log_e.max(axis=1).argmax())
    (impossible, expected), (own, drafted) = counts.T[0], counts.T[-1]
    odds = OTHER_KERNELS * (drafted + 1) / (expected - drafted + 1)
    p_value = float(binom.sf(own - 1, impossible, odds / (1 + odds))) if bets == 2 else 1.0
    return Rate(
        tokens, int(counts[0, best]), counts[1, best] / DRAWS, peak / np.log(10), found_after, best == 1, p_value
    )


def _impossible(
    logits: Tensor,
    draft: Tensor | None,
    tokens: Sequence[int],
    sampling: Sampling,
    noise: float,
    random: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Whether each of `tokens` `(n,)` is impossible, and for how many imagined engines: `(n, 1)`,
    or with a draft `(n, 2)`, where the second counts the draft's most probable tokens."""
    zero = claimed_probs(logits, sampling) == 0
    emitted = torch.tensor(tokens, device=zero.device)
    own = [zero.gather(-1, emitted[:, None])[:, 0]]
    first = None if draft is None else draft.argmax(dim=-1)
    if first is not None:
        own += [own[0] & (emitted == first)]
    others = torch.zeros(len(emitted), len(own), dtype=torch.long)
    for _ in range(DRAWS):
        drawn = torch.from_numpy(random.standard_normal(tuple(logits.shape), dtype=np.float32)).to(logits)
        mass = claimed_probs(logits + noise * drawn, sampling).where(zero, 0.0)
        parts = [mass.sum(dim=-1), *([] if first is None else [mass.gather(-1, first[:, None])[:, 0]])]
        others += torch.from_numpy(random.random(len(emitted)))[:, None] < torch.stack(parts, dim=-1).cpu()
    return torch.stack(own, dim=-1).long().numpy(force=True), others.numpy()
