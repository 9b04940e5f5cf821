"""Load a model or a pair of models of transformers.

Weights are read from safetensors only, and code that comes with a checkpoint is never executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from specnb.models.checkpoints import folder_of, require_checksums, require_complete, require_safetensors
from specnb.models.double_precision import in_double
from specnb.models.packing import pack
from specnb.models.support import require_same_vocabulary
from specnb.models.trained_pair import TRAINED_PAIR as TRAINED_PAIR
from specnb.models.trained_pair import is_trained, require_pair

CHECKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights as they are; those of quantised ones have no extremes."""


@dataclass(frozen=True)
class Pair:
    """A target, a draft model with the same vocabulary, and their tokenizer.

    >>> pair = load_pair()
    >>> pair.target.config.vocab_size == pair.draft.config.vocab_size == len(pair.tokenizer)
    True
    >>> pair.tokenizer.decode(pair.encode("def area(")[1:])
    'def area('
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        """The prompt of `text`: its tokens, after the begin-of-sequence token if the tokenizer has one."""
        begin, tokens = self.tokenizer.bos_token_id, self.tokenizer.encode(text, add_special_tokens=False)
        return ([] if begin is None else [begin]) + list(tokens)


def load_pair(
    target: str | Path = TRAINED_PAIR / "target",
    draft: str | Path = TRAINED_PAIR / "draft",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
) -> Pair:
    """The pair that this project trained, or any two models by folder or by name on the Hugging Face hub.

    `packed` also keeps copies of weights in other layouts where these were measured to be faster on this machine, at
    first use, in half a second per model (`specnb.models.packing.pack`); the weights then take up to three times the
    memory. On other devices and in float64 it does nothing. The choice is stored, so one machine generates the same
    tokens every time. In float32 the last bits of the logits depend on that choice and on the number of rows; for
    results that must not, use float64 or `packed=False`, the weights as saved. In float64 a Llama model computes in
    float64 throughout (`specnb.models.double_precision`), so every processor generates the same sequences.

    Raises `OSError` if there is no such model, its weights are not safetensors, or a file of the trained pair is not
    the committed one; `ValueError` if the tensors of a file are not those of the model, if a number in them or in the
    configuration is not finite, or if the two vocabularies differ.

    >>> pair = load_pair()  # doctest: +SKIP
    >>> pair.tokenizer.decode(pair.encode("To be"))  # doctest: +SKIP
    'To be'
    """
    for name in (target, draft):
        require_pair(Path(name))
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
    """One model, by its folder or its name on the Hugging Face hub; arguments and errors as in `load_pair`.

    >>> load_model("gpt2", dtype=torch.float64)  # doctest: +SKIP
    """
    require_pair(Path(name))
    folder = folder_of(name)
    if is_trained(folder):
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
    _require_finite(folder, model)
    if dtype == torch.float64:
        in_double(model)
    model.to(torch.device(device))
    return pack(model.eval()) if packed else model.eval()


def _require_finite(folder: Path, model: PreTrainedModel) -> None:
    """Raises `ValueError` for weights, or frequencies of rotary positions, that are NaN or infinite.

    The logits may be finite in spite of them: torch's attention takes scores of NaN for masked ones and returns zeros.
    """
    weights = dict(model.named_parameters())
    frequencies = {name: values for name, values in model.named_buffers() if name.endswith("inv_freq")}
    for tensors, where in ((frequencies, "config.json (its rope_parameters)"), (weights, "weights")):
        for name, values in tensors.items():
            if values.dtype in CHECKED and values.numel() and not bool(torch.stack(values.aminmax()).isfinite().all()):
                raise ValueError(
                    f"the model in {folder} has a number in {name} that is NaN or infinite; "
                    f"the {where} must be corrected, or copied again"
                )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, and without the report on unsuitable tensors: `require_complete` makes it an error."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
