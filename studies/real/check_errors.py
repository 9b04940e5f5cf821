"""How often the check of a sampler errs: right results that it refuses, and faults that it passes.

A line for each model, dtype, kind of comparison and what was compared:

- `what` "plain", "copies", with "packed" as `compile="auto"` has it: right results of SmolLM2 for two prompts
  at a time, half at temperature 0 and half at 1. Prompts are cut from those of `data/workloads.jsonl` of all
  kinds, one after the other, and have 1 to 300 tokens; the logarithm of their number is uniform.
- `what` "chain", "tree": right results of small random models of every architecture that can be decoded
  (`model` is their number), in 16 bits.
- other `what`: faults of a mean total variation `size`, mixed into the distributions of the loop: a key
  that later tokens do not see, positions that are one too high from a place on, a layer with other
  weights, flatter logits; and the first of these in one row of eight only. With `size` 0 nothing is wrong.

`refused` of `comparisons` were refused, with a 95% interval of the rate; `where` says whether one step
or a completion of 64 tokens was compared.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from specnb.cache import CachedModel, prefill
from specnb.check import PLACES, Check, Comparison, Rounding, probabilities
from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling, sample, total_variation
from specnb.drafters import TreeDrafter
from specnb.loading import load_pair
from specnb.sampler import Sampler, generate
from studies import corpus, study
from studies.real.smollm2 import model_and_tokenizer, prompts_of
from studies.real.workloads import KINDS

LONGEST, WIDTH, COMPLETION = 300, 5, 64
SIZES = (0.0, 1.7e-4, 0.01, 0.02, 0.03, 0.05, 0.1)
ROWS = 8


class Counted(Check):
    """A check that counts what it refuses."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.counted: Counter[tuple[str, bool]] = Counter()

    def _compare(self, *given: Any, **named: Any) -> Rounding | None:
        measured, refused = None, False
        try:
            measured = super()._compare(*given, **named)
        except TypeError:
            refused = True
        self.counted[named["where"], refused] += 1
        return measured

    def lines(self) -> Iterator[dict[str, Any]]:
        for where in dict.fromkeys(where for where, _ in self.counted):
            refused = self.counted[where, True]
            yield {"where": where, **rate(refused, refused + self.counted[where, False])}


def rate(refused: int, comparisons: int) -> dict[str, Any]:
    """The columns of a count, with the Clopper-Pearson interval."""
    low = stats.beta.ppf(0.025, refused, comparisons - refused + 1) if refused else 0.0
    high = stats.beta.ppf(0.975, refused + 1, comparisons - refused) if refused < comparisons else 1.0
    return {"comparisons": comparisons, "refused": refused, "low": low, "high": high}


@cache
def asked(tokenizer: Any) -> list[int]:
    """All prompts, one after the other."""
    every = [prompts_of(tokenizer, kind, 12) for kind in KINDS]
    return list(itertools.chain.from_iterable(prompt for group in zip(*every, strict=True) for prompt in group))


def right(dtype: str, way: str, comparisons: int, new_tokens: int) -> Iterator[dict[str, Any]]:
    """Right results of SmolLM2; packed weights are kept, and only the comparison begins anew."""
    target, tokenizer = model_and_tokenizer(dtype)
    stream, chosen = asked(tokenizer), np.random.default_rng(0)
    drafter = PromptLookupDrafter(target.config.vocab_size) if "copies" in way else None
    checks = []
    for temperature in (0, 1):
        sampler = Sampler(
            target, drafter, sampling=Sampling(temperature), compile="auto" if "packed" in way else False, rows=2,
            slots=LONGEST + new_tokens, progress=False,
        )  # fmt: skip
        sampler.check = Counted(target, sampler.gamma, sampler.sampling)
        for number in range(comparisons // 4):
            lengths = np.exp(chosen.uniform(0, np.log(LONGEST), 2)).astype(int)
            starts = chosen.integers(0, len(stream) - LONGEST, 2)
            sampler.check.rows = sampler.check.longest = 0
            sampler.generate(
                [stream[start : start + length] for start, length in zip(starts, lengths, strict=True)],
                max_new_tokens=new_tokens, seed=number,
            )  # fmt: skip
        checks.append(sampler.check.counted)
    both = Counted(target, 0)
    both.counted = checks[0] + checks[1]
    for line in both.lines():
        yield {"model": "SmolLM2-135M", "dtype": dtype, "what": way, "size": 0.0} | line


def small_models() -> Iterator[tuple[str, PreTrainedModel]]:
    """Small random models of the architectures whose configurations take the usual names of sizes."""
    logging.set_verbosity_error()
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "num_experts": 4, "n_embd": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 512, "ffn_dim": 96, "is_decoder": True, "word_embed_proj_dim": 64, "use_cache": True,
        "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1, "sliding_window": 32, "rotary_dim": 8, "n_inner": 96,
    }  # fmt: skip
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            known = CONFIG_MAPPING[kind]().to_dict()
            config = CONFIG_MAPPING[kind](**{name: size for name, size in sizes.items() if name in known})
            with torch.device("meta"):
                if AutoModelForCausalLM.from_config(config).num_parameters() > 5e6:
                    continue
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).float().eval()
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.data.normal_(0, 0.25)
            generate(model, [[2, 3, 4], [5, 6]], None, max_new_tokens=4, progress=False)
        except Exception:  # cannot be made so small, or is refused in float32
            continue
        yield kind, model


