# make only sets up and calls; what happens is in workflow/Snakefile and in the tests.
PYTHON ?= python3
CORES ?= 2
# With its default shell, make 3.81 of macOS looks for simple commands in the PATH it was called with.
SHELL = /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Whatever the locale says, files are UTF-8.
export PYTHONUTF8 := 1
ifneq ($(filter C POSIX,$(LC_ALL)),)
export LC_ALL := C.UTF-8
endif
# Jupyter, Snakemake and matplotlib need a home that can be written.
ifneq ($(shell test -d "$$HOME" && test -w "$$HOME" && echo yes),yes)
export HOME := $(shell mkdir -p "$(CURDIR)/build/home")$(CURDIR)/build/home
endif
# Results of these targets are committed; those of explorations go to build/own.
models paper: export SPECNB_OUT := $(or $(SPECNB_OUT),$(CURDIR))
# Notebooks that take a minute or less.
NOTEBOOKS ?= $(wildcard notebooks/00_* notebooks/01_* audit/notebooks/04_*)
# Where `make lab` copies the notebooks to.
LAB ?= build/lab
PIPELINE = python workflow/pipeline.py --cores $(CORES) --quiet rules host
# Where several processes share the cores, idle threads must not spin. What is timed alone keeps the default: with two
# threads the real model takes nearly twice as long a token when they sleep.
reproduce accept sweep test fast nbval: export GOMP_SPINCOUNT ?= 0

FOLDERS = audit data figures notebooks specnb workflow
.PHONY: help tests docs $(FOLDERS) environment reproduce accept sweep test fast nbval bounds wheel lint lab book demo studies engines models distilled features paper lock clean

reproduce: environment  ## run every notebook and typeset the paper, under build/, and compare all of it with what is committed
	$(PIPELINE)
	python workflow/compare.py

accept: environment  ## put what `make reproduce` made in place of the committed files that differ (MEASURED=1: timings and pictures, too)
	$(PIPELINE)
	python workflow/compare.py --accept $(if $(MEASURED),--measured)

sweep: environment  ## run a notebook with every combination of the parameters in workflow/sweep.yml (SWEEP=mine.yml: in another file)
	$(PIPELINE) --keep-going --config sweep=$(or $(SWEEP),workflow/sweep.yml)

test: environment  ## all checks: style and types, tests and examples, the short notebooks
	$(MAKE) -j 2 lint nbval  # mypy uses one core
	$(MAKE) fast

lint: environment  ## style, types, and imports that point downwards
	ruff check && ruff format --check && mypy && lint-imports --no-logo

fast: environment  ## the tests, and the examples in docstrings
	pytest -n $(CORES) --doctest-modules specnb audit/specnb_audit audit/audit_studies studies notebooks/support
	pytest -n $(CORES) --dist loadscope --no-loadscope-reorder

nbval: export SPECNB_OUT := $(or $(SPECNB_OUT),$(CURDIR)/build/own)
nbval: environment  ## short notebooks, run and compared with their committed outputs (NOTEBOOKS=notebooks: all of the folder)
	pytest -n $(CORES) --dist loadscope --nbval $(NOTEBOOKS)

bounds: environment  ## run every notebook at the ends of the bounds of its parameters
	pytest -n $(CORES) -m slow tests/notebooks/test_bounds.py

wheel: environment  ## build both wheels, into build/wheels, and use them in another environment, outside the checkout
	python .ci/wheel.py

book: environment  ## notebooks as committed, guides, claims and interface as pages that need no network: build/book/index.html
	python -c "import furo, myst_nb, numpydoc, sphinx_reredirects" 2>/dev/null || pip install -q -c constraints.txt -e .[book]
	rm -rf build/book
	python -m sphinx -c docs -n -W --keep-going $$(test -t 1 || echo -q) -d build/book-cache . build/book
	@echo build/book/index.html

