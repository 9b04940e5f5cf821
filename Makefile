# make only sets up and calls; what happens is in the Snakefile and in the tests.
PYTHON ?= python3
CORES ?= 2
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Whatever the locale says, files are UTF-8.
export PYTHONUTF8 := 1
# Jupyter, Snakemake and matplotlib need a home that can be written.
ifneq ($(shell test -d "$$HOME" && test -w "$$HOME" && echo yes),yes)
export HOME := $(shell mkdir -p "$(CURDIR)/build/home")$(CURDIR)/build/home
endif
# Results of these targets are committed; those of explorations go to build/own.
models notebooks paper: export SPECNB_OUT := $(or $(SPECNB_OUT),$(CURDIR))
NBVAL = pytest -n $(CORES) --dist loadscope --nbval --nbval-sanitize-with tests/sanitize.cfg
# On a busy machine idle threads must not spin while others wait for the core.
export GOMP_SPINCOUNT ?= 0

.PHONY: environment reproduce test fast wheel compared nbval lint lab docs studies engines models distilled features notebooks paper lock clean

reproduce: environment  ## run every notebook; figures, tables and verdicts go to figures/ and data/results/
	snakemake --cores $(CORES) --quiet rules host

test: environment lint fast compared  ## all checks: style and types, tests and examples, the notebooks

lint: environment  ## style, types, and imports that point downwards
	ruff check && ruff format --check && mypy && lint-imports --no-logo

fast: environment  ## the tests, and the examples in docstrings
	pytest -n $(CORES) --dist loadscope --no-loadscope-reorder --doctest-modules specnb specnb_audit studies tests

compared: environment  ## the notebooks against their committed outputs: as make reproduce ran them, by nbval where it has not
	python tests/portability.py --made
	python tests/portability.py --not-made | xargs -r $(NBVAL)

nbval: environment  ## the notebooks, run again and compared with their committed outputs
	$(NBVAL) $(or $(NOTEBOOKS),notebooks)

wheel: environment  ## build the wheel and use it in another environment, outside the checkout
	python .ci/wheel.py

docs: environment  ## the public interface as pages, from docstrings: build/docs/index.html
	pdoc --math --output-directory build/docs specnb specnb_audit

lab: environment  ## explore in JupyterLab
	jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

studies: export OMP_NUM_THREADS = $(or $(THREADS),1)
studies: environment  ## measure the committed tables that take long (ONLY=bug_suite: one of them; SMALL=1: a trial); run again, it goes on
	python -m studies $(or $(ONLY),all) $(if $(SMALL),--small)

engines: environment  ## collect tokens from other engines, each in its own environment (ENGINE=openvino: one of them)
	snakemake -s engines.smk --workflow-profile none --cores $(CORES) --keep-going --rerun-incomplete --quiet rules host \
		--config engine=$(ENGINE)

# Large tensors are allocated and freed in every step of a training. With these settings of glibc their pages are kept,
# which takes a third off the time on a CPU; elsewhere they mean nothing.
models distilled features: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=20000000000:glibc.malloc.top_pad=500000000

models: environment  ## train the pair anew (PRESET=cpu takes about an hour on two cores, PRESET=gpu wants a GPU)
	python -m studies.training.training --preset $(or $(PRESET),cpu)
	python -m studies.training.model_card

distilled: environment  ## train copies of the draft for acceptance, with several objectives; run again, it goes on
	python -m studies distillation
	python -m studies.training.distillation

features: environment  ## train heads that draft from the target's features, and their control; run again, it goes on
	python -m studies feature_drafts
	python -m studies.training.feature_drafts

notebooks: environment  ## execute the notebooks in place, as they are committed
	python -m studies.notebooks

paper: environment  ## typeset the paper from results and figures; a missing or stale one stops it by name
	python -m paper

lock: environment  ## resolve constraints.txt anew, for all platforms
	pip install -q uv
	uv pip compile -q --universal --fork-strategy fewest --python-version 3.11 --no-header --no-annotate --all-extras pyproject.toml -o constraints.txt

clean:  ## forget what was run; keeps the environment
	rm -rf build .snakemake

environment:
	@$(PYTHON) .ci/install.py
