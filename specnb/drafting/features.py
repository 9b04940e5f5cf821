"""Drafters that read the target's hidden states: no draft model, and no pass of one over the prompt.

The target's pass has already computed what the text so far says about the next token; a small network turns its states
and the newest token into the next distributions (`specnb.models.draft_heads`). The embeddings and the output head are
those of the target, which must be the model that verifies.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedModel

from specnb.arguments import shown
from specnb.drafting.base import Context, Drafter, Proposal
from specnb.models.cache import RaggedCache
from specnb.models.compilation import Compiled
from specnb.models.draft_heads import AttentionHead, Head, ParallelHeads, RecurrentHead
from specnb.models.support import require_supported
from specnb.sampling.distributions import Sampling, require_sampling, sample, standardise


class HeadDrafter(Drafter):
    """Drafts with `head`, which was trained on the hidden states of `target`, as `sampling` says.

    `compile` compiles what a step computes as one function. Raises `TypeError` for a head of another kind than the
    drafter's, a target that the loop cannot run and a `sampling` that is no `Sampling`, and `ValueError` for a head of
    another width, dtype or device.
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
        self.draft = Compiled(self.drafted) if compile else self.drafted

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
        raise NotImplementedError

    def distribution(self, features: Tensor) -> Tensor:
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

    def drafted(self, tokens: Tensor, lengths: Tensor, states: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """See `HeadDrafter.drafted`."""
        context = Context(tokens, lengths, states)
        state, newest = context.last_hidden_state, context.newest
        draft_tokens, distributions = [], []
        for uniform in uniforms.unbind(dim=1):
            state = self.head(state, self.embedding(newest))
            distributions.append(self.distribution(self.head.features(state)))
            newest = sample(distributions[-1], uniform)
            draft_tokens.append(newest)
        return torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1)


class AttentionDrafter(HeadDrafter):
    """Draft tokens sampled one after the other from an `AttentionHead`, with the keys and values of the tokens before.

    A step first computes the keys and values of the newest gamma + 1 tokens with the target's states, because those of
    draft tokens were computed with the head's own. `capturable` says that the drafter serves one batch only, so that a
    CUDA graph may hold its operations. Raises what `HeadDrafter` does.

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
            self._allocate(*tokens.shape)
        else:
            tokens, lengths, states = tokens[rows], lengths[rows], states[rows]
        slots = torch.arange(int(lengths.max()), device=tokens.device).expand(len(tokens), -1)
        self._enter(tokens, states, slots, self._bias(slots[:1]), rows)

    def _allocate(self, rows: int, slots: int) -> None:
        """A cache of this size; it is kept for later batches, since compiled functions belong to its tensors."""
        allocation = rows, slots, self.head.scale.dtype, self.head.scale.device
        if self.allocated != allocation:
            self.allocated, self.cache = allocation, RaggedCache(1, slots)
            self.draft = Compiled(self.drafted) if self.compile else self.drafted
        self.cache.clear()

    def _bias(self, slots: Tensor) -> Tensor:
        """What is added to the scores of tokens in `slots` `(rows, n)`, for all slots of the cache."""
        return self.head.bias(slots[..., None] - torch.arange(self.cache.capacity, device=slots.device))  # type: ignore[no-any-return]

    def _enter(self, tokens: Tensor, states: Tensor, slots: Tensor, bias: Tensor, rows: Tensor | None = None) -> Tensor:
        """The head's states `(rows, n, width)` of the tokens in `slots` `(rows, n)`, with the target's states."""
        before = states.take_along_dim((slots - 1).clamp_min(0)[..., None], dim=1)
        state = self.head.combined(before).where(slots[..., None] > 0, 0.0)
        return self._read(state, tokens.gather(1, slots), slots, bias, rows)

    def _read(self, state: Tensor, tokens: Tensor, slots: Tensor, bias: Tensor, rows: Tensor | None = None) -> Tensor:
        """The head's states `(rows, n, width)` of `tokens` `(rows, n)` in `slots`, which are in the cache from now."""
        self.cache.write_at(slots, rows)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, 0)
            return scaled_dot_product_attention(query, keys, values, attn_mask=bias)

        return self.head(state, self.embedding(tokens), attend)  # type: ignore[no-any-return]

    def drafted(self, tokens: Tensor, lengths: Tensor, states: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """See `HeadDrafter.drafted`."""
        gamma = uniforms.shape[1]
        # After full acceptance the newest gamma + 1 tokens have states that the cache was not computed with. In a row
        # of fewer tokens the first is computed several times.
        known = gamma + 1
        slots = (lengths[:, None] + torch.arange(-known, gamma - 1, device=lengths.device)).clamp_min(0)
        bias = self._bias(slots)
        state = self._enter(tokens, states, slots[:, :known], bias[:, :, :known])[:, -1:]
        draft_tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for at, uniform in enumerate(uniforms.unbind(dim=1), start=gamma):
            if draft_tokens:
                one = slice(at, at + 1)
                state = self._read(state, draft_tokens[-1][:, None], slots[:, one], bias[:, :, one])
            distributions.append(self.distribution(self.head.features(state[:, 0])))
            draft_tokens.append(sample(distributions[-1], uniform))
        return torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1)


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
        state = Context(tokens, lengths, states).last_hidden_state
        q = self.distribution(self.head(state)[:, :gamma])
        draft_tokens, missing = sample(q, uniforms[:, :count]), max(0, gamma - count)
        return pad(draft_tokens, (0, missing), value=-1), pad(q, (0, 0, 0, missing))


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
