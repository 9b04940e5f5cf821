"""Llama models that compute in float64 from end to end.

transformers computes the norms and the rotary angles of Llama in float32 even if the model is in float64. A sum in
another order, as on another processor, then changes logits by 1e-6. With these two steps in float64 it changes them by
1e-14, so every processor generates the same sequences and prints the same digits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding


class DoubleRotary(LlamaRotaryEmbedding):
    """Cosines and sines of the angles `position * inv_freq`, computed in float64."""

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Both `(batch, n, head_dim)` for `position_ids` `(batch, n)`, with the device and dtype of `x`.

        A copy of the model may have been converted to another dtype since.
        """
        angles = position_ids[..., None].double() * self.inv_freq.to(x.device, torch.float64)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def in_double(model: PreTrainedModel) -> None:
    """Replaces, in place, the modules of a float64 Llama model that compute in float32.

    Other models, and rotary embeddings of another type than "default", are not changed.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                setattr(parent, name, _norm(child))
            elif isinstance(child, LlamaRotaryEmbedding) and child.rope_type == "default":
                setattr(parent, name, DoubleRotary(child.config).to(child.inv_freq.device))


def _norm(norm: LlamaRMSNorm) -> nn.RMSNorm:
    replacement = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, device="meta")
    replacement.weight = norm.weight
    return replacement.train(norm.training)
