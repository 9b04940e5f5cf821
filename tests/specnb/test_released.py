"""Drafts in the formats in which they were released: what `load_drafter` loads is what the format
says, over whole sequences, in float64; what it cannot load it names."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_reference import PROMPTS, VOCAB, Steps, logits_along
from safetensors.torch import load_file, save_file
from tiny import roomy
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from specnb.distributions import Sampling
from specnb.heads import AttentionDrafter, Eagle3Head, NextTokenHead
from specnb.loading import in_double, load_model
from specnb.released import load_drafter
from specnb.sampler import generate
from studies.training.released_heads import save_head

WIDTH = 8
LAYERS = 8  # of the target, so that EAGLE-3's default layers are three
KEPT = [0, 1, 4, 5, 9, 11, 12]
"""Tokens of the target that a head with a map drafts."""
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model = roomy(VOCAB, layers=LAYERS)
    in_double(model)
    return model


def llama_settings(**more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "rms_norm_eps": 1e-5,
             "rope_theta": 1000.0, "max_position_embeddings": 128}  # fmt: skip
    return {"model_type": "llama", **sizes, **more}


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Large ones, by which the distributions depend on every token before."""
    random = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=random, dtype=torch.float64) * 0.7 for name, shape in shapes.items()}


def authors(folder: Path, whole: bool = False, pickled: bool = False, **config: Any) -> Path:
    """An EAGLE-3 head as its authors save it; `whole` if it drafts every token."""
    settings = llama_settings(**config)
    read, mixed = 2 * WIDTH, settings["num_attention_heads"] * settings["head_dim"]
    layer = {
        "self_attn.q_proj": (mixed, read), "self_attn.k_proj": (6, read), "self_attn.v_proj": (6, read),
        "self_attn.o_proj": (WIDTH, mixed), "mlp.gate_proj": (16, WIDTH), "mlp.up_proj": (16, WIDTH),
        "mlp.down_proj": (WIDTH, 16), "hidden_norm": (WIDTH,), "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }  # fmt: skip
    rows = VOCAB if whole else len(KEPT)
    shapes = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,), "lm_head.weight": (rows, WIDTH)}
    weights = random_tensors(shapes)
    if not whole:
        weights |= maps()
    settings |= {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": rows}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def maps() -> Weights:
    kept = torch.tensor(KEPT)
    inside = torch.zeros(VOCAB, dtype=torch.bool)
    inside[kept] = True
    return {"d2t": kept - torch.arange(len(KEPT)), "t2d": inside}


def speculators(folder: Path, target: PreTrainedModel, config: Any = None, **options: Any) -> Path:
    """An EAGLE-3 head as `save_head` saves it, with random weights."""
    layers = options.pop("layers", (1, 3, 7))
    head = Eagle3Head(
        config or LlamaConfig(**llama_settings()), layers, options.pop("draft_vocab", len(KEPT)), **options
    )
    return saved(folder, target, head)


def next_token(folder: Path, target: PreTrainedModel, config: Any = None) -> Path:
    return saved(folder, target, NextTokenHead(config or LlamaConfig(**llama_settings())))


def saved(folder: Path, target: PreTrainedModel, head: Any) -> Path:
    if getattr(head, "d2t", None) is not None:
        head.choose(torch.tensor(KEPT))
    random = random_tensors({name: tuple(one.shape) for name, one in head.named_parameters()})
    head.double().load_state_dict(random, strict=False)
    save_head(head, folder, target)
    return folder


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.25, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
QWEN3 = Qwen3Config(
    **(llama_settings(model_type="qwen3") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
)
RELEASED: dict[str, Callable[[Path, PreTrainedModel], Path]] = {
    "of its authors": lambda folder, target: authors(folder),
    "of its authors, pickled": lambda folder, target: authors(folder, pickled=True),
    "of its authors, every token": lambda folder, target: authors(folder, whole=True),
    "of its authors, scaled positions": lambda folder, target: authors(folder, rope_scaling=LLAMA3),
    "of its authors, other positions": lambda folder, target: authors(
        folder, rope_scaling={"type": "linear", "factor": 2.0}
    ),
    "of speculators": speculators,
    "of speculators, every token": lambda folder, target: speculators(folder, target, draft_vocab=None),
    "norm_before_residual": lambda folder, target: speculators(folder, target, norm_before_residual=True),
    "norm_before_fc": lambda folder, target: speculators(folder, target, norm_before_fc=True),
    "fc_norm, norm_output": lambda folder, target: speculators(folder, target, fc_norm=True, norm_output=True),
    "own embeddings": lambda folder, target: speculators(folder, target, own_embedding=True),
    "two layers": lambda folder, target: speculators(
        folder, target, LlamaConfig(**llama_settings(num_hidden_layers=2, attention_bias=True))
    ),
    "of a Qwen3": lambda folder, target: speculators(folder, target, QWEN3),
    "next-token layer": next_token,
    "next-token layer of a Qwen3": lambda folder, target: next_token(folder, target, QWEN3),
}
"""Name -> makes a folder with a head."""


@torch.inference_mode()
def worst(steps: Steps, drafter: AttentionDrafter, target: PreTrainedModel, folder: Path) -> float:
    """The largest difference of a q from the one that the format says."""
    weights = (
        load_file(folder / "model.safetensors")
        if (folder / "model.safetensors").exists()
        else torch.load(folder / "pytorch_model.bin", weights_only=True)
    )
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("transformer_layer_config")
    if inner:  # written by transformers 5 with other names
        inner["rope_theta"] = inner["rope_parameters"]["rope_theta"]
        inner.setdefault("rms_norm_eps", 1e-6)
    embeddings: Any = target.get_input_embeddings()
    ids = torch.tensor(KEPT) if "d2t" in weights else torch.arange(VOCAB)
    furthest, compared = 0.0, 0
    for tokens, (drafted, q) in steps.seen:
        if len(tokens) < 2:
            continue  # no state goes before the first token
        every = target(tokens[None], output_hidden_states=True).hidden_states
        states = torch.cat([every[number][0, :-1] for number in drafter.hidden_layers], dim=-1)
        logits = logits_along(
            weights, config, states, tokens, drafted[:-1], embeddings.weight,
            target.get_output_embeddings().weight,
        )  # fmt: skip
        expected = torch.zeros_like(q)
        expected[:, ids] = logits.softmax(dim=-1)
        furthest, compared = max(furthest, float((q - expected).abs().max())), compared + 1
    assert compared > 30
    return furthest


@pytest.mark.parametrize("name", RELEASED)
def test_every_q_is_the_one_of_the_format(name: str, target: PreTrainedModel, tmp_path: Path) -> None:
    """In a batch of two rows of unequal length, which other prompts take over."""
    folder = RELEASED[name](tmp_path, target)
    drafter = load_drafter(target, folder)
    steps = Steps(drafter)
    generate(target, PROMPTS, drafter, gamma=3, max_new_tokens=18, batch_size=2, seed=4, progress=False)
    assert worst(steps, drafter, target, folder) < 1e-10
    cold = Sampling(temperature=0)
    asked: dict[str, Any] = {"max_new_tokens": 12, "sampling": cold, "progress": False}
    made = generate(target, PROMPTS, load_drafter(target, folder, cold), gamma=3, batch_size=2, **asked)
    assert made.tokens == generate(target, PROMPTS, None, **asked).tokens


def test_a_saved_head_has_no_embeddings_of_its_target(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = speculators(tmp_path / "a", target)
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")
    drafter = load_drafter(target, folder)
    assert drafter.embedding is target.get_input_embeddings()
    save_head(drafter.head, tmp_path / "b", target)
    weights, again = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()


def test_the_layers_that_are_read_are_numbered_as_hidden_states(target: PreTrainedModel, tmp_path: Path) -> None:
    """Those in `eagle_config` are numbered from the first layer's output."""
    folder = authors(tmp_path)
    assert load_drafter(target, folder).hidden_layers == (2, 4, 5)
    with_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 6]})(folder)
    assert load_drafter(target, folder).hidden_layers == (1, 3, 7)


