"""A drafter that copies what follows the newest tokens in given documents: a file to edit, a
retrieved passage.

The table of the documents lies on the host: on a CUDA device a step waits for a copy of the
sequence to the host and of a distribution back, for each draft token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specnb.drafters import ChainDrafter, Context
from specnb.ngram import copied, require_lengths, whole_tokens

SEPARATOR = -1  # between documents; no sequence contains it


class SuffixAutomaton:
    """All substrings of `documents`, and how often each occurs.

    It has a state for each set of strings that end at the same places in the documents, at most two
    states for each token. A search makes `longest` dictionary look-ups for each row and draft
    token.

    >>> automaton = SuffixAutomaton([[1, 2, 3], [1, 2, 4], [2, 4]])
    >>> automaton.continuations([7, 1, 2])
    (2, {3: 1, 4: 1})
    """

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        last = 0
        for document in documents:
            for token in [*document, SEPARATOR]:
                last = self._append(token, last)
        for state in sorted(range(1, len(self.length)), key=lambda state: -self.length[state]):
            self.count[self.link[state]] += self.count[state]

    def _append(self, token: int, last: int) -> int:
        """Extends the automaton by one token (Blumer et al. 1985); returns the state of the whole
        string."""
        new = self._state({}, 0, self.length[last] + 1, 1)
        state = last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state < 0:
            return new
        target = self.next[state][token]
        if self.length[target] == self.length[state] + 1:
            self.link[new] = target
            return new
        copy = self._state(dict(self.next[target]), self.link[target], self.length[state] + 1, 0)
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = copy
            state = self.link[state]
        self.link[target] = self.link[new] = copy
        return new

    def _state(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.length) - 1

    def continuations(self, recent: Sequence[int]) -> tuple[int, dict[int, int]]:
        """The longest suffix of `recent` that occurs with a token after it: its length, and how
        often each follows."""
        state = matched = 0
        for token in recent:
            while state > 0 and token not in self.next[state]:
                state = self.link[state]
                matched = self.length[state]
            if token in self.next[state]:
                state, matched = self.next[state][token], matched + 1
        while True:
            after = {token: self.count[to] for token, to in self.next[state].items() if token != SEPARATOR}
            if after or state == 0:
                return matched, after
            state = self.link[state]
            matched = self.length[state]


class SuffixDrafter(ChainDrafter):
    """Proposes what follows the longest suffix of the sequence in `documents`, which are the same
    for all rows.

    At least `shortest` of the newest tokens have to occur, and at most `longest` are looked at;
    otherwise nothing is proposed. `proportional` samples among the continuations as often as each
    occurs; otherwise the most frequent one is taken (the lowest token among equals) and q is
    one-hot.

    Raises `ValueError` for lengths that are not 1 <= shortest <= longest, documents without tokens,
    and tokens outside the vocabulary; `TypeError` for documents that are no lists of whole numbers.

    >>> drafter = SuffixDrafter([[4, 5, 6, 7]], vocab=9)
    >>> drafter.distribution(Context(torch.tensor([[1, 4, 5, 0]]), torch.tensor([3])), 0).argmax(-1)
    tensor([6])
    """

    def __init__(
        self,
        documents: Iterable[Sequence[int]],
        vocab: int,
        longest: int = 32,
        shortest: int = 2,
        proportional: bool = False,
    ) -> None:
        require_lengths(vocab, shortest, longest)
        documents = [whole_tokens(f"document {number}", each).tolist() for number, each in enumerate(documents)]
        if not any(documents):
            raise ValueError("the documents have no tokens; give at least one document with a few tokens")
        outside = [token for document in documents for token in document if not 0 <= token < vocab]
        if outside:
            raise ValueError(
                f"the documents have the token {outside[0]}; the vocabulary has the tokens 0 to {vocab - 1}. "
                "Encode them with the target's tokenizer"
            )
        self.automaton = SuffixAutomaton(documents)
        self.vocab, self.longest, self.shortest, self.proportional = vocab, longest, shortest, proportional

    def distribution(self, context: Context, position: int) -> Tensor:
        tokens, lengths = context.tokens, context.lengths
        counts = torch.zeros(len(tokens), self.vocab)
        for row, (sequence, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
            matched, after = self.automaton.continuations(sequence[max(0, length - self.longest) : length])
            if matched >= self.shortest:
                counts[row, list(after)] = torch.tensor(list(after.values()), dtype=torch.float32)
        return copied(counts, self.proportional).to(tokens.device)
