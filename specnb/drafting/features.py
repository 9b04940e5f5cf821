"""Drafters that read the target's last hidden state: no draft model, no cache, and no pass over the prompt.

The target's pass has already computed what the text so far says about the next token; a small network turns that state
and the newest token into the next distributions (`specnb.models.draft_heads`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.arguments import shown
from specnb.drafting.base import Context, Drafter, Proposal
from specnb.models.draft_heads import ParallelHeads, RecurrentHead
from specnb.models.support import require_supported
from specnb.sampling.distributions import Sampling, require_sampling, sample, standardise


class FeatureDrafter(Drafter):
    """Draft tokens sampled one after the other from `head`, which continues the state of `target` token by token.

    The embeddings and the output head are those of `target`, which must be the model that verifies. Raises `TypeError`
    for a head that is no `RecurrentHead`, a target that the loop cannot run and a `sampling` that is no `Sampling`, and
    `ValueError` for a head of another width, dtype or device.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> target = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> drafter = FeatureDrafter(target, RecurrentHead(width=8, hidden=16), Sampling(temperature=0))
    >>> context = Context(torch.tensor([[1, 2]]), torch.tensor([2]), torch.ones(1, 2, 8))
    >>> drafter.propose(context, torch.rand(1, 3, dtype=torch.float64)).q.shape
    torch.Size([1, 3, 4])
    """

    hidden_layers = (-1,)
    capturable = True

    def __init__(self, target: PreTrainedModel, head: RecurrentHead, sampling: Sampling = Sampling()) -> None:
        _require_head(target, head, RecurrentHead)
        require_sampling(sampling)
        self.head, self.sampling = head, sampling
        self.vocab = target.config.vocab_size
        self.embedding, self.output = target.get_input_embeddings(), target.get_output_embeddings()

    @torch.no_grad()
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        state, newest = context.last_hidden_state.to(self.head.scale.dtype), context.newest
        draft_tokens, distributions = [], []
        for uniform in uniforms.unbind(dim=1):
            state = self.head(state, self.embedding(newest))
            q = standardise(self.output(self.head.features(state)), self.sampling, check=False)
            newest = sample(q, uniform)
            draft_tokens.append(newest)
            distributions.append(q)
        return Proposal(torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1))


class ParallelHeadsDrafter(Drafter):
    """Draft tokens sampled independently of each other, each from its own head of `heads` on the state of `target`.

    Proposes as many tokens as there are heads, and none after them. The newest token is not read, so the first head
    predicts the token after it from the state that the newest was sampled from. Raises the same as `FeatureDrafter`,
    for heads that are no `ParallelHeads`.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> target = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> drafter = ParallelHeadsDrafter(target, ParallelHeads(width=8, hidden=16, count=2), Sampling(temperature=0))
    >>> context = Context(torch.tensor([[1, 2]]), torch.tensor([2]), torch.ones(1, 2, 8))
    >>> (drafter.propose(context, torch.rand(1, 3, dtype=torch.float64)).draft_tokens >= 0).tolist()
    [[True, True, False]]
    """

    hidden_layers = (-1,)
    capturable = True

    def __init__(self, target: PreTrainedModel, heads: ParallelHeads, sampling: Sampling = Sampling()) -> None:
        _require_head(target, heads, ParallelHeads)
        require_sampling(sampling)
        self.heads, self.sampling = heads, sampling
        self.vocab = target.config.vocab_size
        self.output = target.get_output_embeddings()

    @torch.no_grad()
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        gamma, count = uniforms.shape[1], self.heads.settings["count"]
        state = context.last_hidden_state.to(self.heads.scale.dtype)
        logits = self.output(self.heads(state)[:, :gamma])
        q = standardise(logits, self.sampling, check=False)
        draft_tokens = sample(q, uniforms[:, :count])
        if gamma <= count:
            return Proposal(draft_tokens, q)
        missing = gamma - count
        nothing = draft_tokens.new_full((len(q), missing), -1)
        return Proposal(torch.cat([draft_tokens, nothing], 1), torch.nn.functional.pad(q, (0, 0, 0, missing)))


def _require_head(target: PreTrainedModel, head: object, kind: type) -> None:
    require_supported(target)
    if not isinstance(head, kind):
        raise TypeError(f"head is {shown(head)}; it must be a {kind.__name__} of specnb.models.draft_heads")
    width = head.settings["width"]  # type: ignore[attr-defined]  # both kinds have it
    if width != target.config.hidden_size:
        raise ValueError(
            f"the head reads states of width {width}, and {type(target).__name__} has {target.config.hidden_size}; "
            "give the head that was trained for this target"
        )
    own, its = next(head.parameters()), target.dtype  # type: ignore[attr-defined]  # both kinds are modules
    if own.dtype != its or own.device != target.device:
        raise ValueError(
            f"the head is {own.dtype} on {own.device}, and the target {its} on {target.device}; "
            "give head.to(target.device, target.dtype)"
        )
