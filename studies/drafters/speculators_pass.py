"""What `speculators` drafts from given states; run by `released_formats` in an environment that has
it.

    python speculators_pass.py FOLDER VERIFIER GIVEN OUT

FOLDER holds a head in the layout of `speculators`, or of EAGLE-3's authors, which is converted
first; GIVEN the target's `states` `(n, width)` and the `tokens` `(n + 1,)`. OUT gets the draft
tokens `(n, depth)` after each token, later ones along the given tokens, or the logits of a
next-token layer.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DEPTH = 3


def main(folder: str, verifier: str, given: str, out: str) -> None:
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if "speculators_model_type" not in config:
        made = tempfile.mkdtemp()
        converter: Any = import_module("speculators.convert.eagle.eagle3_converter").Eagle3Converter()
        converter.convert(folder, made, verifier, validate=False)
        folder = made
    tensors = load_file(given)
    states, tokens = tensors["states"][None], tensors["tokens"][None]
    name = "MTPDraftModel" if config.get("speculators_model_type") == "mtp" else "Eagle3DraftModel"
    part = "mtp" if name == "MTPDraftModel" else "eagle3"
    model: Any = getattr(import_module(f"speculators.models.{part}"), name).from_pretrained(folder).eval()
    if part == "eagle3" and "embed_tokens.weight" not in load_file(f"{folder}/model.safetensors"):
        # speculators 0.9.0 looks for NaN to see which embeddings a file lacks, in memory that nothing has written.
        embeddings = load_file(f"{verifier}/model.safetensors")["model.embed_tokens.weight"]
        model.embed_tokens.weight.data.copy_(embeddings)
    with torch.no_grad():
        if part == "mtp":
            logits, _, _ = model(tokens, torch.cat([states, states[:, -1:]], dim=1))
            save_file({"logits": logits[0][0].contiguous()}, out)
            return
        document = torch.zeros(1, states.shape[1], dtype=torch.int64)
        drafted = model(states, tokens[:, 1:], document, ttt_steps=DEPTH)
    save_file({"drafted": torch.stack([each[0] for each in drafted], dim=-1).contiguous()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
