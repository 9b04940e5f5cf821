"""Adapters with engines that are not there: light imports, and what each engine is asked for."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from audit_studies.engines.adapters import Models
from audit_studies.engines.adapters.__main__ import ENGINES, adapter, main
from specnb.loading import TRAINED_PAIR
from specnb_audit.cli.settings import SPECULATIONS, Request, Settings
from specnb_audit.setting_names import ENGINE_ORDERS
from specnb_audit.token_file import read_tokens


def test_an_adapter_says_what_it_supports() -> None:
    for module in map(adapter, ENGINES):
        assert module.PACKAGE
        assert "none" in module.SUPPORTED, "no verdict without its control"
        assert set(module.SUPPORTED) <= set(SPECULATIONS)


def test_adapters_import_nothing_but_python() -> None:
    """In an engine's environment there is neither torch nor transformers, nor numpy in some."""
    names = [f"audit_studies.engines.adapters.{name}" for name in (*ENGINES, "gguf", "__main__")]
    code = f"import sys, {', '.join(names)}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Models, Settings]]:
    """An engine that continues a prompt with its seed; `asked` is what it was asked for."""
    asked = []

    def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
        asked.append((models, settings))
        yield from ([request.seed, 1] for request in requests)

    fake = SimpleNamespace(PACKAGE="fake", SUPPORTED=("none", "draft"), generate=generate)
    monkeypatch.setattr("audit_studies.engines.adapters.__main__.adapter", lambda name: fake)
    return asked


def arguments(tmp_path: Path, *more: str) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[0, 5]\n[0, 7]\n")
    out = tmp_path / "tokens.jsonl"
    return ["openvino", "--target", "t", "--prompts", str(prompts), "--out", str(out), *more]


def test_the_command_writes_what_the_audit_reads_and_continues(
    engine: list[tuple[Models, Settings]], tmp_path: Path
) -> None:
    given = arguments(tmp_path, "--count", "5", "--seed", "3", "--temperature", "0.7")
    assert main(given) == 0
    out = tmp_path / "tokens.jsonl"
    whole = out.read_bytes()
    assert [one.prompt for one in read_tokens(out)] == [[0, 5], [0, 7], [0, 5], [0, 7], [0, 5]]
    assert [one.tokens[0] for one in read_tokens(out)] == [Settings(seed=3).seed_of(number) for number in range(5)]
    out.write_bytes(whole[: len(whole) // 2])
    assert main(given) == 0
    assert out.read_bytes() == whole
    assert main(given) == 0
    assert len(engine) == 2, "a complete file needs no engine"
    assert engine[0][1].temperature == 0.7


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


def test_the_mend_of_vllm_repeats_each_value_for_its_draft_tokens() -> None:
    from audit_studies.engines.adapters.vllm_mended import expanded

    values, ends = torch.tensor([5, 0, 2], dtype=torch.int32), torch.tensor([2, 3, 6], dtype=torch.int32)
    assert expanded(values, ends, 6, replace_from=0, replace_to=1).tolist() == [5, 5, 1, 2, 2, 2]
    assert expanded(values, ends, 6).dtype == torch.int32
