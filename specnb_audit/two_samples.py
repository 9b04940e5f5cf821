"""Do two files of samples come from one distribution? A sequential test that needs no model.

Sequences of the same prompt are paired, one of each file. Under the null hypothesis the two of a pair could be
exchanged. So whatever is learnt from the pairs before, a guess which of the two comes from the first file is right with
probability 1/2, and the factor 2 * (probability that was given to the truth) has expectation 1. The product of such
factors is an e-value (`specnb_audit.evidence`). The guesses are those of online logistic regressions, on several
*views* of a sequence: this is the classifier two-sample test, made sequential.

A difference is found only as far as a view shows it: far more tokens are needed than where distributions are known.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit

from specnb.measure.statistics import Estimate, proportion
from specnb_audit.evidence import log_mean
from specnb_audit.report import counted
from specnb_audit.token_file import Sample

Features = dict[Hashable, float]
RATES = (0.01, 0.03, 0.1, 0.3)
"""Learning rates of the classifiers; each has one e-value, and the mean of them all is the test's."""
BEGINNING = 16  # positions that have features of their own, for each prompt
BACK_OFF = 4.0  # pairs of tokens seen so often have half the weight in the estimated probability of a token


class Memory:
    """Counts over all pairs so far, of both files together."""

    def __init__(self) -> None:
        self.tokens: Counter[Hashable] = Counter()
        self.pairs: Counter[Hashable] = Counter()
        self.followed: Counter[Hashable] = Counter()
        self.total = 0

    def add(self, sample: Sample) -> None:
        self.tokens.update(sample.tokens)
        self.pairs.update(_pairs(sample))
        self.followed.update(before for before, _ in _pairs(sample))
        self.total += len(sample.tokens)

    def log_frequency(self, token: Hashable) -> float:
        return math.log((self.tokens[token] + 0.5) / (self.total + 1))

    def log_probability(self, before: Hashable, token: Hashable) -> float:
        """Of `token` after `before`, estimated from counts of pairs, and of single tokens where pairs are few."""
        prior = BACK_OFF * math.exp(self.log_frequency(token))
        return math.log((self.pairs[before, token] + prior) / (self.followed[before] + BACK_OFF))


def _pairs(sample: Sample) -> Iterator[tuple[Hashable, Hashable]]:
    return zip((None, *sample.tokens), sample.tokens, strict=False)


def _summary(sample: Sample, memory: Memory) -> Features:
    """Length and predictability: what temperature, filters and penalties change."""
    tokens, n = sample.tokens, max(len(sample.tokens), 1)
    return {
        "length": math.log1p(len(tokens)),
        "distinct": len(set(tokens)) / n,
        "repeated": sum(one == other for one, other in _pairs(sample)) / n,
        "unseen": sum(memory.tokens[token] == 0 for token in tokens) / n,
        "frequency": sum(memory.log_frequency(token) for token in tokens) / n,
        "probability": sum(memory.log_probability(before, token) for before, token in _pairs(sample)) / n,
    }


def _counts(of: Callable[[Sample], Iterator[Hashable]]) -> Callable[[Sample, Memory], Features]:
    def features(sample: Sample, memory: Memory) -> Features:
        counts = Counter(of(sample))
        norm = math.sqrt(sum(count * count for count in counts.values())) or 1.0
        return {key: count / norm for key, count in counts.items()}

    return features


VIEWS: dict[str, Callable[[Sample, Memory], Features]] = {
    "summary": _summary,
    "tokens": _counts(lambda sample: iter(sample.tokens)),
    "pairs of tokens": _counts(_pairs),
    "beginning": _counts(lambda sample: ((sample.prompt, *at) for at in enumerate(sample.tokens[:BEGINNING]))),
}
"""Length and predictability; counts of tokens; counts of neighbouring tokens; the first tokens after each prompt."""


