"""Why is acceptance low? Which known mistake in serving a draft explains what an engine's log counts.

Each hypothesis, the draft as it is given or a mistake, says with which probability each draft token
of the log was accepted (`draft_replay`). An e-value against a hypothesis is the likelihood of the log
under others over its own, averaged; if the hypothesis is true, it reaches 1 / level with probability
at most `level`. The others are all other hypotheses, and calibrations of the hypothesis itself:
acceptance that is lower, higher, or follows its probabilities less than it says. What is left are
the hypotheses that the log does not exclude: a confidence set, empty if none fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit, logit, logsumexp
from scipy.stats import binom, norm
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.acceptance import DepthRates, depth_rates, depth_sums
from specnb.arguments import require_whole, token_list
from specnb.distributions import Sampling
from specnb.drafters import Drafter, ModelDrafter
from specnb.statistics import Estimate, bootstrap
from specnb.support import context_limit, require_supported, vocabulary
from specnb_audit.draft_mistakes import known_mistakes
from specnb_audit.draft_replay import Array, Log, Served, Text, replay
from specnb_audit.explanations import beginning, unclaimed_settings
from specnb_audit.predict_numbers import in_range
from specnb_audit.teacher_forcing import Completion, Models, require_completions

RIGHT = "no mistake"
ENTRIES = 2**26  # probabilities of the target that are kept at a time
FEWEST, RESAMPLES = 8, 1000  # sequences over which an interval resamples
SURE = 1e-6  # other settings than those given fit the text by a likelihood ratio above its inverse, for each
# Calibrations: log-odds of the first depth and of later ones move by a number, after a factor
MOVED = (-1.6, -0.8, -0.3, 0.0, 0.3, 0.8, 1.6)
FACTORS = (0.0, 0.4, 0.7, 1.0, 1.4)
Over = Literal["steps", "requests"]


class Tried(NamedTuple):
    """A hypothesis and what the log says to it.

    Attributes
    ----------
    against
        Decimal logarithm of the e-value against it; NaN for a log without text.
    gain
        Log-likelihood of the log, in nats, over that without a mistake; NaN for a log without text.
    conditional, tokens_per_step
        What it makes of acceptance by depth, and in all.
    excluded
        Whether the log excludes it.
    """

    name: str
    mend: str
    against: float
    gain: float
    conditional: list[float]
    tokens_per_step: float
    excluded: bool


@dataclass(frozen=True, repr=False)
class AcceptanceCauses:
    """What `explain_acceptance` returns; printed, the answer and then the reasons.

    Attributes
    ----------
    named
        The known mistakes that the log leaves, best first, if it excludes that there is none.
    tried
        Every hypothesis, "no mistake" first, then by how well it fits.
    expected, logged
        Acceptance of the draft as it is given, and of the log, at the places that the log tests.
    kinds
        By kind of text: acceptance expected and logged, over all depths.
    tests
        Draft tokens that were tested, or steps of a log without text.
    settings
        What the text says against the settings given; then no mistake is named.
    """

    named: tuple[str, ...]
    tried: tuple[Tried, ...]
    expected: DepthRates
    logged: DepthRates
    kinds: dict[str, tuple[float, float]]
    tests: int
    level: float
    with_text: bool = True
    notes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the log agrees with the draft and the settings as they are given."""
        return not self.tried[0].excluded and not self.settings

    @property
    def inseparable(self) -> list[str]:
        """The mistakes that the log does not tell from no mistake, if it agrees with that."""
        return [one.name for one in self.tried[1:] if self.fits and not one.excluded]

    def _answer(self) -> list[str]:
        by_name = {one.name: one for one in self.tried}
        if self.settings:
            return list(self.settings)
        if self.fits:
            same = "no known mistake is needed: the log agrees with the draft as it is given"
            return [
                same,
                f"the draft is that good on this text: {self.expected.tokens_per_step.value:.2f} tokens per step",
            ]
        if not self.named:
            return [
                "none of the known mistakes fits the log, and the draft as it is given does not either",
                "give another template, checkpoint or quantisation as `others` in Python: audit/docs/low-acceptance.md",
            ]
        if len(self.named) == 1:
            return [f"the log fits one known mistake: {self.named[0]}", f"look at: {by_name[self.named[0]].mend}"]
        return [f"the log fits {len(self.named)} known mistakes, and cannot tell them apart:"] + [
            f"  {name}; look at: {by_name[name].mend}" for name in self.named
        ]

    def __str__(self) -> str:
        right, of = self.tried[0], "draft tokens tested" if self.with_text else "steps, of which averages are known"
        lines = [*self._answer(), f"{'depth':<7}{'draft as given':<25}log  (conditional acceptance)"]
        pairs = zip(self.expected.conditional, self.logged.conditional, strict=True)
        lines += [f"{depth:<7}{_short(want):<25}{_short(have)}" for depth, (want, have) in enumerate(pairs, 1)]
        want, have = self.expected.tokens_per_step, self.logged.tokens_per_step
        lines.append(f"tokens per step, bonus included: {_short(want)} as given, {_short(have)} in the log")
        if self.with_text:
            lines.append(f"e-value against no mistake: {_power(right.against)}; excluded from {1 / self.level:g} on")
        same = [one for one in self.tried[1:] if not one.excluded]
        tried = f"{len(self.tried) - 1} mistakes tried, {len(same)} not excluded at level {self.level:g}"
        lines.append(f"{self.tests:,} {of}; {tried}")
        if self.inseparable:
            by = max(abs(one.tokens_per_step - right.tokens_per_step) for one in same)
            lines.append(f"not told from no mistake, as they change tokens per step by {by:.2g} at most:")
            lines += [f"  {one.name}" for one in same]
        for kind, (given, counted) in sorted(self.kinds.items(), key=lambda one: one[1]):
            lines.append(f"  {kind}: {given:.3f} of the draft tokens accepted as given, {counted:.3f} in the log")
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__


