# Executes the notebooks, collects their verdicts and typesets the paper, under build/: `make reproduce` compares that
# with what is committed. Runs with other parameters (see config.yml and sweep.yml) go to build/own, and SPECNB_OUT
# names another folder. A notebook runs again when its code, its parameters, the library or a file that it reads has changed.
import hashlib
import json
import os
import shlex
import sys
from glob import glob
from pathlib import Path

import yaml
from snakemake.exceptions import WorkflowError

sys.path.insert(0, str(workflow.basedir))
from notebooks.support import dependencies, parameters  # noqa: E402
from studies.files import located, notebooks as of_checkout  # noqa: E402

# Notebooks that `--configfile` names, and only these, with its parameters; without it all there are.
KNOWN = dict.fromkeys(of_checkout(), {}) | yaml.safe_load(Path("config.yml").read_text(encoding="utf-8"))["notebooks"]
OWN = config.get("notebooks") or {}
STANDARD = not OWN and not config.get("sweep")
NOTEBOOKS = KNOWN if STANDARD else {name: KNOWN.get(name, {}) | (own or {}) for name, own in OWN.items()}
OUT = os.path.relpath(os.environ.get("SPECNB_OUT") or ("build" if STANDARD else "build/own"))
PYTHON = shlex.quote(sys.executable)  # also where snakemake was called by its path
os.environ["SPECNB_OUT"] = str(Path(OUT).resolve())  # for all jobs

SHARED = [
    str(file)
    for folder, names in (("specnb", "**/*.py"), ("audit/specnb_audit", "**/*.py"), ("audit/audit_studies", "**/*.py"), ("studies", "**/*.py"), ("notebooks/support", "*.py"), ("data/pair", "**/*.safetensors"))
    for file in sorted(Path(folder).glob(names))
] + ["data/claims.yml", "data/corpus.csv"]


def code(notebook):
    """A digest of the code cells. The file itself changes with `make accept`, too, and with every word of its text."""
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    return hashlib.sha256(json.dumps([cell["source"] for cell in cells if cell["cell_type"] == "code"]).encode()).hexdigest()


def reads(name, made=()):
    """What a notebook reads; a table of another notebook that is `made` in this run is this run's."""
    names = dependencies.reads(PARSED[name]) + KNOWN.get(name, {}).get("reads", [])
    names = [f"{OUT}/{file}" if f"{OUT}/{file}" in made else file for file in names]
    return [file for name in names for file in sorted(glob(name)) or [name]]


def checked(name, entry):
    """The parameters of a run, for papermill, which would only warn of a name that the notebook does not have."""
    notebook, given = Path(located("notebooks", f"{name}.ipynb")), entry.get("parameters", {})
    if not notebook.exists():
        raise WorkflowError(f"there is no {notebook}")
    if not given:
        return "{}"
    if wrong := parameters.unknown(given, parameters.of_notebook(notebook)):
        raise WorkflowError(f"{notebook}: {'; '.join(wrong)}")
    return json.dumps(given)


GIVEN = {name: checked(name, entry) for name, entry in NOTEBOOKS.items()}
PARSED = {name: dependencies.code_of(path) for name, path in of_checkout().items()}
MADE = {name: [f"{OUT}/{file}" for file in dependencies.writes(name, PARSED[name])] for name in NOTEBOOKS}
RESULTS = [file for files in MADE.values() for file in files]
WANTED = [*(f"{OUT}/{located('notebooks', name)}.ipynb" for name in MADE), *RESULTS, f"{OUT}/data/results/claims.csv"]
WANTED += [f"{OUT}/paper"] if STANDARD and Path("paper").exists() else []
if config.get("sweep"):
    include: "sweep.smk"

    WANTED = expand(f"{SWEPT}/{{run}}/notebook.ipynb", run=RUNS)


rule all:
    default_target: True
    input:
        WANTED,

for name, entry in NOTEBOOKS.items():
    rule:
        name: f"notebook_{name.split('_')[0].replace('/', '_')}"
        input:
            SHARED,
            reads(name, RESULTS),
            notebook=ancient(f"{located('notebooks', name)}.ipynb"),
        output:
            MADE[name],
            notebook=f"{OUT}/{located('notebooks', name)}.ipynb",
        log:
            f"{OUT}/logs/{name}.ipynb",
        params:
            code=code(f"{located('notebooks', name)}.ipynb"),
            folder=Path(located("notebooks", name)).parent,
            given=lambda wildcards, given=GIVEN[name]: given,  # a function: its braces are no wildcards
        threads: workflow.cores if entry.get("timed") or any("_timed" in file for file in MADE[name]) else 1
        retries: 1  # a kernel and its client can wait for each other, seen once in a cell with widgets
        shell:
            "{PYTHON} -m papermill {input.notebook:q} {log:q} --cwd {params.folder} -k python3 -y {params.given:q} --execution-timeout 900"
            " --no-progress-bar --log-level ERROR && {PYTHON} .ci/compare.py --tidy {log:q} {output.notebook:q}"

rule claims:
    input:
        "data/claims.yml",
        verdicts=[file for file in RESULTS if file.endswith(".claims.csv")],
    output:
        f"{OUT}/data/results/claims.csv",
    shell:
        "{PYTHON} -m notebooks.support.findings {input.verdicts:q}"

rule paper:
    input:
        RESULTS,
        f"{OUT}/data/results/claims.csv",
        sorted(str(file) for file in Path("paper").glob("*.*") if file.suffix in (".py", ".typ", ".bib")),
        sorted(file for place in ("", "audit/") for file in glob(f"{place}data/results/[a-z]*") if not file.endswith("/claims.csv")),
    output:
        directory(f"{OUT}/paper"),
    shell:
        "{PYTHON} -m paper"
