"""The drafter interface. A drafter proposes draft tokens, together with the exact distribution each was sampled from.

One interface serves every kind:

    chain                   leave `parents` as None; each draft token follows the one before it
    tree, several drafts    set `parents`; (-1, -1) is two independent drafts of the next token
    feature-based heads     set `hidden_layers`; `Context.hidden_states` then holds the target's hidden states
    adaptive length         propose -1 (with q = 0) from some token on; `update` says what was accepted
    refilled rows           `start(context, rows)` resets the rows that begin a new prompt

A minimal drafter is in `specnb.drafting.base`.

`Proposal.q` is the distribution after all processing (temperature, top-k, top-p), in the dtype that was used to
sample. The q of a deterministic drafter is one-hot. A drafter that reports another distribution than the one it
sampled from makes the output distribution wrong, and no rule can notice.

Drafters that are a next-token distribution: each draft token is sampled given the sequence and those before it.

Such a drafter writes `distribution`, and `ChainDrafter.propose` samples from it. Mixtures and stopping rules combine
these distributions, so what is reported is by construction what was sampled from.

A template: copy this file to write a drafter of your own.

It proposes each token from a fixed table of next-token probabilities, given the token before. Replace the table by
whatever predicts tokens. Everything else is the contract: sample with the uniforms given, and return the very
distribution that was sampled from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from specnb.arguments import require_whole
from specnb.distributions import sample
from specnb.rules import Outcome, TreeOutcome


class Context(NamedTuple):
    """What a drafter may look at: the sequence of each row and, if it asked for them, the target's hidden states.

    tokens         (rows, slots)         prompt and completion so far; entries from `lengths` on are meaningless
    lengths        (rows,)               tokens of each row so far, the prompt included
    hidden_states  (rows, slots, width)  the target's hidden states at each token but the newest, whose forward pass
                                         has not been made yet; None unless the drafter names `hidden_layers`
    """

    tokens: Tensor
    lengths: Tensor
    hidden_states: Tensor | None = None

    @property
    def newest(self) -> Tensor:
        """The newest token of each row `(rows,)`.

        >>> import torch
        >>> Context(torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([2, 3])).newest
        tensor([6, 9])
        """
        return self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]

    @property
    def last_hidden_state(self) -> Tensor:
        """`(rows, width)`: the target's hidden state from which the newest token was sampled; 0 for a row of one token.

        Raises `ValueError` unless the drafter asked for hidden states.

        >>> import torch
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
    q             (rows, gamma, vocab)  float32 or float64: the distribution each was sampled from; 0 where nothing is

    >>> import torch
    >>> certain = Proposal(torch.tensor([[2, -1]]), torch.tensor([[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]]))
    >>> certain.q.sum(dim=-1)  # one token proposed with certainty, and then none
    tensor([[1., 0.]])
    """

    draft_tokens: Tensor
    q: Tensor


class Drafter(Protocol):
    """Inherit from this class, set `vocab`, and write `propose`; every other member has a default.

    vocab          number of tokens in the vocabulary, the target's
    parents        None for a chain. For a tree of gamma nodes, the parent of each node: an earlier node, or -1 for the
                   newest token of the row
    hidden_layers  which of the target's hidden states are needed, numbered as in `output_hidden_states` of
                   transformers: -1 is the input of the output head. Several are concatenated
    draft_model    the model of transformers that drafts, if any: memory, device and context limit are checked with
                   those of the target
    can_refill     False for a drafter that cannot restart single rows; then `generate` refuses a `batch_size` below
                   the number of prompts
    capturable     True if `propose` and `update` are a fixed sequence of tensor operations on tensors that stay where
                   they are, and the drafter serves one batch only: then a CUDA graph may hold them

    What a row gets must depend on that row alone, so that its tokens do not depend on the batch.

    >>> import torch
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
    hidden_layers: tuple[int, ...] = ()
    draft_model: PreTrainedModel | None = None
    can_refill: bool = True
    capturable: bool = False

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """Forget earlier sequences; new ones begin, in all rows or in `rows` `(n,)` while the others go on.

        Called before the first step of a sequence, when the target's prompt pass is done. May raise.
        """
        return

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """Draft tokens for every row, sampled with `uniforms` `(rows, gamma)`, the only source of randomness.

        Each token is in the vocabulary or -1. Each q is 0 or more everywhere and sums to 1; to 0 where the token
        is -1. In a tree, q of a node is its distribution given its ancestors and all nodes before it. The loop
        raises `TypeError` or `ValueError` for anything else.

        Proposing fewer tokens than gamma is exact as long as that is decided before the tokens in question are
        sampled; see contract 10 of the design.
        """
        raise NotImplementedError(f"{type(self).__name__} has no propose(context, uniforms)")

    def update(self, context: Context, outcome: Outcome | TreeOutcome) -> None:
        """Called at the end of a step: `outcome.accepted` `(rows,)` of the tokens proposed were accepted.

        `context` has the tokens emitted. For a tree, `outcome` is a `TreeOutcome`, whose `path` names the nodes
        accepted. Rows that have ended get outcomes too; they mean nothing.
        """
        return


