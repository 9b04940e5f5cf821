# Runs of one notebook over a grid of parameters, which `sweep` in the configuration names: `make sweep`. A part of the
# Snakefile. Each run has its own folder, and nothing of one run is read by another.
sys.path.insert(0, str(workflow.basedir))
import sweep  # noqa: E402

FILE = Path(config["sweep"])
try:
    SWEEP = sweep.read(FILE)
except (OSError, ValueError) as error:
    raise WorkflowError(str(error))
RUNS, ENTRY = SWEEP.runs, KNOWN.get(SWEEP.notebook, {})
SWEPT = sweep.folder(FILE, Path(OUT))
checked(SWEEP.notebook, {"parameters": next(iter(RUNS.values()))})  # names are the same in all runs


rule swept:
    input:
        SHARED,
        reads(SWEEP.notebook),
        notebook=ancient(f"{located('notebooks', SWEEP.notebook)}.ipynb"),
    output:
        notebook=f"{SWEPT}/{{run}}/notebook.ipynb",
        made=directory(f"{SWEPT}/{{run}}/made"),
    log:
        f"{SWEPT}/{{run}}/log.ipynb",
    params:
        code=code(f"{located('notebooks', SWEEP.notebook)}.ipynb"),
        folder=Path(located("notebooks", SWEEP.notebook)).parent,
        given=lambda wildcards: json.dumps(RUNS[wildcards.run]),
    wildcard_constraints:
        run="[0-9a-f]{12}",
    threads: workflow.cores if ENTRY.get("timed") else 1
    shell:
        'SPECNB_OUT="$PWD"/{output.made:q} {PYTHON} -m papermill {input.notebook:q} {log:q} --cwd {params.folder} -k python3 -y {params.given:q}'
        " --execution-timeout 900 --no-progress-bar --log-level ERROR && {PYTHON} workflow/compare.py --tidy {log:q} {output.notebook:q}"


onsuccess:
    print(sweep.gather(FILE, Path(OUT)))

onerror:
    print(sweep.gather(FILE, Path(OUT)))
