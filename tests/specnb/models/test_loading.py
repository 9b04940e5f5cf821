"""Models of transformers: what `load_pair` and `load_model` load and refuse, and what the loop can
run."""

import copy
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
from tiny import LIMIT, gpt2, llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from unsupported_models import SIZES, convolving, encoder_decoder, without_positions

from specnb.cache import CachedModel
from specnb.distributions import Sampling
from specnb.loading import TRAINED_PAIR, load_model, load_pair
from specnb.models import loading
from specnb.models.checkpoints import CHECKSUMS, require_checksums, write_checksums
from specnb.sampler import generate
from specnb.support import context_limit, require_supported

WORDS = ("begin", "one", "two", "three")


def saved(folder: Path, model: PreTrainedModel, words: Sequence[str] = WORDS, begin: str | None = "begin") -> Path:
    model.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=words[1]))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin).save_pretrained(folder)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return saved(tmp_path / "target", llama())


def test_a_pair_of_two_folders_generates(target: Path, tmp_path: Path) -> None:
    pair = load_pair(target, saved(tmp_path / "draft", gpt2(layers=1)))
    assert pair.encode("one three two") == [0, 1, 3, 2]
    assert not pair.target.training
    assert pair.target.dtype == torch.float32
    made = generate(pair.target, [pair.encode("one")], pair.draft, max_new_tokens=4, progress=False)
    assert made.tokens == generate(llama(), [[0, 1]], gpt2(layers=1), max_new_tokens=4, progress=False).tokens
    assert load_pair(target, target, dtype=torch.float64).draft.dtype == torch.float64
    no_beginning = saved(tmp_path / "other", llama(), begin=None)
    assert load_pair(no_beginning, no_beginning).encode("two two") == [2, 2]


def test_a_model_of_the_hub_is_loaded_from_the_folder_that_it_was_put_in(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "snapshot_download", lambda name, **_: str(target))
    assert load_pair("some/model", target).target.config.vocab_size == VOCAB


def test_a_tied_output_layer_may_be_left_out(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()
    folder = saved(tmp_path, model)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert torch.equal(load_model(folder).lm_head.weight, model.model.embed_tokens.weight)


def test_shards_of_safetensors_are_loaded(target: Path) -> None:
    model = llama()
    (target / "model.safetensors").unlink()
    model.save_pretrained(target, max_shard_size="1KB")
    assert len(list(target.glob("*.safetensors"))) > 1
    assert torch.equal(load_model(target).lm_head.weight, model.lm_head.weight)


# What is refused. Each entry changes a folder, and its message is the error's.


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


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.trace), "w")


def pickled(folder: Path, name: str = "pytorch_model.bin") -> None:
    """Weights in a format that runs whatever it likes when it is loaded."""
    (folder / "model.safetensors").unlink()
    with (folder / name).open("wb") as file:
        pickle.dump(Trap(folder / "ran"), file)


