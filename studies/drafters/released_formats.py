"""Heads in released formats, drafted with here and by the projects that the formats come from.

    comparison   with whom: `speculators` 0.9, which also converts the layout of EAGLE-3's authors,
                 or transformers, whose `generate(use_mtp=True)` has next-token layers
    format       what was drafted with; all heads are random, of a tiny random target
    depth        draft tokens after each place of a text, each along the tokens that are there
    places       of draft tokens that were compared, each the most probable one
    equal        of them, those that are the same
    difference   the largest one of two q, if the other project gives its own
    generated_equal    of transformers: completions at temperature 0 that are the same, of `texts`

`speculators` is run in an environment of its own, because it asks for packages that this project
does not have: `python -m venv other`, with torch and transformers of the versions in the record,
`pip install --no-deps speculators==0.9.0`, and what its import then misses (openai, datasets,
loguru, hs_connectors and others). `SPECNB_SPECULATORS` names the Python of that environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from specnb.distributions import Sampling
from specnb.drafters import Context
from specnb.heads import AttentionDrafter, Eagle3Head, NextTokenHead
from specnb.loading import load_model
from specnb.released import load_drafter
from specnb.sampler import generate
from studies.drafters import speculators_pass
from studies.study import Study
from studies.training.released_heads import save_head

VOCAB, WIDTH, LAYERS, KEPT = 48, 32, 8, 20
NO_SPECIAL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = NO_SPECIAL | {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
          "num_experts_per_tok": 2, "moe_intermediate_size": 16}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3": SIZES | ROUTED | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                                    "qk_nope_head_dim": 8, "v_head_dim": 12, "head_dim": 8},
    "Glm4Moe": SIZES | ROUTED,
    "Mellum": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": 5},
}  # fmt: skip
OWN_LAYERS = 2  # of a target with next-token layers
TAKEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
"""Names that Mellum has for the parts of its layer."""


def randomise(model: torch.nn.Module, deviation: float = 0.3) -> None:
    """Weights by which a distribution depends on every token before."""
    for weight in model.parameters():
        weight.data.normal_(1.0 if weight.dim() == 1 else 0.0, deviation)


def llama_target(folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=LAYERS))
    randomise(model)
    model.save_pretrained(folder)
    return load_model(folder)


@contextmanager
def next_token_checkpoint(folder: Path, family: str, count: int) -> Iterator[Path]:
    """A random target with `count` next-token layers, which are saved as released ones are.

    transformers finds them by patterns that hold the numbers of the released layers, and these have
    others.
    """
    model_class: Any = getattr(transformers, f"{family}ForCausalLM")
    config_class: Any = getattr(transformers, f"{family}Config")
    kinds = {"layer_types": ["full_attention", *["sliding_attention"] * count] * 2} if family == "Mellum" else {}
    every = OWN_LAYERS + count
    settings = FAMILIES[family] | {name: kind[:every] for name, kind in kinds.items()}
    torch.manual_seed(0)
    whole = model_class(config_class(**settings, num_hidden_layers=every)).eval()
    randomise(whole)
    whole.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for number in range(OWN_LAYERS, every):
        own, norm = f"model.layers.{number}.", torch.rand(WIDTH) + 0.5
        weights[f"{own}eh_proj.weight"] = torch.randn(WIDTH, 2 * WIDTH) * 0.3
        for place, name in enumerate(("enorm", "hnorm", "shared_head.norm")):
            weights[f"{own}{name}.weight"] = norm.roll(place)
        if family == "Mellum":
            for name in [name for name in weights if name.startswith(own)]:
                part = name.removeprefix(own)
                taken = TAKEN.get(part.removesuffix(".weight"))
                weights[f"mtp.{taken}.weight" if taken else f"mtp.layers.0.{part}"] = weights.pop(name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": OWN_LAYERS, "num_nextn_predict_layers": count}
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:OWN_LAYERS]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    usual = model_class._keys_to_ignore_on_load_unexpected
    model_class._keys_to_ignore_on_load_unexpected = [
        r"^mtp\.", *(rf"model\.layers\.{number}\..*" for number in range(OWN_LAYERS, every))
    ]  # fmt: skip
    try:
        yield folder
    finally:
        model_class._keys_to_ignore_on_load_unexpected = usual


@torch.inference_mode()
def along(drafter: AttentionDrafter, target: PreTrainedModel, tokens: Tensor, depth: int) -> Tensor:
    """q `(n - depth, depth, vocab)` after the first 2, 3, ... of `tokens` `(n + 1,)`, along those that
    follow."""
    lengths = torch.arange(2, len(tokens) - depth + 2)
    hidden = target(tokens[None], output_hidden_states=True).hidden_states
    states = torch.cat([hidden[number] for number in drafter.hidden_layers], dim=-1)
    rows = len(lengths)
    context = Context(tokens.expand(rows, -1), lengths, states.expand(rows, -1, -1))
    drafter.start(context)
    given = torch.nn.functional.pad(tokens, (0, depth)).unfold(0, depth, 1)[lengths]
    return drafter.along(context, given)


def of_transformers(texts: int, new_tokens: int) -> Iterator[dict[str, Any]]:
    prompts = torch.randint(1, VOCAB, (texts, 6), generator=torch.Generator().manual_seed(1))
    for family, count in (("DeepseekV3", 1), ("Glm4Moe", 1), ("Glm4Moe", 2), ("Mellum", 1)):
        with tempfile.TemporaryDirectory() as made, next_token_checkpoint(Path(made), family, count) as folder:
            target = load_model(folder)
            theirs: Any = MtpModel.from_pretrained(target).eval()
            equal, places, difference = 0, 0, 0.0
            texts_equal = 0
            drafter, cold = load_drafter(target), Sampling(temperature=0)
            own = generate(
                target, prompts.tolist(), load_drafter(target, sampling=cold), gamma=count, max_new_tokens=new_tokens,
                sampling=cold, progress=False,
            )  # fmt: skip
            for prompt, completion in zip(prompts, own.tokens, strict=True):
                longer = assisted(target, prompt, new_tokens)
                texts_equal += longer[len(prompt) :].tolist() == completion
                for place, mine in enumerate(along(drafter, target, longer, count)):
                    drafted, other = drafts_of_transformers(theirs, target, longer[: place + 2])
                    # Later ones were drafted after their own tokens, so they are compared while these are the given.
                    same = (drafted[:-1] == longer[place + 2 : place + 1 + count]).cumprod(dim=0)
                    known = 1 + int(same.sum())
                    equal += int((mine.argmax(dim=-1) == drafted)[:known].sum())
                    places += known
                    difference = max(difference, float((mine - other)[:known].abs().max()))
            yield {"comparison": "transformers", "format": f"{family}, {count} layer{'s' * (count > 1)}",
                   "places": places, "depth": count, "equal": equal, "difference": difference,
                   "generated_equal": texts_equal, "texts": texts}  # fmt: skip


def assisted(target: Any, prompt: Tensor, new_tokens: int) -> Tensor:
    """`prompt` and its completion at temperature 0, which transformers drafts with the next-token
    layers."""
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    asked = {"do_sample": False, "use_mtp": True, "max_new_tokens": new_tokens, "pad_token_id": 0}
    made: Tensor = target.generate(prompt[None], attention_mask=mask, **asked)[0]
    return made


@torch.inference_mode()
def drafts_of_transformers(layers: Any, target: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Draft tokens `(layers,)` after `tokens`, and their q."""
    state = target(tokens[None], output_hidden_states=True).hidden_states[-1][:, :-1]
    places, cache = torch.arange(1, len(tokens))[None], MtpCache(config=target.config.get_mtp_config())
    drafted, logits, _ = layers(tokens[None, 1:], state, None, places, cache)
    return drafted[0], logits[0].softmax(dim=-1)