# What is refused. Each entry changes the folder of an EAGLE-3 head.


def with_config(**entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | entries))

    return change


def with_weights(**tensors: Any) -> Callable[[Path], None]:
    """With other tensors, or without those that are None; "." in a name is "__"."""

    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            name = name.replace("__", ".")
            weights[name] = tensor
            if tensor is None:
                del weights[name]
        save_file(weights, folder / "model.safetensors")

    return change


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.trace), "w")


def trapped(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Trap(folder / "ran"), file, protocol=2)


def verified_by(**verifier: Any) -> Callable[[Path], None]:
    return with_config(speculators_config={"verifier": verifier})


OFFSETS = maps()["d2t"]
BROKEN: dict[str, Callable[[Path], object]] = {
    "model.safetensors is not an EAGLE-3 head .*: layers.0.hidden_norm.weight is missing": with_weights(
        midlayer__hidden_norm__weight=None
    ),
    r"model.safetensors .*: more has shape \(1,\) for none: it is unknown": with_weights(more=torch.ones(1)),
    r"model.safetensors .*: fc.weight has shape \(8, 16\) for \(8, 24\)": with_weights(fc__weight=torch.ones(8, 16)),
    r"lm_head.weight has shape \(7, 8\) for \(6, 8\)": with_config(draft_vocab_size=6),
    "d2t in .*model.safetensors has torch.float32 numbers": with_weights(d2t=OFFSETS.float()),
    "has a number in fc.weight that is NaN or infinite": with_weights(fc__weight=torch.full((8, 24), torch.nan)),
    "d2t in .*model.safetensors points outside": with_weights(d2t=OFFSETS + 1),
    "d2t in .*model.safetensors does not give each token once": with_weights(d2t=OFFSETS.sub(1).clamp(0)),
    "d2t .*, or not those of t2d": with_weights(t2d=maps()["t2d"].flip(0)),
    "drafts 7, without a map d2t, tokens, and the target has 13": with_weights(d2t=None, t2d=None),
    "drafts 7 of 12 tokens, and the target has 13": with_config(vocab_size=12),
    "made for another model with states of width 16, and the target is a LlamaForCausalLM with 8": with_config(
        hidden_size=16
    ),
    "made for Qwen3 or a/b with states of width 8, and the target is a LlamaForCausalLM with 8": verified_by(
        name_or_path="a/b", architectures=["Qwen3ForCausalLM"]
    ),
    "reads hidden states .2, 4, 8., and this target of 8 layers has 0 to 7": with_config(
        eagle_aux_hidden_state_layer_ids=[2, 4, 8]
    ),
    "has dynamic positions, which depend on the longest row": with_config(
        rope_scaling={"type": "dynamic", "factor": 2.0}
    ),
    "layers of a 'gemma' model": with_config(transformer_layer_config={"model_type": "gemma", "hidden_size": 8}),
    "model.safetensors is cut off": cut,
    "pytorch_model.bin is cut off": cut_pickle,
    "pytorch_model.bin .* holds something else than tensors": trapped,
    "model_ema.safetensors has .*, which another file has, too": lambda folder: shutil.copy(
        folder / "model.safetensors", folder / "model_ema.safetensors"
    ),
    "holds neither safetensors nor a pytorch_model.bin": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_head_that_does_not_fit_is_refused_in_one_line(message: str, target: PreTrainedModel, tmp_path: Path) -> None:
    BROKEN[message](authors(tmp_path))
    with pytest.raises(ValueError, match=message) as error:
        load_drafter(target, tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("layers", "width"), [(2, 8), (LAYERS, 2 * WIDTH)])
def test_a_head_of_another_target_is_refused_in_the_first_call(
    layers: int, width: int, target: PreTrainedModel, tmp_path: Path
) -> None:
    """The other target has too few layers, or states of another width."""
    authors(tmp_path)
    sizes = {"num_hidden_layers": layers, "hidden_size": width}
    other = type(target)(LlamaConfig(**(target.config.to_dict() | sizes))).double().eval()
    with pytest.raises(ValueError, match=r"give .*its own target"):
        generate(other, PROMPTS, load_drafter(target, tmp_path), max_new_tokens=4, progress=False)


def test_a_folder_without_its_configuration_is_named(target: PreTrainedModel, tmp_path: Path) -> None:
    (authors(tmp_path) / "config.json").unlink()
    for load in (load_model, lambda folder: load_drafter(target, folder)):
        with pytest.raises(OSError, match=r"No such file .*config.json"):
            load(tmp_path)


def released(config: dict[str, Any], *names: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")

    return make


def medusa_pickle(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "base_model_name_or_path": "a/b"}))
    torch.save({"0.0.linear.weight": torch.zeros(1)}, folder / "medusa_lm_head.pt")