MEMBERS = (
    "vocab", "parents", "hidden_layers", "draft_model", "can_refill", "capturable", "start", "propose", "update",
)  # fmt: skip


def missing_members(drafter: Any) -> list[str]:
    """The members of `Drafter` that `drafter` lacks.

    >>> missing_members("no drafter")[:2]
    ['vocab', 'parents']
    """
    return [name for name in MEMBERS if not hasattr(drafter, name)]


class ChainDrafter(Drafter):
    """Samples each draft token from `distribution`. A row stops where that is zero; nothing is proposed after it.

    On the CPU drafting ends as soon as all rows have stopped; on another device it goes on, because the host would
    have to wait to know.

    >>> class Cycle(ChainDrafter):
    ...     vocab = 3
    ...     def distribution(self, context, position):
    ...         return torch.nn.functional.one_hot((context.newest + 1) % 3, 3).float()
    >>> Cycle().propose(Context(torch.tensor([[0, 1, 0, 0, 0]]), torch.tensor([2])), torch.rand(1, 3)).draft_tokens
    tensor([[2, 0, 1]])
    """

    def distribution(self, context: Context, position: int) -> Tensor:
        """`(rows, vocab)`: the distribution of the next token; 0 in rows in which nothing is to be proposed.

        `context` has the sequences with the first `position` draft tokens of the step, and the hidden states that
        there were before the step. Decided by these alone, so before the token is sampled (contract 10 of the design).
        """
        raise NotImplementedError(f"{type(self).__name__} has no distribution(context, position)")

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        padding = context.tokens.new_zeros(len(uniforms), uniforms.shape[1])
        # Behind a row's length there may be -1, of draft tokens that were not proposed; slots hold valid tokens here.
        tokens, lengths = torch.cat([context.tokens.clamp_min(0), padding], dim=1), context.lengths
        going = torch.ones_like(lengths, dtype=torch.bool)
        draft_tokens, distributions = [], []
        for position, uniform in enumerate(uniforms.unbind(dim=1)):
            q = self.distribution(Context(tokens, lengths, context.hidden_states), position)
            going = going & ~(q.sum(dim=-1) <= 0)  # NaN goes on, to the check of the step
            if not going.is_cuda and not going.any():
                break
            q = q.where(going[:, None], 0.0)
            distributions.append(q)
            draft_tokens.append(sample(q, uniform).where(going, -1))
            tokens.scatter_(1, lengths[:, None], draft_tokens[-1].clamp_min(0)[:, None])
            lengths = lengths + going
        return padded(draft_tokens, distributions, uniforms, self.vocab)


def padded(draft_tokens: list[Tensor], distributions: list[Tensor], uniforms: Tensor, vocab: int) -> Proposal:
    """The proposal of as many tokens as `uniforms` `(rows, gamma)`: the given ones, then -1 with q = 0.

    >>> padded([], [], torch.rand(1, 2), vocab=3).draft_tokens
    tensor([[-1, -1]])
    """
    rows, gamma = uniforms.shape
    missing = gamma - len(draft_tokens)
    nothing = torch.full((rows,), -1, dtype=torch.int64, device=uniforms.device)
    zero = (distributions[0] if distributions else uniforms.new_zeros(rows, vocab, dtype=torch.float32)) * 0.0
    return Proposal(
        torch.stack([*draft_tokens, *[nothing] * missing], dim=1),
        torch.stack([*distributions, *[zero] * missing], dim=1),
    )


