"""The audit's exact mode: the joint distribution of the next few tokens, enumerated, for small vocabularies.

Where all texts of a few tokens can be listed, no alternative needs to be thought of: every deviation of the
joint distribution counts, whatever it looks like.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from specnb.measure.statistics import detectable_total_variation, goodness_of_fit, merge_rare_cells
from specnb.sampling.enumeration import Conditional

CELLS = 200_000
CONCENTRATIONS = 10.0 ** np.arange(1, 7)
"""How close to the target's joint distribution the alternatives lie: the prior is Dirichlet(concentration x distribution)."""


@dataclass(frozen=True)
class JointReport:
    """Counted texts against their enumerated probabilities.

    log10_e          evidence: the likelihood of distributions near the target's, averaged, over that of the target's.
                     It reaches 1/delta with probability at most delta, for any distribution and any n
    p_value          Pearson's, beside it; its rate of false alarms is right for large counts only
    total_variation  between the frequencies and the distribution; at this n an exact sampler shows some, too
    detectable       the total variation that Pearson's test finds at `delta` with power 0.99
    impossible       texts of probability zero, and how often they came
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
            f"{self.total_variation:.4f} in {self.n:,} texts over {self.cells:,} cells; "
            f"{self.detectable:.4f} would have been found, and {sum(self.impossible.values())} texts are impossible"
        )


def audit_joint(
    probs: Conditional, completions: Sequence[Sequence[int]], length: int, eos: int | None = None, delta: float = 1e-6
) -> JointReport:
    """Whether the first `length` tokens of `texts`, all after the same prompt, have the joint distribution that `distribution`
    gives them; it maps the tokens so far to the float64 distribution of the next. A text ends with `eos`.

    Raises `ValueError` for no texts, a text that is too short and does not end, tokens outside the
    vocabulary, and more than 200,000 possible texts.
    """
    vocab = len(probs(()))
    if vocab**length > CELLS:
        raise ValueError(
            f"{vocab} tokens have {vocab**length:,} texts of length {length}; at most {CELLS:,} are listed"
        )
    seen = Counter(_start(text, number, length, eos, vocab) for number, text in enumerate(completions))
    if not seen:
        raise ValueError("there are no texts to judge; give at least one")
    chances = dict(_enumerated(probs, (), 1.0, length, eos))
    impossible = {text: count for text, count in seen.items() if chances.get(text, 0.0) == 0}
    possible = [text for text, chance in chances.items() if chance > 0]
    expected = np.array([chances[text] for text in possible])
    counts = np.array([seen[text] for text in possible], dtype=np.float64)
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


def _start(text: Sequence[int], number: int, length: int, eos: int | None, vocab: int) -> tuple[int, ...]:
    start = tuple(int(token) for token in text[:length])
    if eos in start:
        start = start[: start.index(eos) + 1]
    elif len(start) < length:
        raise ValueError(f"text {number} has {len(start)} tokens and does not end; each needs {length}")
    if not all(0 <= token < vocab for token in start):
        raise ValueError(f"text {number} is {start}; the vocabulary has the tokens 0 to {vocab - 1}")
    return start


def _enumerated(
    probs: Conditional, text: tuple[int, ...], chance: float, length: int, eos: int | None
) -> Iterator[tuple[tuple[int, ...], float]]:
    if len(text) == length or (text and text[-1] == eos):
        yield text, chance
        return
    for token, following in enumerate(probs(text).tolist()):
        yield from _enumerated(probs, (*text, token), chance * following, length, eos)


def _log_evidence(counts: NDArray[np.float64], probs: NDArray[np.float64]) -> float:
    """ln of the Dirichlet-multinomial likelihood over the multinomial one, averaged over concentrations.

    Its expectation under the distribution is 1, since both are probabilities of the same sequence of texts.
    """
    n = counts.sum()
    start = CONCENTRATIONS[:, None] * probs
    ratios = (gammaln(start + counts) - gammaln(start) - counts * np.log(probs)).sum(axis=1)
    ratios += gammaln(CONCENTRATIONS) - gammaln(CONCENTRATIONS + n)
    return float(logsumexp(ratios) - np.log(len(CONCENTRATIONS)))