def _short(estimate: Any) -> str:
    return f"{estimate.value:.3g}" if np.isnan(estimate.low) else str(estimate).split(" (")[0]


def _power(exponent: float) -> str:
    return f"{10**exponent:.2g}" if abs(exponent) < 4 else f"10^{exponent:.0f}"


def explain_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel | Drafter,
    completions: Sequence[Sequence[int]],
    *,
    prompts: Sequence[Sequence[int]],
    gamma: int,
    steps: Sequence[Sequence[int]] | None = None,
    bonus: bool = True,
    undrafted: bool = False,
    per_position: Sequence[float] | None = None,
    conditional: bool | None = None,
    over: Over | None = None,
    logged_steps: int | None = None,
    sampling: Sampling = Sampling(),
    others: Mapping[str, Mapping[str, Any]] | None = None,
    kinds: Sequence[str] | None = None,
    level: float = 0.01,
    tolerance: float = 0.01,
    batch: int = 64,
    progress: bool = True,
) -> AcceptanceCauses:
    """Which known mistake in serving a draft explains the acceptance that an engine logged, if any.

    Parameters
    ----------
    draft
        A draft model, sampled as `sampling` says, or a drafter, such as `load_drafter` returns.
        Mistakes are known for draft models, EAGLE-3 heads and next-token layers of `speculators`.
    completions, prompts
        What the engine wrote after each prompt, as tokens.
    gamma
        Draft tokens of a step.
    steps
        For each completion, the number of tokens that each step emitted, in order.
    bonus
        Whether `steps` count the recovered or bonus token of each step; otherwise they count
        accepted draft tokens.
    undrafted
        Whether the first step of each completion had no draft, as if the prompt's pass emits a token.
    per_position, conditional, over, logged_steps
        In place of `steps`, for a log without text: acceptance rates by depth; whether they are
        conditional (of steps that accepted the tokens before) or marginal (of all steps); whether
        they are averaged over steps or over requests; and over how many steps. `completions` are then
        of the same kind as the text of the log.
    sampling
        Of the target.
    others
        What the engine may have used, by name: a mapping with "target", "draft", "prompts" or
        "sampling" in place of those given. `{"the base model": {"target": base}}`
    kinds
        A name for each completion, by which acceptance is listed.
    level
        With no mistake, one is named with at most this probability; and the right one, if it is known,
        is excluded with at most this probability.
    tolerance
        Differences between acceptance probabilities up to this are taken for rounding.
    batch
        Sequences that are replayed at a time.

    Returns
    -------
    AcceptanceCauses

    Raises
    ------
    ValueError
        For counts that do not add up to the tokens, and a log without a column that is needed.

    Examples
    --------
    >>> from specnb import generate, load_pair
    >>> pair = load_pair()
    >>> made = generate(pair.target, [[0, 5], [0, 9]], pair.draft, gamma=2, max_new_tokens=20)
    >>> steps = [[int(n) for n in row if n] for row in made.record.emitted]
    >>> found = explain_acceptance(
    ...     pair.target, pair.draft, made.tokens, prompts=made.prompts, steps=steps, gamma=2, progress=False
    ... )
    >>> found.fits
    True
    """
    require_whole(gamma=(gamma, 1), batch=(batch, 1))
    in_range("level", level, 1e-12, 0.5)
    in_range("tolerance", tolerance, 1e-6, 0.2)
    require_supported(target)
    log = _log(target, prompts, completions, steps, gamma, bonus, undrafted)
    if kinds is not None and len(kinds) != len(log.completions):
        raise ValueError(f"there are {len(log.completions)} completions and {len(kinds)} kinds; give one for each")
    rates = _rates(per_position, conditional, over, logged_steps, gamma)
    if (rates is None) == (steps is None):
        raise ValueError(
            "the log has no column 'steps', the tokens that each step emitted; give it, or for a log without text "
            "per_position, conditional, over and logged_steps"
        )
    drafter = draft if isinstance(draft, Drafter) else ModelDrafter(draft, sampling, vocab=vocabulary(target))
    tried = hypotheses(target, drafter, log, sampling)
    tried += [_other(name, drafter, sampling, vocabulary(target), **given) for name, given in (others or {}).items()]
    if rates is None:
        return _by_token(target, log, tried, sampling, kinds, level, tolerance, batch, progress)
    return _by_average(target, log.every_place(), tried, sampling, rates, level, batch, progress)


