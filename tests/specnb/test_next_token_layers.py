"""The next-token layers in a target's own checkpoint: what the drafter samples from is what
transformers computes of one row over the whole sequence, in float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from head_reference import PROMPTS, Steps
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from specnb.distributions import Sampling
from specnb.loading import load_model
from specnb.released import load_drafter
from specnb.sampler import generate
from studies.drafters.released_formats import next_token_checkpoint


class Double:
    """torch, in which float32 is float64: norms and routers would round, the latter otherwise for
    one token than for several."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def checkpoint(tmp_path: Path, family: str, count: int) -> Iterator[Path]:
    with next_token_checkpoint(tmp_path, family, count) as folder:
        yield folder


@torch.inference_mode()
def logits_along(target: PreTrainedModel, layers: Any, tokens: Tensor, drafted: Tensor) -> Tensor:
    """Logits `(k + 1, vocab)` after `tokens` `(n,)` and each of the `k` tokens `drafted`."""
    state: Tensor = target(tokens[None], output_hidden_states=True).hidden_states[-1][0, :-1]
    after, made, logits = tokens[1:], state, []
    last = len(layers.layers) - 1
    for depth in range(len(drafted) + 1):
        new = drafted[depth - 1 : depth]
        if 0 < depth <= last:  # the next layer reads what the one before made of every token
            state, after = made, torch.cat([after[1:], new])
        elif depth:  # the last one goes on with its own state
            state, after = torch.cat([state, made[-1:]]), torch.cat([after, new])
        layer = min(depth, last)
        places = torch.arange(1 + layer, 1 + layer + len(after))
        made = layers.forward_layer(layer, state[None], places[None], None, input_ids=after[None])[0]
        logits.append(layers._project_to_logits(made[-1]))
    return torch.stack(logits)


@pytest.mark.parametrize(("family", "count"), [("DeepseekV3", 1), ("Glm4Moe", 1), ("Glm4Moe", 2), ("Mellum", 1)])
def test_every_q_is_that_of_transformers(
    checkpoint: Path, family: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch of two rows of unequal length, which other prompts take over; more tokens than
    layers are drafted by the last one."""
    monkeypatch.setattr(sys.modules[getattr(transformers, f"{family}ForCausalLM").__module__], "torch", Double())
    target = load_model(checkpoint, dtype=torch.float64)
    target.set_experts_implementation("eager")  # the usual product of experts has no float64
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    config = target.config.to_dict()
    drafter = load_drafter(target)
    steps = Steps(drafter)
    generate(target, PROMPTS, drafter, gamma=3, max_new_tokens=18, batch_size=2, seed=4, progress=False)
    layers: Any = MtpModel.from_pretrained(target)
    furthest, compared = 0.0, 0
    for tokens, (drafted, q) in steps.seen:
        if len(tokens) > 1:  # no state goes before the first token
            expected = logits_along(target, layers.eval(), tokens, drafted[:-1]).softmax(dim=-1)
            furthest, compared = max(furthest, float((q - expected).abs().max())), compared + 1
    assert compared > 30
    assert furthest < 1e-10
    cold: dict[str, Any] = {"max_new_tokens": 10, "sampling": Sampling(temperature=0), "progress": False}
    made = generate(target, PROMPTS, load_drafter(target, sampling=cold["sampling"]), gamma=3, batch_size=2, **cold)
    assert made.tokens == generate(target, PROMPTS, None, **cold).tokens
    assert target.config.to_dict() == config
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


@pytest.mark.parametrize(("family", "count"), [("Glm4Moe", 1)])
def test_a_checkpoint_without_its_layers_is_refused(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.2.eh_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks next-token layers of Glm4MoeForCausalLM, or parts of them"):
        load_drafter(load_model(checkpoint))