def small(dtype: str) -> Iterator[dict[str, Any]]:
    """Right results of small models, in 16 bits, over a chain of copies and over a tree of a draft model."""
    refused: dict[str, list[str]] = {"chain": [], "tree": []}
    tried = dict.fromkeys(refused, 0)
    for kind, model in small_models():
        target = copy.deepcopy(model).to(getattr(torch, dtype))
        for way in refused:
            drafter: Any = "auto" if way == "chain" else TreeDrafter(target, (-1, -1, 0))
            try:
                generate(target, [[2, 3, 4], [5, 6] * 9], drafter, max_new_tokens=24, progress=False)
            except TypeError as error:
                if way == "tree" and "was decoded" not in str(error):  # trees are refused, too
                    continue
                refused[way].append(kind)
            tried[way] += 1
    for way, names in refused.items():
        about = {"model": f"{tried[way]} architectures", "dtype": dtype, "what": way, "size": 0.0, "where": "all"}
        yield about | rate(len(names), tried[way]) | {"refused_of": " ".join(names)}


Distributions = Callable[[PreTrainedModel, list[int], int], Tensor]


def in_the_loop(model: PreTrainedModel, text: list[int], known: int) -> Tensor:
    """The distributions after `text` from token number `known` on, in the cache of the loop, `WIDTH` tokens a pass."""
    runner, tokens = CachedModel(model, len(text) + WIDTH), torch.tensor([text])
    prefill(runner, tokens[:, :known], torch.tensor([known]))
    places = torch.arange(known - 1, len(text))[None]
    parts = [runner.run(tokens.gather(1, part), part, keep=part.shape[1])[0] for part in places.split(WIDTH, dim=1)]
    return probabilities(torch.cat(parts))


def hidden_key(model: PreTrainedModel, text: list[int], known: int) -> Tensor:
    """Tokens from number `known` on do not see the one before it."""
    sees = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    sees[known:, known - 1] = False
    mask = torch.zeros(sees.shape, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)
    logits = model(input_ids=torch.tensor([text]), attention_mask=mask[None, None], use_cache=False).logits
    return probabilities(logits[0, known - 1 :])


def late_positions(model: PreTrainedModel, text: list[int], known: int) -> Tensor:
    """Positions are one too high from token number `known` on."""
    positions = torch.arange(len(text)) + (torch.arange(len(text)) >= known - 1)
    logits = model(input_ids=torch.tensor([text]), position_ids=positions[None], use_cache=False).logits
    return probabilities(logits[0, known - 1 :])


def other_layer(model: PreTrainedModel, text: list[int], known: int) -> Tensor:
    """The weights of one layer are others by a tenth."""
    changed = _with_other_layer(model)
    return probabilities(changed(input_ids=torch.tensor([text]), use_cache=False).logits[0, known - 1 :])


@cache
def _with_other_layer(model: PreTrainedModel) -> PreTrainedModel:
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for weight in changed.model.layers[1].parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        weight.data += 0.1 * weight.std() * noise
    return changed


