"""The first layers of the target as the draft: self-speculation by early exit (LayerSkip, Draft &
Verify).

No other model is needed and no weight is stored twice. The output head reads hidden states that it
was not trained on unless the target was trained for early exit, so measure the acceptance before
you count on it.
"""

from __future__ import annotations

import copy
from typing import cast

from torch import nn
from transformers import PreTrainedModel


def early_exit(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the first `layers` layers of `target`, its final norm and output head; all weights
    are shared.

    Give it to `specnb.generate` as the draft. It has a key-value cache of its own, so verification
    evaluates the first layers once more.

    >>> import torch
    >>> from studies.speed.synthetic import Shape, empty_model
    >>> target = empty_model(Shape(3, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> draft = early_exit(target, 1)
    >>> draft.config.num_hidden_layers, target.config.num_hidden_layers
    (1, 3)
    >>> draft.get_output_embeddings() is target.get_output_embeddings()
    True
    """
    depth = target.config.num_hidden_layers
    draft, body = shallow(target), shallow(cast(PreTrainedModel, target.base_model))
    names = [name for name, child in body.named_children() if isinstance(child, nn.ModuleList) and len(child) == depth]
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    draft.config = body.config = config
    body._modules[names[0]] = nn.ModuleList(list(getattr(body, names[0]))[:layers])
    draft._modules[target.base_model_prefix] = body
    return draft


def shallow(module: PreTrainedModel) -> PreTrainedModel:
    """The same module with a list of children of its own."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other