class TemplateDrafter(Drafter):
    """Samples each draft token from the row of `table` `(vocab, vocab)` that belongs to the token before.

    >>> table = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.0, 0.5]])
    >>> context = Context(tokens=torch.tensor([[2, 0, 0]]), lengths=torch.tensor([2]))
    >>> TemplateDrafter(table).propose(context, torch.tensor([[0.3, 0.3, 0.3]])).draft_tokens
    tensor([[1, 2, 0]])
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.vocab = table.shape[-1]

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        token, tokens, distributions = context.newest, [], []
        for uniform in uniforms.unbind(dim=1):
            q = self.table[token]  # (rows, vocab): what this token is sampled from, and what is reported
            token = sample(q, uniform)
            tokens.append(token)
            distributions.append(q)
        return Proposal(torch.stack(tokens, dim=1), torch.stack(distributions, dim=1))


def require_lengths(vocab: int, shortest: int, longest: int) -> None:
    """Raises `ValueError` unless all are whole numbers with 1 <= `shortest` <= `longest`, and `vocab` at least 1.

    >>> require_lengths(vocab=9, shortest=2, longest=2)
    """
    require_whole(vocab=(vocab, 1), shortest=(shortest, 1), longest=(longest, 1))
    if not shortest <= longest:
        raise ValueError(f"shortest is {shortest} and longest {longest}; they must be 1 <= shortest <= longest")


def whole_tokens(name: str, tokens: Any) -> NDArray[np.int64]:
    """`tokens`, a list, array or tensor of token numbers, as an array `(tokens,)`.

    Raises `TypeError` for anything else: a text, a generator (which may have no end), numbers that are not whole.

    >>> whole_tokens("tokens", [3, 1])
    array([3, 1])
    """
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sized | Iterable) or not hasattr(tokens, "__len__"):
        raise TypeError(f"{name} is a {type(tokens).__name__}; it must be a list or array of token numbers")
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError) as error:
        raise TypeError(f"{name} is no list of token numbers: {error}") from error
    if array.ndim != 1 or not (array.dtype.kind in "iu" or array.size == 0):
        raise TypeError(
            f"{name} is an array of shape {array.shape} and type {array.dtype}; it must be one list of token numbers, "
            "which are whole: encode a text with the target's tokenizer"
        )
    return array.astype(np.int64)


def require_drafter(name: str, drafter: Any) -> None:
    """Raises `TypeError` unless `drafter` is a drafter that proposes chains and needs no hidden states."""
    _require_no_tree(name, drafter)
    if drafter.hidden_layers:
        raise TypeError(
            f"{name} is a {type(drafter).__name__}, which reads the target's hidden states; here it would draft where "
            "there are none: give a drafter that reads tokens alone"
        )


def _require_no_tree(name: str, drafter: Any) -> None:
    if isinstance(drafter, type) or missing_members(drafter):
        raise TypeError(wrong(name, drafter, "a drafter"))
    if drafter.parents is not None:
        raise TypeError(
            f"{name} is a {type(drafter).__name__}, which proposes a tree; within another drafter it must propose a "
            "chain"
        )


def require_chain(name: str, drafter: Any) -> None:
    """Raises `TypeError` unless `drafter` is a `ChainDrafter`: one that can be mixed and stopped."""
    if not isinstance(drafter, ChainDrafter):
        raise TypeError(wrong(name, drafter, "a ChainDrafter, which has the distribution of each draft token"))
    _require_no_tree(name, drafter)


def wrong(name: str, given: Any, allowed: str) -> str:
    shown = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
    advice = ": give ModelDrafter(model, sampling)" if isinstance(given, PreTrainedModel) else ""
    return f"{name} is {shown}; it must be {allowed}{advice}"


def require_equal_vocabularies(first: Any, second: Any) -> None:
    """Raises `ValueError` unless both drafters have one vocabulary."""
    if first.vocab != second.vocab:
        raise ValueError(
            f"{type(first).__name__} has {first.vocab} tokens and {type(second).__name__} {second.vocab}; "
            "drafters that are combined need the target's vocabulary"
        )


def shared_hidden_layers(first: Any, second: Any) -> tuple[int, ...]:
    """The hidden layers that both drafters read, or the one that reads any.

    Raises `ValueError` where both read some and these differ: there is one record of hidden states.
    """
    if first.hidden_layers and second.hidden_layers and tuple(first.hidden_layers) != tuple(second.hidden_layers):
        raise ValueError(
            f"{type(first).__name__} reads the hidden layers {first.hidden_layers} and {type(second).__name__} "
            f"{second.hidden_layers}; drafters that are combined must read the same ones"
        )
    return tuple(first.hidden_layers or second.hidden_layers)


def evaluate_again(drafter: Any, count: int) -> None:
    """From now on each model in `drafter` begins a step with at least the `count` newest tokens of a row.

    A drafter that is called by another one misses tokens: those that the other adds without calling it.

    >>> from specnb.drafting.ngram import UniformDrafter
    >>> evaluate_again(UniformDrafter(4), 3)  # there is no model in it
    """
    if hasattr(drafter, "unseen"):
        drafter.unseen = max(drafter.unseen, count)
    for part in getattr(drafter, "__dict__", {}).values():
        if not isinstance(part, type) and not missing_members(part):
            evaluate_again(part, count)
