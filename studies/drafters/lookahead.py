"""Lookahead decoding (Fu et al., arXiv:2402.02057): the target drafts for itself by Jacobi
iteration, without training.

A window of guesses stands behind the newest token: `window` positions, and for each the last
`ngram` - 1 rounds of guesses. Each pass of the target evaluates all of them, beside the candidates
that it verifies. What it says after the guesses of a position is the next round's guess for the
position after it; with the guesses that led to it, it is an n-gram, which is kept under its first
token. Candidates are the n-grams that begin with the newest token.

The draft tokens of a step are fixed by what earlier passes computed, so q is one-hot, and any exact
rule keeps the target's distribution at any temperature. At temperature 0 the completion is the
target's greedy one.

Here n-grams come from the window alone, not from the prompt; candidates of one step begin with
different tokens; and the window moves by as many positions as were emitted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from specnb.arguments import require_whole
from specnb.drafters import Context, Proposal
from specnb.rules import Outcome
from specnb.trees import top_children
from studies.drafters.one_pass import OnePassDrafter

KEPT = 32  # n-grams under one first token; the one that was found longest ago is dropped


class LookaheadDrafter(OnePassDrafter):
    """Drafts from n-grams that Jacobi iteration of the target found, for `generate` with
    `hooks=ONE_PASS`.

    A pass evaluates 1 + (`ngram` - 1) (`candidates` + `window`) tokens. The n-grams lie on the
    host. Raises `ValueError` unless the sizes are whole numbers, ngram and vocab from 2 and the
    others from 1.

    >>> drafter = LookaheadDrafter(vocab=9, window=2, ngram=3, candidates=1)
    >>> drafter.parents, drafter.extra_parents
    ((-1, 0), (-1, 2, 2, 3))
    """

    def __init__(self, vocab: int, window: int = 5, ngram: int = 4, candidates: int = 2) -> None:
        require_whole(vocab=(vocab, 2), window=(window, 1), ngram=(ngram, 2), candidates=(candidates, 1))
        self.vocab, self.window, self.levels, self.candidates = vocab, window, ngram - 1, candidates
        self.scheme = top_children  # without randomness
        self.parents = tuple(-1 if at % self.levels == 0 else at - 1 for at in range(candidates * self.levels))
        first = len(self.parents)
        # The oldest guesses follow each other.
        rounds = [[first + at - 1 if at else -1 for at in range(window)]]
        rounds += [[first + level * window + at for at in range(window)] for level in range(self.levels - 1)]
        self.extra_parents = tuple(parent for level in rounds for parent in level)

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """First guesses are the last tokens of the prompt, over and over."""
        count, device = self.levels * self.window, context.lengths.device
        back = torch.arange(1, count + 1, device=device) % context.lengths[:, None]
        guesses = context.tokens.gather(1, context.lengths[:, None] - 1 - back).unflatten(1, (self.levels, self.window))
        if rows is None:
            self.guesses = guesses
            self.known: list[dict[int, list[tuple[int, ...]]]] = [{} for _ in guesses]
        else:
            self.guesses[rows] = guesses[rows]
            for row in rows.tolist():
                self.known[row] = {}

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        chosen = []
        for newest, known in zip(context.newest.tolist(), self.known, strict=True):
            latest: dict[int, tuple[int, ...]] = {}
            for ngram in reversed(known.get(newest, [])):
                latest.setdefault(ngram[0], ngram)
            chosen.append([token for ngram in [*latest.values()][: self.candidates] for token in ngram])
        draft_tokens = torch.tensor([[*row, *[-1] * (len(self.parents) - len(row))] for row in chosen])
        draft_tokens = draft_tokens.to(context.tokens.device)
        proposed = (draft_tokens >= 0)[..., None]
        return Proposal(draft_tokens, one_hot(draft_tokens.clamp_min(0), self.vocab) * proposed.float())

    def extra_tokens(self, context: Context) -> Tensor:
        """The guesses, round by round, the oldest first."""
        guesses: Tensor = self.guesses.flatten(1)
        return guesses

    def read(self, logits: Tensor) -> None:
        """Keeps an n-gram for each position of the window, and goes on to the next round of
        guesses."""
        new = logits[:, -self.window :].argmax(dim=-1)
        found = torch.cat([self.guesses, new[:, None]], dim=1)
        for known, ngrams in zip(self.known, found.transpose(1, 2).tolist(), strict=True):
            for first, *rest in ngrams:
                others = [ngram for ngram in known.get(first, []) if ngram != tuple(rest)]
                known[first] = [*others, tuple(rest)][-KEPT:]
        self.guesses = found[:, 1:]

    def update(self, context: Context, outcome: Outcome) -> None:
        """A round of guesses moves the window by one position, each accepted token by one more."""
        places = torch.arange(self.window, device=self.guesses.device) + outcome.accepted[:, None]
        self.guesses = self.guesses.take_along_dim((places % self.window)[:, None], dim=2)