def _log(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]],
    steps: Sequence[Sequence[int]] | None, gamma: int, bonus: bool, undrafted: bool,
) -> Log:  # fmt: skip
    given = [token_list(f"prompt {at}", one) for at, one in enumerate(prompts)]
    written = [token_list(f"completion {at}", one) for at, one in enumerate(completions)]
    if len(given) != len(written) or not given or not all(map(len, [*given, *written])):
        raise ValueError(
            f"there are {len(given)} prompts and {len(written)} completions; give as many, of a token or more each"
        )
    require_completions(target, list(map(Completion, given, written)))
    if steps is None:
        return Log(given, written, [[1] * len(one) for one in written], gamma)
    if len(steps) != len(written):
        raise ValueError(f"there are {len(written)} completions and steps of {len(steps)}; give them for each")
    sizes = [[int(size) + (not bonus) for size in row] for row in steps]
    for at, (row, tokens) in enumerate(zip(sizes, written, strict=True)):
        if sum(row) != len(tokens):
            counted = "with" if bonus else "without"
            raise ValueError(
                f"completion {at} has {len(tokens)} tokens, and its {len(row)} steps {counted} the bonus token make "
                f"{sum(row)}: say in bonus whether the steps count it"
            )
        if min(row) < 1 or max(row) > gamma + 1:
            raise ValueError(
                f"a step of completion {at} emits {min(row) if min(row) < 1 else max(row)} tokens; with gamma {gamma} "
                f"it is 1 to {gamma + 1}"
            )
    return Log(given, written, sizes, gamma, undrafted)


class _Rates(NamedTuple):
    conditional: Array
    over: Over
    steps: int


