"""Models of transformers, as the loop sees them: tokens and slots in, logits out.

The only rooms that know transformers are this one and `cache`. Weights are read from safetensors
only, and no code that comes with a checkpoint is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from specnb.cache import RaggedCache, additive_mask, ragged_mask, uncroppable
from specnb.checkpoints import folder_of, require_checksums, require_complete, require_safetensors
from specnb.double import in_double
from specnb.fast import pack

PAIR = Path(__file__).resolve().parent.parent / "data" / "pair"


@dataclass(frozen=True)
class Pair:
    """A target, a draft that shares its vocabulary, and their tokenizer."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        """The prompt that `text` is: its tokens, after the token that begins a text where the model has one."""
        begin = self.tokenizer.bos_token_id
        return ([] if begin is None else [begin]) + self.tokenizer.encode(text, add_special_tokens=False)


def load_pair(
    target: str | Path = PAIR / "target",
    draft: str | Path = PAIR / "draft",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
) -> Pair:
    """The pair that this project trained; or any two names or folders of Hugging Face.

    `packed` keeps some weights in a second layout too, where that was measured to be faster on this machine, at first
    use in half a second for each model (`specnb.fast.pack`); on other devices and in float64 it does nothing. It is
    the default because no weight is used in a slower layout than as saved, and because the choice is kept: one
    machine gives the same tokens every time. But in float32 the last bits of logits depend on that choice and on the
    number of rows. Results that must not need float64, or `packed=False`: exactly the weights as saved.
    In float64 a Llama model computes in float64 throughout (`specnb.double`), so that the same sequences come out on
    every processor.

    Raises `OSError` where there is no such model, it has anything but safetensors, or a file of the shipped pair is
    not the one that was committed; and `ValueError` when a file's tensors are not those of the model, or the two have
    different vocabularies: then their distributions are not about the same tokens.
    """
    folders = [folder_of(name) for name in (target, draft)]
    models = [load_model(folder, device, dtype, packed) for folder in folders]
    require_same_vocabulary(models[0], models[1].config.vocab_size)
    tokenizers = [AutoTokenizer.from_pretrained(folder, trust_remote_code=False) for folder in folders]
    if tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise ValueError(f"the tokenizers of {target} and {draft} differ; choose a draft of the target's own family")
    return Pair(models[0], models[1], tokenizers[0])


def load_model(
    name: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32, packed: bool = True
) -> PreTrainedModel:
    """One model, by its name or folder of Hugging Face. `packed`, and what it raises, as in `load_pair`."""
    folder = folder_of(name)
    if folder.resolve().parent == PAIR.resolve():
        require_checksums(folder)
    require_safetensors(folder)
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, attn_implementation="sdpa",
                ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
    except SafetensorError as error:
        raise OSError(f"the weights in {folder} cannot be read ({error}); get the files again") from error
    model, info = loaded
    require_complete(folder, info)
    if dtype == torch.float64:
        in_double(model)
    model.to(torch.device(device))
    return pack(model.eval()) if packed else model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and no report on tensors that do not fit, which `require_complete` turns into an error."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def require_same_vocabulary(target: PreTrainedModel, draft_vocab: int) -> None:
    """Raises `ValueError` unless the draft has as many tokens as the target."""
    vocab = target.config.vocab_size
    if vocab != draft_vocab:
        raise ValueError(
            f"the target has {vocab} tokens and the draft {draft_vocab}; both need the same "
            "vocabulary, so choose a draft of the target's own family"
        )


def require_supported(model: PreTrainedModel) -> None:
    """Raises `TypeError`, naming what is in the way, for a model that the loop cannot run exactly."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} is no model of transformers; load one with load_pair or from_pretrained")
    if model.training:
        raise TypeError(f"{name} is in training mode, where dropout makes its laws random; call its eval() first")
    if model.config.is_encoder_decoder:
        raise TypeError(f"{name} is an encoder-decoder; the loop runs decoder-only models")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise TypeError(f"{name} takes no position_ids, which rows of different lengths need")
    if model.get_output_embeddings() is None or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise TypeError(f"{name} gives no next-token logits; load it with load_pair or as a ...ForCausalLM")
    attention = model.config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise TypeError(f"{name} runs {attention} attention; load it with attn_implementation='sdpa' or 'eager'")
    reason = uncroppable(DynamicCache(config=model.config))
    if reason:
        raise TypeError(f"the cache of {name} cannot be cropped: {reason}")


def context_limit(model: PreTrainedModel) -> int | None:
    """The most tokens that `model` has positions for, or None where its configuration names no limit."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this, the angles of all rows change with the longest text of the batch.
        return int(rope["original_max_position_embeddings"])
    return getattr(model.config, "max_position_embeddings", None)


class Runner:
    """A model with the cache of one batch: runs tokens at given slots and returns the logits there.

    What lies at higher slots than a token is invisible to it, so a row is cropped by running its next
    tokens at lower slots. `capacity` is the number of slots of each row.
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.cache = RaggedCache(model.config.num_hidden_layers, capacity)
        self.last_position = (context_limit(model) or capacity) - 1

    def clear(self) -> None:
        """Forgets the texts that were run; the cache's tensors stay where they are."""
        self.cache.clear()

    def run(
        self,
        tokens: Tensor,
        slots: Tensor,
        keep: int,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Logits `(batch, keep, vocab)` of the last `keep` of `tokens` `(batch, n)` put at `slots` `(batch, n)`.

        Where tokens do not stand in a line (a tree), `positions` `(batch, n)` says where each is in its text,
        and `visible` `(batch, n, capacity)` which slots it sees, its own among them. `rows` `(batch,)` are the rows
        of the cache that these tokens belong to, if they are not all of it.
        """
        self.cache.write_at(slots, rows)
        if visible is None:
            mask = ragged_mask(slots, self.capacity, self.model.dtype)
        else:
            mask = additive_mask(visible, self.model.dtype)
        output = self.model(
            input_ids=tokens,
            # Drafts beyond the model's limit are cut off before they are emitted; they only need a valid index.
            position_ids=(slots if positions is None else positions).clamp_max(self.last_position),
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits
