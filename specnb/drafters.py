"""Drafters: the interface, chains and trees from a draft model.

To write one, inherit from `ChainDrafter` and give a next-token distribution, or from `Drafter`;
`specnb.exactness.judge_drafter` checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specnb.cache import CachedModel, LengthBound, prefill
from specnb.distributions import Sampling, sample, standardise
from specnb.fast import Compile, PrivateModel
from specnb.rules import Outcome
from specnb.support import TokenMap, require_supported
from specnb.trees import SCHEMES, Scheme, TokenTree, distinct_children, top_children

# Newest tokens of a row in the first draft pass of a step: after full acceptance the last draft
# token and the bonus token are not in the cache, otherwise one token.
NEWEST = 2


class Context(NamedTuple):
    """What a drafter may look at.

    Attributes
    ----------
    tokens : (rows, slots)
        Prompt and completion so far; from `lengths` `(rows,)` on anything, even -1.
    hidden_states : (rows, slots, width)
        The target's, at each token but the newest, if the drafter names `hidden_layers`.
    bound
        What the host knows of the rows' lengths, for a drafter with a cache on a GPU.
    """

    tokens: Tensor
    lengths: Tensor
    hidden_states: Tensor | None = None
    bound: LengthBound | None = None

    @property
    def newest(self) -> Tensor:
        return self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]


class Proposal(NamedTuple):
    """What a drafter proposes in a step.

    Attributes
    ----------
    draft_tokens : (rows, gamma)
        int64; -1 if nothing is proposed.
    q : (rows, gamma, vocab)
        The distribution each token was sampled from, after all processing, in float32 or float64;
        one-hot for a token chosen without randomness, 0 at -1. With another q the output is wrong.

    Examples
    --------
    >>> Proposal(torch.tensor([[2]]), torch.tensor([[[0.0, 0.0, 1.0]]])).q.shape
    torch.Size([1, 1, 3])
    """

    draft_tokens: Tensor
    q: Tensor


TOLERANCE = 1e-4  # how far a sum of q may lie from 1; ten times the rounding of a float32 softmax


def no_distribution(proposal: Proposal) -> Tensor:
    """Whether each q `(rows, gamma)` is negative somewhere or has another sum than 1, or 0 for -1; NaN passes."""
    proposed = (proposal.draft_tokens >= 0).to(proposal.q.dtype)
    return ((proposal.q.sum(dim=-1) - proposed).abs() > TOLERANCE) | (proposal.q.amin(dim=-1) < 0)


class Drafter:
    """The interface of a drafter: set `vocab`, the target's, and write `propose`; other members have defaults.

    What a row gets must depend on that row alone.

    Attributes
    ----------
    parents
        Of a tree, the parent of each node; (-1, -1) is two drafts of the next token.
    scheme
        How siblings are sampled, if some rules are not exact for that.
    hidden_layers
        The hidden states for `Context`, numbered as `output_hidden_states` of transformers.
    draft_model
        The model that drafts, if any; its memory and context limit are checked.
    can_refill
        Whether single rows can be restarted.
    gamma
        Draft tokens of a step for `gamma="auto"`.
    capturable
        True if `propose` and `update` are a fixed sequence of operations on tensors that stay in
        place, for one batch only: a CUDA graph may then hold them.
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
        """Begin new sequences in all rows, or in `rows` `(n,)`, after the target's pass over the prompts."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """Propose draft tokens, sampled with `uniforms` `(rows, gamma)`, the only source of randomness.

        A chain may be narrower than gamma, or -1 from some position on, if that is decided before the
        tokens in question are sampled. In a tree, q of a node is its distribution given all nodes
        before it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no propose(context, uniforms)")

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        """The q `(rows, n, vocab)` that `propose` would have used had it sampled `tokens` `(rows, n)`; 0 for none.

        Called in place of `propose`. By default `propose` is called n times, with uniforms at which
        its q has these tokens; after one that a row cannot sample, q is 0.
        """
        if self.parents is not None:
            raise TypeError(f"{type(self).__name__} proposes a tree, and `along` follows one path; give a chain")
        uniforms = torch.full(tokens.shape, 0.5, dtype=torch.float64, device=tokens.device)
        possible = torch.ones_like(context.lengths, dtype=torch.bool)
        distributions = []
        for position, token in enumerate(tokens.unbind(dim=1)):
            proposed, q = padded(*self.propose(context, uniforms), tokens.shape[1])
            strayed = (proposed != tokens)[:, :position].any(dim=1) & possible
            if bool(strayed.any()):
                name = type(self).__name__
                raise ValueError(f"{name} does not sample with `uniforms` alone, in turn: write along(context, tokens)")
            distributions.append(q[:, position].where(possible[:, None], 0.0))
            uniforms[:, position], chance = _middle(q[:, position], token)
            possible = possible & (chance > 0)
        return torch.stack(distributions, dim=1)

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "propose" in vars(cls) and "along" not in vars(cls):
            cls.along = Drafter.along  # type: ignore[method-assign]  # an inherited one is of another `propose`

    def lengths(self, gamma: int) -> tuple[int, ...]:
        """The usual numbers in steps with fewer than `gamma` draft tokens; passes over them are compiled, too."""
        return () if self.draft_model is not None or self.hidden_layers else (0,)

    def update(self, context: Context, outcome: Outcome) -> None:
        """Learn at the end of a step which tokens were accepted."""


