"""Models of transformers: what `load_pair` and `load_model` load and refuse, and what the loop can
run."""

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from architectures import tiny_model
from safetensors.torch import load_file, save_file
from tiny import LIMIT, WORDS, gpt2, llama, tokenizer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specnb import loading
from specnb.loading import TRAINED_PAIR, load_model, load_pair
from specnb.sampler import generate
from specnb.support import context_limit, require_supported

TEMPLATE = "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"


def saved(folder: Path, model: PreTrainedModel, words: Sequence[str] = WORDS, begins: bool = True) -> Path:
    """A folder with `model` and a tokenizer."""
    model.save_pretrained(folder)
    tokenizer(words, begins, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def changed(**settings: Any) -> LlamaForCausalLM:
    """A tiny Llama with other settings."""
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**(llama().config.to_dict() | settings))).eval()
    return model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return saved(tmp_path / "target", llama())


def test_a_pair_of_two_folders_generates(target: Path, tmp_path: Path) -> None:
    pair = load_pair(target, saved(tmp_path / "draft", gpt2(layers=1)))
    assert not pair.target.training
    assert pair.target.dtype == torch.float32
    made = generate(pair.target, [pair.encode("one")], pair.draft, max_new_tokens=4, progress=False)
    assert made.tokens == generate(llama(), [[0, 1]], gpt2(layers=1), max_new_tokens=4, progress=False).tokens
    assert load_pair(target, target, dtype="bfloat16").draft.dtype == torch.bfloat16


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_is_encoded_as_its_own_tokenizer_does_and_begins_once(tmp_path: Path, begins: bool) -> None:
    folder = saved(tmp_path, llama(), begins=begins)
    pair, turns = load_pair(folder, folder), [{"role": "user", "content": "two three"}]
    template: Any = pair.tokenizer.apply_chat_template
    assert pair.encode("one two") == pair.tokenizer("one two")["input_ids"] == [0] * begins + [1, 2]
    assert pair.encode(template(turns, tokenize=False)) == template(turns)["input_ids"] == [0, 2, 3]


def test_a_model_of_the_hub_is_loaded_from_its_folder(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "snapshot_download", lambda name, **_: str(target))
    assert load_pair("some/model", target).encode("one") == [0, 1]


def test_what_the_hub_says_of_a_name_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "there is no such model. " * 20 + "Check the name."
    monkeypatch.setattr(loading, "snapshot_download", Mock(side_effect=OSError(said)))
    with pytest.raises(OSError, match=r"'some/model' is no folder here, and was not fetched .*Check the name\.$"):
        load_model("some/model")


def test_a_tied_output_layer_may_be_left_out(tmp_path: Path) -> None:
    model = changed(tie_word_embeddings=True)
    folder = saved(tmp_path, model)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert torch.equal(load_model(folder).lm_head.weight, model.model.embed_tokens.weight)


# What is refused. Each entry changes a folder.


def configured(**entries: Any) -> Callable[[Path], object]:
    """The configuration with other `entries`."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | entries))

    return change


def weighted(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    """The weights after `change` of the dictionary of tensors."""

    def of(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return of


def broken(name: str, number: float) -> Callable[[Path], object]:
    """One number of the first layer's `name` is `number`."""

    def change(weights: dict[str, Tensor]) -> None:
        next(weight for each, weight in weights.items() if each.endswith(name)).view(-1)[3] = number

    return weighted(change)


NAN, INF = float("nan"), float("inf")
SILENTLY_WRONG: dict[str, Callable[[Path], object]] = {
    "1 missing in the file: model.norm.weight": weighted(lambda weights: weights.pop("model.norm.weight")),
    "9 missing in the file: model.layers.2": configured(num_hidden_layers=3),
    "1 unknown to the model: more": weighted(lambda weights: weights.update(more=torch.ones(1))),
    "9 unknown to the model: model.layers.1": configured(num_hidden_layers=1),
    # transformers would fetch and execute these.
    "names some/kernels": configured(attn_implementation="some/kernels"),
    "names kernels/of-a-part@main": configured(vision_config={"_attn_implementation": {"": "kernels/of-a-part@main"}}),
    "names flash_attention_2": configured(text_config={"attn_implementation": "flash_attention_2"}),
    "names sonicmoe": configured(experts_implementation="sonicmoe"),
    "has an adapter": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "inv_freq that is NaN or infinite": configured(rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
    # Attention takes scores of NaN for masked ones, so NaN in a query projection does not reach the
    # logits.
    "layers.0.*q_proj.weight that is NaN or infinite": broken("q_proj.weight", NAN),
    "layers.0.*down_proj.weight that is NaN or infinite": broken("down_proj.weight", INF),
}


@pytest.mark.parametrize("message", SILENTLY_WRONG)
def test_weights_that_would_be_silently_wrong_are_refused(target: Path, message: str) -> None:
    if message == "has an adapter" and find_spec("peft"):
        pytest.skip("transformers reads it with peft")
    SILENTLY_WRONG[message](target)
    with pytest.raises(ValueError, match=message):
        load_model(target)


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.trace), "w")


def pickled(folder: Path) -> None:
    """Weights in a format that runs whatever it likes when it is loaded."""
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Trap(folder / "ran"), file, protocol=2)  # the one of torch


def with_code(folder: Path) -> None:
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    configured(model_type="unheard-of", auto_map=auto_map)(folder)


