"""The audit's exact mode: the enumerated joint distribution of the next few tokens, for small vocabularies.

Where all sequences of a few tokens can be enumerated, no alternative has to be named: every deviation of the joint
distribution counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from specnb.distributions import Conditional
from specnb.measure.statistics import detectable_total_variation, goodness_of_fit, merge_rare_cells

MAX_SEQUENCES = 200_000
CONCENTRATIONS = 10.0 ** np.arange(1, 7)
"""The alternatives have the prior Dirichlet(concentration x the target's joint distribution)."""


@dataclass(frozen=True)
class JointReport:
    """Counts of n sequences against their enumerated probabilities.

    cells            number of possible sequences
    log10_e          decimal logarithm of the e-value: the mean likelihood under distributions near the target's, over
                     that under the target's. It exceeds 1/delta with probability at most delta, for any n
    p_value          of Pearson's test; its false-alarm rate is right for large counts only
    total_variation  between frequencies and probabilities; at finite n it is positive for an exact sampler too
    detectable       the total variation that Pearson's test detects at `delta` with power 0.99
    impossible       sequences of probability zero and their counts
    """

    delta: float
    n: int
    cells: int
    log10_e: float
    p_value: float
    total_variation: float
    detectable: float
    impossible: dict[tuple[int, ...], int]

    @property
    def rejected(self) -> bool:
        """Whether exactness is rejected at the false-alarm rate `delta`."""
        return self.log10_e >= -math.log10(self.delta)

    def __str__(self) -> str:
        verdict = "REJECTED" if self.rejected else "no deviation was found"
        return (
            f"{verdict}: e = 10^{self.log10_e:.1f}, Pearson's p = {self.p_value:.2g}, total variation "
            f"{self.total_variation:.4f} in {self.n:,} sequences over {self.cells:,} possible ones; "
            f"{self.detectable:.4f} would have been detected; {sum(self.impossible.values())} sequences are impossible"
        )


def audit_joint(
    probs: Conditional, completions: Sequence[Sequence[int]], length: int, eos: int | None = None, delta: float = 1e-6
) -> JointReport:
    """Whether the first `length` tokens of `completions`, all of one prompt, have the target's joint distribution.

    `probs` maps the tokens so far (without the prompt) to the float64 distribution `(vocab,)` of the next token. A
    completion may be shorter if it ends with `eos`.

    Raises `ValueError` for no completions, one that is too short without an `eos`, tokens outside the vocabulary, and
    more than 200,000 possible sequences.

    >>> import torch
    >>> coin = lambda tokens: torch.tensor([0.5, 0.5], dtype=torch.float64)
    >>> audit_joint(coin, [[0, 0], [1, 1]] * 40, length=2).rejected  # each token is right, the pair is not
    True
    >>> audit_joint(coin, [[0], [1]] * 40, length=1).rejected
    False
    """
    vocab = len(probs(()))
    if vocab**length > MAX_SEQUENCES:
        raise ValueError(
            f"{vocab} tokens form {vocab**length:,} sequences of length {length}; at most {MAX_SEQUENCES:,} are "
            "enumerated: give a smaller length"
        )
    seen = Counter(_start(tokens, number, length, eos, vocab) for number, tokens in enumerate(completions))
    if not seen:
        raise ValueError("there are no completions to audit; give at least one")
    probabilities = dict(_enumerated(probs, (), 1.0, length, eos))
    impossible = {tokens: count for tokens, count in seen.items() if probabilities.get(tokens, 0.0) == 0}
    possible = [tokens for tokens, probability in probabilities.items() if probability > 0]
    expected = np.array([probabilities[tokens] for tokens in possible])
    counts = np.array([seen[tokens] for tokens in possible], dtype=np.float64)
    n = len(completions)
    fit = goodness_of_fit([*counts, sum(impossible.values())], [*expected, 0.0])
    tested = len(merge_rare_cells(counts, expected * n)[1])
    return JointReport(
        delta=delta,
        n=n,
        cells=len(possible),
        log10_e=math.inf if impossible else _log_evidence(counts, expected) / math.log(10),
        p_value=fit.p_value,
        total_variation=fit.total_variation,
        detectable=detectable_total_variation(tested, n, delta) if tested > 1 else math.inf,
        impossible=impossible,
    )


def _start(tokens: Sequence[int], number: int, length: int, eos: int | None, vocab: int) -> tuple[int, ...]:
    start = tuple(int(token) for token in tokens[:length])
    if eos in start:
        start = start[: start.index(eos) + 1]
    elif len(start) < length:
        raise ValueError(f"completion {number} has {len(start)} tokens and no eos; it needs {length}")
    if not all(0 <= token < vocab for token in start):
        raise ValueError(f"completion {number} begins with {start}; the vocabulary has the tokens 0 to {vocab - 1}")
    return start


def _enumerated(
    probs: Conditional, tokens: tuple[int, ...], probability: float, length: int, eos: int | None
) -> Iterator[tuple[tuple[int, ...], float]]:
    if len(tokens) == length or (tokens and tokens[-1] == eos):
        yield tokens, probability
        return
    for token, following in enumerate(probs(tokens).tolist()):
        yield from _enumerated(probs, (*tokens, token), probability * following, length, eos)


def _log_evidence(counts: NDArray[np.float64], probs: NDArray[np.float64]) -> float:
    """ln of the Dirichlet-multinomial likelihood over the multinomial one, averaged over concentrations.

    The ratio has expectation 1 under `probs`, since both are probabilities of the same data.
    """
    n = counts.sum()
    start = CONCENTRATIONS[:, None] * probs
    ratios = (gammaln(start + counts) - gammaln(start) - counts * np.log(probs)).sum(axis=1)
    ratios += gammaln(CONCENTRATIONS) - gammaln(CONCENTRATIONS + n)
    return float(logsumexp(ratios) - np.log(len(CONCENTRATIONS)))