def _middle(q: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The middle `(rows,)` of the uniforms at which `sample` returns `token`, and its probability."""
    chance = q.gather(-1, token[:, None])[:, 0].double()
    cumulative = q.cumsum(dim=-1, dtype=torch.float64)
    return (cumulative.gather(-1, token[:, None])[:, 0] - chance / 2) / cumulative[:, -1].clamp_min(1e-9), chance


class SequentialDrafter(Drafter):
    """A drafter that has its draft tokens one after the other: a class writes `in_turn`."""

    def in_turn(self, context: Context, width: int, choose: Callable[[int, Tensor], Tensor]) -> Proposal:
        """At most `width` tokens, of which `choose(position, q)` returns one after the other."""
        raise NotImplementedError(f"{type(self).__name__} has no in_turn(context, width, choose)")

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return self.in_turn(context, uniforms.shape[1], lambda position, q: sample(q, uniforms[:, position]))

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        width = tokens.shape[1]
        return padded(*self.in_turn(context, width, lambda position, q: tokens[:, position]), width).q


class ChainDrafter(SequentialDrafter):
    """A drafter that samples each draft token from `distribution`.

    Examples
    --------
    >>> class TableDrafter(ChainDrafter):
    ...     def __init__(self, table):
    ...         self.table, self.vocab = table, table.shape[-1]
    ...     def distribution(self, context, position):
    ...         return self.table[context.newest]  # (rows, vocab)
    >>> from specnb.exactness import judge_drafter
    >>> judge_drafter(TableDrafter(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.0, 0.5]]))).exact
    True
    """

    def distribution(self, context: Context, position: int) -> Tensor:
        """The distribution `(rows, vocab)` of the next token; 0 in rows that propose nothing more in this step.

        `context` has the first `position` draft tokens of the step, and the hidden states from
        before it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no distribution(context, position)")

    def in_turn(self, context: Context, width: int, choose: Callable[[int, Tensor], Tensor]) -> Proposal:
        # Draft tokens of -1 may lie beyond a row's length; an index must be a token.
        tokens, lengths = pad(context.tokens.clamp_min(0), (0, width)), context.lengths
        going = torch.ones_like(lengths, dtype=torch.bool)
        draft_tokens, distributions = [], []
        for position in range(width):
            q = self.distribution(context._replace(tokens=tokens, lengths=lengths), position)
            going = going & (q.sum(dim=-1) != 0)  # NaN and negative numbers go on, to the check of the step
            if lengths.device.type == "cpu" and not going.any():
                break
            q = q.where(going[:, None], 0.0)
            distributions.append(q)
            draft_tokens.append(choose(position, q).where(going, -1))
            tokens.scatter_(1, lengths[:, None], draft_tokens[-1].clamp_min(0)[:, None])
            lengths = lengths + going
        if not draft_tokens:
            return nothing(lengths, self.vocab)
        return Proposal(torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1))


