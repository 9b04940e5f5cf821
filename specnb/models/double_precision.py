"""Llama models that compute in float64 from end to end.

transformers computes the norms and the rotary angles of Llama in float32 even where the model is in float64. One sum in
another order, as on another processor, then moves logits by 10^-6; without these two steps by 10^-14, so that the same
sequences and the same digits come out on every processor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding


class DoubleRotary(LlamaRotaryEmbedding):
    """Cosines and sines of the angles `position * inv_freq`, in float64."""

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both `(batch, n, head_dim)`, for `position_ids` `(batch, n)`; of `x` only the device counts."""
        angles = position_ids[..., None].double() * self.inv_freq.to(x.device, torch.float64)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def in_double(model: PreTrainedModel) -> None:
    """Replaces, in place, what a float64 Llama model computes in float32; other models stay as they are.

    Rotary embeddings of another type than "default" also stay as they are.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                setattr(parent, name, _norm(child))
            elif isinstance(child, LlamaRotaryEmbedding) and child.rope_type == "default":
                setattr(parent, name, DoubleRotary(child.config).to(child.inv_freq.device))


def _norm(norm: LlamaRMSNorm) -> nn.RMSNorm:
    same = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, device="meta")
    same.weight = norm.weight
    return same.train(norm.training)
