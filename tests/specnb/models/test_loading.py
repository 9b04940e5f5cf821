"""Models of transformers: what `load_pair` loads and refuses, and what the loop can run."""

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from implementation_distribution import VOCAB
from safetensors.torch import load_file, save_file
from tiny import LIMIT, gpt2, llama, neox, qwen2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from unsupported_models import SIZES, encoder_decoder, sliding, without_positions

from specnb.decoding.generate import generate
from specnb.models import checkpoints, loading
from specnb.models import loading as trained_pair
from specnb.models.cached_model import CachedModel
from specnb.models.checkpoints import CHECKSUMS, require_checksums, write_checksums
from specnb.models.loading import load_model, load_pair
from specnb.models.support import context_limit, require_same_vocabulary, require_supported

WORDS = ("begin", "one", "two", "three")


def saved(folder: Path, model: PreTrainedModel, words: Sequence[str] = WORDS, begin: str | None = "begin") -> Path:
    model.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=words[1]))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin).save_pretrained(folder)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return saved(tmp_path / "target", llama()), saved(tmp_path / "draft", gpt2(layers=1))


def test_a_pair_of_two_folders_generates(folders: tuple[Path, Path]) -> None:
    pair = load_pair(*folders)
    assert pair.encode("one three two") == [0, 1, 3, 2]
    assert not pair.target.training
    assert not pair.draft.training
    assert pair.target.dtype == torch.float32
    made = generate(pair.target, [pair.encode("one")], pair.draft, max_new_tokens=4, progress=False)
    assert made.tokens == generate(llama(), [[0, 1]], gpt2(layers=1), max_new_tokens=4, progress=False).tokens


def test_a_pair_comes_in_the_dtype_asked_for(folders: tuple[Path, Path]) -> None:
    pair = load_pair(*folders, dtype=torch.float64)
    assert pair.target.dtype == pair.draft.dtype == torch.float64


def test_without_a_beginning_token_a_prompt_is_its_text(tmp_path: Path) -> None:
    folder = saved(tmp_path, llama(), begin=None)
    assert load_pair(folder, folder).encode("two two") == [2, 2]