def nothing(lengths: Tensor, vocab: int) -> Proposal:
    return Proposal(lengths.new_zeros(len(lengths), 0), lengths.new_zeros(len(lengths), 0, vocab, dtype=torch.float32))


def padded(draft_tokens: Tensor, q: Tensor, gamma: int) -> Proposal:
    """The proposal of width `gamma` that begins with `draft_tokens` and `q`, then -1 with q = 0."""
    missing = gamma - draft_tokens.shape[1]
    if not missing:
        return Proposal(draft_tokens, q)
    return Proposal(pad(draft_tokens, (0, missing), value=-1), pad(q, (0, 0, 0, missing)))


def needs_cache(drafter: Any, sizes: tuple[Any, ...]) -> bool:
    """Whether an earlier batch left no cache of these `sizes`; `ValueError` if a graph may hold another."""
    if drafter.allocated == sizes:
        return False
    if drafter.allocated and drafter.capturable:
        raise ValueError(f"a graph may hold this drafter's cache; make another drafter for {sizes[:2]} rows and slots")
    return True


class ModelDrafter(ChainDrafter):
    """A chain of tokens sampled one after the other from a draft model.

    Parameters
    ----------
    vocab
        Number of the target's tokens, if it is not the model's (`specnb.support.TokenMap`).
    compile
        As in `specnb.fast.PrivateModel`.
    capturable
        True if the drafter serves one batch only, so that a CUDA graph may hold its cache.

    Examples
    --------
    >>> from specnb import generate, load_pair
    >>> pair = load_pair()
    >>> len(generate(pair.target, [[1, 2]], ModelDrafter(pair.draft, Sampling(0.5)), max_new_tokens=4).tokens[0])
    4
    """

    runner: CachedModel
    runner_class: type[CachedModel] = CachedModel

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling = Sampling(),
        *,
        vocab: int | None = None,
        compile: Compile = False,
        capturable: bool = False,
    ) -> None:
        self.require_model(model)
        self.model = self.draft_model = model
        self.private = PrivateModel(model, compile)
        if self.private.compiled is not None:
            self.private.compiled.widths = frozenset({1, NEWEST})
        self.sampling = sampling
        self.token_map = TokenMap(model, vocab)
        self.vocab = self.token_map.vocab
        self.capturable = capturable
        self.allocated: tuple[Any, ...] = ()

    def require_model(self, model: PreTrainedModel) -> None:
        require_supported(model)

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        tokens, lengths = context.tokens, context.lengths
        if rows is None:
            self.private.require_unchanged()
            if needs_cache(self, sizes := (*tokens.shape, self.model.dtype, self.model.device)):
                self.runner = self.runner_class(self.private.modules, tokens.shape[1])
                self.runner.token_map = self.token_map
                self.allocated = sizes
            self.runner.clear()
        prefill(self.runner, tokens, lengths, rows)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        newest, slots = self._newest(context.tokens, context.lengths, NEWEST)
        seen = self.runner.cache.least(context.lengths + uniforms.shape[1] - 1, bound=context.bound)
        draft_tokens, distributions = [], []
        for uniform in uniforms.unbind(dim=1):
            distributions.append(self._after(newest, slots, seen))
            draft_tokens.append(self.sample(distributions[-1], uniform))
            newest, slots = draft_tokens[-1][:, None], slots[:, -1:] + 1
        return Proposal(torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1))

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        newest, slots = self._newest(context.tokens, context.lengths, NEWEST)
        width = tokens.shape[1]
        ahead = context.lengths[:, None] + torch.arange(width - 1, device=slots.device)
        fed = torch.cat([newest, tokens[:, :-1]], dim=1)
        logits = self.runner.run(fed, torch.cat([slots, ahead], dim=1), keep=width)
        return standardise(logits, self.sampling, check=False)

    def distribution(self, context: Context, position: int) -> Tensor:
        newest, slots = self._newest(context.tokens, context.lengths, 1 if position else NEWEST)
        return self._after(newest, slots, self.runner.cache.least(slots, bound=context.bound))

    def _newest(self, tokens: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
        back = torch.arange(count, 0, -1, device=lengths.device)
        slots = (lengths[:, None] - back).clamp_min(0)
        return tokens.gather(1, slots), slots

    def _after(self, newest: Tensor, slots: Tensor, seen: int) -> Tensor:
        logits = self.runner.run(newest, slots, keep=1, seen=seen)[:, -1]
        return standardise(logits, self.sampling, check=False)

    def sample(self, probs: Tensor, uniform: Tensor) -> Tensor:
        return sample(probs, uniform)


def require_exact(rule: Any, scheme: Scheme | None, parents: tuple[int, ...]) -> None:
    """Raise `ValueError` if `rule` is not exact for a tree whose siblings are sampled by `scheme`."""
    suitable: tuple[Scheme, ...] = getattr(rule, "schemes", SCHEMES)
    if suitable != SCHEMES and scheme not in suitable and len(set(parents)) < len(parents):
        known = " or ".join(each.__name__ for each in suitable) or "no scheme"
        sampled = "a way that the drafter does not name as its scheme" if scheme is None else scheme.__name__
        raise ValueError(f"this rule is not exact for children sampled by {sampled}, but for those of {known}")


class TreeDrafter(ModelDrafter):
    """A tree of the shape `parents`, sampled from a draft model, one forward pass for each level.

    `scheme` says how siblings are sampled (`specnb.trees`); `top_children` ignores `sampling`, and at
    temperature 0 the others propose a single token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parents: tuple[int, ...],
        sampling: Sampling = Sampling(),
        scheme: Scheme = distinct_children,
        **settings: Any,
    ) -> None:
        super().__init__(model, Sampling() if scheme is top_children else sampling, **settings)
        if self.private.compiled is not None:  # passes as wide as the levels of the tree run eagerly
            self.private.compiled.widths = frozenset()
        self.parents: tuple[int, ...] = tuple(parents)
        self.scheme: Scheme = scheme
        self.tree = TokenTree(self.parents, model.device)
        inner = [(node, depth) for node, depth in enumerate(self.tree.node_depths) if node in self.parents]
        self.levels = [[node for node, depth in inner if depth == level] for level in range(1, self.tree.depth)]
        # Made here, because a step may not copy to the device.
        self.entries = [torch.tensor(level, device=model.device) + 1 for level in self.levels]

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        before = self.allocated
        super().start(context, rows)
        if self.allocated is not before:  # every graph of a batch writes to it
            self.first_node = torch.zeros_like(context.lengths)[:, None]

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        self.first_node.copy_(context.lengths[:, None])
        root = context.lengths - 1
        slots, positions = self.tree.slots(root), self.tree.positions(root)
        visible = self.tree.visible(root, self.runner.capacity)
        seen = self.runner.cache.least(slots, visible, bound=context.bound)
        tokens: dict[int, Tensor] = {}
        q: dict[int, Tensor] = {}

        def sample_children(node: int, probs: Tensor) -> None:
            siblings: list[Tensor] = []
            for child in (child for child, parent in enumerate(self.parents) if parent == node):
                q[child] = self.scheme(probs, siblings)
                if node >= 0:
                    q[child] = q[child].where((tokens[node] >= 0)[:, None], 0.0)
                tokens[child] = sample(q[child], uniforms[:, child]).where(q[child].sum(-1) > 0, -1)
                siblings.append(tokens[child])

        # A leaf that was accepted in the last step is not in the cache, so the first pass has two tokens.
        sample_children(-1, self._after(*self._newest(context.tokens, context.lengths, NEWEST), seen))
        for level, entries in zip(self.levels, self.entries, strict=True):
            logits = self.runner.run(
                torch.stack([tokens[node] for node in level], dim=1).clamp_min(0),
                slots[:, entries],
                keep=len(level),
                positions=positions[:, entries],
                visible=visible[:, entries],
                seen=seen,
            )
            probs = standardise(logits, self.sampling, check=False)
            for i, node in enumerate(level):
                sample_children(node, probs[:, i])
        nodes = range(len(self.parents))
        return Proposal(torch.stack([tokens[i] for i in nodes], dim=1), torch.stack([q[i] for i in nodes], dim=1))

    def update(self, context: Context, outcome: Outcome) -> None:
        assert outcome.path is not None
        depth = torch.arange(outcome.path.shape[1], device=outcome.path.device)
        self.runner.move(self.first_node + outcome.path.clamp_min(0), self.first_node + depth)