class Classifier:
    """Logistic regression without an offset, learning from one pair after the other (AdaGrad, Duchi et al. 2011)."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.weights: defaultdict[Hashable, float] = defaultdict(float)
        self.squares: defaultdict[Hashable, float] = defaultdict(float)

    def learn(self, difference: Features) -> float:
        """The score of a pair, before learning that the first of the two comes from the first file."""
        score = sum(self.weights[key] * value for key, value in difference.items())
        surprise = float(expit(-score))
        for key, value in difference.items():
            if value:
                self.squares[key] += (surprise * value) ** 2
                self.weights[key] += self.rate * surprise * value / math.sqrt(self.squares[key])
        return score


@dataclass(frozen=True)
class TwoSampleReport:
    """The outcome of a comparison of `pairs` pairs of sequences at the false-alarm rate `delta`.

    found_after  number of pairs after which equality was rejected, or None
    log10_e      decimal logarithm of the e-value at the end, and `log10_e_peak` the largest
    by_view      the same for each of `VIEWS`, at the end
    guessed      share of right guesses which file a sequence is from; 1/2 for equal distributions. Pairs whose
                 difference is in nothing learnt so far are not guessed
    identical    pairs of equal sequences, as equal seeds give; they are no evidence either way
    unpaired     sequences without a partner of the same prompt, which were left out
    """

    delta: float
    pairs: int
    found_after: int | None
    log10_e: float
    log10_e_peak: float
    by_view: dict[str, float]
    guessed: Estimate
    identical: int
    unpaired: int

    @property
    def rejected(self) -> bool:
        """Whether equality is rejected at the false-alarm rate `delta`."""
        return self.found_after is not None

    @property
    def too_few(self) -> int:
        """The number of pairs that equality could be rejected with, where there are fewer; else 0."""
        least = math.ceil(-math.log2(self.delta))  # a pair at most doubles the e-value
        return least if self.pairs < least else 0

    def __str__(self) -> str:
        views = ", ".join(f"{name} 10^{value:.1f}" for name, value in self.by_view.items())
        verdict = "no difference was found"
        if self.found_after is not None:
            verdict = f"REJECTED after {counted(self.found_after, 'pair')}: the two files have different distributions"
        lines = [
            f"comparison of {counted(self.pairs, 'pair')} of sequences, false-alarm rate at most {self.delta:g}",
            verdict,
            f"e-value: 10^{self.log10_e:.1f}, largest 10^{self.log10_e_peak:.1f} (by view: {views})",
        ]
        if self.guessed.n:
            lines += [
                f"which file a sequence is from was guessed right in {self.guessed.value:.1%} of "
                f"{counted(self.guessed.n, 'pair')}, 95% interval [{self.guessed.low:.1%}, {self.guessed.high:.1%}]; "
                "chance gives 50%"
            ]
        if self.too_few:
            lines += [f"note: a pair at most doubles the e-value, so fewer than {self.too_few} cannot reject"]
        if self.identical:
            lines += [f"note: {counted(self.identical, 'pair')} {'is' if self.identical == 1 else 'are'} identical"]
        if self.unpaired:
            lines += [f"note: {counted(self.unpaired, 'sequence')} had no partner of the same prompt"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON types."""
        return {**vars(self), "rejected": self.rejected, "guessed": self.guessed._asdict()}


def compare_samples(
    samples: Sequence[Sample], reference: Sequence[Sample], delta: float = 1e-6, stop: bool = False
) -> TwoSampleReport:
    """Whether `samples` and `reference` come from one distribution, given their prompts.

    `stop`: as soon as that is rejected. Equal distributions are rejected with probability at most `delta`, whenever one
    stops. Sequences must be independent of each other; those of one file that share noise are found as a difference.

    Raises `ValueError` for a delta outside (0, 1), and where no prompt is in both.

    >>> one, other = [Sample("", (0, 0))] * 60, [Sample("", (1, 1))] * 60
    >>> compare_samples(one, other).rejected, compare_samples(one, one).rejected
    (True, False)
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; a false-alarm rate lies between 0 and 1")
    pairs = list(_paired(samples, reference))
    if not pairs:
        raise ValueError("no prompt is in both files; generate both with the same prompts")
    memory = Memory()
    classifiers = [(view, Classifier(rate)) for view in VIEWS for rate in RATES]
    log_e, peak, right, guesses, n = np.zeros(len(classifiers)), 0.0, 0, 0, 0
    found_after: int | None = None
    for n, pair in enumerate(pairs, 1):
        differences = {name: _difference(*(view(one, memory) for one in pair)) for name, view in VIEWS.items()}
        scores = np.array([classifier.learn(differences[view]) for view, classifier in classifiers])
        truth, opposite = (float(log_mean(log_e + np.log(2 * expit(sign * scores)))) for sign in (1, -1))
        right, guesses = right + (truth > opposite), guesses + (truth != opposite)
        log_e += np.log(2 * expit(scores))
        peak = max(peak, truth)
        if found_after is None and truth >= -math.log(delta):
            found_after = n
            if stop:
                break
        for one in pair:
            memory.add(one)
    by_view = log_mean(log_e.reshape(len(VIEWS), -1)) / math.log(10)
    return TwoSampleReport(
        delta=delta,
        pairs=n,
        found_after=found_after,
        log10_e=float(log_mean(log_e)) / math.log(10),
        log10_e_peak=peak / math.log(10),
        by_view=dict(zip(VIEWS, by_view.tolist(), strict=True)),
        guessed=proportion(right, guesses) if guesses else Estimate(0.5, 0.0, 1.0, 0),
        identical=sum(one == other for one, other in pairs[:n]),
        unpaired=len(samples) + len(reference) - 2 * len(pairs),
    )


def _paired(samples: Sequence[Sample], reference: Sequence[Sample]) -> Iterator[tuple[Sample, Sample]]:
    """The pairs in the order of `samples`; the first with a prompt meets the first of `reference` with it."""
    waiting: defaultdict[Hashable, deque[Sample]] = defaultdict(deque)
    for one in reference:
        waiting[one.prompt].append(one)
    for one in samples:
        if waiting[one.prompt]:
            yield one, waiting[one.prompt].popleft()


def _difference(one: Features, other: Features) -> Features:
    return {key: one.get(key, 0.0) - other.get(key, 0.0) for key in {**one, **other}}
