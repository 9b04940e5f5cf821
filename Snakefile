# One rule per notebook. Every job is started each time (profiles/default) and looks itself whether its results are up
# to date, by their contents. Snakemake sees only the marks under build/done: it deletes the outputs of a job before
# it starts, and committed results must stay until new ones replace them.
import json
import os
import re
import sys
from pathlib import Path

import yaml

from specnb.notebook import reproduce

configfile: "config.yml"

# The paper is about the runs of config.yml; runs with other parameters have none, and leave committed results alone.
STANDARD = config == yaml.safe_load(Path("config.yml").read_text(encoding="utf-8"))
OUT = Path(os.environ.get("SPECNB_OUT") or ("." if STANDARD else "build/own")).resolve()
os.environ["SPECNB_OUT"] = str(OUT)  # for all jobs

DONE = Path(os.path.relpath(OUT)) / "build" / "done"
PAPER = STANDARD and Path("paper").exists()
MADE_BY = {name[:2]: str(DONE / f"{name}.txt") for name in config["notebooks"]}
RESULT = re.compile(r"data/results/(\d\d)_")
HELD = []


def needed(entry):
    """The marks of the notebooks whose results this one reads. Other files are no inputs to Snakemake, which takes
    those with time stamps of the future for an error."""
    return [MADE_BY[match[1]] for match in map(RESULT.match, entry.get("reads", [])) if match]


def measures_time(entry):
    """Whether a notebook measures time, and so must have the machine to itself; the others run side by side."""
    return entry.get("timed", False) or any(name.endswith("_timed") for name in entry.get("tables", []) + entry.get("figures", []))


onstart:
    HELD.append(reproduce.lock(DONE.parent / "lock"))

onsuccess:
    print(reproduce.summary(DONE), file=sys.stderr)

rule all:
    input:
        list(MADE_BY.values()),
        DONE / "claims.txt",
        [DONE / "paper.txt"] if PAPER else [],

for number, (name, entry) in enumerate(config["notebooks"].items()):
    rule:
        name: f"notebook_{name[:2]}"
        input:
            needed(entry),
        output:
            MADE_BY[name[:2]],
        params:
            name=name,
            entry=lambda wildcards, text=json.dumps(entry): text,  # a function: its braces are no wildcards
        priority: -number
        threads: workflow.cores if measures_time(entry) else 1
        resources:
            mem_mb=4000,
        shell:
            "python -m specnb.notebook.reproduce {params.name} {params.entry:q} --done {output:q}"

rule claims:
    input:
        list(MADE_BY.values()),
    output:
        DONE / "claims.txt",
    shell:
        "python -m specnb.notebook.findings > {output:q}"

rule paper:
    input:
        DONE / "claims.txt",
    output:
        DONE / "paper.txt",
    shell:
        "python -m paper > {output:q}"
