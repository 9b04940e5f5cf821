"""The drafter interface: a drafter proposes draft tokens, together with the exact distribution each
was sampled from.

One interface serves every kind:

    chain                   leave `parents` as None; each draft token follows the one before it
    tree, several drafts    set `parents`; (-1, -1) is two independent drafts of the next token
    feature-based heads     set `hidden_layers`; `Context.hidden_states` then holds the target's
                            hidden states
    adaptive length         propose -1 (with q = 0) from some token on; `update` says what was
                            accepted
    refilled rows           `start(context, rows)` resets the rows that begin a new prompt

`Proposal.q` is the distribution after all processing (temperature, top-k, top-p), in the dtype that
was used to sample. The q of a deterministic drafter is one-hot. A drafter that reports another
distribution than the one it sampled from makes the output distribution wrong, and no rule can
notice.

A template. Most drafters are a next-token distribution: write `distribution`, and `ChainDrafter`
samples from it, so what is reported is what was sampled from. This one looks the next token up in a
table, given the token before:

>>> class TableDrafter(ChainDrafter):
...     def __init__(self, table):
...         self.table, self.vocab = table, table.shape[-1]
...     def distribution(self, context, position):
...         return self.table[context.newest]  # (rows, vocab)
>>> drafter = TableDrafter(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.0, 0.5]]))
>>> drafter.propose(Context(torch.tensor([[2, 0, 9]]), torch.tensor([2])), torch.full((1, 3), 0.3)).draft_tokens
tensor([[1, 2, 0]])

Check a new drafter by enumeration: whatever p is, a step must have the target's joint distribution.

>>> from specnb.judging import judge_drafter
>>> judge_drafter(drafter).exact
True

Then give it to `specnb.generate` in place of the draft model, and add it to
`tests/support/drafter_kinds.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specnb.distributions import sample
from specnb.rules import Outcome
from specnb.trees import Scheme


class Context(NamedTuple):
    """What a drafter may look at: the sequence of each row and, if it asked for them, the target's
    hidden states.

    tokens         (rows, slots)         prompt and completion so far; anything from `lengths` on,
                   even -1: clamp it
    lengths        (rows,)               tokens of each row so far, the prompt included
    hidden_states  (rows, slots, width)  the target's hidden states at each token but the newest,
                   whose forward pass
                                         has not been made yet; None unless the drafter names
                                         `hidden_layers`
    waits                                whether the host waits for the device in this step in any
                                         case
    """

    tokens: Tensor
    lengths: Tensor
    hidden_states: Tensor | None = None
    waits: bool = False

    @property
    def readable(self) -> bool:
        """Whether the host may read numbers of tensors: on a CPU, and in a step that `waits` for
        another device.

        >>> Context(torch.tensor([[5]]), torch.tensor([1])).readable
        True
        """
        return self.waits or self.tokens.device.type == "cpu"

    @property
    def newest(self) -> Tensor:
        """The newest token of each row `(rows,)`.

        >>> Context(torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([2, 3])).newest
        tensor([6, 9])
        """
        return self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]

    @property
    def last_hidden_state(self) -> Tensor:
        """`(rows, width)`: the target's hidden state from which the newest token was sampled; 0 for
        a row of one token.

        Raises `ValueError` unless the drafter asked for hidden states.

        >>> states = torch.arange(6.0).reshape(1, 3, 2)
        >>> Context(torch.zeros(1, 3), torch.tensor([2]), states).last_hidden_state
        tensor([[0., 1.]])
        """
        if self.hidden_states is None:
            raise ValueError("there are no hidden states; set the drafter's hidden_layers, such as (-1,)")
        at = (self.lengths - 2)[:, None, None]
        states = self.hidden_states.take_along_dim(at.clamp_min(0), dim=1)
        return states.where(at >= 0, 0.0)[:, 0]


class Proposal(NamedTuple):
    """What a drafter proposes in one step.

    draft_tokens  (rows, gamma)         int64; -1 where nothing is proposed
    q             (rows, gamma, vocab)  float32 or float64: the distribution each was sampled from;
                  0 where nothing is

    >>> certain = Proposal(torch.tensor([[2, -1]]), torch.tensor([[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]]))
    >>> certain.q.sum(dim=-1)  # one token proposed with certainty, and then none
    tensor([[1., 0.]])
    """

    draft_tokens: Tensor
    q: Tensor


TOLERANCE = 1e-4
"""How far the sum of a drafter's q may lie from 1; the rounding of a float32 softmax stays below a
tenth of it."""


def no_distribution(proposal: Proposal) -> Tensor:
    """`(rows, gamma)`: where q is none, below 0 somewhere or with a sum other than 1 for a token and
    0 for -1. NaN is not noticed.

    >>> no_distribution(Proposal(torch.tensor([[0, 1, -1]]), torch.tensor([[[0.5, 0.5], [0.5, 0.6], [0.0, 0.0]]])))
    tensor([[False,  True, False]])
    """
    proposed = (proposal.draft_tokens >= 0).to(proposal.q.dtype)
    return ((proposal.q.sum(dim=-1) - proposed).abs() > TOLERANCE) | (proposal.q.amin(dim=-1) < 0)


class Drafter:
    """Inherit from this class, set `vocab`, and write `propose`; every other member has a default.

    vocab          number of tokens in the vocabulary, the target's
    parents        None for a chain. For a tree of gamma nodes, the parent of each node: an earlier
                   node, or -1 for the newest token of the row
    scheme         for a tree, how the children of a node are sampled, if some rules are not exact
                   for that
    hidden_layers  which of the target's hidden states are needed, numbered as in
                   `output_hidden_states` of transformers: -1 is the input of the output head.
                   Several are concatenated
    draft_model    the model of transformers that drafts, if any: memory, device and context limit
                   are checked with those of the target
    can_refill     False for a drafter that cannot restart single rows; then `generate` refuses a
                   `batch_size` below the number of prompts
    every_step     True for a drafter that must be asked in every step: `gamma="auto"` is a fixed
                   number for it
    usual          that number, where steps of a chain cannot be chosen; None is
                   `specnb.decoding.auto_gamma.FIXED`
    capturable     True if `propose` and `update` are a fixed sequence of tensor operations on
                   tensors that stay where they are, and the drafter serves one batch only: then a
                   CUDA graph may hold them

    What a row gets must depend on that row alone, so that its tokens do not depend on the batch.

    >>> class AlwaysZero(Drafter):
    ...     vocab = 3
    ...     def propose(self, context, uniforms):
    ...         tokens = torch.zeros(uniforms.shape, dtype=torch.int64)
    ...         return Proposal(tokens, torch.nn.functional.one_hot(tokens, self.vocab).float())
    >>> AlwaysZero().propose(Context(torch.tensor([[1]]), torch.tensor([1])), torch.rand(1, 2)).draft_tokens
    tensor([[0, 0]])
    """

    vocab: int
    parents: tuple[int, ...] | None = None
    scheme: Scheme | None = None
    hidden_layers: tuple[int, ...] = ()
    draft_model: PreTrainedModel | None = None
    can_refill: bool = True
    every_step: bool = False
    usual: int | None = None
    capturable: bool = False

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """Forget earlier sequences; new ones begin, in all rows or in `rows` `(n,)` while the
        others go on.

        Called before the first step of a sequence, when the target's prompt pass is done. May
        raise.
        """
        return

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """Draft tokens for every row, sampled with `uniforms` `(rows, gamma)`, the only source of
        randomness.

        Each token is in the vocabulary or -1. Each q is 0 or more everywhere and sums to 1; to 0
        where the token is -1. In a tree, q of a node is its distribution given its ancestors and
        all nodes before it. The loop raises `TypeError` or `ValueError` for anything else. A chain
        may end where no row proposes anything more.

        Proposing fewer tokens than gamma is exact as long as that is decided before the tokens in
        question are sampled.
        """
        raise NotImplementedError(f"{type(self).__name__} has no propose(context, uniforms)")

    def fewest(self, gamma: int) -> int:
        """How many draft tokens a step has at least that asks for `gamma`; compiled, a step has so
        many or `gamma`.

        0, or `gamma` for a drafter with a model or with the target's hidden states, which propose
        as many as is asked.
        """
        return gamma if self.draft_model is not None or self.hidden_layers else 0

    def matched(self, context: Context) -> NDArray[np.int64] | None:
        """For `gamma="auto"`, of a drafter that copies: how many tokens of each row `(rows,)` agree
        with those before the place that it would copy from now, 0 for nothing to copy. Acceptance
        is then estimated by this number. None, the default: it is estimated by the position of a
        draft token."""
        return None

    def update(self, context: Context, outcome: Outcome) -> None:
        """Called at the end of every step: `outcome.accepted` `(rows,)` of the tokens proposed were
        accepted.

        `context` has the tokens emitted. For a tree, `outcome.path` names the nodes accepted. Rows
        that have ended get outcomes too; they mean nothing. With `gamma="auto"`, unless
        `every_step` is set, there are steps without `propose`, and rows that keep nothing of what
        was proposed. `outcome` does not tell which, so what a drafter keeps must not rest on them:
        `ModelDrafter` compares its cache with the sequence (`SeenTokens`).
        """
        return


class ChainDrafter(Drafter):
    """Samples each draft token from `distribution`. A row stops where that is zero; nothing is
    proposed after it.

    Mixtures and stopping rules combine these distributions. On the CPU drafting ends as soon as all
    rows have stopped; on another device it goes on, because the host would have to wait to know.
    The module has an example.
    """

    def distribution(self, context: Context, position: int) -> Tensor:
        """`(rows, vocab)`: the distribution of the next token; 0 in rows in which nothing is to be
        proposed.

        `context` has the sequences with the first `position` draft tokens of the step, and the
        hidden states that there were before the step. Decided by these alone, so before the token
        is sampled.
        """
        raise NotImplementedError(f"{type(self).__name__} has no distribution(context, position)")

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        # From a row's length on there may be -1, of draft tokens that were not proposed; slots hold
        # valid tokens here.
        tokens, lengths = pad(context.tokens.clamp_min(0), (0, uniforms.shape[1])), context.lengths
        going = torch.ones_like(lengths, dtype=torch.bool)
        draft_tokens, distributions = [], []
        for position, uniform in enumerate(uniforms.unbind(dim=1)):
            q = self.distribution(context._replace(tokens=tokens, lengths=lengths), position)
            going = going & ~(q.sum(dim=-1) <= 0)  # NaN goes on, to the check of the step
            if context.readable and not going.any():
                break
            q = q.where(going[:, None], 0.0)
            distributions.append(q)
            draft_tokens.append(sample(q, uniform).where(going, -1))
            tokens.scatter_(1, lengths[:, None], draft_tokens[-1].clamp_min(0)[:, None])
            lengths = lengths + going
        if not draft_tokens:
            return nothing(lengths, self.vocab)
        return Proposal(torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1))


def nothing(lengths: Tensor, vocab: int) -> Proposal:
    """No position at all, for rows of these `lengths` `(rows,)`.

    >>> nothing(torch.tensor([4, 2]), vocab=3).q.shape
    torch.Size([2, 0, 3])
    """
    return Proposal(lengths.new_zeros(len(lengths), 0), lengths.new_zeros(len(lengths), 0, vocab, dtype=torch.float32))


def padded(draft_tokens: Tensor, q: Tensor, gamma: int) -> Proposal:
    """The proposal of `gamma` tokens: `draft_tokens` `(rows, n)` with their `q` `(rows, n, vocab)`,
    then -1 with q = 0.

    >>> padded(torch.tensor([[2]]), torch.tensor([[[0.0, 0.0, 1.0]]]), gamma=3).draft_tokens
    tensor([[ 2, -1, -1]])
    """
    missing = gamma - draft_tokens.shape[1]
    if not missing:
        return Proposal(draft_tokens, q)
    return Proposal(pad(draft_tokens, (0, missing), value=-1), pad(q, (0, 0, 0, missing)))


def require_part(name: str, drafter: Any) -> None:
    """Raises `TypeError` unless `drafter`, which is to be part of another drafter, is a
    `ChainDrafter` without tree."""
    if not isinstance(drafter, ChainDrafter):
        given = f"the class {drafter.__name__}" if isinstance(drafter, type) else f"a {type(drafter).__name__}"
        advice = ": give ModelDrafter(model, sampling)" if isinstance(drafter, PreTrainedModel) else ""
        raise TypeError(f"{name} is {given}; it must be a ChainDrafter{advice}")
    if drafter.parents is not None:
        raise TypeError(
            f"{name} is a {type(drafter).__name__}, which proposes a tree; within another drafter it must propose a "
            "chain"
        )


def require_equal_vocabularies(first: Drafter, second: Drafter) -> None:
    """Raises `ValueError` unless both drafters have one vocabulary."""
    if first.vocab != second.vocab:
        raise ValueError(
            f"{type(first).__name__} has {first.vocab} tokens and {type(second).__name__} {second.vocab}; drafters "
            "that are combined propose the target's tokens: make both with vocab=..., which ModelDrafter takes, too"
        )


def require_own_batch(drafter: Any, sizes: tuple[Any, ...]) -> None:
    """Raises `ValueError` if a capturable drafter, whose cache a graph may hold, needs one of other
    `sizes`."""
    if drafter.allocated and drafter.capturable:
        raise ValueError(
            f"a graph may hold the cache of this capturable drafter, of {drafter.allocated[:2]} rows and slots; make "
            f"another drafter for {sizes[:2]}"
        )