def heads_of_speculators(folder: Path, target: PreTrainedModel) -> Iterator[tuple[str, Path]]:
    """The name and the folder of each head."""
    llama = LlamaConfig(**SIZES, num_hidden_layers=1, rms_norm_eps=1e-5)
    qwen3 = Qwen3Config(**SIZES, num_hidden_layers=1)
    makers: dict[str, Callable[[], Any]] = {
        "EAGLE-3 of its authors, converted": lambda: Eagle3Head(llama, (2, 4, 5), KEPT, own_embedding=True),
        "EAGLE-3": lambda: Eagle3Head(llama, (1, 3, 6), KEPT, own_embedding=True),
        "EAGLE-3, norm_before_residual": lambda: Eagle3Head(llama, (1, 3, 6), KEPT, norm_before_residual=True),
        "EAGLE-3, norm_before_fc": lambda: Eagle3Head(llama, (1, 3, 6), KEPT, norm_before_fc=True),
        "EAGLE-3, fc_norm, norm_output": lambda: Eagle3Head(llama, (1, 3, 6), KEPT, fc_norm=True, norm_output=True),
        "EAGLE-3 of a Qwen3, every token": lambda: Eagle3Head(qwen3, (1, 3, 6)),
        "next-token layer of a Qwen3": lambda: NextTokenHead(qwen3),
    }
    for number, (name, make) in enumerate(makers.items()):
        torch.manual_seed(number)
        head, place = make(), folder / str(number)
        randomise(head)
        if getattr(head, "d2t", None) is not None:
            head.choose(torch.randperm(VOCAB)[:KEPT].sort().values)
        save_head(head, place, target)
        if name.endswith("converted"):
            as_its_authors(place)
        yield name, place


