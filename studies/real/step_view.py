"""The steps of one row of a generation as text: each token decoded, with what became of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from specnb.record import StepRecord
from studies.files import read_table


@dataclass(frozen=True)
class StepView:
    """One step of one row, each token decoded to a string.

    `accepted` are the accepted draft tokens, `rejected` the first rejected one, if any, and
    `unused` the draft tokens after it, which were never tested. `sampled` is the recovered or bonus
    token, `None` if the sequence ended before.
    """

    accepted: list[str]
    rejected: str | None
    sampled: str | None
    unused: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many tokens the step emitted."""
        return len(self.accepted) + (self.sampled is not None)

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """Pairs (string, fate): all draft tokens in order, then the recovered or bonus token.

        >>> StepView(["a", "b"], "c", "d", unused=["e"]).pieces
        [('a', 'accepted'), ('b', 'accepted'), ('c', 'rejected'), ('e', 'unused'), ('d', 'recovered')]
        >>> StepView(["a", "b"], None, "d").pieces
        [('a', 'accepted'), ('b', 'accepted'), ('d', 'bonus')]
        """
        rejected = [] if self.rejected is None else [(self.rejected, "rejected")]
        unused = [(token, "unused") for token in self.unused]
        fate = "bonus" if self.rejected is None else "recovered"
        sampled = [] if self.sampled is None else [(self.sampled, fate)]
        return [*((token, "accepted") for token in self.accepted), *rejected, *unused, *sampled]


def step_views(record: StepRecord, row: int, tokenizer: PreTrainedTokenizerBase) -> list[StepView]:
    """The steps of one row of a batch, in order.

    Tokens that the end of the sequence cut off are left out.
    """
    views = []
    for step in range(int(record.active[row].sum())):
        draft_tokens = [str(tokenizer.decode([token])) for token in record.draft_tokens[row, step] if token >= 0]
        accepted, emitted = int(record.accepted[row, step]), int(record.emitted[row, step])
        whole = emitted == accepted + 1
        views.append(
            StepView(
                accepted=draft_tokens[: min(accepted, emitted)],
                rejected=draft_tokens[accepted] if whole and accepted < len(draft_tokens) else None,
                sampled=str(tokenizer.decode([int(record.token[row, step])])) if whole else None,
                unused=draft_tokens[accepted + 1 :] if whole else [],
            )
        )
    return views


def recorded_steps(kind: str, temperature: float) -> list[StepView]:
    """The steps of one answer of the real model, from the table `real_steps`.

    >>> recorded_steps("edit", 0)[0].sampled
    '```'
    """
    table = read_table("results/real_steps", keep_default_na=False)
    answer = table[(table.kind == kind) & (table.temperature == temperature)]
    parts = answer[["accepted", "rejected", "sampled", "unused"]].to_numpy()
    return [StepView(*(json.loads(part or "null") for part in row)) for row in parts]
