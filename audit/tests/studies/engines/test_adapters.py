"""Adapters with engines that are not there: light imports, and what each engine is asked for."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from audit_studies.engines import random_targets
from audit_studies.engines.adapters import Models
from audit_studies.engines.adapters.__main__ import ENGINES
from specnb.loading import TRAINED_PAIR
from specnb_audit.cli.settings import Request, Settings
from specnb_audit.setting_names import ENGINE_ORDERS


def test_adapters_import_nothing_but_python() -> None:
    """In an engine's environment there is neither torch nor transformers, nor numpy in some."""
    names = [f"audit_studies.engines.adapters.{name}" for name in (*ENGINES, "gguf", "__main__")]
    code = f"import sys, {', '.join(names)}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_llama_cpp_is_asked_for_the_order_of_filters_that_is_audited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from audit_studies.engines.adapters import llama_cpp

    asked = []

    def handle(request: dict[str, Any]) -> str:
        asked.append(request)
        return json.dumps({"__verbose": {"tokens": [request["seed"]]}})

    server = SimpleNamespace(handle_completions=handle)
    monkeypatch.setattr(llama_cpp, "_server", lambda *given: server)
    monkeypatch.setattr(llama_cpp, "convert", lambda model, out: out)
    given = [Request([0, 1], 5), Request([0, 2], 6)]
    settings = Settings(temperature=0.7, top_k=40)
    assert list(llama_cpp.generate(Models(tmp_path), given, settings)) == [[5], [6]]
    audited = [name.replace("-", "_") for name in ENGINE_ORDERS["llama.cpp"] if name != "min-p"]
    assert asked[0]["samplers"] == audited
    assert (asked[0]["min_p"], asked[0]["repeat_penalty"]) == (0.0, 1.0)
    assert asked[0]["ignore_eos"] is False, "it would remove the end token from the distribution"


def test_transformers_assisted_generation_keeps_the_prompt_apart() -> None:
    from audit_studies.engines.adapters import transformers

    models = Models(TRAINED_PAIR / "target", TRAINED_PAIR / "draft")
    settings = Settings(speculation="draft", max_new_tokens=4)
    (tokens,) = transformers.generate(models, [Request([0, 5, 9], 1)], settings)
    assert len(tokens) == 4
    assert transformers.default_dtype(str(models.target)) == "bfloat16"  # that of its file


@pytest.mark.parametrize("target", ["llama", "glm4-moe", "deepseek-v3"])
def test_targets_with_random_weights_are_those_of_their_folders_and_draft(target: str, tmp_path: Path) -> None:
    """The audit builds the target, the engine loads it; p is neither almost uniform nor one
    token."""
    from audit_studies.engines.adapters import transformers

    own = random_targets.target(target)
    random_targets.save(target, tmp_path)
    ids = torch.randint(random_targets.VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    logits = own(ids).logits.detach()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert (loaded(ids).logits - logits).abs().max() < 1e-5
    assert 1 < torch.special.entr(logits.softmax(-1)).sum(-1).mean() < 3.5
    kinds = ["dflash", "other-tokenizer", "early-exit", "stopping", "lookup"] if target == "llama" else ["mtp"]
    made = {}
    for kind in ["none", *kinds]:
        (made[kind],) = transformers.generate(
            Models(tmp_path / "target", tmp_path / kind), [Request([0, 5, 9], 1)],
            Settings(speculation=kind, max_new_tokens=6, temperature=0.0),
        )  # fmt: skip
    assert set(map(tuple, made.values())) == {tuple(made["none"])}


def test_the_mend_of_transformers_makes_the_draft_tokens_certain() -> None:
    from audit_studies.engines.adapters.transformers_mended import certain

    assert certain(torch.rand(1, 2, 3), torch.tensor([[2, 0]])).softmax(-1).tolist() == [[[0, 0, 1], [1, 0, 0]]]


def test_the_mend_of_vllm_repeats_each_value_for_its_draft_tokens() -> None:
    from audit_studies.engines.adapters.vllm_mended import expanded

    values, ends = torch.tensor([5, 0, 2], dtype=torch.int32), torch.tensor([2, 3, 6], dtype=torch.int32)
    assert expanded(values, ends, 6, replace_from=0, replace_to=1).tolist() == [5, 5, 1, 2, 2, 2]
    assert expanded(values, ends, 6).dtype == torch.int32