def eagle1_pickle(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(llama_settings(architectures=["LlamaForCausalLM"])))
    torch.save(
        {"fc.weight": torch.zeros(1), "layers.0.mlp.up_proj.weight": torch.zeros(1)}, folder / "pytorch_model.bin"
    )


OTHERS: dict[str, Callable[[Path], object]] = {
    "an EAGLE-1 or EAGLE-2 head": released(llama_settings(), "fc.weight", "layers.0.self_attn.q_proj.weight"),
    "an EAGLE-1 or EAGLE-2 head, pickled": eagle1_pickle,
    "Medusa heads": released({"model_type": "medusa", "medusa_num_heads": 3}, "0.0.linear.weight", "0.1.weight"),
    "Medusa heads, pickled": medusa_pickle,
    "a DFlash draft": released({"architectures": ["DFlashDraftModel"], "block_size": 8}, "fc.weight"),
    "a DSpark draft": released({"architectures": ["DSparkDraftModel"], "block_size": 8}, "fc.weight"),
    "next-token layers cut out of a checkpoint": released(
        {"architectures": ["DeepseekV3ForCausalLMNextN"]}, "model.layers.0.eh_proj.weight"
    ),
    **{
        f"a {kind} draft of speculators": released({"speculators_model_type": kind}, "fc.weight")
        for kind in ("eagle", "peagle", "dflash", "dflash2", "dspark", "xpress")
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_format_that_is_not_read_is_named(name: str, target: PreTrainedModel, tmp_path: Path) -> None:
    OTHERS[name](tmp_path)
    found, _, pickled = name.partition(", ")
    with pytest.raises(ValueError, match=f"is no model but {found}: .*load_drafter"):
        load_model(tmp_path)
    if not pickled:
        with pytest.raises(ValueError, match=f"holds {found}: .*load_drafter"):
            load_drafter(target, tmp_path)


@pytest.mark.parametrize("name", ["of its authors", "of its authors, pickled", "of speculators", "next-token layer"])
def test_load_model_says_that_a_folder_is_a_draft(name: str, target: PreTrainedModel, tmp_path: Path) -> None:
    folder = RELEASED[name](tmp_path, target)
    with pytest.raises(ValueError, match=re.escape(f"give it to load_drafter(target, {str(folder)!r})")):
        load_model(folder)


def test_a_model_is_no_draft_and_a_target_without_next_token_layers_has_none(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no draft of a known format; a model drafts as draft=load_model"):
        load_drafter(target, tmp_path)
    with pytest.raises(ValueError, match="loads no next-token layers from the checkpoint of this LlamaForCausalLM"):
        load_drafter(load_model(tmp_path))
