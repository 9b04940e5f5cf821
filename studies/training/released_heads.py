"""Save a trained head in the layout of `speculators`, which `specnb.load_drafter` and engines load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import PreTrainedModel

from specnb.formats import CONFIG
from specnb.heads import Eagle3Head, NextTokenHead
from studies.files import WEIGHTS


def save_head(
    head: Eagle3Head | NextTokenHead, folder: Path, target: PreTrainedModel, *, name: str | None = None, gamma: int = 3
) -> None:
    """Save `head` in `folder`.

    Parameters
    ----------
    name
        By which engines load the target; by default the name or folder from which it was loaded.
    gamma
        Number of draft tokens that the file advises.
    """
    kind = "eagle3" if isinstance(head, Eagle3Head) else "mtp"
    config: dict[str, Any] = {
        "architectures": [f"{'Eagle3' if kind == 'eagle3' else 'MTP'}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": {**head.config.to_diff_dict(), "model_type": head.config.model_type},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": gamma}],
            "verifier": {"name_or_path": name or target.config.name_or_path, "architectures": [type(target).__name__]},
        },
    }
    if isinstance(head, Eagle3Head):
        config |= head.settings | {
            "draft_vocab_size": head.lm_head.out_features,
            "target_hidden_size": head.fc.in_features // len(head.hidden_layers),
            "eagle_aux_hidden_state_layer_ids": list(head.hidden_layers),
        }
    else:
        config["num_nextn_predict_layers"] = 1
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in head.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