# Copies and not links: the server refuses pictures behind a link that leads out of its folder. An edit of specnb counts.
lab: environment  ## explore copies of the notebooks in JupyterLab, under build/lab, where they are kept until `make clean` (OPTIONS="--no-browser --port=9000": its options)
	@mkdir -p $(LAB)/notebooks $(LAB)/audit/notebooks
	@for file in notebooks/*.ipynb notebooks/README.md audit/notebooks/*.ipynb; do test -e $(LAB)/$$file || cp $$file $(LAB)/$$file; done
	@for name in data docs figures audit/data audit/docs audit/figures audit/README.md CONTRIBUTING.md; do rm -rf $(LAB)/$$name && cp -R $$name $(LAB)/$$name; done
	@ln -sfn "$(CURDIR)/specnb" $(LAB)/specnb
	jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --notebook-dir=$(LAB) --LabApp.default_url=/lab/tree/notebooks/00_quickstart.ipynb $(OPTIONS)

demo: environment  ## a real model answers with and without speculation, seen and timed (fetches 93 MB the first time)
	python -m studies.real.demo

studies: export OMP_NUM_THREADS = $(or $(THREADS),1)
studies: environment  ## measure the committed tables that take long (ONLY=bug_suite: one of them; SMALL=1: a trial); run again, it goes on
	python -m studies $(or $(ONLY),all) $(if $(SMALL),--small)

engines: environment  ## collect tokens from other engines, each in its own environment (ENGINE=openvino: one of them)
	snakemake -s audit/engines.smk --workflow-profile none --cores $(CORES) --keep-going --rerun-incomplete --quiet rules host \
		--config engine=$(ENGINE)

# Large tensors are allocated and freed in every step of a training. With these settings of glibc their pages are kept,
# which takes a third off the time on a CPU; elsewhere they mean nothing.
models distilled features: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=20000000000:glibc.malloc.top_pad=500000000

models: environment  ## train the pair anew (about an hour on two cores)
	python -m studies.training.training
	python -m studies.training.evaluation

distilled: environment  ## train copies of the draft for acceptance, with several objectives; run again, it goes on
	python -m studies distillation
	python -m studies.training.distillation

features: environment  ## train heads that draft from the target's features, and their control; run again, it goes on
	python -m studies feature_drafts
	python -m studies.training.feature_drafts

paper: environment  ## typeset the paper from the committed results and figures
	python -m paper

lock: environment  ## resolve constraints.txt anew, for all platforms
	pip install -q uv
	uv pip compile -q --universal --fork-strategy fewest --python-version 3.11 --no-header --no-annotate --all-extras pyproject.toml -o constraints.txt

clean:  ## forget what was run; keeps the environment
	rm -rf build .snakemake

environment: .venv/ready

# `ready` is made last, so what was interrupted begins anew; other requirements are installed over what is there. Paths
# of the checkout are made relative: Python reads .pth files in the locale's encoding, and with LC_ALL=C would not start
# if the absolute path has an umlaut.
.venv/ready: requirements.txt constraints.txt pyproject.toml audit/pyproject.toml
	@test -w . || { echo "nothing can be written into this folder; copy the checkout to one that can be written" && false; }
	@test -e $@ || rm -rf .venv
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit(f"Python {sys.version.split()[0]} is too old: make PYTHON=python3.11, or later")'
	@echo "installing packages into .venv"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install $$(test -t 1 || echo -q) --disable-pip-version-check -r requirements.txt
	@cd .venv/lib/python3*/site-packages && echo ../../../.. > __editable__.specnb-*.pth && echo ../../../../audit > __editable__.specnb_audit-*.pth
	@cp -R .ci/jupyter/. .venv/
	@touch $@

help:  ## what make can do
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

# These are names of folders, too: without a rule, make would find nothing to be done.
tests: test
docs: book
$(FOLDERS): help
	@echo "$@ is a folder; make can do what is listed above" && false