def flatter(model: PreTrainedModel, text: list[int], known: int) -> Tensor:
    """Logits are divided by 2."""
    return probabilities(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, known - 1 :] / 2)


FAULTS: dict[str, Distributions] = {
    "hidden key": hidden_key, "positions": late_positions, "other layer": other_layer, "flatter": flatter,
}  # fmt: skip


class Kept(Counted):
    """Keeps the passes over a text, which are those of every fault and size."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._pass, self._in_pieces = _kept(self._pass), _kept(self._in_pieces)  # type: ignore[method-assign]


def _kept(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    made: dict[Any, Tensor] = {}

    def once(*given: Any, **named: Any) -> Tensor:
        key = tuple(tuple(each) if isinstance(each, list) else each for each in given)
        if key not in made:
            while len(made) > 8:
                made.pop(next(iter(made)))
            made[key] = function(*given, **named)
        return made[key]

    return once


@torch.inference_mode()
def wrong(name: str, dtype: str, texts: int) -> Iterator[dict[str, Any]]:
    """Faults of each size in one step and in a completion."""
    pair = load_pair(dtype=dtype)
    model, stream = pair.target, [token for text in corpus.read("held-out", limit=20) for token in pair.encode(text)]
    check, chosen = Kept(model, WIDTH - 1), np.random.default_rng(1)
    counted: Counter[tuple[str, float, str, bool]] = Counter()
    for number in range(texts):
        known, start = int(chosen.integers(8, 150)), int(chosen.integers(0, len(stream) - LONGEST))
        text = list(stream[start : start + known + COMPLETION - 1])
        right = in_the_loop(model, text, known)
        uniforms = torch.from_numpy(chosen.random(len(right)))
        own = check._pass(model, text, min(len(text), PLACES[1]))
        measured, _ = check._rounding(text, own, torch.empty(0, dtype=torch.int64))
        compared = Comparison(check, [text[: known + at] for at in range(ROWS)], ROWS, COMPLETION).chosen
        for fault, made in FAULTS.items():
            faulty = made(model, text, known)
            off = float(total_variation(faulty, right).mean())
            for size in SIZES:
                if size > off:
                    continue
                there = torch.lerp(right, faulty, size / off)
                tokens = sample(there, uniforms)
                given = there.gather(-1, tokens[:, None]).log()[:, 0]
                for where in ("first step", "completion"):
                    check.counted.clear()
                    if where == "first step":
                        begin = text[: known + WIDTH - 1]
                        check._compare(begin, known, there[:WIDTH], where=where, measured=measured)
                    else:
                        check._compare(text, known, given, tokens.tolist(), where=where)
                    found = check.counted[where, True] > 0
                    counted[fault, size, where, found] += 1
                    if fault == "hidden key":
                        of_one = number % ROWS in compared
                        counted["hidden key in one row of eight", size, where, found and of_one] += 1
    for fault, size, where in dict.fromkeys(key[:3] for key in counted):
        refused = counted[fault, size, where, True]
        about = {"model": name, "dtype": dtype, "what": fault, "size": size, "where": where}
        yield about | rate(refused, refused + counted[fault, size, where, False])


def measure(item: str, comparisons: int, in_float16: int, new_tokens: int, texts: int) -> list[dict[str, Any]]:
    kind, *about = item.split("-")
    if kind == "right":
        dtype, way = about
        made = right(dtype, way.replace("_", ", "), comparisons if dtype == "bfloat16" else in_float16, new_tokens)
    elif kind == "small":
        made = small(about[0])
    else:
        made = wrong(about[0], about[1], texts if about[0] == "pair" else texts // 2)
    return list(made)


STUDY = study.Study(
    measure,
    settings={"comparisons": 500, "in_float16": 60, "new_tokens": 16, "texts": 24},
    small={"comparisons": 4, "in_float16": 4, "new_tokens": 4, "texts": 1},
    items=(
        "right-bfloat16-plain",
        "right-bfloat16-plain_packed",
        "right-bfloat16-copies",
        "right-bfloat16-copies_packed",
        "right-float16-plain",
        "right-float16-copies_packed",
        "small-bfloat16",
        "small-float16",
        "wrong-pair-float32",
        "wrong-pair-bfloat16",
        "wrong-pair-float16",
    ),
    small_items=("wrong-pair-float32",),
)