def test_different_vocabularies_are_refused(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", llama())
    draft = saved(tmp_path / "draft", llama(VOCAB + 1), words=(*WORDS, "four"))
    with pytest.raises(ValueError, match=f"target has {VOCAB} tokens and the draft {VOCAB + 1}"):
        load_pair(target, draft)
    with pytest.raises(ValueError, match="target has 4 tokens and the draft 9"):
        require_same_vocabulary(llama(), 9)


def test_different_tokenizers_are_refused(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", llama())
    draft = saved(tmp_path / "draft", llama(), words=("begin", "two", "one", "three"))
    with pytest.raises(ValueError, match=r"tokenizers of .*target and .*draft differ"):
        load_pair(target, draft)


def test_a_folder_that_is_not_there_is_named_with_what_to_give(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nothing; give a folder with config.json"):
        load_pair(folders[0], tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"there is no folder a/b/c, and the hub has no such names; give"):
        load_model("a/b/c")
    with pytest.raises(NotADirectoryError, match=r"config.json is a file; give the folder"):
        load_model(folders[0] / "config.json")
    (folders[0] / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"target has no config.json"):
        load_model(folders[0])


def test_an_unreachable_hub_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("Name or service not known\nmore")

    monkeypatch.setattr(checkpoints, "snapshot_download", unreachable)
    with pytest.raises(
        FileNotFoundError, match=r"no folder missing/folder, .* from the hub \(Name or .* known\); give"
    ):
        load_model("missing/folder")


def test_a_model_of_the_hub_is_loaded_from_the_folder_that_it_was_put_in(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "snapshot_download", lambda name, **_: str(folders[0]))
    assert load_pair("some/model", folders[1]).target.config.vocab_size == VOCAB


# Weights that are not all of the model, or more.


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """The weights in `folder` after `change` of the dictionary of tensors."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def described(folder: Path, **entries: Any) -> None:
    """The configuration in `folder` with other `entries`."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


def test_missing_unknown_and_resized_tensors_are_named(folders: tuple[Path, Path]) -> None:
    changed(folders[0], lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"1 missing in the file: model.norm.weight\. Get"):
        load_pair(*folders)
    changed(folders[0], lambda weights: weights.update({"model.norm.weight": torch.ones(9), "more": torch.ones(1)}))
    with pytest.raises(
        ValueError, match=r"unknown to the model: more; 1 of another size: model.norm.weight \(\[9\] in"
    ):
        load_pair(*folders)


@pytest.mark.parametrize(("layers", "wrong"), [(1, "9 unknown to the model"), (3, "9 missing in the file")])
def test_more_or_fewer_layers_than_in_the_file_are_refused(folders: tuple[Path, Path], layers: int, wrong: str) -> None:
    described(folders[0], num_hidden_layers=layers)
    with pytest.raises(ValueError, match=rf"{wrong}: model.layers.{min(layers, 2)}"):
        load_pair(*folders)


INFINITE = {"__float__": "Infinity"}  # as transformers writes it


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", float("nan")),
        ("rope_parameters", {"rope_type": "default", "rope_theta": float("nan")}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": INFINITE}),
        ("rms_norm_eps", float("inf")),
        ("sizes", [1.0, float("nan")]),
        ("time_step_limit", [0.0, float("nan")]),
    ],
)
def test_a_configuration_with_a_number_that_is_not_finite_is_refused(
    folders: tuple[Path, Path], key: str, value: Any
) -> None:
    described(folders[0], **{key: value})
    with pytest.raises(OSError, match=r"config.json has .* = (nan|inf), which is no finite number"):
        load_model(folders[0])


@pytest.mark.parametrize("none", [float("inf"), INFINITE])
def test_a_limit_may_be_infinite(folders: tuple[Path, Path], none: Any) -> None:
    described(folders[0], time_step_limit=[0.0, none])
    load_model(folders[0])


@pytest.mark.parametrize("theta", [0.0, -1.0])
def test_rotary_frequencies_are_finite(folders: tuple[Path, Path], theta: float) -> None:
    described(folders[0], rope_parameters={"rope_type": "default", "rope_theta": theta})
    with pytest.raises(ValueError, match=r"inv_freq that is NaN or infinite; the config\.json"):
        load_model(folders[0])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q_proj.weight", "down_proj.weight"])
def test_weights_are_finite(tmp_path: Path, name: str, number: float) -> None:
    """Attention takes scores of NaN for masked ones, so those of a query projection do not reach the logits."""
    model = llama()
    next(weights for each, weights in model.named_parameters() if each.endswith(name)).data.view(-1)[3] = number
    with pytest.raises(ValueError, match=rf"layers.0.*{name} that is NaN or infinite; the weights"):
        load_model(saved(tmp_path / "broken", model))


def test_a_tied_output_layer_may_be_left_out(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    folder = saved(tmp_path, model)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert torch.equal(load_model(folder, packed=False).lm_head.weight, model.model.embed_tokens.weight)


def test_a_truncated_file_is_an_os_error(folders: tuple[Path, Path]) -> None:
    file = folders[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match=r"weights in .*target cannot be read"):
        load_model(folders[0])


# The shipped pair.


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pair in place of the trained one."""
    for role in ("target", "draft"):
        write_checksums(saved(tmp_path / role, llama()))
    monkeypatch.setattr(trained_pair, "TRAINED_PAIR", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_flipped_bit_in_the_trained_pair_is_an_error(shipped: Path, name: str) -> None:
    load_pair(shipped / "target", shipped / "draft")
    content = bytearray((shipped / "draft" / name).read_bytes())
    content[-2] ^= 1
    (shipped / "draft" / name).write_bytes(content)
    with pytest.raises(OSError, match=rf"draft/{name} is not the one that was committed .*; restore it"):
        load_pair(shipped / "target", shipped / "draft")


def test_a_trained_pair_without_its_checksums_or_a_file_is_refused(shipped: Path) -> None:
    (shipped / "draft" / "tokenizer_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer_config.json is missing; restore"):
        load_model(shipped / "draft")
    (shipped / "target" / CHECKSUMS).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{CHECKSUMS} is missing; restore"):
        load_model(shipped / "target")


def test_the_committed_pair_is_the_one_that_its_checksums_name() -> None:
    for role in ("target", "draft", "draft-distilled"):
        as_list = (loading.TRAINED_PAIR / role / CHECKSUMS).read_text()
        assert {line.split()[1] for line in as_list.splitlines()} >= {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        }
        require_checksums(loading.TRAINED_PAIR / role)


# Nothing but safetensors.


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.trace), "w")


@pytest.mark.parametrize("shard", ["pytorch_model.bin", "model.pt", "../other/model.safetensors", "sub/w.safetensors"])
def test_an_index_that_names_other_files_is_refused_before_they_are_read(
    folders: tuple[Path, Path], tmp_path: Path, shard: str
) -> None:
    target, draft = folders
    (target / "model.safetensors").unlink()
    if "/" not in shard:
        with (target / shard).open("wb") as file:
            pickle.dump(Trap(tmp_path / "ran"), file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(llama().state_dict(), shard)}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OSError, match=rf"index.json names '{shard}'; only safetensors"):
        load_pair(target, draft)
    assert not (tmp_path / "ran").exists()


def test_a_configuration_that_names_other_weights_is_refused(folders: tuple[Path, Path]) -> None:
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"transformers_weights": "adapter_model.bin"}))
    with pytest.raises(OSError, match=r"names the weights 'adapter_model.bin'; only safetensors"):
        load_model(folders[0])


def test_shards_of_safetensors_are_loaded(tmp_path: Path) -> None:
    model = llama()
    folder = saved(tmp_path, model)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="1KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert torch.equal(load_model(folder, packed=False).lm_head.weight, model.lm_head.weight)
    missing = sorted(folder.glob("*.safetensors"))[0]
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=rf"names {missing.name}, which is not there"):
        load_model(folder)


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 10**5], ids=["cut off", "a list", "deep"])
def test_a_configuration_that_is_no_object_is_an_os_error(folders: tuple[Path, Path], content: str) -> None:
    (folders[0] / "config.json").write_text(content)
    with pytest.raises(OSError, match=r"config.json (is not JSON|must hold a JSON object)"):
        load_model(folders[0])


def test_weights_that_are_not_safetensors_are_refused(folders: tuple[Path, Path]) -> None:
    """A pickle runs whatever it likes when it is loaded."""
    target, draft = folders
    (draft / "model.safetensors").unlink()
    torch.save(gpt2(layers=1).state_dict(), draft / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_pair(target, draft)


@pytest.mark.parametrize("model_type", ["llama", "unheard-of"])
def test_code_of_a_checkpoint_is_not_executed(folders: tuple[Path, Path], tmp_path: Path, model_type: str) -> None:
    """With a known type the library's own class is used; an unknown one is refused."""
    target, draft = folders
    ran = tmp_path / "ran"
    (target / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    config = json.loads((target / "config.json").read_text())
    config["model_type"] = model_type
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (target / "config.json").write_text(json.dumps(config))
    if model_type == "llama":
        assert type(load_pair(target, draft).target) is LlamaForCausalLM
    else:
        with pytest.raises(ValueError, match="trust_remote_code"):
            load_pair(target, draft)
    assert not ran.exists()


# What the loop can run.


@pytest.mark.parametrize("make", [llama, gpt2, neox, qwen2])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_decoders_of_full_attention_are_supported(make: Callable[..., PreTrainedModel], attention: str) -> None:
    model = make()
    model.set_attn_implementation(attention)
    require_supported(model)


def flash() -> PreTrainedModel:
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    return model


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "T5ForConditionalGeneration is an encoder-decoder": encoder_decoder,
    "BloomForCausalLM takes no position_ids": without_positions,
    "MistralForCausalLM cannot be cropped: its layer 0 is a DynamicSlidingWindowLayer": sliding,
    "LlamaForCausalLM runs flash_attention_2": flash,
    "LlamaForCausalLM is in training mode": lambda: llama().train(),
    "LlamaModel gives no next-token logits": lambda: llama().model,
    "Linear is no model of transformers": lambda: torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_models_that_cannot_be_run_exactly_are_refused_by_name(message: str) -> None:
    model = UNSUPPORTED[message]()
    if "training" not in message:
        model.eval()
    with pytest.raises(TypeError, match=message):
        require_supported(model)


def test_a_window_that_is_never_used_is_no_obstacle() -> None:
    require_supported(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)).eval())


# Positions.


def test_the_limit_is_that_of_the_configuration() -> None:
    assert context_limit(llama()) == context_limit(gpt2()) == LIMIT


def long_rope() -> PreTrainedModel:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.0],
        "long_factor": [4.0, 9.0],
        "original_max_position_embeddings": 8,
        "factor": 2.0,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope, initializer_range=1.0))
    model.eval()
    return model


