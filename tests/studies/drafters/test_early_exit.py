"""Early exit: the first layers with the target's own weights."""

from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES

from studies.drafters.early_exit import early_exit


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_output_head_after_the_first_layers(architecture: str) -> None:
    target: Any = ARCHITECTURES[architecture](5, layers=3)
    tokens = torch.tensor([[1, 3, 0, 2]])
    with torch.no_grad():
        # The last hidden state is the one after the final norm, those before it are not.
        states = target(tokens, output_hidden_states=True).hidden_states
        norm = target.model.norm if architecture == "llama" else target.transformer.ln_f
        expected = target.get_output_embeddings()(norm(states[2]))
        assert torch.allclose(early_exit(target, 2)(tokens).logits, expected, atol=1e-6)