def as_its_authors(folder: Path) -> None:
    """Turn the layout of `speculators` into that of EAGLE-3's authors."""
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    save_file({name.replace("self_attn.self_attn", "self_attn"): one for name, one in renamed.items()},
              folder / "model.safetensors")  # fmt: skip
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = config["transformer_layer_config"] | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": KEPT}
    inner |= {"rope_theta": 10000.0, "num_hidden_layers": 1, "hidden_act": "silu"}
    inner.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(inner), encoding="utf-8")


def of_speculators(places: int) -> Iterator[dict[str, Any]]:
    python = os.environ.get("SPECNB_SPECULATORS")
    if python is None:
        raise ValueError("SPECNB_SPECULATORS must name the Python of an environment that has speculators 0.9")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        target = llama_target(folder / "target")
        tokens = torch.randint(1, VOCAB, (places + 1,), generator=torch.Generator().manual_seed(2))
        with torch.inference_mode():
            hidden = target(tokens[None], output_hidden_states=True).hidden_states
        for name, place in heads_of_speculators(folder, target):
            drafter = load_drafter(target, place)
            states = torch.cat([hidden[number][0, :-1] for number in drafter.hidden_layers], dim=-1)
            save_file({"states": states.contiguous(), "tokens": tokens}, folder / "given")
            command = [python, speculators_pass.__file__, place, folder / "target", folder / "given", folder / "out"]
            subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, env=os.environ | {"PYTHONPATH": ""})
            theirs = load_file(folder / "out")
            depth = speculators_pass.DEPTH if "drafted" in theirs else 1
            q = along(drafter, target, tokens, depth)
            row: dict[str, Any] = {"comparison": "speculators 0.9.0", "format": name, "depth": depth}
            if "drafted" in theirs:
                own: Tensor = drafter.proposed if drafter.proposed is not None else torch.arange(VOCAB)
                others = own[theirs["drafted"][: len(q)]]
            else:  # it runs later ones without the states of earlier tokens
                probs = theirs["logits"].softmax(dim=-1)
                others, q = probs.argmax(dim=-1, keepdim=True)[: len(q)], q[: len(probs)]
                row["difference"] = float((q[:, 0] - probs[: len(q)]).abs().max())
            yield row | {"places": others.numel(), "equal": int((q.argmax(dim=-1) == others).sum())}


def rows(item: str, texts: int, new_tokens: int, places: int) -> Sequence[dict[str, Any]]:
    made = list(of_transformers(texts, new_tokens) if item == "transformers" else of_speculators(places))
    columns = ("comparison", "format", "depth", "places", "equal", "difference", "generated_equal", "texts")
    return [{name: row.get(name) for name in columns} for row in made]


STUDY = Study(
    rows=rows,
    settings={"texts": 8, "new_tokens": 24, "places": 128},
    small={"texts": 2, "new_tokens": 8, "places": 128},
    items=("transformers", "speculators"),
    small_items=("transformers",),
)