def test_positions_that_change_with_the_batch_are_out_of_bounds() -> None:
    """With longrope a row's own distribution changes as soon as any row of its batch passes the original length."""
    model = long_rope()
    assert context_limit(model) == 8
    with pytest.raises(ValueError, match="need 9 positions, and LlamaForCausalLM has 8"):
        generate(model, [[0], [1, 2]], max_new_tokens=7)
    with torch.inference_mode():
        tokens = torch.tensor([[0, 1, 2, 3, 2, 1], [3, 2, 1, 0, 1, 2]])
        near = torch.arange(6).expand(2, -1)
        alone = model(input_ids=tokens[:1], position_ids=near[:1]).logits[0]
        with_neighbour = model(input_ids=tokens, position_ids=torch.stack([near[0], near[0] + 5])).logits[0]
    assert (alone - with_neighbour).abs().max() > 1e-3


def test_a_forward_pass_beyond_the_last_position_keeps_a_valid_index() -> None:
    """Drafts may overshoot a model with learned positions; what comes out there is never emitted."""
    model = gpt2()
    with torch.inference_mode():
        beyond = torch.tensor([[LIMIT, LIMIT + 1]])
        logits = CachedModel(model, LIMIT + 3).run(torch.zeros_like(beyond), beyond, keep=2)
    assert logits.shape == (1, 2, VOCAB)
