"""Drafters that read the target's hidden states: no draft model, and no pass of one over the prompt.

The target's pass has already computed what the text so far says about the next token; a small network turns its states
and the newest token into the next distributions (`specnb.models.draft_heads`). The embeddings and the output head are
those of the target, which must be the model that verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedModel

from specnb.arguments import shown
from specnb.drafting.base import Context, Proposal
from specnb.drafting.chain import ChainDrafter
from specnb.models.cache import RaggedCache
from specnb.models.compilation import Compiled
from specnb.models.draft_heads import AttentionHead, Head, ParallelHeads, RecurrentHead
from specnb.models.support import require_supported
from specnb.sampling.distributions import Sampling, require_sampling, sample, standardise


class HeadDrafter(ChainDrafter):
    """Drafts with `head`, which was trained on the hidden states of `target`, as `sampling` says.

    From one `start` to the next either `propose` is called, always with the same gamma, or `distribution`, by a mixture
    or a stopping rule. `compile` compiles what `propose` computes as one function. Raises `TypeError` for a head of
    another kind than the drafter's, a target that the loop cannot run and a `sampling` that is no `Sampling`, and
    `ValueError` for a head of another width, dtype or device.
    """

    kind: ClassVar[type]
    hidden_layers = (-1,)
    capturable = True

    def __init__(
        self, target: PreTrainedModel, head: Head, sampling: Sampling = Sampling(), *, compile: bool = False
    ) -> None:
        require_supported(target)
        require_head(target, head, self.kind)
        require_sampling(sampling)
        self.head: Any = head
        self.sampling, self.compile = sampling, compile
        self.vocab = target.config.vocab_size
        self.embedding, self.output = target.get_input_embeddings(), target.get_output_embeddings()
        self.draft = self._draft()
        self.state: Any = None
        self.evaluated = 0  # draft tokens whose distribution was computed in the last step

    def _draft(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return Compiled(self.drafted) if self.compile else self.drafted

    @torch.no_grad()
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        return Proposal(*self.draft(context.tokens, context.lengths, self.recorded(context), uniforms))

    def recorded(self, context: Context) -> Tensor:
        """The target's hidden states, in the head's dtype. Raises `ValueError` where there are none."""
        if context.hidden_states is None:
            raise ValueError("there are no hidden states; give this drafter to generate, which records them for it")
        return context.hidden_states.to(self.head.scale.dtype)

    def drafted(self, tokens: Tensor, lengths: Tensor, states: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draft tokens and q, of the parts of a `Context` and `uniforms` `(rows, gamma)`."""
        state = self.first_state(Context(tokens, lengths, states), uniforms.shape[1])
        draft_tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for position, uniform in enumerate(uniforms.unbind(dim=1)):
            if position:
                state = self.next_state(state, draft_tokens[-1], lengths + position - 1)
            distributions.append(self.after(state, position))
            draft_tokens.append(sample(distributions[-1], uniform))
        return torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1)

    @torch.no_grad()
    def distribution(self, context: Context, position: int) -> Tensor:
        """See `ChainDrafter.distribution`: for mixtures and stopping rules, which sample from it themselves."""
        if position:
            self.state = self.next_state(self.state, context.newest, context.lengths - 1)
        else:
            self.state = self.first_state(context._replace(hidden_states=self.recorded(context)), self.evaluated)
        self.evaluated = position + 1
        return self.after(self.state, position)

    def first_state(self, context: Context, drafted: int) -> Tensor:
        """What the first draft token depends on. The last step computed at most `drafted` draft tokens."""
        raise NotImplementedError

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        """What the next draft token depends on, after the draft tokens `token` `(rows,)` in the slots `slot`."""
        raise NotImplementedError

    def after(self, state: Tensor, position: int) -> Tensor:
        """q `(rows, vocab)` of the draft token at `position` of a step."""
        return self.q(self.head.features(state))

    def q(self, features: Tensor) -> Tensor:
        """q of the input `features` `(..., width)` of the output head."""
        return standardise(self.output(features), self.sampling, check=False)


class FeatureDrafter(HeadDrafter):
    """Draft tokens sampled one after the other from a `RecurrentHead`, which continues the last hidden state.

    There is no cache. Raises what `HeadDrafter` does.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> target = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> drafter = FeatureDrafter(target, RecurrentHead(width=8, hidden=16), Sampling(temperature=0))
    >>> context = Context(torch.tensor([[1, 2]]), torch.tensor([2]), torch.ones(1, 2, 8))
    >>> drafter.propose(context, torch.rand(1, 3, dtype=torch.float64)).q.shape
    torch.Size([1, 3, 4])
    """

    kind = RecurrentHead

    def first_state(self, context: Context, drafted: int) -> Tensor:
        """See `HeadDrafter.first_state`."""
        return self.next_state(context.last_hidden_state, context.newest, context.lengths - 1)

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        """See `HeadDrafter.next_state`."""
        return self.head(state, self.embedding(token))  # type: ignore[no-any-return]


