"""Audits sequences one after the other; may be stopped after any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from specnb.arguments import require_whole
from specnb.prompts import as_list
from specnb_audit.alternatives import ALTERNATIVES, LEARNED
from specnb_audit.bets import Bets, CutoffGap, Row, steps_between
from specnb_audit.evidence import Evidence, TotalVariationEstimate, log_mean
from specnb_audit.numerics import Impossible, ImpossibleTokens, Numerics, Rate, bar, crossing
from specnb_audit.report import VIOLATIONS, Report

Ends = int | Iterable[int] | None
POSITION_GROUPS = (0, 1, 4, 16, 64, 256, 1024)  # first position of each
SUM_TOLERANCE = 1e-5  # of distributions given, which are not normalised again
SHARE = 0.01
"""The part of `delta` that the number of impossible tokens has, where numerics explain the size of
each: half of it for the bet on it, and half for the comparison with a control."""


class Auditor:
    """Audits sequence after sequence; one may stop after any without a higher false-alarm rate.

    Parameters
    ----------
    delta : float
        Largest probability that an exact sampler is ever rejected.
    seed : int
        Of the audit's own uniforms.
    eos, max_new_tokens
        The tokens after which a sequence must end, and its length without one; checked only if
        given.
    numerics : Numerics, optional
        How far rounding may move the engine's distributions from the target's.
    undeclared : callable, optional
        Returns the numerics of bfloat16 when a token needs them; None if the engine's dtype is
        known.
    ignore : iterable of str
        Kinds of deviation that are left out: names in `ALTERNATIVES` and `VIOLATIONS`.

    Raises
    ------
    ValueError
        For settings out of range, and unknown names in `ignore`.

    Examples
    --------
    >>> import torch
    >>> auditor = Auditor()
    >>> for _ in range(40):  # the sampler claims a fair coin and always returns 1
    ...     auditor.add(Row([1], torch.tensor([[0.5, 0.5]])))
    >>> auditor.found_after
    29
    """

    def __init__(
        self,
        delta: float = 1e-6,
        seed: int = 0,
        eos: Ends = None,
        max_new_tokens: int | None = None,
        numerics: Numerics | None = None,
        undeclared: Callable[[], Numerics] | None = None,
        ignore: Iterable[str] = (),
    ) -> None:
        if not 0 < delta < 1:
            raise ValueError(f"delta is {delta}; a false-alarm rate lies between 0 and 1")
        require_whole(seed=(seed, 0), max_new_tokens=(1 if max_new_tokens is None else max_new_tokens, 1))
        self.ignored = frozenset(ignore)
        if unknown := sorted(self.ignored - ALTERNATIVES.keys() - VIOLATIONS.keys()):
            raise ValueError(f"ignore has {unknown[0]}; kinds are {', '.join([*VIOLATIONS, *ALTERNATIVES])}")
        self.delta = delta
        self.ends = end_tokens(eos)
        self.max_new_tokens = max_new_tokens
        self.numerics = numerics
        self.bets = Bets(seed, self.ends)
        self.alternatives: list[str] = []
        self.evidence: Evidence | None = None
        self.distance = TotalVariationEstimate()
        # Natural log of each e-value, `(n, alternatives)`
        self.logs: list[NDArray[np.float64]] = []
        # Sequence, position, token and position in the step, `(4, n)`
        self.places: list[NDArray[np.int64]] = []
        self.violations: dict[str, int] = {}
        # Number of tokens after which the first of each kind is known.
        self.violated_after: dict[str, int] = {}
        self.impossible = ImpossibleTokens(numerics, undeclared)
        # Number of tokens after which the e-value passed 1/delta.
        self.crossed_after: int | None = None
        self.numerics_only = False
        self.certain = True  # whether every possible token so far had probability 1
        self.rate: Rate | None = None
        self.tokens = self.sequences = self.offset = 0
        self.ended = self.wrong_length = False

    @torch.no_grad()
    def add(self, row: Row) -> None:
        """Audit one row. Raises `ValueError` if its tokens and distributions do not fit together."""
        _require_row(row)
        if not row.continues:
            self.sequences, self.offset = self.sequences + 1, 0
            self.ended = self.wrong_length = False
            self.bets.begin(row.prompt, row.batch)
        end_tokens(self.ends, row.p.shape[1])
        row = self._until_eos(row)
        if len(row.tokens) == 0:
            return
        bets = self.bets.bets_on(row).without(self.ignored)
        if self.evidence is None:
            if not bets.alternatives:
                raise ValueError("ignore leaves no kind of deviation to test for; leave out one of its names")
            self.alternatives = bets.alternatives
            self.evidence = Evidence(bets.alternatives, bets.masks.shape[1])
        if bets.alternatives != self.alternatives or bets.masks.shape[1] != self.evidence.subsets:
            raise ValueError(
                "some sequences come with a draft's distributions or with steps and others do not; give them for all"
            )
        own = row.p.gather(-1, _tokens(row)[:, None])[:, 0].numpy(force=True)
        zero = own == 0
        self.certain = self.certain and bool((zero | (own == 1)).all())
        ratios = np.where(zero[:, None], 1.0, bets.ratios)
        log_e = self.evidence.add(ratios, bets.masks)
        self.distance.add(bets.deviations)
        self._record_impossible(row, np.flatnonzero(zero))
        n = len(row.tokens)
        positions = self.offset + np.arange(n)
        sequence = np.full(n, self.sequences - 1)
        self.places.append(np.stack([sequence, positions, np.asarray(row.tokens), bets.step_positions]))
        self.logs.append(log_e)
        self._update_verdict(log_mean(log_e))
        self.tokens += n
        self.offset += n

    def _until_eos(self, row: Row) -> Row:
        """The row up to its end token; tokens after it are violations, and so is a wrong length."""
        tokens = [int(token) for token in row.tokens]
        keep = 0 if self.ended else len(tokens)
        ends = [at for at, token in enumerate(tokens[:keep]) if token in self.ends]
        if ends:
            keep, self.ended = ends[0] + 1, True
        if keep < len(tokens):
            self._violation("after-the-end", self.tokens + keep + 1, len(tokens) - keep)
        self._check_length(keep, row.more)
        if keep == len(tokens):
            return row
        q, raw, other = (None if probs is None else probs[:keep] for probs in (row.q, row.raw, row.suspected))
        faults = {name: probs[:, :keep] for name, probs in row.faults.items()}
        steps = None if row.steps is None else steps_between(row.steps, 0, keep)
        kept = replace(row, tokens=tokens[:keep], p=row.p[:keep], q=q, raw=raw, suspected=other, faults=faults)
        return replace(kept, steps=steps)

    def _check_length(self, n: int, more: bool) -> None:
        if self.max_new_tokens is None or self.wrong_length:
            return
        length = self.offset + n
        too_long = length > self.max_new_tokens
        self.wrong_length = too_long or (length < self.max_new_tokens and not self.ended and not more)
        if self.wrong_length:
            after = max(self.max_new_tokens - self.offset, 0) + 1 if too_long else n
            self._violation("wrong-length", self.tokens + after, 1)

    def _record_impossible(self, row: Row, zeros: NDArray[np.intp]) -> None:
        for at in zeros.tolist():
            if row.q is not None:
                self.impossible.are_drafted.append(bool(row.q[at, int(row.tokens[at])] == row.q[at].max() > 0))
            gap = row.cutoff_gaps.get(self.offset + at, CutoffGap(float("nan"), float("nan")))
            if self.impossible.add(Impossible(self.sequences - 1, self.offset + at, int(row.tokens[at]), *gap)) == (
                "violations"
            ):
                self._violation("impossible", self.tokens + at + 1, 1)

    def _violation(self, name: str, after: int, count: int) -> None:
        if name in self.ignored:
            return
        self.violations[name] = self.violations.get(name, 0) + count
        self.violated_after[name] = min(after, self.violated_after.get(name, after))

    @property
    def _level(self) -> tuple[float, float]:
        """The false-alarm rate of the bets, and the nats per token that numerics explain."""
        nats = 0.0 if self.numerics is None else self.numerics.nats
        return self.delta * (1 - SHARE * self.impossible.may_be_explained), nats

    def _update_verdict(self, log_e: NDArray[np.float64]) -> None:
        if self.crossed_after is None:
            self.crossed_after = crossing(log_e, *self._level, self.tokens)
            self.numerics_only = self.numerics_only or crossing(log_e, self.delta, 0.0, self.tokens) is not None

    def excuse_impossible(self) -> None:
        """A control has as many and as large impossible tokens: they are no violations."""
        self.impossible.move("undeclared", "violations")
        self.violations.pop("impossible", None)
        self.violated_after.pop("impossible", None)

    def convict_impossible(self, rate: Rate | None, after: int | None) -> None:
        """Impossible tokens that numerics explain one by one are violations, as is known after
        `after` tokens."""
        self.rate = rate
        if after is not None:
            explained = self.impossible.counts["borderline"] + self.impossible.counts["undeclared"]
            self.impossible.move("violations", "borderline", "undeclared")
            self._violation("impossible", after, explained)

    @property
    def found_after(self) -> int | None:
        """The number of tokens after which exactness was rejected, or None."""
        crossed = [] if self.crossed_after is None else [self.crossed_after]
        return min([*self.violated_after.values(), *crossed], default=None)

    @property
    def first_violation(self) -> int | None:
        """Index of the token of the first violation; 0 for one known before the first token."""
        return max(min(self.violated_after.values()) - 1, 0) if self.violated_after else None

    @property
    def log10_e(self) -> float:
        """Decimal logarithm of the e-value so far; infinite after a violation."""
        if self.first_violation is not None:
            return float("inf")
        return float(log_mean(self.logs[-1][-1:])[0] / np.log(10)) if self.logs else 0.0

    def report(self, detect: bool = True) -> Report:
        """The report so far; `detect` adds what would have been detected. Raises `ValueError`
        without tokens and violations."""
        nothing = self.found_after is None
        if self.evidence is None:
            if nothing:
                raise ValueError("there are no tokens to audit; give at least one sequence with a token in it")
            logs, running, names = np.empty((0, 0)), np.empty(0), list[str]()
        else:
            logs, names = np.concatenate(self.logs) / np.log(10), self.evidence.names
            running = log_mean(logs * np.log(10)) / np.log(10)
            if self.first_violation is not None:
                running[self.first_violation :] = np.inf
                running[-1] = np.inf  # the violation may come after the last token that was bet on
        return Report(
            delta=self.delta,
            tokens=self.tokens,
            sequences=self.sequences,
            found_after=self.found_after,
            numerics_only=nothing and (self.numerics_only or self.impossible.counts["undeclared"] > 0),
            running=running,
            running_by_alternative=dict(zip(names, logs.T, strict=True)),
            tv=self.distance.estimate(),
            violations=self.violations,
            impossible=self.impossible.listed["violations"],
            borderline=self.impossible.listed["borderline"],
            undeclared=self.impossible.listed["undeclared"],
            impossible_summary=self.impossible.summary(self.tokens),
            rate=self.rate,
            certain=self.certain,
            breakdown={} if nothing or not names else self._breakdown(logs),
            detectable=self._detectable() if detect and nothing and not self.numerics_only else {},
            numerics=self.numerics,
        )

    def _detectable(self) -> dict[str, float]:
        assert self.evidence is not None
        needed = bar(*self._level, self.tokens)
        # One impossible token is enough.
        found = {"impossible": 1 - 0.1 ** (1 / self.tokens)} | self.evidence.detectable(needed)
        return {name: value for name, value in found.items() if name not in {*LEARNED, *self.ignored}}

    def _breakdown(self, logs: NDArray[np.float64]) -> dict[str, list[tuple[str, int, float]]]:
        """The leading alternative's gains over groups of tokens; `logs` are decimal, `(n,
        alternatives)`."""
        gains = np.diff(logs[:, int(logs[-1].argmax())], prepend=0.0)
        sequence, position, token, step_position = np.concatenate(self.places, axis=1)
        groups: dict[str, tuple[NDArray[np.int64], Callable[[int], str]]] = {
            "position in the sequence": (np.searchsorted(POSITION_GROUPS, position, side="right") - 1, _positions),
            "token": (token, str),
            "sequence": (sequence, str),
        }
        if (step_position >= 0).any():
            groups["position in the step"] = (step_position, str)
        return {grouping: _summed(index, gains, name) for grouping, (index, name) in groups.items()}


def end_tokens(eos: Ends, vocab: int | None = None) -> set[int]:
    """The set of end tokens that `eos` names. Raises `ValueError` for one outside a vocabulary of
    `vocab` tokens, `TypeError` for what is no token."""
    ends = set(as_list(eos))
    outside = [token for token in sorted(ends) if token < 0 or (vocab is not None and token >= vocab)]
    if outside:
        known = "token ids are 0 or more" if vocab is None else f"the vocabulary has the tokens 0 to {vocab - 1}"
        raise ValueError(f"eos is {outside[0]}; {known}")
    return ends


def _positions(group: int) -> str:
    first = POSITION_GROUPS[group]
    if group + 1 == len(POSITION_GROUPS):
        return f"{first} and later"
    last = POSITION_GROUPS[group + 1] - 1
    return f"{first}" if first == last else f"{first} to {last}"


def _summed(
    index: NDArray[np.int64], gains: NDArray[np.float64], name: Callable[[int], str]
) -> list[tuple[str, int, float]]:
    groups, inverse, counts = np.unique(index, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, gains)
    best = np.argsort(-sums, kind="stable")[:20]
    return [(name(int(groups[at])), int(counts[at]), float(sums[at])) for at in best]


def _tokens(row: Row) -> torch.Tensor:
    return torch.as_tensor([int(token) for token in row.tokens], device=row.p.device)


def _require_row(row: Row) -> None:
    n = len(row.tokens)
    for name, probs in (("p", row.p), ("q", row.q), ("raw", row.raw), ("suspected", row.suspected)):
        if probs is None:
            continue
        if probs.ndim != 2 or len(probs) != n or probs.shape[1] != row.p.shape[1]:
            raise ValueError(
                f"{name} has shape {tuple(probs.shape)} for {n} tokens and p {tuple(row.p.shape)}; "
                "each needs one distribution per token, all over the same vocabulary"
            )
        # Each token may be bet on what is too much. NaN fails, too.
        sums = probs.sum(dim=-1, dtype=torch.float64)
        if name == "q":
            sums = sums.where(sums != 0, 1.0)  # nothing was drafted there
        if not bool(((sums - 1).abs() < SUM_TOLERANCE).all()):
            raise ValueError(f"a row of {name} does not sum to 1; give probabilities after standardisation, not logits")
        if n and bool(probs.min() < 0):
            raise ValueError(f"{name} has a negative entry; give probabilities")
    if n and not (min(row.tokens) >= 0 and max(row.tokens) < row.p.shape[1]):
        raise ValueError(f"tokens go from {min(row.tokens)} to {max(row.tokens)} in a vocabulary of {row.p.shape[1]}")
    if row.steps is not None and (sum(row.steps) != n or min(row.steps, default=1) < 1):
        raise ValueError(f"steps add up to {sum(row.steps)} for {n} tokens; give the tokens emitted by each step")
