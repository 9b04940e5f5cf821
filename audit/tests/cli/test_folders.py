"""Folders that hold no model by itself are named for what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specnb_audit.cli.audit import _require_model

LLAMA = {"model_type": "llama"}
INT8 = {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "has int8 weights"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 8}}, r"has int8 weights \(gptq\)"),
        (LLAMA | {"quantization_config": {"config_groups": {"a": {"weights": INT8}}}}, "has int8 weights"),
        (LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}, None),
        (LLAMA | {"architectures": ["LlamaForCausalLM"]}, None),
        ({"peft_type": "LORA"}, "holds an adapter"),
    ],
)
def test_what_a_folder_holds(tmp_path: Path, config: dict[str, Any], words: str | None) -> None:
    name = "adapter_config.json" if "peft_type" in config else "config.json"
    (tmp_path / name).write_text(json.dumps(config), encoding="utf-8")
    if words is None:
        _require_model(str(tmp_path))
    else:
        with pytest.raises(ValueError, match=words):
            _require_model(str(tmp_path))
