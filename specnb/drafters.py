"""Drafters: the interface, a draft model that proposes chains or trees, and mixtures.

A drafter proposes draft tokens, together with the exact distribution each was sampled from. One
interface serves every kind:

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

>>> from specnb.exactness import judge_drafter
>>> judge_drafter(drafter).exact
True

Then give it to a `Sampler` in place of the draft model, and add it to
`tests/support/drafter_kinds.py`.

    ModelDrafter    a chain from a draft model, one forward pass for each token
    MixtureDrafter  a weighted mean of two drafters' distributions
    TreeDrafter     a tree from a draft model, one forward pass for each level; the scheme
                    (`specnb.trees`) says how children are sampled

`specnb.ngram` has drafters that count tokens, `specnb.heads` those that read the target's hidden
states. At temperature 0 all schemes but `top_children` propose one token only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specnb.cache import CachedModel, prefill
from specnb.distributions import Sampling, require_sampling, sample, standardise
from specnb.fast import Compile, PrivateModel
from specnb.number_checks import require_number
from specnb.rules import Outcome
from specnb.support import TokenMap, require_supported
from specnb.trees import SCHEMES, Scheme, TokenTree, distinct_children, top_children

NEWEST = 2
"""Newest tokens of a row that the first forward pass of a step evaluates. After full acceptance the
last draft token and the bonus token are not in the cache; otherwise only one is missing. Two serve
both cases with one shape."""


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
    """

    tokens: Tensor
    lengths: Tensor
    hidden_states: Tensor | None = None

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
    gamma          draft tokens of a step of a chain where `gamma="auto"` leaves the number to the
                   drafter
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
    gamma: int = 4
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

    def update(self, context: Context, outcome: Outcome) -> None:
        """Called at the end of every step: `outcome.accepted` `(rows,)` of the tokens proposed were
        accepted.

        `context` has the tokens emitted. For a tree, `outcome.path` names the nodes accepted. Rows
        that have ended get outcomes too; they mean nothing.
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
            if lengths.device.type == "cpu" and not going.any():
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


class ModelDrafter(ChainDrafter):
    """A chain of tokens sampled one after the other from `model`, as `sampling` says.

    `vocab` is the number of the target's tokens, if the model has another, and `tokens` the
    target's token of each of the model's logits, if its tokens are not numbered as the target's are
    (`specnb.support.TokenMap`). EAGLE-3's d2t is an offset: its `tokens` are
    `torch.arange(len(d2t)) + d2t`. The drafter runs a private copy of the model's modules, made
    faster as `compile` says (`specnb.fast.PrivateModel`). `capturable` says that the drafter serves
    one batch only, so that a CUDA graph may hold its operations. Raises `TypeError` for a model
    that the loop cannot run, and for a `sampling` that is no `Sampling`, and what `TokenMap`
    raises; `start` raises `RuntimeError` if the model's weights were changed since.

    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> drafter = ModelDrafter(model, Sampling(temperature=0))
    >>> context = Context(tokens=torch.tensor([[1, 2, 0, 0, 0, 0]]), lengths=torch.tensor([2]))
    >>> drafter.start(context)
    >>> drafter.propose(context, torch.rand(1, 3, dtype=torch.float64)).q.shape
    torch.Size([1, 3, 4])
    """

    runner: CachedModel
    runner_class: type[CachedModel] = CachedModel

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling = Sampling(),
        *,
        vocab: int | None = None,
        tokens: Sequence[int] | Tensor | None = None,
        compile: Compile = False,
        capturable: bool = False,
    ) -> None:
        self.require_model(model)
        require_sampling(sampling)
        self.model = self.draft_model = model
        self.private = PrivateModel(model, compile)
        if self.private.compiled is not None:
            self.private.compiled.widths = frozenset({1, NEWEST})
        self.sampling = sampling
        self.token_map = TokenMap(model, vocab, tokens)
        self.vocab = self.token_map.vocab
        self.capturable = capturable
        self.allocated: tuple[Any, ...] = ()

    def require_model(self, model: PreTrainedModel) -> None:
        """Raises `TypeError` for a model that this drafter cannot run."""
        require_supported(model)

    def allocate(self, slots: int) -> None:
        """Make an empty cache of so many slots."""
        self.runner = self.runner_class(self.private.modules, slots)
        self.runner.token_map = self.token_map

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """Fill the cache with the prompts."""
        tokens, lengths = context.tokens, context.lengths
        if rows is None:
            self.private.require_unchanged()
            sizes = (*tokens.shape, self.model.dtype, self.model.device)
            # The cache is kept for later batches: a graph may hold it.
            if self.allocated != sizes:
                require_own_batch(self, sizes)
                self.allocated = sizes
                self.allocate(tokens.shape[1])
            self.runner.clear()
        prefill(self.runner, tokens, lengths, rows)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        newest, slots = self._newest(context.tokens, context.lengths, NEWEST)
        seen = self.runner.cache.least(context.lengths + uniforms.shape[1] - 1)
        draft_tokens, distributions = [], []
        for uniform in uniforms.unbind(dim=1):
            distributions.append(self._after(newest, slots, seen))
            draft_tokens.append(self.sample(distributions[-1], uniform))
            newest, slots = draft_tokens[-1][:, None], slots[:, -1:] + 1
        return Proposal(torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1))

    def distribution(self, context: Context, position: int) -> Tensor:
        """For mixtures and stopping rules, which sample from it themselves."""
        return self._after(*self._newest(context.tokens, context.lengths, 1 if position else NEWEST))

    def _newest(self, tokens: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` newest tokens of each row and their slots, both `(rows, count)`; slot 0 again
        in short rows."""
        back = torch.arange(count, 0, -1, device=lengths.device)
        slots = (lengths[:, None] - back).clamp_min(0)
        return tokens.gather(1, slots), slots

    def _after(self, newest: Tensor, slots: Tensor, seen: int | None = None) -> Tensor:
        logits = self.runner.run(newest, slots, keep=1, seen=seen)[:, -1]
        return standardise(logits, self.sampling, check=False)

    def sample(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """One token `(rows,)` from each of `probs` `(rows, vocab)`."""
        return sample(probs, uniform)


class MixtureDrafter(ChainDrafter):
    """Samples from `weight` x first + (1 - `weight`) x second where both propose, and from the one
    that does elsewhere.

    With `weight` 1 the second drafter is used only where the first proposes nothing. Both are
    evaluated at every draft token, so the cost is the sum of theirs.

    Raises `ValueError` for a weight outside [0, 1], for different vocabularies and for drafters
    that read different hidden layers, `TypeError` for drafters that are no `ChainDrafter`.

    >>> from specnb.ngram import PromptLookupDrafter, UniformDrafter
    >>> drafter = MixtureDrafter(PromptLookupDrafter(vocab=2, shortest=1), UniformDrafter(2), weight=0.5)
    >>> drafter.distribution(Context(torch.tensor([[0, 1, 0], [0, 0, 0]]), torch.tensor([3, 1])), 0)
    tensor([[0.2500, 0.7500],
            [0.5000, 0.5000]])
    """

    def __init__(self, first: ChainDrafter, second: ChainDrafter, weight: float = 1.0) -> None:
        require_part("first", first)
        require_part("second", second)
        require_number(most=1.0, weight=weight)
        require_equal_vocabularies(first, second)
        one, other = first.hidden_layers, second.hidden_layers
        if one and other and tuple(one) != tuple(other):  # there is one record of hidden states
            raise ValueError(
                f"{type(first).__name__} reads the hidden layers {one} and {type(second).__name__} {other}; "
                "drafters that are combined must read the same ones"
            )
        self.first, self.second, self.weight = first, second, weight
        self.vocab = first.vocab
        self.draft_model = second.draft_model or first.draft_model
        self.hidden_layers = tuple(one or other)
        self.can_refill = first.can_refill and second.can_refill
        self.capturable = first.capturable and second.capturable

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.first.start(context, rows)
        self.second.start(context, rows)

    def distribution(self, context: Context, position: int) -> Tensor:
        one, other = (drafter.distribution(context, position) for drafter in (self.first, self.second))
        # NaN is no empty row.
        has_one, has_other = (~(q.sum(dim=-1, keepdim=True) <= 0) for q in (one, other))
        both = self.weight * one + (1 - self.weight) * other
        return both.where(has_one & has_other, one.where(has_one, other))

    def update(self, context: Context, outcome: Outcome) -> None:
        self.first.update(context, outcome)
        self.second.update(context, outcome)


def require_exact(rule: Any, scheme: Scheme, parents: tuple[int, ...]) -> None:
    """Raises `ValueError` for a `PlannedRule` of some schemes and another one.

    A tree in which no node has two children is a chain for every scheme.

    >>> from specnb.rules import recursive_rejection
    >>> from specnb.trees import independent_children
    >>> require_exact(recursive_rejection, independent_children, (-1, -1))
    """
    suitable: tuple[Scheme, ...] = getattr(rule, "schemes", SCHEMES)
    if suitable != SCHEMES and scheme not in suitable and len(set(parents)) < len(parents):
        names = " or ".join(other.__name__ for other in suitable)
        other = f"Give the TreeDrafter scheme={names}, or another rule" if suitable else "Give another rule"
        raise ValueError(
            f"this rule is not exact for children sampled by {scheme.__name__}: the output would not have the target's "
            f"distribution. {other}, such as recursive_rejection"
        )


class TreeDrafter(ModelDrafter):
    """A tree of the shape `parents`, sampled from `model` as `sampling` and `scheme` say.

    The cache keeps the accepted path, as the target's does. `top_children` looks at the order of
    the probabilities only: it ignores `sampling`. The other arguments are those of `ModelDrafter`.
    Raises what that raises, and `ValueError` for parents that do not come before their children.

    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> drafter = TreeDrafter(model, (-1, -1, 0), Sampling())
    >>> context = Context(tokens=torch.tensor([[1, 2, 0, 0, 0, 0]]), lengths=torch.tensor([2]))
    >>> drafter.start(context)
    >>> drafter.propose(context, torch.rand(1, 3, dtype=torch.float64)).q.shape
    torch.Size([1, 3, 4])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parents: tuple[int, ...],
        sampling: Sampling = Sampling(),
        scheme: Scheme = distinct_children,
        *,
        vocab: int | None = None,
        tokens: Sequence[int] | Tensor | None = None,
        compile: Compile = False,
        capturable: bool = False,
    ) -> None:
        own = Sampling() if scheme is top_children else sampling
        super().__init__(model, own, vocab=vocab, tokens=tokens, compile=compile, capturable=capturable)
        if self.private.compiled is not None:  # its passes have the widths of the tree's levels
            self.private.compiled.widths = frozenset()
        self.parents: tuple[int, ...] = tuple(parents)
        self.scheme: Scheme = scheme
        self.tree = TokenTree(self.parents, model.device)
        depths = list(enumerate(self.tree.node_depths))
        self.levels = [[node for node, own in depths if own == depth] for depth in range(1, self.tree.depth)]
        # Without leaves.
        self.levels = [[node for node in level if node in self.parents] for level in self.levels]
        # As a step may not copy.
        self.entries = [torch.tensor(level, device=model.device) + 1 for level in self.levels]

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        self.first_node = context.lengths[:, None].clone()
        root = context.lengths - 1
        slots, positions = self.tree.slots(root), self.tree.positions(root)
        visible = self.tree.visible(root, self.runner.capacity)
        # A leaf that was accepted in the last step is not in the cache: the first forward pass has
        # the last two tokens.
        last_two = torch.stack([context.lengths - 2, context.lengths - 1], dim=1).clamp_min(0)
        logits = self.runner.run(context.tokens.gather(1, last_two), last_two, keep=1)
        # The model's distribution after a node.
        after = {-1: standardise(logits[:, 0], self.sampling, check=False)}
        tokens: dict[int, Tensor] = {}
        q: dict[int, Tensor] = {}
        self._sample_children([-1], after, tokens, q, uniforms)
        for level, entries in zip(self.levels, self.entries, strict=True):
            logits = self.runner.run(
                torch.stack([tokens[node] for node in level], dim=1).clamp_min(0),
                slots[:, entries],
                keep=len(level),
                positions=positions[:, entries],
                visible=visible[:, entries],
            )
            probs = standardise(logits, self.sampling, check=False)
            after.update((node, probs[:, i]) for i, node in enumerate(level))
            self._sample_children(level, after, tokens, q, uniforms)
        nodes = range(len(self.parents))
        return Proposal(torch.stack([tokens[i] for i in nodes], dim=1), torch.stack([q[i] for i in nodes], dim=1))

    def update(self, context: Context, outcome: Outcome) -> None:
        """Copies the cache entries of the accepted path to where its tokens are; see
        `Drafter.update`."""
        assert outcome.path is not None
        depth = torch.arange(outcome.path.shape[1], device=outcome.path.device)
        self.runner.move(self.first_node + outcome.path.clamp_min(0), self.first_node + depth)

    def _sample_children(
        self,
        nodes: list[int],
        after: dict[int, Tensor],
        tokens: dict[int, Tensor],
        q: dict[int, Tensor],
        uniforms: Tensor,
    ) -> None:
        """Samples the children of `nodes`; a node without a token (-1) has no children either."""
        for node in nodes:
            siblings: list[Tensor] = []
            for child in (child for child, parent in enumerate(self.parents) if parent == node):
                own = self.scheme(after[node], siblings)
                if node >= 0:
                    own = own.where((tokens[node] >= 0)[:, None], 0.0)
                q[child] = own
                tokens[child] = sample(own, uniforms[:, child]).where(own.sum(-1) > 0, -1)
                siblings.append(tokens[child])
