# make only sets up and calls; what happens is in the Snakefile and in the tests.
PYTHON ?= python3
CORES ?= 2
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# On a busy machine idle threads must not spin while others wait for the core.
export GOMP_SPINCOUNT ?= 0

.PHONY: reproduce test lint lab bench bench-gpu models notebooks paper lock clean

reproduce: .venv/ready  ## run every notebook; figures, tables and verdicts go to figures/ and data/results/
	snakemake --cores $(CORES) --rerun-incomplete --nolock --quiet rules host

test: .venv/ready lint  ## all tests, the notebooks included
	pytest -n $(CORES) --dist loadscope --nbval --nbval-sanitize-with tests/sanitize.cfg tests notebooks

lint: .venv/ready
	ruff check && ruff format --check && mypy

lab: .venv/ready  ## explore in JupyterLab
	jupyter lab notebooks

bench: export OMP_NUM_THREADS = $(or $(THREADS),1)
bench: .venv/ready  ## measure what is promised about time, on a machine that does nothing else
	python -m specnb.bench $(STAGES)

bench-gpu: .venv/ready  ## measure it on a GPU (DEVICE=cuda), at published sizes: 20 minutes; run again, it goes on
	python -m specnb.bench.gpu --device $(or $(DEVICE),cuda)

models: .venv/ready  ## train the pair anew (PRESET=cpu takes about an hour on two cores, PRESET=gpu wants a GPU)
	python -m specnb.train --preset $(or $(PRESET),cpu)
	python -m specnb.card

notebooks: .venv/ready  ## execute the notebooks in place, as they are committed
	python -m specnb.notebooks

paper: .venv/ready  ## typeset the paper from results and figures; a missing or stale one stops it by name
	python -m specnb.paper

lock: .venv/ready  ## resolve constraints.txt anew, for all platforms
	pip install -q uv
	uv pip compile -q --universal --fork-strategy fewest --python-version 3.11 --no-header --no-annotate pyproject.toml -o constraints.txt

clean:  ## forget what was run; keeps the environment
	rm -rf build .snakemake

# The mark is made last, so an installation that was interrupted is done again.
.venv/ready: requirements.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	pip install -q --disable-pip-version-check -r requirements.txt
	mkdir -p .venv/etc/ipython  # kernels here talk to this machine only, and need not warn of it
	echo "c.IPKernelApp.log_level = 40" > .venv/etc/ipython/ipython_kernel_config.py
	touch $@