@pytest.mark.parametrize("change", [pickled, with_code])
def test_no_code_of_a_folder_is_executed(target: Path, change: Callable[[Path], object]) -> None:
    change(target)
    with pytest.raises((OSError, ValueError)):
        load_model(target)
    assert not (target / "ran").exists()


@pytest.mark.parametrize("words", [(*WORDS, "four"), WORDS[:3], ("begin", "two", "one", "three")])
def test_tokenizers_that_differ_are_refused(target: Path, tmp_path: Path, words: Sequence[str]) -> None:
    with pytest.raises(ValueError, match=r"tokenizers of .* differ in [12] tokens, such as '(four|three|one)'"):
        load_pair(target, saved(tmp_path / "other", llama(5), words=words))


def test_a_tokenizer_is_not_made_up(target: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    llama(5).save_pretrained(bare)
    for folders in ((target, bare), (bare, bare)):
        with pytest.raises(OSError, match="bare' has no tokenizer that can be read"):
            load_pair(*folders)


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        (cut, {}, r"target/model.safetensors is cut off"),
        *(
            (str, {"target": name}, f"'{name}' is no folder here; give one")
            for name in ("no/such/folder", "./none", "../none", "/none", "~/none", Path("none"), "pyproject.toml")
        ),
        (str, {"target": ""}, r"'' is no folder here, and was not fetched"),
        (str, {"draft": None}, r"there is no draft for '.*target'"),
        (str, {"dtype": "bloat16"}, r"dtype is 'bloat16'; it must be one of float64"),
        (str, {"dtype": torch.int8}, r"dtype is torch.int8; it must be one of float64"),
        (str, {"device": "gpu"}, r"device is 'gpu'; torch can use"),
        (str, {"device": "meta:x"}, r"device is 'meta:x'; torch can use"),
    ],
)
def test_an_error_names_what_is_wrong(
    target: Path, change: Callable[[Any], object], given: dict[str, Any], message: str
) -> None:
    change(target)
    with pytest.raises((OSError, TypeError, ValueError), match=message):
        load_pair(**({"target": target, "draft": target} | given))


# Float64.


class Dtypes(TorchFunctionMode):
    """Collects the floating dtypes of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        # What is read from an attribute, such as a float32 buffer, is not computed.
        if isinstance(result, torch.Tensor) and result.is_floating_point() and "__get__" not in str(function):
            self.seen.add(result.dtype)
        return result


@torch.inference_mode()
def test_a_float64_model_computes_nothing_in_less_and_is_the_same_model() -> None:
    tokens = torch.arange(1, 65).reshape(2, 32)
    double, single = (load_model(TRAINED_PAIR / "draft", dtype=dtype) for dtype in (torch.float64, torch.float32))
    with Dtypes() as dtypes:
        logits = double(tokens).logits
    assert dtypes.seen == {torch.float64}
    torch.testing.assert_close(logits.float(), single(tokens).logits, atol=1e-3, rtol=0)
    rounded = copy.deepcopy(double).to(torch.bfloat16)(tokens).logits  # type: ignore[arg-type]
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), logits, atol=0.5, rtol=0)


# What the loop can run.


def flash() -> PreTrainedModel:
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    return model


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "T5ForConditionalGeneration is an encoder-decoder": lambda: tiny_model("t5", True),
    "BloomForCausalLM takes no position_ids": lambda: tiny_model("bloom"),
    "cache of RecurrentGemmaForCausalLM cannot be cropped: its layer 0 is a Linear": lambda: tiny_model(
        "recurrent_gemma"
    ),
    "LlamaForCausalLM runs flash_attention_2": flash,
    "LlamaForCausalLM is in training mode": lambda: llama().train(),
    "LlamaModel gives no next-token logits": lambda: llama().model,
    "Linear is no model of transformers": lambda: torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_models_that_cannot_be_run_exactly_are_refused_by_name(message: str) -> None:
    with pytest.raises(TypeError, match=message):
        require_supported(UNSUPPORTED[message]())


@torch.inference_mode()
def test_the_context_ends_where_positions_end_or_change_with_the_batch() -> None:
    """With longrope a row's own distribution changes as soon as any row of its batch passes the
    original length."""
    assert context_limit(llama()) == context_limit(gpt2()) == LIMIT
    factors = {"short_factor": [1.0, 1.0], "long_factor": [4.0, 9.0], "factor": 2.0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8} | factors
    model = changed(rope_parameters=rope)
    assert context_limit(model) == 8
    with pytest.raises(ValueError, match=r"prompt 1 of 2 tokens and 7 .* 9 positions, and the target, Llama.*, has 8"):
        generate(model, [[0], [1, 2]], None, max_new_tokens=7)
    with pytest.raises(ValueError, match=r"prompt 0 of 3 .* 9 positions, and the draft, Llama.*, has 8"):
        generate(llama(), [[0, 1, 2]], model, max_new_tokens=6)
    tokens, near = torch.tensor([[0, 1, 2, 3, 2, 1], [3, 2, 1, 0, 1, 2]]), torch.arange(6).expand(2, -1)
    alone = model(input_ids=tokens[:1], position_ids=near[:1]).logits[0]
    with_neighbour = model(input_ids=tokens, position_ids=torch.stack([near[0], near[0] + 5])).logits[0]
    assert (alone - with_neighbour).abs().max() > 1e-3
