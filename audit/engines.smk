# Tokens of other engines for the audit: `make engines`, `make engines ENGINE=openvino`.
#
# Every engine gets an environment of its own from pinned versions (audit/data/engines/<engine>.txt; gemma4 is transformers
# in a release that can build Gemma 4's assistant). Each row of
# audit/data/engines/rows.csv is a job, and one that fails leaves the others alone (--keep-going). Tokens are committed, so a
# mark under build/engines/done stands for each file; `make studies ONLY=engines` audits them, without any engine.
import os
import sys

from audit_studies.engines.engines import SHIPPED, rows

ENGINE = str(config.get("engine") or "")  # `--config engine=` is None
STANDARD = ("openvino", "llama_cpp", "transformers")  # with the pair within 40 minutes on two cores; the others by name
WANTED = (ENGINE,) if ENGINE else STANDARD
LONGER = {("llama_cpp", "default", 1.0), ("transformers", "default", 1.0), ("transformers", "float32", 0.9)}  # engine, dtype, top-p
CHOSEN = [
    row for row in rows().values()
    if row.environment in WANTED
    and (ENGINE or (row.target == SHIPPED and (row.engine, row.dtype, row.top_p) not in LONGER))
]
if not CHOSEN:
    raise ValueError(f"no row of audit/data/engines/rows.csv is of engine {ENGINE!r}; there are {sorted({r.environment for r in rows().values()})}")


def python(engine):
    """transformers is in the project's own environment."""
    return sys.executable if engine == "transformers" else f"build/engines/{engine}/bin/python"


def needed(row):
    """What must exist before a row is collected: the engine's environment."""
    return [] if row.environment == "transformers" else [f"build/engines/{row.environment}/installed.txt"]


rule all:
    input:
        [f"build/engines/done/{row.name}.txt" for row in CHOSEN],

for name in sorted({row.environment for row in CHOSEN} - {"transformers"}):
    rule:
        name: f"environment_{name}"
        input:
            f"audit/data/engines/{name}.txt",
        output:
            f"build/engines/{name}/installed.txt",
        params:
            folder=f"build/engines/{name}",
        shell:
            "python -m venv {params.folder} && {params.folder}/bin/python -m pip install -q --no-deps -r {input} "
            "&& cp {input} {output}"

for number, row in enumerate(CHOSEN):
    rule:
        name: row.name
        input:
            needed(row),
        output:
            touch(f"build/engines/done/{row.name}.txt"),
        params:
            row=row.name,
            python=python(row.environment),
        priority: -number
        threads: workflow.cores  # generations are timed
        shell:
            "python -m audit_studies.engines.engines_collect {params.row} {params.python:q}"