class AttentionDrafter(HeadDrafter):
    """Draft tokens sampled one after the other from an `AttentionHead`, with the keys and values of the tokens before.

    A step first computes the keys and values of the tokens since the last step with the target's states, because those
    of draft tokens were computed with the head's own. `capturable` says that the drafter serves one batch only, so that
    a CUDA graph may hold its operations. Raises what `HeadDrafter` does.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> target = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> drafter = AttentionDrafter(target, AttentionHead(width=8, hidden=16, heads=2, layers=(-1,)))
    >>> context = Context(torch.tensor([[1, 2, 0, 0, 0]]), torch.tensor([2]), torch.ones(1, 5, 8))
    >>> drafter.start(context)
    >>> drafter.propose(context, torch.rand(1, 2, dtype=torch.float64)).q.shape
    torch.Size([1, 2, 4])
    """

    kind = AttentionHead
    cache: RaggedCache

    def __init__(
        self,
        target: PreTrainedModel,
        head: Head,
        sampling: Sampling = Sampling(),
        *,
        compile: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(target, head, sampling, compile=compile)
        self.hidden_layers, self.capturable = self.head.layers, capturable
        self.allocated: tuple[Any, ...] = ()

    @torch.no_grad()
    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """Computes the keys and values of the prompts; see `Drafter.start`."""
        tokens, lengths, states = context.tokens, context.lengths, self.recorded(context)
        if rows is None:
            self.evaluated = 0
            self._allocate(*tokens.shape)
        else:
            tokens, lengths, states = tokens[rows], lengths[rows], states[rows]
        slots = torch.arange(int(lengths.max()), device=tokens.device).expand(len(tokens), -1)
        self._enter(tokens, states, slots, rows)

    def _allocate(self, rows: int, slots: int) -> None:
        """A cache of this size; it is kept for later batches, since compiled functions belong to its tensors."""
        allocation = rows, slots, self.head.scale.dtype, self.head.scale.device
        if self.allocated != allocation:
            self.allocated, self.cache, self.draft = allocation, RaggedCache(1, slots), self._draft()
        self.cache.clear()

    def first_state(self, context: Context, drafted: int) -> Tensor:
        """See `HeadDrafter.first_state`.

        After full acceptance the newest `drafted` + 1 tokens have states that the cache was not computed with. In a row
        of fewer tokens the first is computed several times.
        """
        tokens, lengths, states = context
        back = torch.arange(-1 - drafted, 0, device=lengths.device)
        return self._enter(tokens, states, (lengths[:, None] + back).clamp_min(0))[:, -1]  # type: ignore[arg-type]

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        """See `HeadDrafter.next_state`."""
        return self._read(state[:, None], token[:, None], slot[:, None])[:, 0]

    def _enter(self, tokens: Tensor, states: Tensor, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """The head's states `(rows, n, width)` of the tokens in `slots` `(rows, n)`, with the target's states."""
        before = states.take_along_dim((slots - 1).clamp_min(0)[..., None], dim=1)
        state = self.head.combined(before).where(slots[..., None] > 0, 0.0)
        return self._read(state, tokens.gather(1, slots), slots, rows)

    def _read(self, state: Tensor, tokens: Tensor, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """The head's states `(rows, n, width)` of `tokens` `(rows, n)` in `slots`, which are in the cache from now."""
        self.cache.write_at(slots, rows)
        bias = self.head.bias(slots[..., None] - torch.arange(self.cache.capacity, device=slots.device))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, 0)
            return scaled_dot_product_attention(query, keys, values, attn_mask=bias)

        return self.head(state, self.embedding(tokens), attend)  # type: ignore[no-any-return]


class ParallelHeadsDrafter(HeadDrafter):
    """Draft tokens sampled independently of each other, each from its own one of `ParallelHeads` on one state.

    Proposes as many tokens as there are heads, and none after them. The newest token is not read, so the first head
    predicts the token after it from the state that the newest was sampled from. Raises what `HeadDrafter` does.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> target = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> drafter = ParallelHeadsDrafter(target, ParallelHeads(width=8, hidden=16, count=2), Sampling(temperature=0))
    >>> context = Context(torch.tensor([[1, 2]]), torch.tensor([2]), torch.ones(1, 2, 8))
    >>> (drafter.propose(context, torch.rand(1, 3, dtype=torch.float64)).draft_tokens >= 0).tolist()
    [[True, True, False]]
    """

    kind = ParallelHeads

    def drafted(self, tokens: Tensor, lengths: Tensor, states: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """See `HeadDrafter.drafted`."""
        gamma, count = uniforms.shape[1], self.head.settings["count"]
        q = self.first_state(Context(tokens, lengths, states), 0)[:, :gamma]
        draft_tokens, missing = sample(q, uniforms[:, :count]), max(0, gamma - count)
        return pad(draft_tokens, (0, missing), value=-1), pad(q, (0, 0, 0, missing))

    def first_state(self, context: Context, drafted: int) -> Tensor:
        """The distributions of all heads, `(rows, count, vocab)`."""
        return self.q(self.head(context.last_hidden_state))

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        """The same: no head reads the draft tokens."""
        return state

    def after(self, state: Tensor, position: int) -> Tensor:
        """See `HeadDrafter.after`; 0 behind the last head."""
        return state[:, position] if position < state.shape[1] else torch.zeros_like(state[:, 0])


def require_head(target: PreTrainedModel, head: object, kind: type) -> None:
    """Raises `TypeError` or `ValueError` unless `head` is one of `kind` that fits `target`."""
    if not isinstance(head, kind):
        raise TypeError(f"head is {shown(head)}; give one of the class {kind.__name__} of specnb.models.draft_heads")
    width = head.settings["width"]  # type: ignore[attr-defined]  # every head has it
    if width != target.config.hidden_size:
        raise ValueError(
            f"the head reads states of width {width}, and {type(target).__name__} has {target.config.hidden_size}; "
            "give the head that was trained for this target"
        )
    own, its = next(head.parameters()), target.dtype  # type: ignore[attr-defined]  # every head is a module
    if own.dtype != its or own.device != target.device:
        raise ValueError(
            f"the head is {own.dtype} on {own.device}, and the target {its} on {target.device}; "
            "give head.to(target.device, target.dtype)"
        )