def indexed(shard: str) -> Callable[[Path], object]:
    """An index that names `shard` for all tensors."""

    def change(folder: Path) -> None:
        pickled(folder)
        index = {"metadata": {}, "weight_map": dict.fromkeys(llama().state_dict(), shard)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def with_code(folder: Path) -> None:
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    configured(model_type="unheard-of", auto_map=auto_map)(folder)


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[Callable[[Path], object], type[Exception], str]] = [
    (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, "target' has no config.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), FileNotFoundError, "has no model.safetensors; only safe"),
    (text("config.json", "{"), OSError, "config.json' is not JSON"),
    (text("config.json", "[" * 10**5), OSError, "config.json' is not JSON"),
    (text("config.json", "[1]"), OSError, "config.json' must hold a JSON object and holds a list"),
    (text("adapter_config.json", "{}"), OSError, "holds an adapter"),
    (text("model.safetensors.index.json", "{}"), OSError, "has no weight_map"),
    (pickled, FileNotFoundError, "are loaded: pytorch_model.bin can execute code; if you trust it, load"),
    (configured(transformers_weights="adapter_model.bin"), OSError, r"names the weights 'adapter_model.bin'; only"),
    (indexed("pytorch_model.bin"), OSError, r"index.json' names 'pytorch_model.bin'; only safetensors"),
    (indexed("../other/model.safetensors"), OSError, r"names '../other/model.safetensors'; only safetensors"),
    (indexed("missing.safetensors"), FileNotFoundError, "names 'missing.safetensors', which is not there; copy it"),
    (with_code, ValueError, "target' comes with code of its own, which is never executed here"),
    (cut_off, OSError, r"weights in .*target' cannot be read"),
    (weighted(lambda weights: weights.pop("model.norm.weight")), ValueError, r"1 missing in the file: model.norm.we"),
    (weighted(lambda weights: weights.update(more=torch.ones(1))), ValueError, "unknown to the model: more"),
    (
        weighted(lambda weights: weights.update({"model.norm.weight": torch.ones(9)})),
        ValueError, r"1 of another size: model.norm.weight \(\[9\] in the file, \[8\] in the model\)",
    ),
    (configured(num_hidden_layers=1), ValueError, "9 unknown to the model: model.layers.1"),
    (configured(num_hidden_layers=3), ValueError, "9 missing in the file: model.layers.2"),
    (
        configured(rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
        ValueError, r"inv_freq that is NaN or infinite; the config\.json",
    ),
    # Attention takes scores of NaN for masked ones, so NaN in a query projection does not reach the
    # logits.
    (broken("q_proj.weight", NAN), ValueError, r"layers.0.*q_proj.weight that is NaN or infinite; the weights"),
    (broken("down_proj.weight", INF), ValueError, r"layers.0.*down_proj.weight that is NaN or infinite; the weights"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_folder_that_is_not_right_is_refused_with_what_is_wrong(target: Path, number: int) -> None:
    change, error, message = REFUSED[number]
    change(target)
    with pytest.raises(error, match=message):
        load_model(target)
    assert not (target / "ran").exists()  # no code of the folder was executed


def test_code_of_a_known_kind_of_model_is_not_executed(target: Path) -> None:
    with_code(target)
    configured(model_type="llama")(target)
    assert type(load_model(target)) is LlamaForCausalLM
    assert not (target / "ran").exists()


def test_a_name_that_leads_to_no_model_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*nothing'; give a folder with config.json"):
        load_pair(target, target.parent / "nothing")
    with pytest.raises(FileNotFoundError, match=r"there is no folder 'a/b/c', and the hub has no such names; give"):
        load_model("a/b/c")
    with pytest.raises(NotADirectoryError, match=r"config.json' is a file; give the folder"):
        load_model(target / "config.json")

    def unreachable(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("Name or service not known\nmore")

    monkeypatch.setattr(loading, "snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"no folder 'some/model', .* from the hub \(Name or .* known\); give"):
        load_model("some/model")


@pytest.mark.parametrize("own", [VOCAB + 1, VOCAB + 60])
def test_embeddings_may_be_padded_to_other_sizes(target: Path, tmp_path: Path, own: int) -> None:
    padded = saved(tmp_path / "padded", llama(own))
    for pair in (load_pair(target, padded), load_pair(padded, target)):
        asked: dict[str, Any] = {"max_new_tokens": 8, "sampling": Sampling(0), "progress": False}
        made = generate(pair.target, [pair.encode("one two")], pair.draft, gamma=3, **asked)
        assert made.tokens == generate(pair.target, [[0, 1, 2]], None, **asked).tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*WORDS, "four"), "differ in 1 tokens, first in 'four': missing in the target's, number 4 in the draft's"),
        (WORDS[:3], "in 1 tokens, first in 'three': number 3 in the target's, missing in the draft's; choose"),
        (("begin", "two", "one", "three"), "in 2 tokens, first in 'one': number 1 in the target's, number 2 in the dr"),
    ],
)
def test_tokenizers_that_differ_are_refused_with_the_first_token(
    target: Path, tmp_path: Path, words: Sequence[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_pair(target, saved(tmp_path / "other", llama(5), words=words))


def test_a_folder_without_a_tokenizer_takes_the_other_s(target: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    llama(5).save_pretrained(bare)
    for pair in (load_pair(target, bare), load_pair(bare, target)):
        assert pair.encode("one three two") == [0, 1, 3, 2]
    with pytest.raises(FileNotFoundError, match=r"neither '.*bare' nor '.*bare' has a tokenizer; copy tokenizer.json"):
        load_pair(bare, bare)
    (target / "tokenizer.json").write_text("{")
    with pytest.raises(OSError, match=r"the tokenizer in '.*target' cannot be read \(.*\); copy its files again"):
        load_pair(target, bare)


def test_a_target_of_one_s_own_has_no_default_draft(target: Path) -> None:
    with pytest.raises(
        ValueError, match=r"load_pair\('.*target'\) has no draft; give both, load_pair\(target, draft\)"
    ):
        load_pair(target)


def test_a_dtype_may_be_named(target: Path) -> None:
    for name in ("bfloat16", "torch.float64"):
        assert str(load_pair(target, target, dtype=name).draft.dtype).removeprefix("torch.") in name
    for wrong in ("bf16", "int8", torch.float8_e4m3fn, None, 16):
        with pytest.raises(ValueError, match=r"dtype is .*; it must be one of float64, float32, bfloat16, float16, or"):
            load_model(target, dtype=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("faster", loading.CANDIDATES)
def test_the_fastest_dtype_is_the_one_that_takes_less_time(
    target: Path, faster: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single rounds may be disturbed."""
    times = iter([3.0, 3.0, 1.0, 2.0] * 3 if faster == loading.CANDIDATES[0] else [1.5, 9.0, 2.0, 1.0] * 3)
    monkeypatch.setattr(loading, "seconds_of_a_token", lambda model: next(times))
    assert load_model(target, dtype="fastest").dtype == faster


def test_a_pair_has_the_fastest_dtype_of_its_target(target: Path) -> None:
    assert loading.seconds_of_a_token(load_model(target)) > 0
    pair = load_pair(target, target, dtype="fastest")
    assert pair.target.dtype == pair.draft.dtype
    assert pair.target.dtype in loading.CANDIDATES


@pytest.mark.parametrize("device", ["mps", "gpu", "cuda:99", 3.5])
def test_a_device_that_is_not_there_is_refused(target: Path, device: Any) -> None:
    with pytest.raises(ValueError, match=f"device is '?{device}'?, which torch cannot use here; give 'cpu'"):
        load_model(target, device=device)


def test_an_encoder_decoder_says_how_it_is_loaded(tmp_path: Path) -> None:
    encoder_decoder().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no decoder of tokens; only models without an encoder"):
        load_model(tmp_path)


# The shipped pair.


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pair in place of the trained one."""
    for role in ("target", "draft"):
        write_checksums(saved(tmp_path / role, llama()))
    monkeypatch.setattr(loading, "TRAINED_PAIR", tmp_path)
    return tmp_path


def test_a_file_of_the_trained_pair_that_is_changed_or_missing_is_an_error(shipped: Path) -> None:
    load_pair(shipped / "target", shipped / "draft")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        content = (shipped / "draft" / name).read_bytes()
        (shipped / "draft" / name).write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        with pytest.raises(OSError, match=rf"draft/{name}' is not the one that was committed .*; restore it"):
            load_pair(shipped / "target", shipped / "draft")
        (shipped / "draft" / name).write_bytes(content)
    (shipped / "draft" / "tokenizer_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer_config.json' is missing; restore"):
        load_model(shipped / "draft")
    (shipped / "target" / CHECKSUMS).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{CHECKSUMS}' is missing; restore"):
        load_model(shipped / "target")
    with pytest.raises(FileNotFoundError, match=r"the trained pair is not installed.* from its wheel"):
        load_pair(shipped / "other", shipped / "draft")


def test_the_committed_pair_is_the_one_that_its_checksums_name() -> None:
    for role in ("target", "draft", "draft-distilled"):
        named = {line.split()[1] for line in (TRAINED_PAIR / role / CHECKSUMS).read_text().splitlines()}
        assert named >= {"config.json", "model.safetensors", "tokenizer.json"}
        require_checksums(TRAINED_PAIR / role)


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


def resized() -> PreTrainedModel:
    model = llama()
    model.config.vocab_size += 1
    return model


def without_dictionaries() -> PreTrainedModel:
    model = llama()
    model.config.return_dict = False
    return model


def mixed() -> PreTrainedModel:
    model = llama()
    model.lm_head.double()
    return model


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "T5ForConditionalGeneration is an encoder-decoder": lambda: encoder_decoder().eval(),
    "BloomForCausalLM takes no position_ids": lambda: without_positions().eval(),
    "Lfm2ForCausalLM cannot be cropped: its layer 0 is a LinearAttentionLayer": lambda: convolving().eval(),
    "LlamaForCausalLM runs flash_attention_2": flash,
    "LlamaForCausalLM is in training mode": lambda: llama().train(),
    "LlamaModel gives no next-token logits": lambda: llama().model,
    "LlamaForCausalLM has 5 tokens, and its embedding 4": resized,
    "Linear is no model of transformers": lambda: torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_models_that_cannot_be_run_exactly_are_refused_by_name(message: str) -> None:
    with pytest.raises(TypeError, match=message):
        require_supported(UNSUPPORTED[message]())


@pytest.mark.parametrize("make", [without_dictionaries, mixed, lambda: llama().to(torch.float8_e4m3fn)])  # type: ignore[arg-type]
def test_models_that_fail_in_the_loop_are_refused_by_name(make: Callable[[], PreTrainedModel]) -> None:
    with pytest.raises(TypeError, match="LlamaForCausalLM fails where it gets positions, a mask and a cache"):
        generate(make(), [[0]], None, max_new_tokens=4)


@torch.inference_mode()
def test_the_context_ends_where_positions_end_or_change_with_the_batch() -> None:
    """With longrope a row's own distribution changes as soon as any row of its batch passes the
    original length."""
    assert context_limit(llama()) == context_limit(gpt2()) == LIMIT
    factors = {"short_factor": [1.0, 1.0], "long_factor": [4.0, 9.0], "factor": 2.0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8} | factors
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope, initializer_range=1.0)).eval()
    assert context_limit(model) == 8
    with pytest.raises(ValueError, match="need 9 positions, and LlamaForCausalLM has 8"):
        generate(model, [[0], [1, 2]], None, max_new_tokens=7)
    tokens, near = torch.tensor([[0, 1, 2, 3, 2, 1], [3, 2, 1, 0, 1, 2]]), torch.arange(6).expand(2, -1)
    alone = model(input_ids=tokens[:1], position_ids=near[:1]).logits[0]
    with_neighbour = model(input_ids=tokens, position_ids=torch.stack([near[0], near[0] + 5])).logits[0]
    assert (alone - with_neighbour).abs().max() > 1e-3
    # Drafts may overshoot a model with learned positions; what comes out there is never emitted.
    beyond = torch.tensor([[LIMIT, LIMIT + 1]])
    assert CachedModel(gpt2(), LIMIT + 3).run(torch.zeros_like(beyond), beyond, keep=2).shape == (1, 2, VOCAB)
