# Committed tables that take long to measure: `make experiments`, `make experiments ONLY=false_alarms`, and with SMOKE=1
# small settings that try the code in minutes and write to build/smoke.
#
# Every item of an experiment (a bug, a sampler, a block of audits) has a file of its own under build/experiments, in a
# folder named by the digest of the code, so an interrupted run continues and other code starts anew. Committed tables
# are not outputs to Snakemake, which deletes outputs before a job starts; a mark stands for each.
import os
import sys
from pathlib import Path

SMOKE = str(config.get("smoke", "")) not in ("", "0")
OUT = Path(os.environ.get("SPECNB_OUT") or ("build/smoke" if SMOKE else ".")).resolve()
os.environ["SPECNB_OUT"] = str(OUT)
# In the commands that measure: Snakemake sets these variables to the cores of a job, and a timed job has all of them.
THREADS = "OMP_NUM_THREADS={0} MKL_NUM_THREADS={0}".format(os.environ.get("OMP_NUM_THREADS", 1))

from studies import run
from studies.speed.bench.stages import STAGES

FLAG = "--smoke" if SMOKE else ""
TIMED = ("audit_cost", "beam_speeds", "block_against_token", "drafters", "layout_speeds", "pair_speeds", "recommendation", "rules_in_the_loop")  # measure time and need the machine for themselves
DONE = OUT / "build" / "experiments" / "done"


rule all:
    input:
        [DONE / f"{name}.txt" for name in run.NAMES],
        [] if SMOKE else [DONE / "corpus.txt", DONE / "bench.txt"],

for name in run.NAMES:
    PARTS = run.parts(name, SMOKE)

    rule:
        name: f"{name}_item"
        output:
            PARTS[0].parent / "{item}.csv",
        params:
            name=name,
        threads: workflow.cores if name in TIMED else 1
        shell:
            "{THREADS} python -m studies.run item {params.name} {wildcards.item} {output:q} {FLAG}"

    rule:
        name: name
        input:
            PARTS,
        output:
            touch(DONE / f"{name}.txt"),
        params:
            name=name,
        shell:
            "{THREADS} python -m studies.run gather {params.name} {FLAG}"

rule corpus:  # data/corpus.csv
    output:
        touch(DONE / "corpus.txt"),
    shell:
        "python -m specnb.notebook.corpus"

for stage in STAGES:  # data/results/bench*.csv
    rule:
        name: f"bench_{stage}"
        output:
            touch(DONE / f"bench_{stage}.txt"),
        params:
            stage=stage,
        threads: workflow.cores
        shell:
            "{THREADS} python -m studies.speed.bench {params.stage}"

rule bench:
    input:
        [DONE / f"bench_{stage}.txt" for stage in STAGES],
    output:
        touch(DONE / "bench.txt"),
