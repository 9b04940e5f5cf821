"""Models of transformers: what `load_pair` loads and refuses, and what the loop can run."""

import json

import pytest
import torch
from engine_law import VOCAB
from tiny import LIMIT, gpt2, llama, neox, qwen2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from specnb.decode import generate
from specnb.models import Runner, context_limit, load_pair, require_same_vocabulary, require_supported

WORDS = ("begin", "one", "two", "three")
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LIMIT,
}


def saved(folder, model, words=WORDS, begin="begin"):
    model.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=words[1]))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin).save_pretrained(folder)
    return folder


@pytest.fixture
def folders(tmp_path):
    return saved(tmp_path / "target", llama()), saved(tmp_path / "draft", gpt2(layers=1))


def test_a_pair_of_two_folders_generates(folders):
    pair = load_pair(*folders)
    assert pair.encode("one three two") == [0, 1, 3, 2]
    assert not pair.target.training
    assert not pair.draft.training
    assert pair.target.dtype == torch.float32
    made = generate(pair.target, [pair.encode("one")], pair.draft, max_new_tokens=4, progress=False)
    assert made.tokens == generate(llama(), [[0, 1]], gpt2(layers=1), max_new_tokens=4, progress=False).tokens


def test_a_pair_comes_in_the_dtype_asked_for(folders):
    pair = load_pair(*folders, dtype=torch.float64)
    assert pair.target.dtype == pair.draft.dtype == torch.float64


def test_without_a_beginning_token_a_prompt_is_its_text(tmp_path):
    folder = saved(tmp_path, llama(), begin=None)
    assert load_pair(folder, folder).encode("two two") == [2, 2]


def test_different_vocabularies_are_refused(tmp_path):
    target = saved(tmp_path / "target", llama())
    draft = saved(tmp_path / "draft", llama(VOCAB + 1), words=(*WORDS, "four"))
    with pytest.raises(ValueError, match=f"target has {VOCAB} tokens and the draft {VOCAB + 1}"):
        load_pair(target, draft)
    with pytest.raises(ValueError, match="target has 4 tokens and the draft 9"):
        require_same_vocabulary(llama(), 9)


def test_different_tokenizers_are_refused(tmp_path):
    target = saved(tmp_path / "target", llama())
    draft = saved(tmp_path / "draft", llama(), words=("begin", "two", "one", "three"))
    with pytest.raises(ValueError, match=r"tokenizers of .*target and .*draft differ"):
        load_pair(target, draft)


def test_a_folder_that_is_not_there_is_an_os_error(folders, tmp_path):
    with pytest.raises(OSError, match="nothing"):
        load_pair(folders[0], tmp_path / "nothing")


def test_weights_that_are_not_safetensors_are_refused(folders):
    """A pickle runs whatever it likes when it is loaded."""
    target, draft = folders
    (draft / "model.safetensors").unlink()
    torch.save(gpt2(layers=1).state_dict(), draft / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_pair(target, draft)


@pytest.mark.parametrize("model_type", ["llama", "unheard-of"])
def test_code_that_comes_with_a_checkpoint_is_not_run(folders, tmp_path, model_type):
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
def test_decoders_of_full_attention_are_supported(make, attention):
    model = make()
    model.set_attn_implementation(attention)
    require_supported(model)


def encoder_decoder():
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))


def without_positions():
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=8, n_layer=1, n_head=2))


def sliding():
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))


def flash():
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    return model


UNSUPPORTED = {
    "T5ForConditionalGeneration is an encoder-decoder": encoder_decoder,
    "BloomForCausalLM takes no position_ids": without_positions,
    "MistralForCausalLM cannot be cropped: its layer 0 is a DynamicSlidingWindowLayer": sliding,
    "LlamaForCausalLM runs flash_attention_2": flash,
    "LlamaForCausalLM is in training mode": lambda: llama().train(),
    "Linear is no model of transformers": lambda: torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_models_that_cannot_be_run_exactly_are_refused_by_name(message):
    model = UNSUPPORTED[message]()
    if "training" not in message:
        model.eval()
    with pytest.raises(TypeError, match=message):
        require_supported(model)


def test_a_window_that_is_never_used_is_no_obstacle():
    require_supported(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)).eval())


# Positions.


def test_the_limit_is_that_of_the_configuration():
    assert context_limit(llama()) == context_limit(gpt2()) == LIMIT


def long_rope():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.0],
        "long_factor": [4.0, 9.0],
        "original_max_position_embeddings": 8,
        "factor": 2.0,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope, initializer_range=1.0)).eval()


def test_positions_that_change_with_the_batch_are_out_of_bounds():
    """With longrope a row's own law changes as soon as any row of its batch passes the original length."""
    model = long_rope()
    assert context_limit(model) == 8
    with pytest.raises(ValueError, match="need 9 positions, and LlamaForCausalLM has 8"):
        generate(model, [[0], [1, 2]], max_new_tokens=7)
    with torch.inference_mode():
        tokens = torch.tensor([[0, 1, 2, 3, 2, 1], [3, 2, 1, 0, 1, 2]])
        near = torch.arange(6).expand(2, -1)
        alone = model(input_ids=tokens[:1], position_ids=near[:1]).logits[0]
        beside = model(input_ids=tokens, position_ids=torch.stack([near[0], near[0] + 5])).logits[0]
    assert (alone - beside).abs().max() > 1e-3


def test_a_run_past_the_last_position_keeps_a_valid_index():
    """Drafts may overshoot a model with learned positions; what comes out there is never emitted."""
    model = gpt2()
    with torch.inference_mode():
        beyond = torch.tensor([[LIMIT, LIMIT + 1]])
        logits = Runner(model, LIMIT + 3).run(torch.zeros_like(beyond), beyond, keep=2)
    assert logits.shape == (1, 2, VOCAB)
