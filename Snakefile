# One rule per notebook. Each job is a function of its parameters and inputs and writes only its outputs.
from pathlib import Path

import yaml

configfile: "config.yml"

CODE = sorted(map(str, Path("specnb").rglob("*.py")))
DATA = ["data/claims.csv", "data/corpus.csv"]
PAIR = sorted(map(str, Path("data/pair").glob("*/model.safetensors")))

# The paper is about the runs of config.yml; runs with other parameters have none.
STANDARD = config == yaml.safe_load(Path("config.yml").read_text())
PAPER = sorted(map(str, [*Path("paper").glob("*.typ"), *Path("paper").glob("*.bib")])) if STANDARD else []

rule all:
    input:
        "data/results/claims.csv",
        ["paper/paper.pdf"] if PAPER else [],

for number, (name, notebook) in enumerate(config["notebooks"].items()):
    rule:
        name: f"notebook_{name[:2]}"
        input:
            notebook=f"notebooks/{name}.ipynb",
            code=CODE,
            data=DATA,
            pair=PAIR,
            reads=notebook.get("reads", []),
        output:
            # Executed notebooks are moved here whole; a run that failed or was stopped stays in the log.
            executed=f"build/notebooks/{name}.ipynb",
            claims=f"data/results/{name[:2]}.claims.csv",
            origin=f"data/results/{name[:2]}.origin.json",
            tables=[f"data/results/{name[:2]}_{table}.csv" for table in notebook.get("tables", [])],
            figures=[f"figures/{name[:2]}_{figure}.{kind}" for figure in notebook.get("figures", []) for kind in ("svg", "pdf")],
        log:
            f"build/logs/{name}.ipynb",
        params:
            # YAML, as papermill reads it: to YAML the 1e-06 of JSON is text, not a number.
            values=yaml.safe_dump(notebook.get("parameters", {}), default_flow_style=True),
        priority: -number
        # Notebooks that measure time must have the machine to themselves.
        threads: workflow.cores
        resources:
            mem_mb=4000,
        shell:
            "echo {input.notebook} && papermill -k python3 --cwd notebooks --log-level ERROR -y {params.values:q} {input.notebook} {log}"
            " && cp {log} {output.executed}"

rule claims:
    input:
        [f"data/results/{name[:2]}.claims.csv" for name in config["notebooks"]],
        "data/claims.csv",
        code="specnb/results.py",
    output:
        "data/results/claims.csv",
    shell:
        "python -m specnb.results"

rule paper:
    input:
        "data/results/claims.csv",
        PAPER,
        code=CODE,
    output:
        "paper/paper.pdf",
    shell:
        "python -m specnb.paper"
