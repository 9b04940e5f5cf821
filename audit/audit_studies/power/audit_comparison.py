"""The audit beside other tests, at the same number of tokens and the same false-alarm rate.

Samplers write blocks of `tokens` tokens of a small random pair: the exact loop, and the loop with
each known bug. For about half of the bugs no bet of the audit was designed (they are held out). A
test gets a budget of tokens and rejects if its p-value is at most `ALPHA`. A smaller budget is
tried on disjoint pieces of the blocks. The audit rejects when its e-value has reached 1/`ALPHA`
within the budget; it alone may look after every token.

The audit and every test that reads p run without the draft model and with it. With it a test looks
along p and along q/p, and its p-value is twice the smaller of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit_studies.bugs.bug import Bug
from audit_studies.bugs.known_bugs import EXACT, MORE_BUGS, known_bugs
from audit_studies.bugs.step import leading
from audit_studies.power import relatives
from audit_studies.power.compared_samples import (
    FIRST_IS_ARGMAX,
    LENGTH,
    PROMPTS,
    Judged,
    Sampled,
    View,
    ends_of,
    exact_like,
    greedy_mismatch,
    judge,
    rows_of,
    sampled,
)
from audit_studies.power.random_pair import random_pair
from specnb.distributions import Sampling, sample, standardise
from specnb.loading import Pair
from specnb.rules import Outcome
from specnb_audit.auditor import Auditor
from specnb_audit.bets import Row
from studies.study import Study

ALPHA = 1 / (relatives.PERMUTATIONS + 1)  # the smallest level that the permutation test reaches
BUDGETS = (200, 500, 1000, 2000, 5000, 10_000, 20_000)
PIECES, EXACT_PIECES = 20, 1000  # at most so many pieces are tried for each budget
GREEDY = 2000  # tokens of greedy decoding: it is deterministic, only the prompts differ
SHORT = 5000  # tokens of audits after the first, which are made if that rejects
FILTERS = Sampling(top_k=20, top_p=0.9)  # both remove tokens of the small pair


def own_samples_matching(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Exact match as engines have it: the target samples at every position, and the first mismatch
    ends the step."""
    own = sample(p, torch.cat([accept, final[..., None]], dim=-1))
    accepted = leading(draft_tokens == own[..., :-1], draft_tokens)
    return Outcome(accepted, own.gather(-1, accepted[..., None])[..., 0])


EXACT_MATCH = Bug("exact-match", "accepts what equals the target's own sample", "-", rule=own_samples_matching,
                  lossless=True)  # fmt: skip


def some_colder(p: Tensor) -> Tensor:
    """Every seventh row of p `(rows, positions, vocab)` at temperature 0.7."""
    colder = torch.arange(len(p)) % 7 == 0
    return torch.where(colder[:, None, None], standardise(p.log(), Sampling(0.7)), p)


SOME_COLDER = Bug("some-sequences-colder", "one sequence in seven is sampled at temperature 0.7", "-", p=some_colder)
SUITE = {bug.name: bug for bug in (EXACT, EXACT_MATCH, SOME_COLDER, FIRST_IS_ARGMAX)} | known_bugs(FILTERS) | MORE_BUGS

PValues = Callable[[slice], dict[str, float]]
"""The p-value of each test on the completions of a slice of a block."""
Found = list[tuple[str, int, float]]
"""The name of a test, a budget, and a p-value."""


def along(view: View, judged: NDArray[np.bool_], at: slice) -> dict[str, float]:
    """The p-values of the tests that read p, for the completions of a slice, in one order of the
    vocabulary."""
    kept, score, variance, place, probs = judged[at], view.score[at], view.variance[at], view.place[at], view.probs[at]
    return {
        "ranks": relatives.ranks(view.u[at][kept]),
        "surprise": relatives.surprise(score[kept], variance[kept]),
        "surprise per sequence": relatives.per_sequence(score * kept, variance * kept),
        "marginals": relatives.marginals(place[kept], probs[kept]),
        "first token": relatives.marginals(place[:, 0], probs[:, 0]),
    }


def reading_p(seen: Judged, at: slice) -> dict[str, float]:
    """The same without and with the draft model; an impossible token is a rejection."""
    plain, aimed = (along(view, seen.judged, at) for view in (seen.plain, seen.aimed))
    both = {f"{name}, draft": min(1.0, 2 * min(p, aimed[name])) for name, p in plain.items()}
    return dict.fromkeys(plain | both, 0.0) if seen.zero[at].any() else plain | both


def tests_of(mine: Sampled, seen: Judged, same: Sampled, other: Sampled, seed: int) -> PValues:
    """The tests of a fixed number of tokens. `same` is the exact sampler with the seed of `mine`,
    `other` another."""

    def p_values(at: slice) -> dict[str, float]:
        tested, prompts = (mine.decided[at] >= 0) & seen.judged[at], np.arange(len(mine.tokens))[at] % PROMPTS
        return reading_p(seen, at) | {
            "kernel": relatives.kernel(mine.tokens[at], other.tokens[at], prompts, np.random.default_rng([3, seed])),
            "acceptance": relatives.acceptance(mine.decided[at][tested] == 1, seen.overlap[at][tested]),
            "same seed": float((mine.tokens[at] == same.tokens[at]).all()),
        }

    return p_values