def _rates(
    per_position: Sequence[float] | None, conditional: bool | None, over: Over | None, steps: int | None, gamma: int
) -> _Rates | None:
    if per_position is None:
        return None
    if conditional is None or over not in ("steps", "requests") or steps is None:
        raise ValueError(
            "per_position needs conditional (True: of steps that accepted the tokens before; False: of all steps), "
            "over ('steps' or 'requests') and logged_steps, their number"
        )
    require_whole(logged_steps=(steps, 1))
    rates = np.array([in_range("a rate of per_position", rate, 0, 1) for rate in per_position])
    if len(rates) != gamma:
        raise ValueError(f"per_position has {len(rates)} rates; give {gamma}, one for each draft token")
    if not conditional:
        if (np.diff(rates) > 0).any():
            raise ValueError("marginal rates cannot rise with the depth; are these conditional ones?")
        before = np.concatenate([[1.0], rates[:-1]])
        rates = np.divide(rates, before, out=np.zeros(gamma), where=before > 0)
    return _Rates(rates, over, steps)


def hypotheses(target: PreTrainedModel, drafter: Drafter, log: Log, sampling: Sampling) -> list[Served]:
    """The draft as it is given, and every known mistake in serving it."""
    right = Served(RIGHT, "", drafter)
    return [right, *known_mistakes(target, drafter, sampling), *_begun_otherwise(target, drafter, log)]


def _begun_otherwise(target: PreTrainedModel, drafter: Drafter, log: Log) -> list[Served]:
    begin: Any = getattr(target.config, "bos_token_id", None)
    if not all(prompt[0] == begin for prompt in log.prompts):
        return []
    line = "whether the template or the tokenizer adds the begin token, and that one of them does"
    longest = max(len(prompt) + len(tokens) for prompt, tokens in zip(log.prompts, log.completions, strict=True))
    limit, ways = context_limit(target), dict[str, list[list[int]]]()
    if limit is None or longest <= limit:
        ways["twice"] = [[begin, *prompt] for prompt in log.prompts]
    if min(map(len, log.prompts)) > 1:
        ways["missing"] = [prompt[1:] for prompt in log.prompts]
    return [Served(f"the begin token {how}", line, drafter, prompts=prompts) for how, prompts in ways.items()]


def _other(
    name: str, drafter: Drafter, given_sampling: Sampling, vocab: int, *, target: PreTrainedModel | None = None,
    draft: PreTrainedModel | Drafter | None = None, prompts: Sequence[Sequence[int]] | None = None,
    sampling: Sampling | None = None,
) -> Served:  # fmt: skip
    if isinstance(draft, PreTrainedModel):
        draft = ModelDrafter(draft, given_sampling, vocab=vocab)
    lists = None if prompts is None else [token_list(f"prompt {at}", one) for at, one in enumerate(prompts)]
    return Served(
        name, f"that the engine uses what was given, not {name}", draft or drafter, None, None, target, sampling, lists
    )


