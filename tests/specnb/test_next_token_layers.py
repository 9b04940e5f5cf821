"""The next-token layers in a target's own checkpoint: what the drafter samples from is what
transformers computes of one row over the whole sequence, in float64."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from head_reference import PROMPTS, VOCAB, Steps
from safetensors.torch import load_file, save_file
from tiny import SHAPE
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from specnb.distributions import Sampling
from specnb.loading import load_model
from specnb.released import load_drafter
from specnb.sampler import generate

WIDTH, LAYERS = 16, 2
SIZES: dict[str, Any] = SHAPE | {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3": SIZES | ROUTED | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
                                    "v_head_dim": 6, "head_dim": 4},
    "Glm4Moe": SIZES | ROUTED | {"head_dim": 8},
    "Mellum": SIZES | {"head_dim": 8, "num_experts": 4, "sliding_window": 3},
}  # fmt: skip


class Double:
    """torch, in which float32 is float64: norms and routers would round, the latter otherwise for
    one token than for several."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def checkpoint(folder: Path, family: str, count: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random target with `count` next-token layers, which are saved as those that are released
    are."""
    model_class: Any = getattr(transformers, f"{family}ForCausalLM")
    config_class: Any = getattr(transformers, f"{family}Config")
    settings = dict(FAMILIES[family])
    if family == "Mellum":
        settings["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
    # transformers finds the layers by patterns that hold the numbers of those that are released.
    patterns = [r"^mtp\."] if family == "Mellum" else [rf"model\.layers\.{LAYERS + each}.*" for each in range(count)]
    monkeypatch.setattr(model_class, "_keys_to_ignore_on_load_unexpected", patterns)
    torch.manual_seed(0)
    whole = model_class(config_class(**settings, num_hidden_layers=LAYERS + count)).eval()
    for weight in whole.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.4)
    whole.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for number in range(LAYERS, LAYERS + count):
        own, norm = f"model.layers.{number}.", torch.rand(WIDTH) + 0.5
        names = {"eh_proj": torch.randn(WIDTH, 2 * WIDTH) * 0.4, "enorm": norm, "hnorm": norm.flip(0)}
        weights |= {f"{own}{name}.weight": one for name, one in names.items()}
        weights[f"{own}shared_head.norm.weight"] = norm.roll(1)
        if family == "Mellum":
            released = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
                        "shared_head.norm": "norm"}  # fmt: skip
            for name in [name for name in weights if name.startswith(own)]:
                part = name.removeprefix(own)
                renamed = released.get(part.removesuffix(".weight"))
                weights[f"mtp.{renamed}.weight" if renamed else f"mtp.layers.0.{part}"] = weights.pop(name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": count}
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "count"), [("DeepseekV3", 1), ("Glm4Moe", 1), ("Glm4Moe", 2), ("Mellum", 1)])
def test_every_q_is_that_of_transformers(
    family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch of two rows of unequal length, which other prompts take over; more tokens than
    layers are drafted by the last one."""
    monkeypatch.setattr(sys.modules[getattr(transformers, f"{family}ForCausalLM").__module__], "torch", Double())
    target = load_model(checkpoint(tmp_path, family, count, monkeypatch), dtype=torch.float64)
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


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_without_its_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, "Glm4Moe", 1, monkeypatch)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.eh_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks next-token layers of Glm4MoeForCausalLM, or parts of them"):
        load_drafter(load_model(tmp_path))
