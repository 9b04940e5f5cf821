"""The e-processes of `e_processes` on the tokens of released engines that the audit rejects: tokens
until each rejects, at the audit's own level.

A token whose probability is 0 is a rejection, as in the audit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from audit_studies.engines import engines
from audit_studies.power.anytime import reads_of
from audit_studies.power.e_processes import Read, both
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows
from specnb_audit.token_file import read_tokens
from studies.files import read_table
from studies.study import Study


def rejected() -> list[str]:
    """The rows of `engines` that the audit rejects."""
    table = read_table("audit/results/engines")
    return [str(name) for name in table.row[table.verdict == "rejected"]]


@torch.inference_mode()
def measure(item: str, tokens: int) -> list[dict[str, Any]]:
    """One line for each test of a row: after how many tokens it rejects, if it does within
    `tokens`."""
    row = engines.rows()[item]
    target, draft = engines.models(row)
    sequences = read_tokens(row.file)[: tokens // engines.NEW_TOKENS]
    completions = [Completion(one.prompt, one.tokens) for one in sequences]
    rows = list(teacher_forced_rows(Models(target, row.sampling, draft, row.sampling), completions))
    seen, lines = reads_of(rows, None, row.number), []
    own = torch.cat([one.p.gather(-1, torch.as_tensor(list(one.tokens))[:, None])[:, 0] for one in rows])
    until = int((own == 0).long().argmax()) if (own == 0).any() else len(own)
    impossible = [until + 1] if until < len(own) else []
    for with_draft in (False, True) if draft is not None else (False,):
        views = [seen.plain, seen.aimed] if with_draft else [seen.plain]
        joined = [Read(*(np.concatenate(parts)[:until] for parts in zip(*view, strict=True))) for view in views]
        for name, logs in both(joined).items():
            crossed = (np.flatnonzero(logs >= -np.log(engines.DELTA))[:1] + 1).tolist()
            line = {"row": item, "test": f"{name}, any time{', draft' * with_draft}", "tokens": len(own)}
            peak = float(logs.max(initial=0.0) / np.log(10))
            lines.append(line | {"found_after": min(crossed + impossible, default=None), "log10_e": peak})
    return lines


STUDY = Study(measure, settings={"tokens": 2048}, small={"tokens": 256}, items=rejected())