def _replayed(
    target: PreTrainedModel, log: Log, tried: Sequence[Served], sampling: Sampling, batch: int, progress: bool
) -> list[Array]:
    """For each hypothesis `(rows, steps, gamma, 2)` as `replay` returns it; NaN beyond the steps of a row."""
    longest, hidden = max(map(len, log.completions)), any(one.drafter.hidden_layers for one in tried)
    rows = max(1, min(batch, ENTRIES // (longest * vocabulary(target))))
    parts = [slice(at, at + rows) for at in range(0, len(log.prompts), rows)]
    found = [np.full((len(log.prompts), max(map(len, log.steps)), log.gamma, 2), np.nan) for _ in tried]
    bar = tqdm(total=len(parts) * len(tried), desc="hypotheses", delay=3, leave=False, disable=not progress)
    for part in parts:
        some = replace(log, prompts=log.prompts[part], completions=log.completions[part], steps=log.steps[part])
        texts: dict[Any, Text] = {}
        for at, served in enumerate(tried):
            model, drawn = served.target or target, served.sampling or sampling
            prompts = some.prompts if served.prompts is None else served.prompts[part]
            key = (id(model), drawn, served.prompts is not None and id(served.prompts))
            if key not in texts:
                texts[key] = Text(model, prompts, some.completions, drawn, hidden)
            values = replay(served, texts[key], some).double().cpu().numpy()
            found[at][part, : values.shape[1]] = values
            bar.update()
    bar.close()
    return found


@torch.inference_mode()
def _by_token(
    target: PreTrainedModel, log: Log, tried: Sequence[Served], sampling: Sampling, kinds: Sequence[str] | None,
    level: float, tolerance: float, batch: int, progress: bool,
) -> AcceptanceCauses:  # fmt: skip
    tests = log.tests
    if not len(tests.row):
        raise ValueError("the log tests no draft token before the last step of a completion; give longer completions")
    found = _replayed(target, log, tried, sampling, batch, progress)
    b = np.stack([each[tests.row, tests.step, tests.depth, 0] for each in found])
    row, step, depth = map(np.concatenate, zip((tests.row, tests.step, tests.depth), log.ends, strict=True))
    chance = np.stack([each[row, step, depth, 1] for each in found])
    possible = chance[0] > 0
    against_each = np.stack([text_weights(chance, own, tolerance).sum(axis=-1) for own in range(len(chance))])
    against = evidence(b, against_each, tests.accepted, tests.depth, tolerance)
    of_text = text_weights(chance, 0, tolerance, bounded=False).sum(axis=-1)
    gains = log_likelihood(b, tests.accepted, tolerance) + of_text
    gains -= gains[0]

    def rates(values: Array) -> DepthRates:
        return _by_depth(_sums(values, tests.row, tests.depth, len(log.prompts), log.gamma))

    lines = []
    for at, one in enumerate(tried):
        rates_here = _plain(_sums(b[at], tests.row, tests.depth, len(log.prompts), log.gamma))
        excluded = bool(against[at] >= -np.log(level))
        lines.append(Tried(one.name, one.mend, against[at] / np.log(10), gains[at], *rates_here, excluded))
    of_kind: dict[str, tuple[float, float]] = {}
    if kinds is not None:
        labels = np.array([str(kind) for kind in kinds])[tests.row]
        of_kind = {
            str(kind): (float(b[0][labels == kind].mean()), float(tests.accepted[labels == kind].mean()))
            for kind in sorted(set(labels))
        }
    notes = []
    if not possible.all():
        notes.append(
            f"{(~possible).sum()} tokens of the text have probability 0 under the target: another model or sampling, "
            "or rounding, wrote them"
        )
    first = [row[0] for row in log.steps if len(row) > 1]
    if not log.undrafted and len(first) >= FEWEST and set(first) == {1}:
        notes.append("every first step emits one token: if the pass over the prompt emits it, give undrafted=True")
    sizes = [size for row in log.steps for size in row]
    if log.gamma > 1 and max(sizes) == log.gamma and sizes.count(log.gamma) >= FEWEST:
        notes.append(
            f"no step emits {log.gamma + 1} tokens: if the engine gives no bonus token, explain with gamma "
            f"{log.gamma - 1}"
        )
    # A mistake that is left and changes the text explains it, too.
    left = [gain for one, gain in zip(lines, of_text, strict=True) if not one.excluded]
    text = [Completion(*one) for one in zip(log.prompts, log.completions, strict=True)]
    other, settings = unclaimed_settings(Models(target, sampling), beginning(text), SURE), []
    if other is not None and other.gain > 2 * max(left, default=0):
        settings = [f"{other.cause}; no mistake is named under settings that the text contradicts", other.note]
    logged = rates(tests.accepted.astype(np.float64))
    return _causes(lines, rates(b[0]), logged, of_kind, len(tests.row), level, notes, settings)


def _causes(
    lines: list[Tried], expected: DepthRates, logged: DepthRates, kinds: dict[str, tuple[float, float]], tests: int,
    level: float, notes: list[str], settings: Sequence[str] = (), with_text: bool = True,
) -> AcceptanceCauses:  # fmt: skip
    right, *mistakes = lines
    mistakes.sort(key=lambda one: -one.gain)
    named = tuple(one.name for one in mistakes if right.excluded and not one.excluded and not settings)
    return AcceptanceCauses(
        named, (right, *mistakes), expected, logged, kinds, tests, level, with_text, tuple(notes), tuple(settings)
    )


def log_likelihood(b: Array, accepted: NDArray[np.bool_], tolerance: float) -> Array:
    """Of the log given its text, under each hypothesis `(hypotheses,)`; b is kept away from 0 and 1 by half of
    `tolerance`."""
    inside = b.clip(tolerance / 2, 1 - tolerance / 2)
    total: Array = np.log(np.where(accepted, inside, 1 - inside)).sum(axis=-1)
    return total


def text_weights(chance: Array, own: int, tolerance: float, bounded: bool = True) -> Array:
    """The logarithm of what each token of the text says for each hypothesis against the one numbered `own`.

    `chance` `(hypotheses, n)` has the probabilities of the tokens. Under `own` the mean of a factor, at
    least `tolerance` and, if `bounded`, 1 / `tolerance` at most, is not above 1.
    """
    of_own = chance[own]
    ratio = np.divide(chance, of_own, out=np.where(chance > 0, np.inf, 1.0), where=of_own > 0)
    most = np.where(bounded | (of_own == 0), 1 / tolerance, np.inf)
    return np.log(np.minimum((1 - tolerance) * ratio + tolerance, most))  # type: ignore[no-any-return]


def evidence(
    b: Array, of_text: Array, accepted: NDArray[np.bool_], depth: NDArray[np.int64], tolerance: float
) -> Array:
    """The logarithm of an e-value against each hypothesis `(hypotheses,)`.

    Parameters
    ----------
    b : (hypotheses, n)
        The probability that each draft token is accepted given the text's token.
    of_text : (hypotheses, hypotheses)
        The logarithm of the text's evidence against each for each, `text_weights`.
    accepted, depth : (n,)
        Whether it was, and its depth from 0.

    Notes
    -----
    A hypothesis says that the acceptance probability lies within `tolerance` of its b. Against it
    another probability r is bet with the factor r / p or (1 - r) / (1 - p), where p is the nearest to
    r in that interval. Its expectation is at most 1 for every probability in the interval: it is
    linear, 1 at p, and falls from there into the interval.
    """
    edge = tolerance / 2
    bets = b.clip(edge, 1 - edge)
    calibrated = np.array([(*moved, factor) for moved in product(MOVED, MOVED) for factor in FACTORS])
    moved = np.where(depth > 0, calibrated[:, 1, None], calibrated[:, 0, None])
    found = []
    for own, texts in zip(b, of_text, strict=True):
        low, high = (own - tolerance).clip(0, 1), (own + tolerance).clip(0, 1)

        def factors(r: Array, low: Array = low, high: Array = high) -> Array:
            p = r.clip(low, high)
            ratio = np.where(accepted, r / p, (1 - r) / (1 - p))
            total: Array = np.log(ratio).sum(axis=-1)
            return total

        of_others = factors(bets) + texts
        log_odds = logit(own.clip(0.02, 0.98))
        of_self = [
            factors(expit(one[2] * log_odds + by).clip(edge, 1 - edge))
            for one, by in zip(calibrated, moved, strict=True)
        ]
        # The hypothesis itself, whose factors are 1 at most, is one of the others.
        halves = [logsumexp(of_others) - np.log(len(b)), logsumexp(of_self) - np.log(len(of_self))]
        found.append(np.logaddexp(*halves) - np.log(2))
    return np.array(found)


def _by_average(
    target: PreTrainedModel, log: Log, tried: Sequence[Served], sampling: Sampling, rates: _Rates, level: float,
    batch: int, progress: bool,
) -> AcceptanceCauses:  # fmt: skip
    """Compares averages: the log's rates, and those of each hypothesis along texts of the same kind."""
    if len(log.prompts) < FEWEST:
        raise ValueError(f"there are {len(log.prompts)} completions; averages of a log without text need {FEWEST}")
    counts = np.array([len(one) for one in log.completions])
    beyond = np.add.outer(np.arange(counts.max()), np.arange(log.gamma)) >= counts[:, None, None]
    marginal = rates.conditional.cumprod()
    tested = np.round(rates.steps * np.concatenate([[1.0], marginal[:-1]]))
    counted = rates.conditional * tested
    # Half of `level` is for the means of the text, half for the counts of the log, at each depth and side.
    part, lines, expected = level / (4 * log.gamma), [], []
    for served, values in zip(tried, _replayed(target, log, tried, sampling, batch, progress), strict=True):
        b = np.where(beyond, np.nan, values[..., 0])
        sums = depth_sums(np.stack([b, b, np.where(beyond, np.nan, 1.0)], axis=-1))
        expected.append(_by_depth(sums, rates.over))
        means = np.array([one.value for one in expected[-1].conditional])
        of_text = np.array([(one.high - one.low) / (2 * norm.ppf(0.975)) for one in expected[-1].conditional]) ** 2
        # The text of the log differs from this one as its parts do from each other.
        of_text *= 1 + sums[:, 0].sum() / rates.steps
        about = norm.isf(part) * np.sqrt(of_text)
        near = rates.conditional.clip(means - about, means + about).clip(0, 1)
        tails = np.minimum(binom.cdf(np.ceil(counted), tested, near), binom.sf(np.floor(counted) - 1, tested, near))
        excluded = bool((tails < part).any())  # NaN at a depth that the hypothesis hardly reaches
        gain = np.nansum(binom.logpmf(np.round(counted), tested, near))
        tokens = expected[-1].tokens_per_step.value
        lines.append(Tried(served.name, served.mend, np.nan, gain, means.tolist(), tokens, excluded))
    alone = [Estimate(value, np.nan, np.nan, rates.steps) for value in (*marginal, *rates.conditional, marginal.sum())]
    logged = DepthRates(
        alone[: log.gamma], alone[log.gamma : -1], alone[-1]._replace(value=1 + alone[-1].value), alone[-1]
    )
    notes = ["averages alone: a log with the steps of each text tells apart mistakes that have the same averages"]
    return _causes(lines, expected[0], logged, {}, rates.steps, level, notes, with_text=False)


def _sums(values: Array, row: NDArray[np.int64], depth: NDArray[np.int64], rows: int, gamma: int) -> Array:
    """By sequence `(rows, 3 gamma)`: tests twice, and `values` `(n,)` summed, at each depth."""
    tested, summed = np.zeros((rows, gamma)), np.zeros((rows, gamma))
    np.add.at(tested, (row, depth), 1)
    np.add.at(summed, (row, depth), values)
    return np.concatenate([tested, tested, summed], axis=-1)


def _plain(sums: Array) -> tuple[list[float], float]:
    gamma = sums.shape[-1] // 3
    rates = depth_rates(sums.sum(axis=0))
    return rates[:gamma].tolist(), 1 + float(rates[-1])


def _by_depth(sums: Array, over: Over = "steps") -> DepthRates:
    gamma = sums.shape[-1] // 3

    def rate(column: int, more: float = 0) -> Any:
        def statistic(rows: NDArray[np.int64]) -> Array:
            if over == "requests":
                each = depth_rates(sums[rows])[..., column]
                known = ~np.isnan(each)  # a request may test no token at a depth
                counts = known.sum(axis=-1)
                total = np.nansum(each, axis=-1)
                means: Array = np.divide(total, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
                return means + more
            return depth_rates(sums[rows].sum(axis=-2))[..., column] + more

        one = bootstrap(statistic, len(sums), RESAMPLES, 0)
        return one if len(sums) >= FEWEST else one._replace(low=np.nan, high=np.nan)

    conditional, marginal = ([rate(first + depth) for depth in range(gamma)] for first in (0, gamma))
    return DepthRates(marginal, conditional, rate(2 * gamma, 1), rate(2 * gamma))