def pieces(budget: int, count: int, tokens: int = BUDGETS[-1]) -> Iterator[slice]:
    """The slices of a block of `tokens` with `budget` tokens each: `count` of them, or as many as
    there are.

    >>> list(pieces(10_000, count=4))
    [slice(0, 200, None), slice(200, 400, None)]
    """
    size = budget // LENGTH
    for number in range(min(count, tokens // budget)):
        yield slice(number * size, (number + 1) * size)


def tried(tests: PValues, count: int, tokens: int) -> Found:
    """Tests on `count` pieces of a block of `tokens` for every budget."""
    places = [(budget, at) for budget in BUDGETS for at in pieces(budget, count, tokens)]
    return [(name, budget, p) for budget, at in places for name, p in tests(at).items()]


@torch.inference_mode()
def block_of_tests(bug: Bug, pair: Pair, block: int, count: int, audit: bool, tokens: int = BUDGETS[-1]) -> Found:
    """Every test on `count` pieces of a block of `tokens`; audits where asked for."""
    size, right = tokens // LENGTH, exact_like(bug)
    mine, same, other = (
        sampled(one, pair, seed, size) for one, seed in ((bug, block), (right, block), (right, block + 1))
    )
    rows, ends = rows_of(mine, pair, bug.claimed), ends_of(bug)
    found = tried(tests_of(mine, judge(rows, ends, block), same, other, block), count, tokens)
    if block == 0:
        found += greedy_tests(bug, pair, count)
    if audit:
        # The draft model is unknown.
        blind = [Row(row.tokens, row.p, prompt=row.prompt) for row in rows]
        found += audits("audit", rows, ends, block, tokens)
        found += audits("audit, no draft", blind, ends, block, tokens)
    return found


def greedy_tests(bug: Bug, pair: Pair, count: int) -> Found:
    """Whether greedy decoding with the bug equals plain greedy decoding, as p-values of 0 and 1."""
    differs = greedy_mismatch(bug, pair, 0, GREEDY // LENGTH)
    return tried(lambda at: {"greedy": float(not differs[at].any())}, count, GREEDY)


def audited(rows: Sequence[Row], ends: list[int] | None, seed: int) -> NDArray[np.float64]:
    """The audit's p-value after each token, up to a rejection: one over the largest e-value so
    far."""
    auditor = Auditor(ALPHA, seed, ends)
    for row in rows:
        auditor.add(row)
        if auditor.found_after is not None:
            break
    return 10.0 ** -np.maximum.accumulate(np.maximum(auditor.report(detect=False).running, 0.0))


def audits(name: str, rows: Sequence[Row], ends: list[int] | None, seed: int, longest: int) -> Found:
    """The audit of the first `longest` tokens of a block; if it rejects, audits of later pieces of
    `SHORT` tokens."""
    first = audited(rows[: longest // LENGTH], ends, seed)
    found = [(name, budget, float(first[:budget][-1])) for budget in BUDGETS if budget <= longest]
    if first[-1] <= ALPHA:
        for at in list(pieces(SHORT, len(rows), len(rows) * LENGTH))[1:]:
            piece = audited(rows[at], ends, seed)
            found += [(name, budget, float(piece[:budget][-1])) for budget in BUDGETS if budget <= SHORT]
    return found


def measure(item: str, tokens: int, exact_blocks: int, exact_audits: int) -> pd.DataFrame:
    """One line for each test and budget of the bug `item`: how often it was tried, and how often it
    rejected."""
    is_exact = item == EXACT.name
    blocks, audited_blocks, most = (exact_blocks, exact_audits, EXACT_PIECES) if is_exact else (1, 1, PIECES)
    found: Found = []
    for block in range(blocks):
        found += block_of_tests(SUITE[item], random_pair(), block, -(-most // blocks), block < audited_blocks, tokens)
    return counted(item, found)


def counted(bug: str, found: Found) -> pd.DataFrame:
    """The lines of one bug: `runs`, those `rejected` at `ALPHA`, and those with a p-value of at
    most 0.05."""
    lines = pd.DataFrame(found, columns=["test", "budget", "p"])
    lines = lines.assign(bug=bug, runs=1, rejected=lines.p <= ALPHA * (1 + 1e-9), below_5_percent=lines.p <= 0.05)
    return lines.drop(columns="p").groupby(["bug", "test", "budget"], sort=False).sum().reset_index()


def tokens_to_detection(table: pd.DataFrame) -> pd.DataFrame:
    """Bugs by tests: the smallest budget at which at least half of the runs reject; NaN where there
    is none."""
    enough = table[table.rejected * 2 >= table.runs]
    smallest = enough.pivot_table("budget", "bug", "test", aggfunc="min")
    return smallest.reindex(index=table.bug.unique(), columns=table.test.unique())


STUDY = Study(
    measure,
    settings={"tokens": 20_000, "exact_blocks": 4, "exact_audits": 2},
    small={"tokens": 2000, "exact_blocks": 1, "exact_audits": 1},
    items=tuple(SUITE),
    small_items=("exact", "no-residual"),
)
