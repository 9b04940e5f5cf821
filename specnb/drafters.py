"""A smaller transformers model as the drafter: of chains, of trees, and mixed with another drafter.

    ModelDrafter    a chain, one forward pass for each token
    MixtureDrafter  a weighted mean of two drafters' distributions: a model and copies of the text
                    so far, two models
    TreeDrafter     a tree, one forward pass for each level; the scheme (`specnb.trees`) says how
                    children are sampled

At temperature 0 all schemes but `top_children` propose one token only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import CachedModel, prefill
from specnb.distributions import Sampling, require_sampling, sample, standardise
from specnb.drafters import (
    ChainDrafter,
    Context,
    Proposal,
    require_equal_vocabularies,
    require_own_batch,
    require_part,
)
from specnb.fast import Compiled
from specnb.number_checks import require_number
from specnb.rules import Outcome
from specnb.support import TokenMap, require_supported
from specnb.trees import SCHEMES, Scheme, TokenTree, distinct_children, top_children
from studies.drafters.seen import LEAST, SeenTokens


class ModelDrafter(ChainDrafter):
    """A chain of tokens sampled one after the other from `model`, as `sampling` says.

    `vocab` is the number of the target's tokens, if the model has another, and `tokens` the
    target's token of each of the model's logits, if its tokens are not numbered as the target's are
    (`specnb.support`). EAGLE-3's d2t is an offset: its `tokens` are
    `torch.arange(len(d2t)) + d2t`. `compile` compiles the forward passes and the sampling of a step
    as one function. `capturable` says that the drafter serves one batch only, so that a CUDA graph
    may hold its operations. Raises `TypeError` for a model that the loop cannot run, and for a
    `sampling` that is no `Sampling`, and what `TokenMap` raises.

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
        compile: bool = False,
        capturable: bool = False,
    ) -> None:
        self.require_model(model)
        require_sampling(sampling)
        self.model = self.draft_model = model
        self.sampling = sampling
        self.token_map = TokenMap(model, vocab, tokens)
        self.vocab = self.token_map.vocab
        self.compile, self.capturable = compile, capturable
        self.allocated: tuple[Any, ...] = ()

    def require_model(self, model: PreTrainedModel) -> None:
        """Raises `TypeError` for a model that this drafter cannot run."""
        require_supported(model)

    def allocate(self, slots: int) -> None:
        """Makes an empty cache of so many slots, and the function that samples a step's tokens."""
        self.runner = self.runner_class(self.model, slots)
        self.seen = SeenTokens(slots, self.model.device)
        self.runner.token_map = self.token_map
        compiled = partial(Compiled, dtype=self.model.dtype, growing=True)
        self.draft_tokens = compiled(self._sample_tokens) if self.compile else self._sample_tokens

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """Fills the cache with the prompts."""
        tokens, lengths = context.tokens, context.lengths
        if rows is None:
            sizes = (*tokens.shape, self.model.dtype, self.model.device)
            # The cache is kept for later batches: compiled functions belong to it.
            if self.allocated != sizes:
                require_own_batch(self, sizes)
                self.allocated = sizes
                self.allocate(tokens.shape[1])
            self.runner.clear()
        prefill(self.runner, tokens, lengths, rows)
        self.seen.hold(tokens, lengths - 1, rows)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        tokens, lengths, count = context.tokens, context.lengths, self._unseen(context)
        draft = self.draft_tokens if count == LEAST else partial(self._sample_tokens, count=count)
        used = self.runner.in_use(tokens, lengths + uniforms.shape[1] - 1)
        proposal = Proposal(*draft(used, lengths, uniforms))
        if context.readable:
            evaluated = proposal.draft_tokens[:, :-1]
            after = lengths[:, None] + torch.arange(evaluated.shape[1], device=lengths.device)
            self.seen.hold(tokens.scatter(1, after, evaluated), lengths + evaluated.shape[1])
        return proposal

    def _unseen(self, context: Context) -> int:
        """How many of the newest tokens a step's first forward pass evaluates: no row then reads an
        entry that does not belong to its tokens. Where the host must not wait, this drafter is
        asked in every step, and two are enough."""
        return self.seen.unseen(context.tokens, context.lengths) if context.readable else LEAST

    def _sample_tokens(
        self, tokens: Tensor, lengths: Tensor, uniforms: Tensor, count: int = LEAST
    ) -> tuple[Tensor, Tensor]:
        newest, slots = self._newest(tokens, lengths, count)
        draft_tokens, distributions = [], []
        for uniform in uniforms.unbind(dim=1):
            distributions.append(self._after(newest, slots, tokens.shape[1]))
            draft_tokens.append(self.sample(distributions[-1], uniform))
            newest, slots = draft_tokens[-1][:, None], slots[:, -1:] + 1
        return torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1)

    def distribution(self, context: Context, position: int) -> Tensor:
        """For mixtures and stopping rules, which sample from it themselves."""
        count = 1 if position else self._unseen(context)
        if context.readable:
            self.seen.hold(context.tokens, context.lengths)
        return self._after(*self._newest(context.tokens, context.lengths, count))

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
    evaluated at every draft token, so the cost is the sum of theirs; `specnb.heads`
    avoids that.

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
        self.every_step = first.every_step or second.every_step
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
    the probabilities only: it ignores `sampling`. `vocab`, `tokens` and `capturable` are those of
    `ModelDrafter`. Raises what that raises, and `ValueError` for parents that do not come before
    their children.

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
        capturable: bool = False,
    ) -> None:
        own = Sampling() if scheme is top_children else sampling
        super().__init__(model, own, vocab=vocab, tokens=tokens, capturable=capturable)
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
