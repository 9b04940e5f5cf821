"""Log-probabilities that an engine gives for its tokens, compared with teacher forcing.

They are no part of the verdict: an engine may sample rightly and report wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specnb_audit.constraints import NO_CONSTRAINTS
from specnb_audit.numerics import Numerics
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows

TOLERANCE = 0.01
"""The mean difference up to which they fit, unless the engine's logits differ by more."""
CLEARER = 5.0  # times smaller than for the settings claimed is the mean difference of another kind

Array = NDArray[np.float64]


def logprob_findings(
    models: Models, completions: Sequence[Completion], numerics: Numerics | None
) -> tuple[list[str], list[str]]:
    """A check where log-probabilities fit something else than the settings claimed, and a note
    where they fit those; nothing where there are none."""
    known = [np.array(one.logprobs or [], dtype=np.float64)[: len(one.tokens)] for one in completions]
    given = [one for one, values in zip(completions, known, strict=True) if np.isfinite(values).any()]
    reported = [values for values in known if np.isfinite(values).any()]
    if not given:
        return [], []
    claimed = _of_tokens(models._replace(draft=None, suspected=None, faults=False), given)
    raw = _of_tokens(Models(models.target, faults=False), [one._replace(constraints=NO_CONSTRAINTS) for one in given])
    distances = {
        "the settings claimed": _distance(reported, claimed),
        "the model's own distribution, before temperature and filters (raw)": _distance(reported, raw),
        "the token after, one place too early": _distance([one[:-1] for one in reported], [one[1:] for one in claimed]),
        "the token before, one place too late": _distance([one[1:] for one in reported], [one[:-1] for one in claimed]),
    }
    own = next(iter(distances.values()))
    name = min(distances, key=lambda name: distances[name])
    count = sum(int(np.isfinite(one).sum()) for one in reported)
    if own <= max(TOLERANCE, 0.0 if numerics is None else numerics.logit):
        return [], [f"logprobs of {count:,} tokens fit the settings claimed (mean difference {own:.2g})"]
    if all(not one.any() for one in reported):
        return [f"all logprobs are 0, as if each of {count:,} tokens had been certain; they are not"], []
    if distances[name] < own / CLEARER:
        return [
            f"logprobs fit {name} (mean difference {distances[name]:.2g}), and not the settings claimed ({own:.2g})"
        ], []
    return [f"logprobs of {count:,} tokens do not fit the settings claimed (mean difference {own:.2g})"], []


def _of_tokens(models: Models, completions: Sequence[Completion]) -> list[Array]:
    found: list[Array] = []
    for row in teacher_forced_rows(models, completions):
        tokens = torch.as_tensor(row.tokens, device=row.p.device)
        log: Array = row.p.gather(-1, tokens[:, None])[:, 0].double().log().numpy(force=True)
        if row.continues:
            found[-1] = np.concatenate([found[-1], log])
        else:
            found.append(log)
    return found


def _distance(reported: Sequence[Array], expected: Sequence[Array]) -> float:
    """The mean difference, of tokens that have both; infinite for none."""
    difference = np.abs(np.concatenate(reported) - np.concatenate(expected))
    known = difference[np.isfinite(difference)]
    return float(known.mean()) if len(known) else np.inf
